"""The jobs' book: clear has a meaning, and what was written down is read back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpucost.db.engine import Database
from gpucost.lifecycle.jobs import Jobs, Logged
from gpucost.reasons import Reason
from tests.fakes.rooms import START, TASK, wanted


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database)


def test_a_job_comes_back_as_it_was_wanted(jobs: Jobs) -> None:
    job = wanted(recipe={"precision": "bf16", "per_gpu": {"T4": {"precision": "fp16"}}}, price_cap="0.5 USD")
    jobs.begin(TASK, job, "me", 3, START)
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
    assert jobs.current(TASK, 3) == TASK
    jobs.begin(TASK, wanted(), "me", 3, START)
    if ended is not None:
        jobs.end(TASK.key, "me", ended, START)
    cleared = 7
    assert jobs.current(TASK, cleared).generation == generation


def test_a_retry_of_a_job_that_succeeded_finds_it_done(jobs: Jobs) -> None:
    # The worker died, or Airflow failed the task falsely, after the job was done: nothing is trained again.
    jobs.begin(TASK, wanted(), "me", 3, START)
    jobs.end(TASK.key, "me", Reason.COMPLETED, START)
    assert jobs.current(TASK, 3) == TASK
    assert jobs.ended_as(TASK.key) is Reason.COMPLETED


def test_a_job_belongs_to_one_try_and_is_ended_by_it_alone(jobs: Jobs) -> None:
    jobs.begin(TASK, wanted(), "first", 3, START)
    jobs.begin(TASK, wanted(), "second", 3, START)
    assert jobs.owner(TASK.key) == "second"
    assert not jobs.end(TASK.key, "first", Reason.CANCELLED, START)
    assert not jobs.take_over(TASK.key, "first", "reaper")
    assert jobs.take_over(TASK.key, "second", "reaper")
    assert jobs.end(TASK.key, "reaper", Reason.CANCELLED, START)


def test_generations_follow_each_other_and_other_tasks_have_their_own(jobs: Jobs) -> None:
    for generation in (1, 2, 3):
        tries = 3 + generation
        current = jobs.current(TASK, tries)
        assert current.generation == generation
        jobs.begin(current, wanted(), "me", tries, START)
        jobs.end(current.key, "me", Reason.COMPLETED, START)
    mapped = TASK.model_copy(update={"map_index": 0})
    assert jobs.current(mapped, 3) == mapped


def test_beginning_again_opens_the_job_with_what_is_wanted_now_and_keeps_its_start(jobs: Jobs) -> None:
    jobs.begin(TASK, wanted(), "me", 3, START)
    jobs.end(TASK.key, "me", Reason.BAD_PROGRAM, START)
    later = wanted(deadline=START + timedelta(hours=20))
    jobs.begin(TASK, later, "me", 4, START + timedelta(hours=3))
    assert jobs.load(TASK.key) == (TASK, later, START)
    assert jobs.ended_as(TASK.key) is None
    assert jobs.over() == []


def test_the_first_word_on_how_it_ended_stands(jobs: Jobs) -> None:
    jobs.begin(TASK, wanted(), "me", 3, START)
    jobs.end(TASK.key, "me", Reason.COMPLETED, START)
    jobs.end(TASK.key, "me", Reason.CANCELLED, START)
    assert jobs.ended_as(TASK.key) is Reason.COMPLETED
    assert jobs.over() == [TASK.key]


def test_mlflow_s_run_and_what_it_has_are_kept(jobs: Jobs) -> None:
    jobs.begin(TASK, wanted(), "me", 3, START)
    assert jobs.tracked(TASK.key) == (None, Logged())
    jobs.set_tracked(TASK.key, "run")
    jobs.set_logged(TASK.key, Logged(1, 7, {"loss": 41}))
    assert jobs.tracked(TASK.key) == ("run", Logged(1, 7, {"loss": 41}))


@pytest.mark.parametrize(("attempt", "chunk", "counts"), [(2, 4, True), (3, 0, True), (2, 3, False), (1, 9, False)])
def test_who_is_further_with_mlflow_counts(jobs: Jobs, attempt: int, chunk: int, counts: bool) -> None:
    jobs.begin(TASK, wanted(), "me", 3, START)
    jobs.set_logged(TASK.key, Logged(2, 3, {"loss": 40}))
    jobs.set_logged(TASK.key, Logged(attempt, chunk, {"loss": 99}))
    assert (jobs.tracked(TASK.key)[1].steps == {"loss": 99}) is counts
