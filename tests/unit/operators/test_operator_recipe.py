"""A recipe in the operator's job: options, the name of a file below include/, or nothing, as a form sends it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from gpucost.operators.training import SpotTrainingOperator
from gpucost.recipe import Recipe
from tests.fakes.rooms import START, World


@pytest.fixture
def include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__GPUCOST__INCLUDE_FOLDER", str(tmp_path))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "small.yaml").write_text("batch: 8\naccumulate: 4\n")
    return tmp_path


def wanted(world: World, **job: Any) -> Recipe:
    fields = {"name": "digits", "code": "programs/digits", "gpu": {"kinds": ["T4"]}, "work_hours": 2.0}
    task = SpotTrainingOperator(task_id="train", job=fields | job, deadline_hours=8)
    context: Any = {"dag_run": SimpleNamespace(run_after=START)}
    return task._wanted(context, world.services).recipe


@pytest.mark.parametrize("name", ["recipes/small.yaml", "small.yaml", "small"])
def test_a_recipe_may_be_the_name_of_a_file_below_include(world: World, include: Path, name: str) -> None:
    assert wanted(world, recipe=name) == Recipe(batch=8, accumulate=4)


@pytest.mark.parametrize("empty", ["", None, {}])
def test_a_field_that_is_left_empty_asks_for_no_recipe(world: World, include: Path, empty: Any) -> None:
    assert wanted(world, recipe=empty) == wanted(world) == Recipe()


def test_options_may_stand_in_the_job_itself(world: World, include: Path) -> None:
    assert wanted(world, recipe={"precision": "fp16"}) == Recipe(precision="fp16")


def test_a_recipe_that_is_wrong_fails_at_once_and_says_where(world: World, include: Path) -> None:
    (include / "recipes" / "small.yaml").write_text("batch: none\n")
    with pytest.raises(ValueError, match=r"recipe: .*small\.yaml: batch: got 'none', expected samples per"):
        wanted(world, recipe="small")
    with pytest.raises(AirflowFailException, match=r"nothing was bought: recipe\.batch: got 0, expected samples"):
        wanted(world, recipe={"batch": 0})
    with pytest.raises(AirflowFailException, match="recipe: T4: precision: got bf16"):
        wanted(world, recipe={"precision": "bf16"})
