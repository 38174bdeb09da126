"""A program hangs when it gets nowhere for much longer than a step of its own takes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpucost.job import HangWatch
from gpucost.jobstore import Phase
from gpucost.training.agent.hang import Hang, Hung
from gpucost.training.workdir import Progress

NOW = datetime(2026, 11, 30, tzinfo=UTC)
LIMITS = HangWatch(times=50, at_least_seconds=600, start_seconds=3600)


class Program:
    """A program that is looked at every second."""

    def __init__(self, limits: HangWatch = LIMITS, *, reports: bool = True) -> None:
        self.hang = Hang(limits, reports=reports)
        self.now = 5000.0
        self.progress: Progress | None = None
        self.hang.begin(None, self.now)

    def does(self, step: int, phase: Phase = Phase.TRAINING, resumed: int = 0) -> None:
        self.progress = Progress(step=step, at=NOW, phase=phase, resumed_step=resumed)

    def trains(self, steps: int, seconds: float, first: int = 0) -> None:
        for step in range(first + 1, first + steps + 1):
            self.does(step, resumed=first)
            assert self.waits(seconds) is None

    def waits(self, seconds: float) -> Hung | None:
        end = self.now + seconds
        while self.now < end:
            if hung := self.hang.look(self.progress, self.now):
                return hung
            self.now += min(1.0, end - self.now)
        return self.hang.look(self.progress, self.now)

    def hangs_after(self, at_most: float = 10_000) -> float | None:
        began = self.now
        return self.now - began if self.waits(at_most) else None


def test_short_steps_are_given_the_least_time() -> None:
    program = Program()
    program.trains(20, seconds=0.5)
    assert program.hangs_after() == pytest.approx(600, abs=3)


def test_long_steps_are_given_many_times_theirs() -> None:
    program = Program()
    program.trains(20, seconds=60)
    assert program.hangs_after() == pytest.approx(50 * 60 - 60, abs=3)


def test_a_slow_first_step_does_not_count_as_usual() -> None:
    program = Program()
    program.does(0)
    assert program.waits(3000) is None
    program.trains(20, seconds=20)
    assert program.hang.usual == pytest.approx(20, abs=1)
    hung = program.waits(5000)
    assert hung is not None
    assert (hung.step, hung.phase) == (20, Phase.TRAINING)
    assert hung.usual == pytest.approx(20, abs=1)
    assert hung.seconds == pytest.approx(1000, abs=3)
    assert str(hung).startswith("the program hung at step 20 (training): nothing for 100")


def test_steps_that_were_not_seen_one_by_one_count() -> None:
    program = Program()
    for step in (1, 101, 201, 301):
        program.does(step)
        program.waits(100)
    assert program.hang.usual == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTORING, Phase.TRAINING])
def test_before_the_first_step_other_limits_hold(phase: Phase) -> None:
    program = Program()
    program.does(70, phase, resumed=70)
    assert program.hangs_after() == pytest.approx(3600, abs=3)


def test_a_program_that_never_says_a_word_hangs_unless_it_saves_by_itself() -> None:
    assert Program().hangs_after() == pytest.approx(3600, abs=3)
    program = Program(reports=False)
    assert program.hangs_after() is None
    program.trains(3, seconds=1)
    assert program.hangs_after() == pytest.approx(600, abs=3)


def test_a_save_is_given_the_least_time_and_is_no_step() -> None:
    program = Program()
    program.trains(20, seconds=60)
    program.does(20, Phase.SAVING)
    assert program.waits(500) is None
    program.does(20)
    assert program.hangs_after(500) is None
    program.does(21)
    program.waits(0)
    assert program.hang.usual == pytest.approx(60, abs=1)
    program.does(21, Phase.SAVING)
    assert program.hangs_after() == pytest.approx(600, abs=3)


def test_what_comes_after_the_last_step_may_take_long() -> None:
    program = Program()
    program.trains(20, seconds=1)
    program.does(20, Phase.ENDED)
    assert program.hangs_after() == pytest.approx(3600, abs=3)


def test_a_program_that_is_started_again_begins_anew() -> None:
    program = Program()
    program.trains(20, seconds=1)
    program.hang.begin(program.progress, program.now)
    assert program.waits(3000) is None
    program.does(20, Phase.TRAINING, resumed=20)
    assert program.waits(500) is None
    program.trains(5, seconds=1, first=20)
    assert program.hangs_after() == pytest.approx(600, abs=3)
