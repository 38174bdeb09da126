"""The tracker against a real MLflow server: one run per job, each step once, and MLflow being away."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpucost.clock import ManualClock
from gpucost.jobstore import MetricPoint
from gpucost.money import Money
from gpucost.tracking.mlflow_tracker import RunStatus, Tracker, TrackingAway

START = datetime(2026, 11, 30, 12, tzinfo=UTC)
API = "api/2.0/mlflow"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        f"{folder}/artifacts",
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(uri, process, folder / "log")
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(15)


def wait_until_healthy(uri: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{uri}/health", timeout=2).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    pytest.fail(f"the MLflow server did not come up:\n{log.read_text()[-3000:]}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def tracker(server: str, clock: ManualClock) -> Iterator[Tracker]:
    with Tracker(server, clock=clock) as it:
        yield it


def job_run(tracker: Tracker, job: str, **changes: Any) -> str:
    wanted = {"project": "digits", "name": job, "params": {"seed": 1, "batch": 64}, "tags": {}} | changes
    return tracker.job_run(job, **wanted)


def points(first: int, last: int, at: datetime = START) -> list[MetricPoint]:
    return [
        MetricPoint(step=step, at=at + timedelta(seconds=step), values={"loss": 1 / (step + 1)})
        for step in range(first, last + 1)
    ]


def run_of(server: str, run_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{server}/{API}/runs/get", params={"run_id": run_id}).raise_for_status().json()
    run: dict[str, Any] = answer["run"]
    return run


def pairs(run: dict[str, Any], kind: str) -> dict[str, str]:
    return {pair["key"]: pair["value"] for pair in run["data"].get(kind, [])}


def history(server: str, run_id: str, key: str) -> list[dict[str, Any]]:
    query = {"run_id": run_id, "metric_key": key, "max_results": "10000"}
    answer = httpx.get(f"{server}/{API}/metrics/get-history", params=query).raise_for_status().json()
    metrics: list[dict[str, Any]] = answer.get("metrics", [])
    return metrics


def test_a_second_try_goes_on_in_the_same_run_and_params_stay(server: str, tracker: Tracker) -> None:
    first = job_run(tracker, "job-tries", tags={"gpucost.pool": "a"})
    with Tracker(server, clock=ManualClock(START + timedelta(hours=1))) as second_process:
        again = job_run(second_process, "job-tries", params={"seed": 2, "rate": 0.1}, tags={"gpucost.pool": "b"})
    assert again == first
    run = run_of(server, first)
    assert pairs(run, "params") == {"seed": "1", "batch": "64", "rate": "0.1"}
    assert pairs(run, "tags")["gpucost.pool"] == "b"
    assert run["info"]["start_time"] == int(START.timestamp() * 1000)


def test_attempts_are_child_runs_made_once_and_do_not_hide_the_job(server: str, tracker: Tracker) -> None:
    parent = job_run(tracker, "job-attempts")
    one = tracker.attempt_run(parent, 1, tags={"gpucost.pool": "aws/use1-az1/g4dn.xlarge/spot"})
    two = tracker.attempt_run(parent, 2)
    assert len({parent, one, two}) == 3
    assert tracker.attempt_run(parent, 1) == one
    assert job_run(tracker, "job-attempts") == parent
    tags = pairs(run_of(server, two), "tags")
    assert (tags["mlflow.parentRunId"], tags["gpucost.attempt"]) == (parent, "2")


def test_no_step_is_logged_twice_after_resending_and_resuming(server: str, tracker: Tracker) -> None:
    run_id = job_run(tracker, "job-steps")
    assert tracker.log_points(run_id, points(0, 2499), {}) == {"loss": 2499}
    assert tracker.log_points(run_id, points(0, 2499), {}) == {"loss": 2499}, "the answer was lost: sent again"
    resumed = points(2400, 2600, at=START + timedelta(hours=2))
    assert tracker.log_points(run_id, resumed, {"loss": 2499}) == {"loss": 2600}
    steps = [metric["step"] for metric in history(server, run_id, "loss")]
    assert sorted(steps) == list(range(2601))
    assert history(server, run_id, "loss")[7]["timestamp"] == int((START + timedelta(seconds=7)).timestamp() * 1000)


def test_a_loss_that_is_no_number_and_an_odd_name_hold_nothing_back(server: str, tracker: Tracker) -> None:
    run_id = job_run(tracker, "job-nan")
    values = {"loss": math.nan, "up": math.inf, "acc@1/é": 0.5, "../x": 1.0, "/abs//y": 2.0, ".": 3.0}
    assert set(tracker.log_points(run_id, [MetricPoint(step=3, at=START, values=values)], {}).values()) == {3}
    assert math.isnan(float(history(server, run_id, "loss")[0]["value"]))
    assert len(run_of(server, run_id)["data"]["metrics"]) == len(values)


def test_costs_are_metrics_over_steps(server: str, tracker: Tracker) -> None:
    run_id = job_run(tracker, "job-costs")
    tracker.log_costs(run_id, 10, {"cost_usd": Money.usd("0.125"), "cost_per_step_usd": Decimal("0.0125")}, at=START)
    tracker.log_costs(run_id, 10, {"cost_usd": Money.usd("0.125")}, at=START)
    tracker.log_costs(run_id, 20, {"cost_usd": Money.usd("0.25")}, at=START + timedelta(minutes=1))
    assert [(metric["step"], metric["value"]) for metric in history(server, run_id, "cost_usd")] == [
        (10, 0.125),
        (20, 0.25),
    ]


def test_a_closed_run_has_its_status_and_end_and_opens_again_for_another_try(
    server: str, tracker: Tracker, clock: ManualClock
) -> None:
    run_id = job_run(tracker, "job-closed")
    clock.advance(timedelta(hours=3))
    tracker.close(run_id, RunStatus.FAILED)
    info = run_of(server, run_id)["info"]
    assert (info["status"], info["end_time"]) == ("FAILED", int(clock.now().timestamp() * 1000))
    assert job_run(tracker, "job-closed") == run_id
    assert run_of(server, run_id)["info"]["status"] == "RUNNING"
    tracker.close(run_id, RunStatus.FINISHED)
    tracker.close(run_id, RunStatus.FINISHED)
    assert run_of(server, run_id)["info"]["status"] == "FINISHED"


def test_artifacts_come_back_from_the_server(server: str, tracker: Tracker) -> None:
    run_id = job_run(tracker, "job-artifacts")
    tracker.log_text(run_id, "report.json", '{"cost": "0.25"}')
    tracker.log_text(run_id, "report/page one.md", "# Report\n")
    for name, text in (("report.json", '{"cost": "0.25"}'), ("report/page one.md", "# Report\n")):
        answer = httpx.get(f"{server}/get-artifact", params={"run_id": run_id, "path": name}).raise_for_status()
        assert answer.text == text


def test_the_page_of_a_run_names_its_experiment(server: str, tracker: Tracker) -> None:
    run_id = job_run(tracker, "job-page")
    experiment = run_of(server, run_id)["info"]["experiment_id"]
    assert tracker.page(run_id) == f"{server}/#/experiments/{experiment}/runs/{run_id}"


def test_nobody_there_is_said_within_seconds() -> None:
    began = time.monotonic()
    with Tracker(f"http://127.0.0.1:{free_port()}", clock=ManualClock(START)) as tracker:
        with pytest.raises(TrackingAway, match="did not answer GET"):
            job_run(tracker, "job-away")
        with pytest.raises(TrackingAway):
            tracker.log_points("run", points(0, 1), {})
    assert time.monotonic() - began < 3


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        began = time.monotonic()
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with (
            Tracker(uri, clock=ManualClock(START), timeout=1.0) as tracker,
            pytest.raises(TrackingAway, match="Timeout"),
        ):
            tracker.close("run", RunStatus.FINISHED)
        assert time.monotonic() - began < 4


def test_an_unknown_run_is_refused_with_mlflows_own_word(tracker: Tracker) -> None:
    with pytest.raises(TrackingAway, match="RESOURCE_DOES_NOT_EXIST") as caught:
        tracker.log_costs("0" * 32, 1, {"cost_usd": 1.0})
    assert caught.value.status == 404
