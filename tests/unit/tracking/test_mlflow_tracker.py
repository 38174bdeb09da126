"""What the tracker sends, against a stand-in for the network; tests/system/test_tracking.py asks a real server."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest

from gpucost.clock import ManualClock
from gpucost.jobstore import MetricPoint
from gpucost.money import Money
from gpucost.tracking.mlflow_tracker import RunStatus, Tracker, TrackingAway, metric_key

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
Answer = Callable[[str, dict[str, Any]], httpx.Response]


class Wire:
    """Keeps what was sent, and answers by a function of the method's path and its content."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.requests: list[httpx.Request] = []
        self._answer = answer or (lambda path, body: httpx.Response(200, json={}))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/2.0/mlflow/")
        is_json = request.headers.get("content-type") == "application/json"
        body = json.loads(request.content, parse_constant=_refuse) if is_json else dict(request.url.params)
        self.sent.append((path, body))
        self.requests.append(request)
        return self._answer(path, body)

    def tracker(self, uri: str = "http://mlflow", **options: Any) -> Tracker:
        return Tracker(uri, clock=ManualClock(NOW), transport=httpx.MockTransport(self), **options)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for sent, body in self.sent if sent == path]


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def refusal(status: int, code: str, message: str = "") -> httpx.Response:
    return httpx.Response(status, json={"error_code": code, "message": message})


def point(step: int, at: datetime = NOW, **values: float) -> MetricPoint:
    return MetricPoint(step=step, at=at, values=values or {"loss": 0.5})


def test_points_go_out_in_batches_that_the_server_takes() -> None:
    wire = Wire()
    reached = wire.tracker().log_points("r", [point(step, loss=1, acc=0) for step in range(1250)], {})
    batches = [body["metrics"] for body in wire.bodies("runs/log-batch")]
    assert [len(batch) for batch in batches] == [1000, 1000, 500]
    assert reached == {"loss": 1249, "acc": 1249}


def test_a_point_carries_the_nodes_own_time() -> None:
    wire = Wire()
    wire.tracker().log_points("r", [point(4, at=NOW + timedelta(milliseconds=1500))], {"loss": 3})
    (body,) = wire.bodies("runs/log-batch")
    moment = int(NOW.timestamp() * 1000) + 1500
    assert body == {"run_id": "r", "metrics": [{"key": "loss", "value": 0.5, "timestamp": moment, "step": 4}]}


def test_nothing_new_sends_nothing_and_changes_nothing() -> None:
    wire = Wire()
    assert wire.tracker().log_points("r", [point(1), point(2)], {"loss": 2, "acc": 1}) == {"loss": 2, "acc": 1}
    assert wire.sent == []


def test_a_step_that_two_attempts_did_counts_once() -> None:
    wire = Wire()
    points = [
        point(1, loss=3),
        point(2, loss=2),
        point(2, at=NOW + timedelta(hours=1), loss=9, acc=1),
        point(3, loss=1),
    ]
    wire.tracker().log_points("r", points, {})
    sent = [(metric["step"], metric["key"], metric["value"]) for metric in wire.bodies("runs/log-batch")[0]["metrics"]]
    assert sent == [(1, "loss", 3), (2, "loss", 2), (2, "acc", 1), (3, "loss", 1)]


def test_metrics_of_one_step_may_come_one_after_the_other() -> None:
    wire = Wire()
    reached = wire.tracker().log_points("r", [point(100, loss=1)], {})
    reached = wire.tracker().log_points("r", [point(100, accuracy=0.9), point(100, loss=7)], reached)
    sent = [metric for body in wire.bodies("runs/log-batch") for metric in body["metrics"]]
    assert [(metric["key"], metric["step"], metric["value"]) for metric in sent] == [
        ("loss", 100, 1),
        ("accuracy", 100, 0.9),
    ]
    assert reached == {"loss": 100, "accuracy": 100}


def test_names_that_mlflow_cannot_tell_apart_count_once() -> None:
    wire = Wire()
    twins = MetricPoint(step=1, at=NOW, values={"acc@1": 1.0, "acc_1": 2.0})
    assert wire.tracker().log_points("r", [twins], {}) == {"acc_1": 1}
    assert len(wire.bodies("runs/log-batch")[0]["metrics"]) == 1


def test_what_is_no_number_is_sent_as_protobuf_reads_it() -> None:
    wire = Wire()
    wire.tracker().log_points("r", [point(1, a=math.nan, b=math.inf, c=-math.inf)], {})
    assert [metric["value"] for metric in wire.bodies("runs/log-batch")[0]["metrics"]] == [
        "NaN",
        "Infinity",
        "-Infinity",
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("val/loss-1.0 top:5", "val/loss-1.0 top:5"),
        ("acc@1", "acc_1"),
        ("/abs", "_abs"),
        ("../up", "___up"),
        ("a//b", "a__b"),
        (".", "_"),
        ("", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_a_name_is_made_one_that_the_server_takes(name: str, key: str) -> None:
    assert metric_key(name) == key


def test_costs_are_sent_as_numbers_at_the_time_given() -> None:
    wire = Wire()
    at = NOW - timedelta(seconds=1)
    wire.tracker().log_costs("r", 7, {"cost_usd": Money.usd("0.25"), "per_step": Decimal("0.5"), "share": 1}, at=at)
    wire.tracker().log_costs("r", 8, {"cost_usd": Money.usd("0.5")})
    first, second = (body["metrics"] for body in wire.bodies("runs/log-batch"))
    assert [(metric["key"], metric["value"], metric["step"]) for metric in first] == [
        ("cost_usd", 0.25, 7),
        ("per_step", 0.5, 7),
        ("share", 1.0, 7),
    ]
    assert first[0]["timestamp"] == int(at.timestamp() * 1000)
    assert second[0]["timestamp"] == int(NOW.timestamp() * 1000)


class Server:
    """A run that exists, or does not yet, in an experiment that does not exist yet."""

    def __init__(self, *found: dict[str, Any]) -> None:
        self.searches = list(found)

    def __call__(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "experiments/get-by-name":
            return refusal(404, "RESOURCE_DOES_NOT_EXIST")
        if path == "runs/search":
            run = self.searches.pop(0) if self.searches else {}
            return httpx.Response(200, json={"runs": [run]} if run else {})
        known = {"experiments/create": {"experiment_id": "7"}, "runs/create": {"run": run_of("mine")}}
        return httpx.Response(200, json=known.get(path, {}))


def run_of(run_id: str, status: str = "RUNNING", **params: str) -> dict[str, Any]:
    pairs = [{"key": key, "value": value} for key, value in params.items()]
    return {"info": {"run_id": run_id, "status": status, "experiment_id": "7"}, "data": {"params": pairs}}


def job_run(wire: Wire, **changes: Any) -> str:
    wanted = {"project": "p", "name": "n", "params": {"seed": 1}, "tags": {"gpucost.pool": "a"}} | changes
    return wire.tracker().job_run("job", **wanted)


def test_a_new_job_gets_an_experiment_a_run_params_and_tags() -> None:
    wire = Wire(Server())
    assert job_run(wire) == "mine"
    (made,) = wire.bodies("runs/create")
    assert made["experiment_id"] == "7"
    assert {"key": "gpucost.job", "value": "job"} in made["tags"]
    params, tags = wire.bodies("runs/log-batch")
    assert params["params"] == [{"key": "seed", "value": "1"}]
    assert tags["tags"] == [{"key": "gpucost.pool", "value": "a"}]
    assert wire.bodies("runs/update") == []


def test_a_param_that_is_there_is_never_sent_again() -> None:
    wire = Wire(Server(run_of("old", seed="1")))
    assert job_run(wire, params={"seed": 2, "batch": 64}, tags={}) == "old"
    assert wire.bodies("runs/log-batch") == [{"run_id": "old", "params": [{"key": "batch", "value": "64"}]}]


def test_a_closed_run_is_opened_again() -> None:
    wire = Wire(Server(run_of("old", status="FAILED", seed="1")))
    job_run(wire)
    assert wire.bodies("runs/update") == [{"run_id": "old", "status": "RUNNING"}]


def test_two_who_make_a_run_at_once_end_with_the_older_one() -> None:
    wire = Wire(Server({}, run_of("older")))
    assert job_run(wire) == "older"
    assert wire.bodies("runs/delete") == [{"run_id": "mine"}]


def test_two_who_make_an_experiment_at_once_end_with_one() -> None:
    names = iter(
        [refusal(404, "RESOURCE_DOES_NOT_EXIST"), httpx.Response(200, json={"experiment": {"experiment_id": "9"}})]
    )
    server = Server(run_of("run", seed="1"))

    def answer(path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "experiments/get-by-name":
            return next(names)
        return refusal(400, "RESOURCE_ALREADY_EXISTS") if path == "experiments/create" else server(path, body)

    wire = Wire(answer)
    assert job_run(wire) == "run"
    assert wire.bodies("runs/search")[0]["experiment_ids"] == ["9"]


def test_a_deleted_experiment_is_named_with_the_remedy() -> None:
    gone = httpx.Response(200, json={"experiment": {"experiment_id": "9", "lifecycle_stage": "deleted"}})
    with pytest.raises(TrackingAway, match="'p' is deleted; restore it"):
        job_run(Wire(lambda path, body: gone))


def test_a_run_is_closed_with_status_and_time() -> None:
    wire = Wire()
    wire.tracker().close("r", RunStatus.KILLED)
    assert wire.sent == [("runs/update", {"run_id": "r", "status": "KILLED", "end_time": int(NOW.timestamp() * 1000)})]


def test_an_artifact_store_that_the_server_does_not_serve_is_named() -> None:
    run = {"run": {"info": {"artifact_uri": "s3://bucket/1/r/artifacts"}}}
    wire = Wire(lambda path, body: httpx.Response(200, json=run))
    with pytest.raises(TrackingAway, match="--serve-artifacts"):
        wire.tracker().log_text("r", "report.md", "text")


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (httpx.Response(503, text="upstream is away"), 503, "503  upstream is away"),
        (httpx.Response(302, headers={"location": "/login"}), 302, "302"),
        (refusal(400, "INVALID_PARAMETER_VALUE", "too long"), 400, "INVALID_PARAMETER_VALUE too long"),
        (httpx.Response(404, json=["other"]), 404, "404"),
        (httpx.Response(200, text="<html>"), None, "no JSON: '<html>'"),
        (httpx.Response(200, json=[]), None, "no JSON object"),
    ],
)
def test_every_refusal_is_one_exception_with_the_servers_words(
    answer: httpx.Response, status: int | None, message: str
) -> None:
    with pytest.raises(TrackingAway, match=message) as caught:
        Wire(lambda path, body: answer).tracker().close("r", RunStatus.FINISHED)
    assert caught.value.status == status


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError])
def test_no_answer_is_the_same_exception(error: type[httpx.RequestError]) -> None:
    def fail(path: str, body: dict[str, Any]) -> httpx.Response:
        raise error("gone")

    with pytest.raises(TrackingAway, match=r"did not answer POST api/2\.0/mlflow/runs/update") as caught:
        Wire(fail).tracker("http://ann:secret@mlflow").close("r", RunStatus.FINISHED)
    assert "secret" not in str(caught.value)


def test_it_signs_in_with_what_it_was_given() -> None:
    wire = Wire()
    wire.tracker(token="t0ken").set_tags("r", {"gpucost.pool": "a"})
    wire.tracker("http://ann:s%40cret@mlflow").set_tags("r", {"gpucost.pool": "a"})
    wire.tracker(login=("ann", "s@cret")).set_tags("r", {"gpucost.pool": "a"})
    basic = "Basic " + base64.b64encode(b"ann:s@cret").decode()
    assert [request.headers["authorization"] for request in wire.requests] == ["Bearer t0ken", basic, basic]


def test_the_address_that_httpx_logs_holds_no_password() -> None:
    wire = Wire()
    wire.tracker("http://ann:secret@mlflow:5000/").set_tags("r", {"gpucost.pool": "a"})
    assert str(wire.requests[0].url) == "http://mlflow:5000/api/2.0/mlflow/runs/log-batch"


def test_the_page_shows_no_password() -> None:
    wire = Wire(lambda path, body: httpx.Response(200, json={"run": run_of("r")}))
    assert wire.tracker("https://ann:secret@mlflow:5000/").page("r") == "https://mlflow:5000/#/experiments/7/runs/r"


def test_a_file_store_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="expected the http"):
        Tracker("sqlite:///mlflow.db", clock=ManualClock(NOW))


def test_it_does_without_mlflow_itself() -> None:
    check = "import sys, gpucost.tracking.mlflow_tracker; print('mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": "plugins"}, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
