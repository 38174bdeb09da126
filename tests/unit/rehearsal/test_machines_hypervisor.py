"""Machines follow the book: on, booted, asked to end, ended, found again; without a process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import BY_USER, FROM_INSIDE, LOST, NO_CAPACITY, LaunchSpec
from gpucost.rehearsal.machines import hypervisor
from gpucost.rehearsal.machines.hypervisor import Hypervisor
from gpucost.rehearsal.machines.memory import MIB, MemoryLimit
from gpucost.rehearsal.settings import Settings
from tests.fakes.rehearsal import ORIGIN, MemoryJournal, Watch, at, buy, instance, market
from tests.fakes.rehearsal_power import FakePower

SPEED = 60.0


class Host:
    """A book, a hypervisor and machines on one clock; `restart` makes a new cloud from the journal."""

    def __init__(self, **settings: Any) -> None:
        self.watch = Watch(SPEED)
        self.clock = self.watch.clock
        self.power = FakePower(self.clock)
        self.journal = MemoryJournal()
        self.settings = Settings(state_dir=Path("state"), market=Path("market.json"), boot_s=30, **settings)
        self.pss: dict[int, int] = {}
        self.memory: MemoryLimit | None = None
        self.on_tick: Callable[[], None] = lambda: None
        self.restart()

    def restart(self) -> None:
        """The cloud's next life, before it has looked at anything."""
        self.book = Book(market(), self.clock, self.journal)
        self.book.restore(self.journal.events())
        self.hypervisor = Hypervisor(
            self.book,
            self.clock,
            self.settings,
            self.power,
            memory=self.memory,
            on_tick=lambda: self.on_tick(),
            monotonic=lambda: (self.clock.now() - ORIGIN).total_seconds() / SPEED,
        )
        self.hypervisor.adopt()

    def pass_(self, **time: float) -> None:
        """Let rehearsal time pass, and look."""
        self.watch.set(self.clock.now() + timedelta(**time))
        self.hypervisor.tick()

    def until(self, moment: datetime) -> None:
        """Look every rehearsal second until `moment`."""
        while self.clock.now() < moment:
            self.pass_(seconds=1)

    def running(self, **more: Any) -> str:
        """One instance that has booted."""
        (one,) = buy(self.book, **more)
        self.hypervisor.tick()
        self.pass_(seconds=30)
        assert self.state(one) == "running"
        return one

    def state(self, instance_id: str) -> str:
        return instance(self.book, instance_id).state

    def names(self, instance_id: str) -> list[str]:
        """The living processes of a machine."""
        return [one.name for one in self.power.processes if one.instance_id == instance_id and one.lives]


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_machine_lives_from_its_launch_and_runs_its_user_data_from_its_boot(host: Host) -> None:
    (one,) = buy(host.book)
    host.hypervisor.tick()
    assert (host.state(one), host.names(one)) == ("pending", ["sh"])
    init = host.hypervisor.pid(one)
    host.pass_(seconds=29)
    assert (host.state(one), host.names(one)) == ("pending", ["sh"])
    host.pass_(seconds=1)
    assert (host.state(one), host.names(one)) == ("running", ["sh", "user-data"])
    assert host.hypervisor.pid(one) != init
    assert host.power.lives_of(one)[0] == (instance(host.book, one).launched, None)


def test_the_end_of_the_user_data_is_not_the_end_of_the_machine(host: Host) -> None:
    one = host.running()
    host.power.program_ends(one)
    host.until(at(minutes=20))
    assert (host.state(one), host.names(one)) == ("running", ["sh"])


def test_a_terminated_machine_is_asked_first_and_its_init_goes_last(host: Host) -> None:
    host.power.stubborn = True
    one = host.running()
    polite = host.power.fork(one)
    host.book.begin_end(one, BY_USER)
    host.pass_(seconds=1)
    assert not polite.lives
    assert (host.state(one), host.names(one)) == ("shutting-down", ["sh", "user-data"])
    before = host.clock.now() + timedelta(seconds=host.settings.stop_grace_real_s * SPEED)
    host.until(before - timedelta(seconds=3))
    assert host.names(one) == ["sh", "user-data"]
    host.until(before + timedelta(seconds=3))
    assert (host.state(one), host.names(one)) == ("terminated", [])


def test_a_machine_whose_power_is_cut_is_gone_at_once_with_everything(host: Host) -> None:
    host.power.stubborn = True
    one = host.running()
    host.power.fork(one, stubborn=True)
    host.book.begin_end(one, NO_CAPACITY, abrupt=True)
    host.pass_(seconds=1)
    assert host.names(one) == []
    host.pass_(seconds=1)
    assert host.state(one) == "terminated"


def test_a_machine_that_is_terminated_while_pending_never_boots(host: Host) -> None:
    (one,) = buy(host.book)
    host.hypervisor.tick()
    host.book.begin_end(one, BY_USER)
    host.until(at(seconds=60))
    assert host.state(one) == "terminated"
    assert [process.name for process in host.power.processes] == ["sh"]


@pytest.mark.parametrize(("behavior", "left"), [("terminate", "terminated"), ("stop", "stopped")])
def test_shutdown_from_inside_ends_it_as_its_template_says(host: Host, behavior: Any, left: str) -> None:
    one = host.running(lifecycle="on-demand", spec=LaunchSpec(shutdown_behavior=behavior))
    host.power.ask_shutdown(one)
    host.pass_(seconds=1)
    host.until(at(seconds=60))
    assert host.state(one) == left
    assert instance(host.book, one).ending == FROM_INSIDE
    assert host.names(one) == []


def test_shutdown_in_minutes_waits_for_them_and_can_be_taken_back(host: Host) -> None:
    one = host.running()
    host.power.ask_shutdown(one, "+2")
    host.until(at(seconds=120))
    host.power.cancel_shutdown(one)
    host.until(at(seconds=300))
    assert host.state(one) == "running"
    host.power.ask_shutdown(one, "+2")
    host.until(at(seconds=415))
    assert host.state(one) == "running"
    host.until(at(seconds=425))
    assert instance(host.book, one).ending == FROM_INSIDE


def test_a_stopped_machine_starts_again_and_is_asked_again_before_its_next_end(host: Host) -> None:
    one = host.running(lifecycle="on-demand")
    host.book.begin_stop(one, BY_USER)
    host.until(at(seconds=40))
    assert host.state(one) == "stopped"
    host.book.start_again(one)
    host.hypervisor.tick()
    assert (host.state(one), host.names(one)) == ("pending", ["sh"])
    host.pass_(seconds=30)
    assert (host.state(one), host.names(one)) == ("running", ["sh", "user-data"])
    host.book.begin_stop(one, BY_USER)
    host.until(host.clock.now() + timedelta(seconds=5))
    assert (host.state(one), host.names(one)) == ("stopped", [])


def test_a_machine_whose_first_process_is_killed_is_lost_and_nothing_of_it_stays(host: Host) -> None:
    one = host.running()
    host.power.init_dies(one)
    host.until(host.clock.now() + timedelta(seconds=2.5 * SPEED))
    found = instance(host.book, one)
    assert (found.state, found.ending) == ("terminated", LOST)
    assert host.names(one) == []


def test_what_cannot_be_powered_on_goes_from_pending_to_terminated(host: Host) -> None:
    (one,) = buy(host.book)
    host.power.fails_to_start.add(one)
    host.hypervisor.tick()
    host.pass_(seconds=1)
    found = instance(host.book, one)
    assert (found.state, found.ending) == ("terminated", LOST)


def test_a_process_without_an_instance_is_killed(host: Host) -> None:
    stray = host.power.fork("i-nobody")
    host.until(at(seconds=2 * SPEED))
    assert not stray.lives


def test_decisions_come_before_machines_are_looked_at(host: Host) -> None:
    one = host.running()
    host.on_tick = lambda: host.book.begin_end(one, NO_CAPACITY, abrupt=True) and None
    host.hypervisor.tick()
    assert host.names(one) == []


def test_a_fault_with_one_machine_leaves_the_others_alone(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("the market is away")

    host.on_tick = fails
    one = host.running()
    host.pass_(seconds=1)
    assert host.state(one) == "running"
    assert len([record for record in caplog.records if "the market is away" in str(record.exc_text)]) == 1


def test_a_machine_that_is_switched_on_late_is_launched_then_and_boots_later(host: Host) -> None:
    (one,) = buy(host.book)
    host.pass_(seconds=700.5)
    assert instance(host.book, one).launched == at(seconds=700)
    ((on, _),) = host.power.lives_of(one)
    assert on - at(seconds=700) < timedelta(seconds=1)
    host.pass_(seconds=29)
    assert host.state(one) == "pending"
    host.pass_(seconds=1)
    assert host.state(one) == "running"


def test_what_a_full_journal_did_not_take_is_done_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = buy(host.book)
    with monkeypatch.context() as full:
        full.setattr(host.journal, "write", refuse("no space left"))
        host.pass_(seconds=50.5)
    assert host.names(one) == ["sh"]
    host.pass_(seconds=50)
    assert instance(host.book, one).launched == at(seconds=100)
    host.pass_(seconds=30)
    assert (host.state(one), host.names(one)) == ("running", ["sh", "user-data"])


def refuse(why: str) -> Callable[..., Any]:
    """What always fails."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(why)

    return fails


def test_a_look_that_could_not_look_loses_no_machine(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one = host.running()
    with monkeypatch.context() as blind:
        blind.setattr(host.power, "look", refuse("Too many open files"))
        host.watch.set(at(minutes=10))
        with pytest.raises(OSError, match="Too many open files"):
            host.hypervisor.tick()
    host.pass_(minutes=1)
    assert host.state(one) == "running"


def real_hypervisor(host: Host) -> Hypervisor:
    """Of the same machines, in a thread and in real time."""
    settings = host.settings.model_copy(update={"tick_real_s": 0.01})
    return Hypervisor(host.book, host.clock, settings, host.power)


def within(limit_real_s: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + limit_real_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_the_thread_outlives_a_tick_that_fails_and_says_so_once(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hypervisor, "SILENT_REAL_S", 0.1)
    hypervisor_ = real_hypervisor(host)
    assert not hypervisor_.healthy(), "it has not begun"
    hypervisor_.start()
    (one,) = buy(host.book)
    assert within(5, lambda: host.names(one) == ["sh"])
    with monkeypatch.context() as broken:
        broken.setattr(host.power, "shutdown_requests", refuse("the host is ill"))
        assert within(5, lambda: not hypervisor_.healthy())
        assert "the host is ill" in (hypervisor_.ailment() or "")
    assert within(5, hypervisor_.healthy)
    (another,) = buy(host.book)
    assert within(5, lambda: host.names(another) == ["sh"])
    hypervisor_.stop()
    assert not hypervisor_.healthy(), "nobody looks after machines now"
    assert len([record for record in caplog.records if "the host is ill" in str(record.exc_text)]) == 1


def test_machines_go_on_over_a_restart_of_the_cloud(host: Host) -> None:
    one = host.running()
    pid = host.hypervisor.pid(one)
    host.hypervisor.leave()
    host.watch.set(at(minutes=30))
    host.restart()
    host.pass_(minutes=10)
    found = instance(host.book, one)
    assert (found.state, found.launched, found.ended) == ("running", ORIGIN, None)
    assert (host.hypervisor.pid(one), host.names(one)) == (pid, ["sh", "user-data"])
    host.book.begin_end(one, BY_USER)
    host.until(at(minutes=41))
    assert (host.state(one), host.names(one)) == ("terminated", [])


def test_a_machine_that_waited_for_its_boot_runs_once_after_a_restart(host: Host) -> None:
    (one,) = buy(host.book)
    host.hypervisor.tick()
    host.power.cloud_dies()
    host.restart()
    host.until(at(seconds=40))
    assert (host.state(one), host.names(one)) == ("running", ["sh", "user-data"])


def test_what_was_bought_right_before_the_cloud_was_killed_is_powered_on_by_the_next(host: Host) -> None:
    (one,) = buy(host.book)
    host.restart()
    host.until(at(seconds=40))
    assert (host.state(one), host.names(one)) == ("running", ["sh", "user-data"])


def test_machines_that_a_guard_ended_are_billed_until_then(host: Host) -> None:
    one = host.running()
    (waiting,) = buy(host.book)
    host.hypervisor.tick()
    host.watch.set(at(minutes=5))
    host.power.host_dies()
    host.watch.set(at(hours=3))
    host.restart()
    host.pass_(seconds=1)
    for instance_id in (one, waiting):
        found = instance(host.book, instance_id)
        assert (found.state, found.ending, found.ended) == ("terminated", LOST, at(minutes=5))


def test_what_was_ending_goes_on_ending_after_a_restart(host: Host) -> None:
    host.power.stubborn = True
    one = host.running()
    host.book.begin_end(one, BY_USER)
    host.pass_(seconds=1)
    host.restart()
    host.until(at(minutes=5))
    assert (host.state(one), host.names(one)) == ("terminated", [])
    assert instance(host.book, one).ending == BY_USER


def test_a_person_who_is_done_ends_all_machines_in_the_book_too(host: Host) -> None:
    one = host.running()
    (waiting,) = buy(host.book)
    host.hypervisor.tick()
    host.watch.set(at(minutes=7))
    host.hypervisor.stop()
    assert host.power.living() == set()
    host.watch.set(at(hours=1))
    host.restart()
    for instance_id in (one, waiting):
        found = instance(host.book, instance_id)
        assert (found.state, found.ended) == ("terminated", at(minutes=7))


def test_the_largest_process_of_a_machine_without_memory_is_killed_and_its_init_never() -> None:
    host = Host()
    host.memory = MemoryLimit(lambda _type: 1000, pss_of=lambda pid: rss[pid] * MIB)
    host.restart()
    one = host.running()
    rss: dict[int, int] = {}
    for name, mib in (("small", 300), ("large", 900)):
        process = host.power.fork(one, name, rss=mib * MIB)
        rss[process.pid] = mib
    for process in host.power.processes:
        rss.setdefault(process.pid, 0)
    host.until(host.clock.now() + timedelta(seconds=3 * SPEED))
    assert host.names(one) == ["sh", "user-data", "small"]
    (line,) = host.power.consoles[one]
    assert line.startswith("Out of memory: Killed process ")
    assert line.endswith("(large)")
    assert host.state(one) == "running"


def test_signals_go_to_programs_first(host: Host) -> None:
    one = host.running()
    sent: list[tuple[set[str], signal.Signals]] = []
    plain = host.power.send

    def send(pids: Any, what: signal.Signals) -> None:
        names = {process.name for process in host.power.processes if process.pid in set(pids)}
        sent.append((names, what))
        plain(pids, what)

    host.power.send = send  # type: ignore[method-assign]
    host.book.begin_end(one, BY_USER)
    host.until(host.clock.now() + timedelta(seconds=3))
    assert sent == [({"user-data"}, signal.SIGTERM), ({"sh"}, signal.SIGKILL)]
