"""The thread, end to end on real services: what a user is promised, and what must hold when things are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console

from demo.job import DAG_ID, TASK_ID, DemoJob, run_demo
from demo.promises import check
from gpucost.capacity.lease import Lease, LeaseState
from gpucost.job import JobId
from gpucost.jobstore import Phase
from gpucost.reasons import Reason

from .conftest import Running

REAPER = "reap_leases"

LONG = DemoJob(epochs=40, step_delay_ms=200)
"""A training that would still run long after each of these tests is over."""


@pytest.fixture(autouse=True)
def _no_machine_survives_a_test(running: Running) -> Iterator[None]:
    yield
    assert living(running) == []


def test_the_demo_keeps_its_promises(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, bool] = {}

    def remember(evidence: Any) -> list[Any]:
        promises = list(check(evidence))
        kept.update({promise.text: promise.kept for promise in promises})
        return promises

    monkeypatch.setattr("demo.job.check", remember)
    console = Console(width=120, record=True, highlight=False)

    assert run_demo(running.stack, console), console.export_text()

    assert len(kept) == 8
    assert all(kept.values()), kept
    shown = console.export_text()
    assert "interrupted" in shown
    assert "completed" in shown
    assert "saved" in shown


def test_a_triggerer_killed_in_mid_run_costs_nothing(running: Running) -> None:
    job = trigger(running, DemoJob(epochs=6, step_delay_ms=100))
    first = training(running, job)

    triggerer = running.stack.service("triggerer")
    triggerer.kill()
    triggerer.start()
    triggerer.wait_healthy(90)

    assert running.airflow.wait_for_run(DAG_ID, job.run_id, timeout=150).state == "success"
    leases = running.services.leases.of_job(job.key)
    assert [lease.id for lease in leases] == [first.id], "the machine went on; no second one was bought"
    assert leases[0].state is LeaseState.TERMINATED
    assert charged_as_invoiced(running, job)


def test_a_cloud_killed_in_mid_run_and_started_again_goes_on_with_its_machine(running: Running) -> None:
    job = trigger(running, DemoJob(epochs=8, step_delay_ms=150))
    lease = training(running, job)
    before = machine(running, lease)
    killed = running.stack.service("rehearsal").pid
    assert killed is not None

    # Only the cloud's own process: as a crash of a cloud's API, not of its machines.
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not running.stack.service("rehearsal").is_alive(), 10, "the cloud is gone")
    others = {name: running.stack.service(name).pid for name in ("scheduler", "triggerer", "mlflow", "s3")}
    running.stack.up()

    assert running.stack.service("rehearsal").pid != killed
    assert {name: running.stack.service(name).pid for name in others} == others, "nothing else was started again"
    assert machine(running, lease) == before, "the machine did not notice"
    assert running.airflow.wait_for_run(DAG_ID, job.run_id, timeout=180).state == "success"
    assert [one.id for one in running.services.leases.of_job(job.key)] == [lease.id]
    assert len(running.services.leases.attempts(job.key)) == 1
    assert charged_as_invoiced(running, job)


def test_marking_the_task_failed_ends_the_machine(running: Running) -> None:
    job = trigger(running, LONG)
    lease = training(running, job)

    running.airflow.set_task_state(DAG_ID, job.run_id, TASK_ID, "failed")

    wait_until(lambda: running.services.jobs.ended_as(job.key) is Reason.CANCELLED, 60, "the job is cancelled")
    assert running.services.leases.get(lease.id).state is LeaseState.TERMINATED
    assert living(running) == []
    assert charged_as_invoiced(running, job)


def test_the_reaper_ends_what_a_task_failed_without_a_triggerer_leaves(running: Running) -> None:
    job = trigger(running, LONG)
    lease = training(running, job)
    triggerer = running.stack.service("triggerer")

    triggerer.kill()
    running.airflow.set_task_state(DAG_ID, job.run_id, TASK_ID, "failed")
    triggerer.start()
    triggerer.wait_healthy(90)
    reap(running)

    assert running.services.leases.get(lease.id).state is LeaseState.TERMINATED
    assert running.services.jobs.ended_as(job.key) is Reason.CANCELLED
    assert charged_as_invoiced(running, job)


def test_the_reaper_leaves_a_running_job_alone(running: Running) -> None:
    job = trigger(running, DemoJob(epochs=8, step_delay_ms=150))
    lease = training(running, job)

    reap(running)

    assert running.airflow.wait_for_run(DAG_ID, job.run_id, timeout=180).state == "success"
    assert [one.id for one in running.services.leases.of_job(job.key)] == [lease.id]


def test_clearing_a_deferred_task_keeps_the_machine_and_the_work(running: Running) -> None:
    job = trigger(running, replace(LONG, epochs=8))
    lease = training(running, job)

    running.airflow.clear(DAG_ID, job.run_id, TASK_ID)

    wait_until(lambda: running.services.leases.get(lease.id).owner != lease.owner, 60, "the new try adopts the lease")
    assert running.airflow.wait_for_run(DAG_ID, job.run_id, timeout=180).state == "success"
    assert len(running.services.leases.of_job(job.key)) == 1, "the same machine finished the job"
    assert len(running.services.leases.attempts(job.key)) == 1


def trigger(running: Running, demo: DemoJob) -> JobId:
    """Trigger the DAG as a person would."""
    running.airflow.wait_for_dag(DAG_ID)
    running.airflow.unpause(DAG_ID)
    run_id = f"test_{time.time_ns()}"
    running.airflow.trigger(DAG_ID, demo.form, run_id)
    return JobId(dag_id=DAG_ID, run_id=run_id, task_id=TASK_ID)


def training(running: Running, job: JobId) -> Lease:
    """Wait until the job trains on a machine, and its task is deferred."""

    def trains() -> bool:
        leases = running.services.leases.open(job.key)
        beat = running.services.live.read(leases[-1].id) if leases else None
        deferred = running.airflow.task_instance(DAG_ID, job.run_id, TASK_ID).state == "deferred"
        return beat is not None and beat.phase is Phase.TRAINING and beat.step > 0 and deferred

    wait_until(trains, 90, "the job trains and its task is deferred")
    return running.services.leases.open(job.key)[-1]


def reap(running: Running) -> None:
    """One round of the reaper, as its DAG makes it."""
    running.airflow.wait_for_dag(REAPER)
    run = running.airflow.trigger(REAPER, {}, f"test_{time.time_ns()}")
    assert running.airflow.wait_for_run(REAPER, run.dag_run_id, timeout=90).state == "success"


def living(running: Running) -> list[str]:
    """Machines that the cloud still runs."""
    return [one["instance_id"] for one in machines(running) if one["state"] != "terminated"]


def machine(running: Running, lease: Lease) -> dict[str, Any]:
    """What the cloud says of a lease's machine: its state, its process, its times."""
    [found] = [one for one in machines(running) if one["instance_id"] == lease.instance_id]
    return found


def machines(running: Running) -> list[dict[str, Any]]:
    """Every machine that the cloud ever ran."""
    status = httpx.get(f"{running.rehearsal}/rehearsal/status", trust_env=False).json()
    every: list[dict[str, Any]] = status["instances"]
    return every


def charged_as_invoiced(running: Running, job: JobId) -> bool:
    """Whether the ledger says of the job's machines what the cloud's invoice says."""
    mine = {lease.instance_id for lease in running.services.leases.of_job(job.key)}
    lines = httpx.get(f"{running.rehearsal}/rehearsal/invoice", trust_env=False).json()["lines"]
    charges = running.services.books.charges(job=job.key)
    return sorted(str(charge.amount.amount) for charge in charges) == sorted(
        line["amount"] for line in lines if line["instance_id"] in mine
    )


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `condition` holds, and fail with `what` when it does not in time."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.5)
