"""What is wanted: a wrong field is named with its value and what to write; a key names one job and no other."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpucost.job import JobId, TrainingJob
from gpucost.money import Money
from tests.fakes.rooms import START, TASK, wanted

names = st.text(min_size=1, max_size=80)


def test_a_job_survives_json() -> None:
    job = wanted(price_cap="0.5 USD", recipe={"compile": True, "clip_norm": None}, data={"train": "s3://b/k"})
    assert TrainingJob.model_validate_json(job.model_dump_json()) == job


def test_what_a_form_sends_is_understood() -> None:
    job = TrainingJob.model_validate(
        {
            "name": 12,
            "code": "programs/digits",
            "arguments": ["--epochs", 12],
            "gpu": {"kinds": ["T4"]},
            "work_hours": 2,
            "deadline": "2026-11-30T20:00:00+00:00",
            "budget": "5.00 USD",
            "seed": "7",
        }
    )
    assert (job.name, job.arguments, job.seed, job.budget) == ("12", ("--epochs", "12"), 7, Money.usd("5.00"))


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"work_hours": 0}, "work_hours", "greater than 0"),
        ({"work_hours": float("inf")}, "work_hours", "finite number"),
        ({"work_hours": "soon"}, "work_hours", "valid number"),
        ({"launch_hours": -1}, "launch_hours", "greater than or equal to 0"),
        ({"deadline": datetime(2026, 11, 30)}, "deadline", "timezone"),  # noqa: DTZ001
        ({"budget": 5.0}, "budget", r"expected text such as '12\.50 USD'"),
        ({"price_cap": "0 USD"}, "price_cap.amount", "greater than 0"),
        ({"program": "/bin/sh"}, "program", "expected a path inside the code folder such as 'train.py'"),
        ({"program": "../../x.py"}, "program", "expected a path inside the code folder such as 'train.py'"),
        ({"program": " "}, "program", "expected a path inside the code folder such as 'train.py'"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep", "greater than or equal to 2"),
        ({"checkpoint": {"every_steps": 0}}, "checkpoint.every_steps", "greater than or equal to 1"),
        ({"gpu": {"count": -1}}, "gpu.count", "greater than or equal to 0"),
        ({"gpu": {"kind": "T4"}}, "gpu.kind", "Extra inputs are not permitted"),
        ({"project": "a/b"}, "project", "pattern"),
        ({"priority": 101}, "priority", "less than or equal to 100"),
        ({"sensitivity": "secret"}, "sensitivity", "'public', 'internal' or 'confidential'"),
        ({"seed": 2**32}, "seed", "less than or equal to"),
        ({"world_size": 0}, "world_size", "greater than or equal to 1"),
        ({"wrok_hours": 1}, "wrok_hours", "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_was_expected(
    changes: dict[str, Any], field: str, expected: str
) -> None:
    with pytest.raises(ValidationError) as wrong:
        wanted(**changes)
    [error] = wrong.value.errors()
    assert ".".join(map(str, error["loc"])) == field
    assert re.search(expected, error["msg"]), error["msg"]
    assert "input" in error


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(ValidationError) as wrong:
        wanted(work_hours=-1, seed=-1, project="")
    assert {error["loc"][0] for error in wrong.value.errors()} == {"work_hours", "seed", "project"}


def test_budget_and_price_cap_are_of_one_currency() -> None:
    with pytest.raises(
        ValidationError, match="price_cap: got CNY, expected USD as in budget; state both in one currency"
    ):
        wanted(budget="5 USD", price_cap="3 CNY")


def test_a_job_does_not_change() -> None:
    job = wanted()
    with pytest.raises(ValidationError, match="frozen"):
        job.work_hours = 1.0
    assert job.deadline == START.astimezone(UTC) + timedelta(hours=8)


@given(names, names, names, st.integers(min_value=-1, max_value=10_000), st.integers(min_value=1, max_value=999))
def test_a_key_is_safe_in_an_object_key_a_tag_and_a_host_name(
    dag: str, run: str, task: str, index: int, generation: int
) -> None:
    key = JobId(dag_id=dag, run_id=run, task_id=task, map_index=index, generation=generation).key
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", key), key
    assert len(key) <= 63, "a label of a host name is 63 characters at most"


ids = st.builds(
    JobId,
    dag_id=names,
    run_id=names,
    task_id=names,
    map_index=st.integers(min_value=-1, max_value=9),
    generation=st.integers(min_value=1, max_value=9),
)


@given(ids, ids)
def test_two_jobs_have_two_keys(one: JobId, two: JobId) -> None:
    assume(one != two)
    assert one.key != two.key


@pytest.mark.parametrize("recipe", [{"clip_norm": 1.0}, {"per_gpu": {"T4": {"accumulate": 2}}}])
def test_a_recipe_that_nobody_would_apply_is_refused(recipe: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="recipe: got options beside folder_sync"):
        wanted(folder_sync={}, recipe=recipe)
    assert wanted(folder_sync={}).folder_sync is not None


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"dag_id": "a", "run_id": "bc"}, {"dag_id": "ab", "run_id": "c"}),
        ({"task_id": "train_1"}, {"task_id": "train-1"}),
        ({"task_id": "Train"}, {"task_id": "train"}),
        ({"map_index": 1}, {"map_index": 11}),
        ({"generation": 1}, {"generation": 2}),
    ],
)
def test_near_twins_have_two_keys(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert TASK.model_copy(update=one).key != TASK.model_copy(update=two).key


def test_a_key_says_to_a_person_which_task_it_is() -> None:
    assert TASK.key.startswith("spot-training-train-")
    assert TASK.key == JobId(**TASK.model_dump()).key


def test_the_next_generation_is_another_job_of_the_same_task() -> None:
    second = TASK.next_generation()
    assert second.generation == 2
    assert second.model_copy(update={"generation": 1}) == TASK
    assert second.key.removesuffix("-g2") == TASK.key.removesuffix("-g1")
