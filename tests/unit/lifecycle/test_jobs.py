"""The jobs' book: clear has a meaning, and what was written down is read back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpucost.db.engine import Database
from gpucost.lifecycle.jobs import Jobs
from gpucost.reasons import Reason
from tests.fakes.rooms import START, TASK, wanted


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database)


def test_a_job_comes_back_as_it_was_wanted(jobs: Jobs) -> None:
    job = wanted(recipe={"amp": None}, price_cap="0.5 USD")
    jobs.begin(TASK, job, START)
    assert jobs.load(TASK.key) == (TASK, job, START)
    with pytest.raises(KeyError, match="job: none with key 'nobody'"):
        jobs.load("nobody")


@pytest.mark.parametrize(
    ("ended", "generation"),
    [
        (None, 1),
        (Reason.COMPLETED, 2),
        (Reason.CANCELLED, 1),
        (Reason.BAD_PROGRAM, 1),
        (Reason.DEADLINE_IMPOSSIBLE, 1),
    ],
)
def test_only_a_job_that_succeeded_is_followed_by_the_next_generation(
    jobs: Jobs, ended: Reason | None, generation: int
) -> None:
    assert jobs.current(TASK) == TASK
    jobs.begin(TASK, wanted(), START)
    if ended is not None:
        jobs.end(TASK.key, ended, START)
    assert jobs.current(TASK).generation == generation


def test_generations_follow_each_other_and_other_tasks_have_their_own(jobs: Jobs) -> None:
    for generation in (1, 2, 3):
        current = jobs.current(TASK)
        assert current.generation == generation
        jobs.begin(current, wanted(), START)
        jobs.end(current.key, Reason.COMPLETED, START)
    mapped = TASK.model_copy(update={"map_index": 0})
    assert jobs.current(mapped) == mapped


def test_beginning_again_opens_the_job_with_what_is_wanted_now_and_keeps_its_start(jobs: Jobs) -> None:
    jobs.begin(TASK, wanted(), START)
    jobs.end(TASK.key, Reason.BAD_PROGRAM, START)
    later = wanted(deadline=START + timedelta(hours=20))
    jobs.begin(TASK, later, START + timedelta(hours=3))
    assert jobs.load(TASK.key) == (TASK, later, START)
    assert jobs.ended_as(TASK.key) is None
    assert jobs.over() == []


def test_the_first_word_on_how_it_ended_stands(jobs: Jobs) -> None:
    jobs.begin(TASK, wanted(), START)
    jobs.end(TASK.key, Reason.COMPLETED, START)
    jobs.end(TASK.key, Reason.CANCELLED, START)
    assert jobs.ended_as(TASK.key) is Reason.COMPLETED
    assert jobs.over() == [TASK.key]


def test_mlflow_s_run_and_the_last_step_it_has_are_kept(jobs: Jobs) -> None:
    jobs.begin(TASK, wanted(), START)
    assert jobs.tracked(TASK.key) == (None, -1)
    jobs.set_tracked(TASK.key, "run", 41)
    assert jobs.tracked(TASK.key) == ("run", 41)
