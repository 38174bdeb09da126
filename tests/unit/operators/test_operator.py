"""The operator: parses, calls a room, defers; fails as the reason table says, and leaves no machine behind."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferralError, TaskDeferred

from gpucost.bundle import pack_code
from gpucost.lifecycle.steps import Event, EventKind
from gpucost.operators.training import SpotTrainingOperator
from gpucost.reasons import Reason
from gpucost.triggers import training
from tests.fakes.provider import pool
from tests.fakes.rooms import START, TASK, World


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    code = tmp_path / "include" / "programs" / "digits"
    code.mkdir(parents=True)
    (code / "train.py").write_text("print('training')\n")
    return code


@pytest.fixture(autouse=True)
def _rooms(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpotTrainingOperator, "_services", lambda self: world.services)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))


def operator(folder: Path, deadline_hours: Any = 8, job: dict[str, Any] | None = None, **changes: Any) -> Any:
    fields = {"name": "digits", "code": str(folder), "gpu": {"kinds": ["T4"]}, "work_hours": 2.0, "launch_hours": 0.1}
    return SpotTrainingOperator(task_id="train", job=fields | (job or {}), deadline_hours=deadline_hours, **changes)


def context(try_number: int = 1, map_index: int | None = -1) -> Any:
    ti = SimpleNamespace(
        dag_id=TASK.dag_id,
        run_id=TASK.run_id,
        task_id=TASK.task_id,
        map_index=map_index,
        try_number=try_number,
        max_tries=3,
    )
    return {"ti": ti, "dag_run": SimpleNamespace(run_after=START)}


def deferred(call: Any) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferral:
        call()
    return deferral.value


def event(kind: EventKind, lease_id: str) -> dict[str, Any]:
    return Event(kind=kind, lease_id=lease_id, at=START).model_dump(mode="json")


def test_it_retries_by_default_and_soon(folder: Path) -> None:
    task = operator(folder)
    assert (task.retries, task.retry_delay) == (3, timedelta(seconds=10))
    assert operator(folder, retries=0).retries == 0
    assert set(task.template_fields) == {"job", "deadline_hours", "policy"}


def test_it_buys_defers_and_finishes(world: World, folder: Path) -> None:
    task = operator(folder)
    deferral = deferred(lambda: task.execute(context()))
    [lease] = world.services.leases.open()
    assert (deferral.trigger.lease_id, deferral.trigger.job) == (lease.id, TASK.key)
    assert deferral.trigger.owner == lease.owner == deferral.kwargs["owner"]
    assert deferral.method_name == "resume"
    assert deferral.timeout is None, "a deferral that times out would tell nobody"
    world.pass_hours(1.0)
    world.exit(lease.id, Reason.COMPLETED, results={"accuracy": 0.97})
    fresh = operator(folder)  # another process
    summary = fresh.resume(context(), event(EventKind.EXITED, lease.id), **deferral.kwargs)
    assert (summary["cost"], summary["results"]) == ("0.300000", {"accuracy": 0.97})
    assert world.provider.alive() == []


def test_an_interruption_defers_again_and_is_no_failure(world: World, folder: Path) -> None:
    task = operator(folder)
    deferral = deferred(lambda: task.execute(context()))
    first = deferral.trigger.lease_id
    world.beat(first, step=10)
    world.provider.interrupt(str(world.services.leases.get(first).instance_id))
    again = deferred(lambda: task.resume(context(), event(EventKind.OVER, first), **deferral.kwargs))
    assert again.trigger.lease_id != first
    assert again.kwargs == deferral.kwargs


def test_a_pause_waits_for_a_moment(world: World, folder: Path) -> None:
    for zone in "abc":
        world.provider.refuse(pool(zone), Reason.NO_CAPACITY)
    deferral = deferred(lambda: operator(folder).execute(context()))
    assert deferral.trigger.lease_id is None
    assert deferral.trigger.until == (START + timedelta(minutes=5)).isoformat()


def test_the_deadline_counts_from_the_run_s_run_after(world: World, folder: Path) -> None:
    world.pass_hours(1.0)
    deferred(lambda: operator(folder, deadline_hours="8").execute(context()))
    assert world.services.jobs.load(TASK.key)[1].deadline == START + timedelta(hours=8)


def test_a_relative_folder_lies_in_include(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPUCOST__INCLUDE_FOLDER", str(folder.parents[1]))
    deferred(lambda: operator(folder, job={"code": "programs/digits"}).execute(context()))
    digest = world.services.store(TASK.key).spec().code_digest
    assert digest == pack_code(folder)[0]


@pytest.mark.parametrize(
    ("job", "deadline_hours", "words"),
    [
        ({"work_hours": -1}, 8, "work_hours: got -1"),
        ({"budget": 5.0}, 8, r"budget: got 5\.0.*expected text such as '12\.50 USD'"),
        ({"wrok_hours": 1}, 8, "wrok_hours"),
        ({}, None, "deadline"),
        ({}, "soon", "deadline_hours: got 'soon', expected hours"),
        ({"deadline": START.isoformat()}, 8, "deadline and deadline_hours are both given"),
    ],
)
def test_a_wrong_field_fails_at_once_by_name_and_buys_nothing(
    world: World, folder: Path, job: dict[str, Any], deadline_hours: Any, words: str
) -> None:
    with pytest.raises(AirflowFailException, match=words):
        operator(folder, deadline_hours, job).execute(context())
    assert world.provider.named("launch") == []


def test_a_missing_permission_fails_for_good_with_advice(world: World, folder: Path) -> None:
    world.provider.refuse_all(Reason.NOT_AUTHORIZED, "UnauthorizedOperation: ec2:CreateFleet")
    with pytest.raises(AirflowFailException, match=r"ec2:CreateFleet.*What to do: give the connection's identity"):
        operator(folder).execute(context())


def test_a_failed_program_is_left_to_airflow_s_retries(world: World, folder: Path) -> None:
    task = operator(folder)
    deferral = deferred(lambda: task.execute(context()))
    world.exit(deferral.trigger.lease_id, Reason.BAD_PROGRAM, message="ValueError: no such column")
    with pytest.raises(AirflowException, match="ValueError: no such column") as failed:
        task.resume(context(), event(EventKind.EXITED, deferral.trigger.lease_id), **deferral.kwargs)
    assert not isinstance(failed.value, AirflowFailException)
    assert world.provider.alive() == []
    deferred(lambda: operator(folder).execute(context(try_number=2)))


def test_a_retry_adopts_what_runs(world: World, folder: Path) -> None:
    first = deferred(lambda: operator(folder).execute(context()))
    second = deferred(lambda: operator(folder).execute(context(try_number=2)))
    assert second.trigger.lease_id == first.trigger.lease_id
    assert second.trigger.owner != first.trigger.owner
    assert len(world.provider.machines) == 1


def test_a_mapped_task_is_a_job_of_its_own(world: World, folder: Path) -> None:
    one = deferred(lambda: operator(folder).execute(context(map_index=0)))
    two = deferred(lambda: operator(folder).execute(context(map_index=1)))
    alone = deferred(lambda: operator(folder).execute(context(map_index=None)))
    assert len({one.trigger.job, two.trigger.job, alone.trigger.job}) == 3


# Airflow replaces the arguments of a task whose trigger failed by the error: neither job nor owner is among them.
TRIGGER_FAILED = {"error": "Trigger failure", "traceback": ["RuntimeError: boom"]}


def test_a_trigger_that_failed_leaves_the_machine_to_the_next_try(world: World, folder: Path) -> None:
    task = operator(folder)
    deferred(lambda: task.execute(context()))
    with pytest.raises(TaskDeferralError):
        task.resume_execution("__fail__", dict(TRIGGER_FAILED), context(try_number=1))
    assert len(world.provider.alive()) == 1
    deferred(lambda: operator(folder).execute(context(try_number=2)))
    assert len(world.provider.machines) == 1


def test_a_trigger_that_failed_on_the_last_try_leaves_no_machine(world: World, folder: Path) -> None:
    deferred(lambda: operator(folder).execute(context()))
    with pytest.raises(TaskDeferralError):
        operator(folder).resume_execution("__fail__", dict(TRIGGER_FAILED), context(try_number=4))
    assert world.provider.alive() == []
    assert world.services.leases.open() == []


def test_resuming_goes_to_the_method_that_was_deferred_to(world: World, folder: Path) -> None:
    task = operator(folder)
    deferral = deferred(lambda: task.execute(context()))
    arguments = deferral.kwargs | {"event": event(EventKind.TIME, deferral.trigger.lease_id)}
    again = deferred(lambda: task.resume_execution("resume", arguments, context()))
    assert again.trigger.lease_id == deferral.trigger.lease_id


def test_a_task_ended_by_a_user_while_it_buys_gives_its_machine_back(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpucost.operators.training.goes_on", lambda services, job: False)
    task = operator(folder)
    task.on_kill()
    with pytest.raises(AirflowFailException, match="ended by a user"):
        task.execute(context())
    assert world.provider.alive() == []
    assert world.services.jobs.ended_as(TASK.key) is Reason.CANCELLED


def test_a_worker_that_is_shut_down_or_cleared_while_it_buys_keeps_its_machine(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpucost.operators.training.goes_on", lambda services, job: True)
    task = operator(folder)
    task.on_kill()
    deferred(lambda: task.execute(context()))
    assert len(world.provider.alive()) == 1


def test_a_retry_after_the_job_was_done_trains_nothing_again(world: World, folder: Path) -> None:
    deferral = deferred(lambda: operator(folder).execute(context()))
    world.exit(deferral.trigger.lease_id, Reason.COMPLETED, results={"accuracy": float("nan")})
    done = operator(folder).resume(context(), event(EventKind.EXITED, deferral.trigger.lease_id), **deferral.kwargs)
    again = operator(folder).execute(context(try_number=2))
    assert again == done
    assert json.loads(json.dumps(done, allow_nan=False))["results"] == {"accuracy": "nan"}
    assert len(world.provider.machines) == 1


def test_a_retry_with_a_wrong_field_leaves_no_machine_of_the_try_before(world: World, folder: Path) -> None:
    deferred(lambda: operator(folder).execute(context()))
    with pytest.raises(AirflowFailException, match="work_hours"):
        operator(folder, job={"work_hours": -1}).execute(context(try_number=2))
    assert world.provider.alive() == []


def test_a_dag_s_own_retries_are_kept(folder: Path) -> None:
    task = operator(folder, default_args={"retries": 7})
    assert (task.retries, task.retry_delay) == (7, timedelta(seconds=10))
