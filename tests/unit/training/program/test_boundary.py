"""At a boundary all processes do the same, whoever heard of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpucost.clock import SpecClock
from gpucost.jobstore import Command
from gpucost.training.program.boundary import Boundary, Plan, Wish
from gpucost.training.program.reporting import Reporter
from gpucost.training.ranks import Alone
from gpucost.training.workdir import Request, Workdir

NOW = datetime(2026, 11, 30, tzinfo=UTC)


class Meeting:
    """Two processes as two threads that meet."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.brought: dict[int, Any] = {}

    def rank(self, number: int) -> Any:
        meeting = self

        class One:
            rank = number
            size = 2

            def gather(self, value: Any) -> list[Any]:
                meeting.barrier.wait()
                meeting.brought[number] = value
                meeting.barrier.wait()
                return [meeting.brought[0], meeting.brought[1]]

            def broadcast(self, value: Any) -> Any:
                return self.gather(value)[0]

            def highest(self, wish: int) -> int:
                return max(self.gather(wish))

        return One()


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    found: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: found.update(second=second()))
    thread.start()
    found["first"] = first()
    thread.join(10)
    return found["first"], found["second"]


@pytest.fixture
def workdir(tmp_path: Path) -> Workdir:
    return Workdir(tmp_path)


def pair(workdir: Workdir) -> tuple[Boundary, Boundary]:
    meeting = Meeting()
    first = Boundary(Reporter(workdir, SpecClock()), meeting.rank(0))
    return first, Boundary(Reporter(None, SpecClock(), silent=True), meeting.rank(1))


def test_what_one_process_heard_all_do(workdir: Workdir) -> None:
    first, second = pair(workdir)
    assert both(lambda: first.agree(False), lambda: second.agree(False)) == (Wish.GO_ON, Wish.GO_ON)
    workdir.ask(Request(sequence=1, command=Command.SAVE))
    assert both(lambda: first.agree(False), lambda: second.agree(False)) == (Wish.SAVE, Wish.SAVE)
    second._told.set()
    assert both(lambda: first.agree(True), lambda: second.agree(True)) == (Wish.STOP, Wish.STOP)


def test_a_save_between_micro_steps_waits_for_the_step(workdir: Workdir) -> None:
    boundary = Boundary(Reporter(workdir, SpecClock()), Alone())
    workdir.ask(Request(sequence=1, command=Command.SAVE))
    assert boundary.agree(False, may_save=False) is Wish.GO_ON
    assert boundary.agree(False, may_save=False) is Wish.GO_ON
    assert boundary.agree(False) is Wish.SAVE
    assert boundary.agree(False) is Wish.GO_ON


def test_a_stop_does_not_wait_for_the_step(workdir: Workdir) -> None:
    boundary = Boundary(Reporter(workdir, SpecClock()), Alone())
    workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))
    assert boundary.agree(False, may_save=False) is Wish.STOP


@pytest.mark.parametrize(("seconds", "fits"), [(None, True), (9.0, True), (11.0, False)])
def test_what_does_not_fit_is_told_by_the_stated_time(workdir: Workdir, seconds: float | None, fits: bool) -> None:
    first, second = pair(workdir)
    request = Request(sequence=1, command=Command.SAVE_AND_STOP, gone_by=NOW + timedelta(seconds=10))
    workdir.ask(request)
    both(lambda: first.agree(False), lambda: second.agree(False))
    assert both(lambda: first.fits(seconds, now=lambda: NOW), lambda: second.fits(seconds)) == (fits, fits)


def test_without_a_stated_time_everything_fits(workdir: Workdir) -> None:
    boundary = Boundary(Reporter(workdir, SpecClock()), Alone())
    workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))
    boundary.agree(False)
    assert boundary.fits(1e6)


class TestPlan:
    def plan(self, minimum: float = 0.0, maximum: float | None = None, ranks: Any = None) -> Plan:
        self.real = 0.0
        return Plan(10, minimum, maximum, ranks or Alone(), real=lambda: self.real)

    def due(self, plan: Plan, steps: range, seconds_per_step: float) -> list[int]:
        found = []
        for step in steps:
            self.real += seconds_per_step
            if plan.due(step):
                found.append(step)
                plan.saved()
        return found

    def test_every_so_many_steps(self) -> None:
        assert self.due(self.plan(), range(1, 35), 100.0) == [10, 20, 30]

    def test_no_more_often_than_the_least_time_and_then_at_once(self) -> None:
        assert self.due(self.plan(minimum=15.0), range(1, 41), 1.0) == [15, 30]

    def test_no_rarer_than_the_greatest_time(self) -> None:
        assert self.due(self.plan(maximum=40.0), range(1, 21), 10.0) == [4, 8, 10, 14, 18, 20]

    def test_where_time_matters_one_process_decides(self) -> None:
        plan = self.plan(minimum=1.0, ranks=Meeting().rank(1))
        assert self.due(plan, range(1, 41), 10.0) == []
