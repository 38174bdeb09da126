"""Who runs the machines? Makes the processes of each instance follow what the book says, and reports back.

One thread looks at every machine each tick (real time): powers on what was bought, boots what is due, hears
`shutdown` from inside, and ends what must end until no process of it is left. About once in a real second, and in
each tick while something ends, it looks at the host's processes: whose machine is gone, whose takes too much memory,
which process belongs to nobody. Who is interrupted, and when, is decided elsewhere, right before each tick.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from gpucost.clock import Clock
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import FROM_INSIDE, LOST, Instance
from gpucost.rehearsal.machines import disk
from gpucost.rehearsal.machines.memory import MemoryLimit
from gpucost.rehearsal.machines.power import Power, Sight
from gpucost.rehearsal.settings import Settings

log = logging.getLogger(__name__)

LOOK_EVERY_REAL_S = 1.0
"""How often all processes are looked at while nothing ends."""

AFTER_KILL_REAL_S = 0.02
"""A process that was killed is gone in milliseconds: look again soon."""

SILENT_REAL_S = 15.0
"""A host that switches hundreds of machines on at once is busy for seconds; one that is silent for longer is ill."""

REST = 4.0
"""Looks rest this many times as long as they last: with hundreds of machines they must not eat the host."""

MOST_MINUTES = 60 * 24 * 365
"""A `shutdown` further ahead is as good as none."""

ENDING = frozenset({"shutting-down", "stopping"})


@dataclass
class _Machine:
    """What the hypervisor knows of one machine that is on; touched by its own thread only.

    `seen` is when its init was last known to live: should it die, no later second is billed.
    """

    seen: datetime
    program: int | None = None
    program_end_told: bool = False
    shutdown_due: datetime | None = None
    kill_at_real: float | None = None


class Hypervisor:
    """Runs the instances of one book.

    Args:
        book: what should run.
        clock: the rehearsal clock.
        settings: durations and folders.
        power: the machines' power switches.
        memory: how much each may use; no limit when left out.
        on_tick: called at the beginning of each tick, before machines are looked at: decides on interruptions.
        monotonic: real seconds.
    """

    def __init__(
        self,
        book: Book,
        clock: Clock,
        settings: Settings,
        power: Power,
        *,
        memory: MemoryLimit | None = None,
        on_tick: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._clock = clock
        self._settings = settings
        self._power = power
        self._memory = memory or MemoryLimit(lambda _type: None)
        self._on_tick = on_tick
        self._monotonic = monotonic
        self._machines: dict[str, _Machine] = {}
        self._faults: dict[str, str] = {}
        self._may_look_at = self._must_look_at = monotonic()
        self._ticked = monotonic()
        self._failing = False
        self._soon = False
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hypervisor", daemon=True)

    def start(self) -> None:
        """Take up the machines of an earlier cloud, and start looking after all."""
        self.adopt()
        self._power.open()
        self._ticked = self._monotonic()
        self._thread.start()

    def wake(self) -> None:
        """Look now instead of at the next tick: somebody changed the book."""
        self._wake.set()

    def stop(self) -> None:
        """The host is switched off: every machine ends at once, in the book too; returns when no process is left."""
        self._end_thread()
        for instance in self._book.holding():
            self._book.begin_end(instance.id, LOST, abrupt=True)
        if not self._power.close(machines_go_on=False):
            return
        for instance in self._book.holding():
            self._carefully(instance.id, functools.partial(self._end, instance, None))

    def leave(self) -> None:
        """Let machines go on for a successor on the same folder; the guard ends them when none comes in time."""
        self._end_thread()
        self._power.close(machines_go_on=True)

    def _end_thread(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    def folder(self, instance_id: str) -> Path:
        """The instance's disk."""
        return disk.folder_of(self._settings.state_dir, instance_id)

    def pid(self, instance_id: str) -> int | None:
        """The real process id of its user data, of its init before that is started; None when it is not on."""
        return self._power.pid(instance_id)

    def adopt(self) -> None:
        """Compare the book with what runs: machines that are on go on, those that are not were lost with the host."""
        now, sights = self._clock.now(), self._power.look()
        adopted, lost = 0, 0
        for instance in self._book.holding():
            sight = sights.get(instance.id)
            if sight is not None and sight.init is not None:
                told = self._power.exit_status(instance.id) is not None
                self._machines[instance.id] = _Machine(now, program_end_told=told)
                adopted += 1
            elif instance.living and self._power.was_on(instance.id):
                self._lose(instance, self._power.lost_at())
                lost += 1
        if adopted or lost:
            log.info("machines of an earlier start: %d go on, %d were lost with their host", adopted, lost)

    def _lose(self, instance: Instance, at: datetime | None) -> None:
        """The machine is off and nobody switched it off; a time that lies ahead is a clock's fault."""
        now = self._clock.now()
        if self._book.begin_end(instance.id, LOST, abrupt=True, at=min(at or now, now)):
            log.warning("%s lost: its first process is gone", instance.id)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            tick = self._settings.tick_real_s
            self._wake.wait(min(AFTER_KILL_REAL_S, tick) if self._soon else tick)
            self._wake.clear()
            if not self._stopping.is_set():
                self._tick_or_say_why_not()

    def _tick_or_say_why_not(self) -> None:
        self._failing = not self._carefully("the host", self.tick)
        if not self._failing:
            self._ticked = self._monotonic()

    def healthy(self) -> bool:
        """Whether machines are looked after: a cloud that does not must not be taken for one that works."""
        return self.ailment() is None

    def ailment(self) -> str | None:
        """Why machines are not looked after, for people; None when they are."""
        if not self._thread.is_alive():
            return "machines are not looked after: the hypervisor's thread does not run"
        silent_s = self._monotonic() - self._ticked
        if silent_s <= max(SILENT_REAL_S, 3 * self._settings.tick_real_s):
            return None
        why = self._faults["the host"] if self._failing else "one round of it does not come to its end"
        return f"machines were last looked after {silent_s:.0f} s ago: {why}"

    def tick(self) -> None:
        """Look at every machine once.

        Raises:
            OSError: the host did not let us look; what a look did not see is not taken for gone.
        """
        self._soon = False
        self._carefully("the guard", self._power.check)
        self._carefully("interruptions", self._on_tick)
        requests = self._power.shutdown_requests()
        for instance in self._book.holding():
            if instance.living:
                self._carefully(instance.id, functools.partial(self._look_after, instance, requests.get(instance.id)))
        if self._look_is_due():
            self._look()

    def _carefully(self, what: str, care: Callable[[], None]) -> bool:
        """Whether it went well. A fault must not leave all else alone: say it once, and try again next tick."""
        try:
            care()
        except Exception as error:
            if self._faults.get(what) != str(error):
                self._faults[what] = str(error)
                log.exception("%s: the hypervisor could not look after it; it keeps trying", what)
            return False
        return True

    def _look_after(self, instance: Instance, request: str | None) -> None:
        machine = self._machines.get(instance.id)
        if machine is None:
            machine = self._switch_on(instance)
        if machine is None:
            return
        if instance.waits_for_power:
            # it lives now, however long it waited for that: nobody pays for the time before
            instance = self._book.mark_on(instance.id) or instance
        now = self._clock.now()
        if instance.state == "pending" and now >= instance.launched + timedelta(seconds=self._settings.boot_s):
            self._boot(instance)
        if _is_due(machine, request, now) and self._book.begin_end(instance.id, FROM_INSIDE):
            log.info("%s shut down from inside", instance.id)

    def _switch_on(self, instance: Instance) -> _Machine | None:
        try:
            self._power.switch_on(instance)
        except OSError as error:
            # as on EC2: a machine that cannot be launched goes from pending to terminated
            log.error("%s cannot be powered on: %s", instance.id, error)  # noqa: TRY400 (the sentence tells all)
            self._book.begin_end(instance.id, LOST, abrupt=True)
            return None
        return self._machines.setdefault(instance.id, _Machine(self._clock.now()))

    def _boot(self, instance: Instance) -> None:
        # the book first: a program that looks itself up sees its machine running
        if self._book.mark_running(instance.id):
            self._power.boot(instance.id)
            log.info("%s running: %s, %s", instance.id, instance.pool, instance.lifecycle)

    def _look_is_due(self) -> bool:
        now = self._monotonic()
        ending = any(one.state in ENDING for one in self._book.holding())
        return now >= (self._may_look_at if ending else self._must_look_at)

    def _look(self) -> None:
        began = self._monotonic()
        self._compare()
        ended = self._monotonic()
        self._may_look_at = ended + REST * (ended - began)
        self._must_look_at = max(began + LOOK_EVERY_REAL_S, self._may_look_at)

    def _compare(self) -> None:
        # processes first: each of them belongs to an instance that the book knew before
        now, sights = self._clock.now(), self._power.look()
        holding = {instance.id: instance for instance in self._book.holding()}
        for instance in holding.values():
            sight = sights.get(instance.id)
            if instance.id in self._machines and sight is not None and sight.init is not None:
                self._machines[instance.id].seen = now
            care = self._end if instance.state in ENDING else self._examine
            self._carefully(instance.id, functools.partial(care, instance, sight))
        for instance_id, sight in sights.items():
            if instance_id not in holding:
                log.warning("%s has processes and is not on: they are killed", instance_id)
                self._power.send(sight.processes, signal.SIGKILL)

    def _examine(self, instance: Instance, sight: Sight | None) -> None:
        """A machine that should be on: is it, does its user data run, does it use more memory than it has?"""
        machine = self._machines.get(instance.id)
        if machine is None:
            return  # bought a moment ago
        if sight is None or sight.init is None:
            self._lose(instance, machine.seen)
            self._soon = True
            return
        self._tell_program_end(instance, machine, sight)
        kind = instance.pool.instance_type
        victim = self._memory.victim(kind, sight.processes, sight.init)
        if victim is not None:
            self._power.send([victim.pid], signal.SIGKILL)
            line = f"Out of memory: Killed process {victim.pid} ({victim.name})"
            self._power.console(instance.id, line)
            log.warning("%s %s: it has %s MiB", instance.id, line, self._memory.limit_mib(kind))

    def _tell_program_end(self, instance: Instance, machine: _Machine, sight: Sight) -> None:
        if machine.program is None:
            machine.program = self._power.program(instance.id)
        if machine.program is None or machine.program_end_told or machine.program in sight.processes:
            return
        status = self._power.exit_status(instance.id)
        if status is not None:
            machine.program_end_told = True
            log.info("%s user data ended with %s; the machine stays up", instance.id, status)

    def _end(self, instance: Instance, sight: Sight | None) -> None:
        """One more step to the end: ask all programs, kill what stays, and init last of all."""
        if sight is None or not sight.processes:
            self._power.switch_off(instance.id)
            self._machines.pop(instance.id, None)
            self._book.mark_ended(instance.id)
            ended = self._book.get(instance.id)
            log.info("%s %s", instance.id, ended.state if ended else "gone")
            return
        machine = self._machines.setdefault(instance.id, _Machine(self._clock.now()))
        programs = sight.processes.keys() - {sight.init}
        now = self._monotonic()
        if instance.abrupt or not programs or (machine.kill_at_real is not None and now >= machine.kill_at_real):
            self._power.send(sight.processes, signal.SIGKILL)
            self._soon = True
        elif machine.kill_at_real is None:
            machine.kill_at_real = now + self._settings.stop_grace_real_s
            self._power.send(programs, signal.SIGTERM)


def _is_due(machine: _Machine, request: str | None, now: datetime) -> bool:
    """Whether a machine's request to be powered off, `now` or `+MINUTES`, is to be carried out."""
    if request is None:
        machine.shutdown_due = None
        return False
    if machine.shutdown_due is None:
        digits = request.removeprefix("+")
        minutes = int(digits) if digits.isascii() and digits.isdigit() else 0
        machine.shutdown_due = now + timedelta(minutes=min(minutes, MOST_MINUTES))
    return now >= machine.shutdown_due
