"""The reaper's operator: says what it found, in words and as XCom."""

from __future__ import annotations

import json
import logging
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from gpucost.hooks.gpucost import GpuCostHook
from gpucost.operators.reaping import ReapLeasesOperator
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World


@pytest.fixture(autouse=True)
def _rooms(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuCostHook, "services", lambda self: world.services)


def airflow_says(patch: pytest.MonkeyPatch, states: dict[str, Any]) -> None:
    patch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: {TASK.run_id: states}))


def buy(world: World) -> str:
    world.begin()
    buyer = world.services.buyer
    order = buyer.intend(TASK.key, 1, quote(pool(), "0.30", START), None, "me", START + timedelta(hours=5))
    return str(buyer.buy(order).instance_id)


def test_a_machine_whose_task_failed_is_ended_and_told(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instance = buy(world)
    airflow_says(monkeypatch, {"train": "failed"})
    with caplog.at_level(logging.WARNING, "gpucost"):
        [told] = ReapLeasesOperator(task_id="reap").execute({})  # type: ignore[typeddict-item]
    lease = world.services.leases.of_job(TASK.key)[0]
    assert told == {
        "lease_id": lease.id,
        "instance_id": instance,
        "why": "its job is over",
        "per_hour": "0.30",
        "over": True,
    }
    assert json.loads(json.dumps(told)) == told, "XCom holds JSON"
    assert f"{instance}: its job is over, at $0.3000/h" in caplog.text
    assert world.provider.alive() == []


@pytest.mark.parametrize("state", ["running", "deferred", "up_for_retry", None])
def test_a_machine_whose_task_goes_on_stays(world: World, monkeypatch: pytest.MonkeyPatch, state: str | None) -> None:
    buy(world)
    airflow_says(monkeypatch, {"train": state})
    assert ReapLeasesOperator(task_id="reap").execute({}) == []  # type: ignore[typeddict-item]
    assert len(world.provider.alive()) == 1


def test_a_dry_run_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    buy(world)
    airflow_says(monkeypatch, {})
    [told] = ReapLeasesOperator(task_id="reap", dry_run=True).execute({})  # type: ignore[typeddict-item]
    assert told["over"] is False
    assert len(world.provider.alive()) == 1


def test_its_connections_are_passed_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, ...]] = []

    def services(hook: GpuCostHook) -> Any:
        seen.append((hook.db_conn_id, hook.aws_conn_id, hook.store_conn_id, hook.mlflow_conn_id))
        return world.services

    monkeypatch.setattr(GpuCostHook, "services", services)
    ReapLeasesOperator(task_id="reap", db_conn_id="d", aws_conn_id="a", store_conn_id="s", mlflow_conn_id=None).execute(
        {}
    )  # type: ignore[typeddict-item]
    assert seen == [("d", "a", "s", None)]
