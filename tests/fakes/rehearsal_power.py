"""Machines without processes: they live and die on the rehearsal clock, and everything that lived is kept."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from gpucost.clock import Clock
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.machines.power import Sight
from gpucost.rehearsal.machines.processes import Process


@dataclass
class FakeProcess:
    """A process that lived from `started` until `ended`; None while it lives."""

    instance_id: str
    pid: int
    name: str
    started: datetime
    ended: datetime | None = None
    stubborn: bool = False
    """It ends by SIGKILL only."""
    rss: int = 0

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.ended is None


class FakePower:
    """A `Power` whose machines are records. Give the same one to a second hypervisor: its machines were running on.

    Args:
        clock: the rehearsal clock; processes start and end at its times.

    Attributes:
        processes: every process that ever was, in order of start.
        closed: whether the last hypervisor has ended.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pids = itertools.count(1000)
        self._inits: dict[str, FakeProcess] = {}
        self._programs: dict[str, FakeProcess] = {}
        self._requests: dict[str, str] = {}
        self._lost_at: datetime | None = None
        self.processes: list[FakeProcess] = []
        self.consoles: dict[str, list[str]] = {}
        self.fails_to_start: set[str] = set()
        """Instance ids whose `switch_on` fails."""
        self.stubborn = False
        """Whether programs that boot from now on ignore SIGTERM."""
        self.closed = False

    def open(self) -> None:
        """A guard starts."""
        self.closed = False
        self._lost_at = None

    def check(self) -> None:
        """The guard is fine."""

    def close(self, *, machines_go_on: bool) -> bool:
        """The cloud ends; machines that wait for their boot boot, or all end."""
        self.closed = True
        if machines_go_on:
            self.cloud_dies()
        else:
            self._kill(self._living())
        return True

    def lost_at(self) -> datetime | None:
        """The time of `host_dies`."""
        return self._lost_at

    def was_on(self, instance_id: str) -> bool:
        """Whether it was switched on, and not off since."""
        return instance_id in self._inits

    def switch_on(self, instance: Instance) -> None:
        """Its init lives from now on."""
        if instance.id in self.fails_to_start:
            raise OSError(f"{instance.id}: no memory for another process")
        assert instance.id not in self._inits, "it is on already"
        self._inits[instance.id] = self._start(instance.id, "sh")

    def boot(self, instance_id: str) -> None:
        """Its program lives from now on, once."""
        if instance_id not in self._programs and self._inits[instance_id].lives:
            self._programs[instance_id] = self._start(instance_id, "user-data", stubborn=self.stubborn)

    def look(self) -> Mapping[str, Sight]:
        """What lives."""
        sights: dict[str, dict[int, Process]] = {}
        for one in self._living():
            found = Process(one.pid, parent=1, session=one.pid, started=one.pid, rss=one.rss, name=one.name)
            sights.setdefault(one.instance_id, {})[one.pid] = found
        return {instance_id: Sight(found, self._init_in(instance_id)) for instance_id, found in sights.items()}

    def send(self, pids: Iterable[int], what: signal.Signals) -> None:
        """They end at once, but for what is stubborn."""
        wanted = set(pids)
        hit = [one for one in self._living() if one.pid in wanted]
        self._kill([one for one in hit if what == signal.SIGKILL or not one.stubborn])

    def shutdown_requests(self) -> Mapping[str, str]:
        """What `ask_shutdown` said."""
        return dict(self._requests)

    def console(self, instance_id: str, line: str) -> None:
        """Kept in `consoles`."""
        self.consoles.setdefault(instance_id, []).append(line)

    def program(self, instance_id: str) -> int | None:
        """The pid of the program, alive or not."""
        one = self._programs.get(instance_id)
        return one.pid if one else None

    def exit_status(self, instance_id: str) -> int | None:
        """0 once it has ended."""
        one = self._programs.get(instance_id)
        return None if one is None or one.lives else 0

    def switch_off(self, instance_id: str) -> None:
        """It can be switched on again."""
        for kept in (self._inits, self._programs):
            kept.pop(instance_id, None)
        self._requests.pop(instance_id, None)

    def pid(self, instance_id: str) -> int | None:
        """Of the program, else of init."""
        init = self._inits.get(instance_id)
        return None if init is None else self.program(instance_id) or init.pid

    # What a test lets happen to machines.

    def cloud_dies(self) -> None:
        """The cloud is killed: machines go on, and those that waited for their boot boot now."""
        for instance_id, init in self._inits.items():
            if init.lives:
                self.boot(instance_id)

    def host_dies(self) -> None:
        """Every machine is off at once, as when no successor came in time; the next hypervisor is told when."""
        self._kill(self._living())
        self._lost_at = self._clock.now()

    def init_dies(self, instance_id: str) -> None:
        """Somebody kills the first process; others of the machine live on."""
        self._kill([self._inits[instance_id]])

    def program_ends(self, instance_id: str) -> None:
        """The user data comes to its end."""
        self._kill([self._programs[instance_id]])

    def ask_shutdown(self, instance_id: str, when: str = "now") -> None:
        """A program of the machine calls `shutdown`."""
        self._requests[instance_id] = when

    def cancel_shutdown(self, instance_id: str) -> None:
        """It thinks better of it."""
        self._requests.pop(instance_id, None)

    def fork(self, instance_id: str, name: str = "child", *, stubborn: bool = False, rss: int = 0) -> FakeProcess:
        """One more process of a machine."""
        return self._start(instance_id, name, stubborn=stubborn, rss=rss)

    def lives_of(self, instance_id: str) -> list[tuple[datetime, datetime | None]]:
        """From when until when a process of this machine lived, one pair for each process."""
        return [(one.started, one.ended) for one in self.processes if one.instance_id == instance_id]

    def living(self) -> set[str]:
        """Every instance with a living process."""
        return {one.instance_id for one in self._living()}

    def _living(self) -> list[FakeProcess]:
        return [one for one in self.processes if one.lives]

    def _init_in(self, instance_id: str) -> int | None:
        init = self._inits.get(instance_id)
        return init.pid if init is not None and init.lives else None

    def _start(self, instance_id: str, name: str, *, stubborn: bool = False, rss: int = 0) -> FakeProcess:
        one = FakeProcess(instance_id, next(self._pids), name, self._clock.now(), stubborn=stubborn, rss=rss)
        self.processes.append(one)
        return one

    def _kill(self, victims: Iterable[FakeProcess]) -> None:
        for one in victims:
            one.ended = one.ended or self._clock.now()
