"""The program is asked first and ended when time is up; the first reason stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpucost.clock import ManualClock
from gpucost.job import HangWatch
from gpucost.jobstore import AttemptRecord, Command, Control, JobStore, Member
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.recipe import Recipe
from gpucost.training.agent.asking import ByRequest
from gpucost.training.agent.hang import Hang
from gpucost.training.agent.orders import Extend, Kill, Order, Reconfigure, Save, Stop
from gpucost.training.agent.supervisor import Asking, Supervisor
from gpucost.training.agent.watch import ControlWatch, Repeat
from gpucost.training.workdir import EXIT_REFUSED, EXIT_STOPPED, Progress, Workdir

NOW = datetime(2026, 11, 30, tzinfo=UTC)
REAL = datetime(2030, 1, 1, tzinfo=UTC)
LIMITS = HangWatch(times=10, at_least_seconds=20_000, start_seconds=30_000)


class Fake:
    """A program that runs until it is killed, or longer when it is stuck in the kernel."""

    def __init__(self) -> None:
        self.killed = False
        self.stuck = False
        self.signals = 0
        self.dumped = False

    def exit_code(self) -> int | None:
        return -9 if self.killed and not self.stuck else None

    def kill(self) -> None:
        self.killed = True

    def ask_to_end(self) -> None:
        self.signals += 1

    def dump_stacks(self) -> int:
        self.dumped = True
        return 70


class Stage:
    """A supervisor, and the clocks in hand."""

    def __init__(self, tmp_path: Path) -> None:
        self.real = 1000.0
        self.clock = ManualClock(NOW)
        self.program = Fake()
        self.workdir = Workdir(tmp_path)
        self.extended: list[datetime] = []
        self.supervisor = self.make()
        self.supervisor.begin(self.program)

    def make(self, asking: Asking | None = None, extend: Callable[[datetime], None] | None = None) -> Supervisor:
        return Supervisor(
            asking=asking or ByRequest(self.workdir),
            progress=self.workdir.progress,
            hang=Hang(LIMITS),
            recipe=Recipe(batch=64),
            clock=self.clock,
            expires_at=NOW + timedelta(hours=1),
            extended=extend or self.extend,
            real=lambda: self.real,
            real_now=lambda: REAL + timedelta(seconds=self.real),
        )

    def extend(self, expires_at: datetime) -> None:
        self.extended.append(expires_at)

    def asked(self) -> Command | None:
        request = self.workdir.request()
        return request.command if request else None

    def passes(self, real: float) -> None:
        self.real += real
        self.supervisor.tick()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_notice_asks_first_and_kills_before_the_stated_time(stage: Stage) -> None:
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "notice", within=120))
    assert stage.asked() is Command.SAVE_AND_STOP
    stage.passes(114.9)
    assert not stage.program.killed
    stage.passes(0.2)
    assert stage.program.killed
    assert stage.supervisor.gone_by == 1120
    assert stage.supervisor.run(stage.program) == -9


def test_of_a_short_notice_three_quarters_are_for_saving(stage: Stage) -> None:
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "notice", within=10))
    stage.passes(7.4)
    assert not stage.program.killed
    stage.passes(0.2)
    assert stage.program.killed


def test_the_first_reason_stands_and_the_nearest_end_counts(stage: Stage) -> None:
    stage.supervisor.obey(Stop(Reason.STOPPED, "budget"))
    stage.passes(3600)
    assert not stage.program.killed
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "SIGTERM", within=25))
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "notice", within=120))
    stage.passes(20.1)
    assert stage.program.killed
    assert stage.supervisor.asked is not None
    assert stage.supervisor.asked.reason is Reason.STOPPED


def test_save_goes_on(stage: Stage) -> None:
    stage.supervisor.obey(Save("rebalance"))
    assert stage.asked() is Command.SAVE
    stage.passes(600)
    assert not stage.program.killed
    stage.supervisor.obey(Stop(Reason.STOPPED, "budget"))
    stage.supervisor.obey(Save("rebalance"))
    assert stage.asked() is Command.SAVE_AND_STOP


def test_an_expired_node_ends_and_an_extended_one_goes_on(stage: Stage) -> None:
    stage.supervisor.obey(Extend(NOW + timedelta(hours=3)))
    stage.supervisor.obey(Extend(NOW + timedelta(hours=2)))  # Never shortened.
    assert stage.extended == [NOW + timedelta(hours=3)]
    stage.clock.advance(timedelta(hours=2, minutes=59))
    stage.passes(0)
    assert stage.asked() is None
    stage.clock.advance(timedelta(minutes=1))
    stage.passes(0)
    assert stage.asked() is Command.SAVE_AND_STOP
    assert stage.supervisor.asked is not None
    assert stage.supervisor.asked.reason is Reason.EXPIRED
    stage.passes(30)
    assert stage.program.killed


def test_an_overtaken_attempt_is_ended_at_once(stage: Stage) -> None:
    stage.supervisor.obey(Kill(Reason.FENCED, "attempt 2 owns the job"))
    assert stage.program.killed
    assert stage.asked() is None


def test_an_expired_node_ends_although_it_was_asked_to_stop_before(stage: Stage) -> None:
    stage.supervisor.obey(Stop(Reason.STOPPED, "budget"))
    stage.clock.advance(timedelta(hours=1))
    stage.passes(0)
    stage.passes(30)
    assert stage.program.killed
    assert stage.supervisor.asked is not None
    assert stage.supervisor.asked.reason is Reason.STOPPED


def test_an_expiry_beyond_all_calendars_stands(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: datetime) -> None:
        raise OverflowError("date value out of range")

    supervisor = stage.make(extend=refuse)
    supervisor.begin(stage.program)
    supervisor.obey(Extend(datetime.max.replace(tzinfo=UTC)))
    assert "expiry stays" in capsys.readouterr().err


def test_an_expiry_that_cannot_be_extended_stands(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(expires_at: datetime) -> None:
        raise BlockingIOError("no more processes")

    stage.supervisor = stage.make(extend=refuse)
    stage.supervisor.begin(stage.program)
    stage.supervisor.obey(Extend(NOW + timedelta(hours=2)))
    assert "expiry stays 2026-11-30T01:00:00+00:00: no more processes" in capsys.readouterr().err
    stage.clock.advance(timedelta(hours=1))
    stage.supervisor.tick()
    assert stage.asked() is Command.SAVE_AND_STOP


def test_a_request_tells_the_time_by_which_the_program_must_have_ended(stage: Stage) -> None:
    def gone_by() -> datetime | None:
        request = stage.workdir.request()
        assert request is not None
        return request.gone_by

    stage.supervisor.obey(Stop(Reason.STOPPED, "budget"))
    assert gone_by() is None
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "notice", within=120))
    assert gone_by() == REAL + timedelta(seconds=1000 + 115)
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "SIGTERM", within=1000))
    assert gone_by() == REAL + timedelta(seconds=1000 + 115)


def test_a_program_that_cannot_be_asked_gets_a_signal(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Workdir, request: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Workdir, "ask", full)
    stage.supervisor.obey(Save("rebalance"))
    assert stage.program.signals == 0
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "notice", within=120))
    assert stage.program.signals == 1
    assert "cannot be asked to save_and_stop: [Errno 28] No space left" in capsys.readouterr().err


def test_a_program_that_hangs_leaves_its_stacks_and_is_ended(stage: Stage) -> None:
    stage.workdir.write_progress(Progress(step=5, at=NOW))
    stage.passes(1)
    stage.passes(20_000)
    assert not stage.program.killed
    stage.passes(1)
    assert stage.program.dumped
    assert stage.program.killed
    assert stage.supervisor.hung is not None
    assert stage.supervisor.hung.step == 5
    assert stage.supervisor.stacks_from == 70


def test_where_a_time_is_stated_none_of_it_goes_into_stacks(stage: Stage) -> None:
    stage.workdir.write_progress(Progress(step=5, at=NOW))
    stage.passes(19_990)
    stage.supervisor.obey(Stop(Reason.INTERRUPTED, "notice", within=60))
    stage.passes(40)
    assert not stage.program.dumped
    assert not stage.program.killed


def test_what_is_left_to_do_after_the_end_takes_its_time_until_one_is_stated(stage: Stage) -> None:
    stage.supervisor.obey(Kill(Reason.HUNG, "hung"))
    stage.passes(100)
    work = Fake()
    looks = 0
    look = work.exit_code

    def later() -> int | None:
        nonlocal looks
        looks += 1
        stage.real += 100
        first_notice = looks == 50
        again: Order = Stop(Reason.INTERRUPTED, "notice", within=120) if first_notice else Save("no need to wait")
        stage.supervisor.orders.put(again)
        return look()

    work.exit_code = later  # type: ignore[method-assign]
    stage.supervisor.follow_up(work)
    assert work.killed
    assert 50 < looks < 55
    assert stage.supervisor.gone_by is not None


class TestReconfigure:
    """Another recipe: the program saves, ends, and is started again; or goes on as before."""

    @pytest.fixture(autouse=True)
    def _stage(self, stage: Stage) -> None:
        self.stage = stage
        self.supervisor = stage.supervisor

    def test_a_valid_one_is_started_with(self) -> None:
        self.supervisor.obey(Reconfigure({"accumulate": 2}, "tuning"))
        assert self.stage.asked() is Command.SAVE_AND_STOP
        self.supervisor.obey(Reconfigure({"batch": None}, "tuning again"))
        self.supervisor.obey(Save("rebalance"))
        assert self.stage.asked() is Command.SAVE_AND_STOP
        assert self.supervisor.asked is None
        assert self.supervisor.recipe_to_start_with(EXIT_STOPPED) == Recipe(accumulate=2)
        assert self.supervisor.recipe_to_start_with(EXIT_STOPPED) is None
        self.supervisor.begin(self.stage.program)
        self.supervisor.obey(Save("rebalance"))
        assert self.stage.asked() is Command.SAVE

    def test_an_invalid_one_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.supervisor.obey(Reconfigure({"batch": "many", "colour": "red"}, "tuning"))
        assert self.stage.asked() is None
        said = capsys.readouterr().err
        assert "tuning: the recipe is refused, going on as before" in said
        assert "batch" in said
        assert "colour" in said

    def test_the_same_one_changes_nothing(self) -> None:
        self.supervisor.obey(Reconfigure({"batch": 64}, "tuning"))
        assert self.stage.asked() is None

    @pytest.mark.parametrize("code", [0, 1, -9, None])
    def test_a_program_that_ended_otherwise_is_not_started_again(self, code: int | None) -> None:
        self.supervisor.obey(Reconfigure({"batch": 32}, "tuning"))
        assert self.supervisor.recipe_to_start_with(code) is None

    def test_one_that_the_program_cannot_do_is_taken_back_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.supervisor.obey(Reconfigure({"batch": 32}, "tuning"))
        assert self.supervisor.recipe_to_start_with(EXIT_STOPPED) == Recipe(batch=32)
        assert self.supervisor.recipe_to_start_with(EXIT_REFUSED) == Recipe(batch=64)
        assert "cannot do the recipe {'batch': 32}; going on with the one before" in capsys.readouterr().err
        assert self.supervisor.recipe == Recipe(batch=64)
        assert self.supervisor.recipe_to_start_with(EXIT_REFUSED) is None

    def test_nor_one_that_is_to_stop_meanwhile(self) -> None:
        self.supervisor.obey(Reconfigure({"batch": 32}, "tuning"))
        self.supervisor.obey(Stop(Reason.STOPPED, "budget"))
        assert self.supervisor.recipe_to_start_with(EXIT_STOPPED) is None

    def test_before_the_training_it_holds_from_its_start_on(self) -> None:
        self.supervisor.begin(self.stage.program, training=False)
        self.supervisor.obey(Reconfigure({"batch": 32}, "tuning"))
        assert self.supervisor.recipe == Recipe(batch=32)
        assert self.stage.asked() is None


def test_before_the_training_a_stop_ends_what_is_being_done(stage: Stage) -> None:
    stage.supervisor.begin(stage.program, training=False)
    stage.supervisor.obey(Save("rebalance"))
    assert stage.program.signals == 0
    stage.supervisor.obey(Stop(Reason.STOPPED, "budget"))
    assert stage.program.signals == 1
    stage.passes(40_000)
    assert not stage.program.dumped


class TestStuck:
    """A program that does not even end when it is killed is left behind."""

    @pytest.fixture(autouse=True)
    def _stuck(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        stage.program.stuck = True
        self.stage = stage

    def seconds_until_it_gives_up(self, *orders: Order) -> float:
        for order in orders:
            self.stage.supervisor.obey(order)
        began = self.stage.real
        look = self.stage.program.exit_code

        def later() -> int | None:
            self.stage.real += 0.5
            self.stage.supervisor.orders.put(Save("no need to wait for the queue"))
            return look()

        self.stage.program.exit_code = later  # type: ignore[method-assign]
        assert self.stage.supervisor.run(self.stage.program) is None
        return self.stage.real - began

    def test_it_is_waited_for_a_while(self) -> None:
        assert self.seconds_until_it_gives_up(Kill(Reason.FENCED, "overtaken")) == pytest.approx(20, abs=1)

    def test_a_second_kill_does_not_put_it_off(self) -> None:
        self.stage.supervisor.obey(Kill(Reason.FENCED, "overtaken"))
        self.stage.real += 15
        assert self.seconds_until_it_gives_up(Kill(Reason.FENCED, "overtaken")) == pytest.approx(5, abs=1)

    def test_of_a_stated_time_some_is_left_for_the_exit_record(self) -> None:
        gone = self.seconds_until_it_gives_up(Stop(Reason.INTERRUPTED, "notice", within=120))
        assert 115 < gone < 119


class TestControlWatch:
    """The control object and the fence become orders, each change once."""

    def setup_method(self) -> None:
        self.store = JobStore(Objects.in_memory(), "job")
        self.store.write_attempt(
            AttemptRecord(number=1, members=(Member(lease_id="l"),), created_at=NOW, expires_at=NOW)
        )
        self.store.claim(1)
        self.orders: list[Order] = []
        self.watch = ControlWatch(self.store, 1, self.orders.append)

    def look(self) -> list[Order]:
        self.orders.clear()
        self.watch.look()
        return list(self.orders)

    def test_nothing_asked_is_nothing_done(self) -> None:
        assert self.look() == []

    def test_each_change_is_told_once(self) -> None:
        later = NOW + timedelta(hours=2)
        self.store.ask(1, Control(sequence=1, command=Command.SAVE, why="look", expires_at=later))
        assert self.look() == [Extend(later), Save("look")]
        assert self.look() == []
        self.store.ask(1, Control(sequence=2, command=Command.SAVE_AND_STOP, expires_at=later))
        assert self.look() == [Stop(Reason.STOPPED, "control 2: save_and_stop")]
        self.store.ask(1, Control(sequence=3, command=Command.RECONFIGURE, recipe={"batch": 8}))
        assert self.look() == [Reconfigure({"batch": 8}, "control 3: reconfigure")]

    def test_a_command_of_a_newer_release_is_said_once_and_the_rest_holds(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        later = NOW + timedelta(hours=2)
        self.store.objects.put(
            f"{self.store.attempt_root(1)}/control.json",
            json.dumps({"sequence": 4, "command": "hibernate", "expires_at": later.isoformat(), "new": 1}).encode(),
        )
        assert self.look() == [Extend(later)]
        assert self.look() == []
        said = "control 4 asks for 'hibernate', which this version does not know; going on as before"
        assert capsys.readouterr().err.count(said) == 1
        self.store.ask(1, Control(sequence=5, command=Command.SAVE_AND_STOP, why="budget"))
        assert self.look() == [Stop(Reason.STOPPED, "budget")]

    def test_after_a_control_object_that_is_none_the_next_one_is_heard(self) -> None:
        key = f"{self.store.attempt_root(1)}/control.json"
        repeat = Repeat("control object", 3, self.watch.look, (OSError,))
        for document in (b"", b"[]", b'{"sequence": "many"}', b'{"sequence": -1, "command": "hibernate"}'):
            self.store.objects.put(key, document)
            repeat.once()
        assert self.orders == []
        self.store.claim(2)
        repeat.once()
        assert [type(order) for order in self.orders] == [Kill]

    def test_a_moved_fence_kills(self) -> None:
        self.store.claim(2)
        (order,) = self.look()
        assert isinstance(order, Kill)
        assert order.reason is Reason.FENCED


def test_an_outage_is_said_once_and_its_end_once(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([ConnectionError("refused"), ConnectionError("refused"), None, None])

    def ask() -> None:
        if answer := next(answers):
            raise answer

    repeat = Repeat("control object", 3, ask, (OSError,))
    for _ in range(4):
        repeat.once()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "gpucost agent: control object: refused; trying again every 3 s",
        "gpucost agent: control object: works again",
    ]


def test_what_nobody_foresaw_is_said_in_full_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([ConnectionError("refused"), KeyError("step"), KeyError("step"), None])

    def ask() -> None:
        if answer := next(answers):
            raise answer

    repeat = Repeat("sending", 2, ask, (OSError,))
    for _ in range(4):
        repeat.once()
    said = capsys.readouterr().err
    assert said.count("sending: refused; trying again") == 1
    assert said.count("KeyError: 'step'; trying again every 2 s") == 1
    assert "in ask" in said
    assert said.endswith("sending: works again\n")
