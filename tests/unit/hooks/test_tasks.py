"""Whether anybody comes back to a job: over every state that an Airflow task can be in."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from gpucost.hooks.tasks import is_wanted
from tests.fakes.rooms import TASK

MAPPED = TASK.model_copy(update={"map_index": 3})
OVER = {"success", "failed", "skipped", "upstream_failed", "removed"}
STATES = [state.value for state in TaskInstanceState]


class Airflow:
    """Answers as Airflow's execution API does: run id -> name of the task instance -> state."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.states: dict[tuple[str, str, int], str | None] = {}
        patch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(self.get_task_states))

    def get_task_states(
        self, *, dag_id: str, task_ids: list[str], run_ids: list[str], map_index: int | None
    ) -> dict[str, Any]:
        assert dag_id == TASK.dag_id
        answer: dict[str, dict[str, str | None]] = {}
        for (run_id, task_id, index), state in self.states.items():
            if run_id in run_ids and task_id in task_ids and map_index in (None, index):
                answer.setdefault(run_id, {})[task_id if index < 0 else f"{task_id}_{index}"] = state
        return answer


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> Airflow:
    return Airflow(monkeypatch)


def test_every_state_is_judged() -> None:
    assert set(STATES) > OVER, "Airflow has renamed a state"


@pytest.mark.parametrize("job", [TASK, MAPPED], ids=["single", "mapped"])
@pytest.mark.parametrize("state", [*STATES, None])
def test_only_a_task_that_is_over_is_not_wanted(airflow: Airflow, state: str | None, job: Any) -> None:
    airflow.states[job.run_id, job.task_id, job.map_index] = state
    assert is_wanted(job) is (state not in OVER)


def test_a_state_may_come_as_airflow_s_own_type(airflow: Airflow) -> None:
    for state in TaskInstanceState:
        airflow.states[TASK.run_id, TASK.task_id, -1] = state
        assert is_wanted(TASK) is (state.value not in OVER)


def test_a_task_of_a_deleted_run_is_not_wanted(airflow: Airflow) -> None:
    assert is_wanted(TASK) is False
    airflow.states["another run", TASK.task_id, -1] = "running"
    assert is_wanted(TASK) is False


def test_a_mapped_task_is_not_taken_for_its_neighbour(airflow: Airflow) -> None:
    airflow.states[TASK.run_id, TASK.task_id, 3] = "failed"
    airflow.states[TASK.run_id, TASK.task_id, 4] = "running"
    assert is_wanted(MAPPED) is False
    assert is_wanted(MAPPED.model_copy(update={"map_index": 4})) is True
    assert is_wanted(MAPPED.model_copy(update={"map_index": 5})) is False
    assert is_wanted(TASK) is False, "the task was not mapped when the job began"
