"""One MLflow run per job over all its interruptions and tries; each attempt is a child run.

Runs are found again by their tags, so that whoever comes next (a resumed task, another try, another process) goes on
in the same run. Params never change; what varies is a tag. Metrics carry the node's own times, so that sending them
again changes nothing, and of each metric only steps above the highest one that is there are sent, so that a resumed
program, which does some steps again, logs none of them twice.

Every call is bounded in time. When MLflow is away, or says no, each method raises `TrackingAway`: the caller notes
it, goes on, and comes back later with the same arguments.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from gpucost.clock import Clock
from gpucost.jobstore import MetricPoint
from gpucost.money import Money
from gpucost.tracking.rest import MlflowRest, TrackingAway

if TYPE_CHECKING:
    import httpx

__all__ = ["RunStatus", "Tracker", "TrackingAway"]

JOB_TAG = "gpucost.job"
ATTEMPT_TAG = "gpucost.attempt"
PARENT_TAG = "mlflow.parentRunId"

# Limits of MLflow's log-batch call and of its columns; longer values are refused by the server.
METRICS_PER_CALL = 1000
ENTITIES_PER_CALL = 100
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
KEY_LENGTH = 250


class RunStatus(StrEnum):
    """How a run stands."""

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


class Tracker:
    """Tells an MLflow server about jobs; safe to make anew in every process.

    Args:
        uri: the server's address, e.g. `http://127.0.0.1:5000`; a user and password in it are used.
        clock: dates what has no time of its own.
        login: user and password, where the server wants them.
        token: a bearer token, where the server wants one.
        timeout: seconds that one call may wait.
        transport: stands in for the network, for tests.
    """

    def __init__(
        self,
        uri: str,
        *,
        clock: Clock,
        login: tuple[str, str] | None = None,
        token: str | None = None,
        timeout: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._rest = MlflowRest(uri, login=login, token=token, timeout=timeout, transport=transport)
        self._clock = clock

    def job_run(
        self,
        job: str,
        *,
        project: str,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, object] | None = None,
    ) -> str:
        """The job's run: found by its tag, made if absent, open again if it was closed.

        Args:
            job: the job's key.
            project: the MLflow experiment; made if absent.
            name: what people call the run.
            params: what never changes; a param that the run has already is left as it is.
            tags: what may vary; the newest value stands.

        Returns:
            The run's id.

        Raises:
            TrackingAway: MLflow is away, or the experiment was deleted there.
        """
        experiment = self._experiment(project)
        run = self._find_or_create(experiment, {JOB_TAG: job}, name, self._clock.now())
        run_id = str(run["info"]["run_id"])
        if run["info"].get("status") != RunStatus.RUNNING:
            self._rest.post("runs/update", {"run_id": run_id, "status": RunStatus.RUNNING.value})
        present = {param["key"] for param in run.get("data", {}).get("params", [])}
        fresh = [
            {"key": key, "value": str(value)[:PARAM_LENGTH]}
            for key, value in ((metric_key(key), value) for key, value in params.items())
            if key not in present
        ]
        for batch in _batches(fresh, ENTITIES_PER_CALL):
            self._rest.post("runs/log-batch", {"run_id": run_id, "params": batch})
        self.set_tags(run_id, tags or {})
        return run_id

    def attempt_run(
        self,
        parent: str,
        attempt: int,
        *,
        tags: Mapping[str, object] | None = None,
        started_at: datetime | None = None,
    ) -> str:
        """The child run of attempt number `attempt`: found by its tags, made if absent.

        Returns:
            The child run's id.

        Raises:
            TrackingAway: MLflow is away.
        """
        experiment = str(self._run(parent)["info"]["experiment_id"])
        marks = {PARENT_TAG: parent, ATTEMPT_TAG: str(attempt)}
        run = self._find_or_create(experiment, marks, f"attempt {attempt}", started_at or self._clock.now())
        run_id = str(run["info"]["run_id"])
        self.set_tags(run_id, tags or {})
        return run_id

    def log_points(self, run_id: str, points: Iterable[MetricPoint], logged: Mapping[str, int]) -> dict[str, int]:
        """Log what the run does not have yet, with the node's own times; sending again is harmless.

        A metric's steps only grow within an attempt. A step at or below the highest one of that metric was done again
        by a resumed attempt, and is left out: the first time counts. What the earlier attempt did not get to log of
        that step, another metric for instance, is logged.

        Args:
            run_id: the job's run.
            points: in the order in which they were written, attempt after attempt.
            logged: metric as MLflow names it -> the highest step that the run has of it.

        Returns:
            `logged` with `points` in it. Keep it only when this returns.

        Raises:
            TrackingAway: MLflow is away; come back with the same points and the same `logged`.
        """
        reached = dict(logged)
        metrics: list[dict[str, Any]] = []
        for point in points:
            for name, value in point.values.items():
                key = metric_key(name)
                if point.step > reached.get(key, -1):
                    reached[key] = point.step
                    metrics.append(_metric(key, value, point.at, point.step))
        self._log_metrics(run_id, metrics)
        return reached

    def log_costs(
        self, run_id: str, step: int, costs: Mapping[str, Money | Decimal | float], at: datetime | None = None
    ) -> None:
        """Log amounts as metrics at `step`.

        Args:
            run_id: the job's or an attempt's run.
            step: the training step that they belong to.
            costs: metric name, with the currency in it, e.g. `cost_usd` -> amount.
            at: when they held; send the same time again when sending again. Now, when left out.

        Raises:
            TrackingAway: MLflow is away.
        """
        moment = at or self._clock.now()
        plain = {key: float(value.amount if isinstance(value, Money) else value) for key, value in costs.items()}
        self._log_metrics(run_id, [_metric(metric_key(key), value, moment, step) for key, value in plain.items()])

    def set_tags(self, run_id: str, tags: Mapping[str, object]) -> None:
        """Set tags; the newest value stands.

        Raises:
            TrackingAway: MLflow is away.
        """
        pairs = [{"key": metric_key(key), "value": str(value)[:TAG_LENGTH]} for key, value in tags.items()]
        for batch in _batches(pairs, ENTITIES_PER_CALL):
            self._rest.post("runs/log-batch", {"run_id": run_id, "tags": batch})

    def log_text(self, run_id: str, name: str, text: str) -> None:
        """Store `text` as the run's artifact `name`, e.g. `report.md`.

        Raises:
            TrackingAway: MLflow is away, or does not serve artifacts itself.
        """
        root = str(self._run(run_id)["info"]["artifact_uri"])
        parts = urlsplit(root)
        if parts.scheme != "mlflow-artifacts":
            raise TrackingAway(
                f"MLflow stores the artifacts of run {run_id} in {parts.scheme}:, expected mlflow-artifacts:; "
                "start its server with --serve-artifacts and --artifacts-destination"
            )
        self._rest.put_artifact(f"{parts.path}/{name}", text.encode())

    def close(self, run_id: str, status: RunStatus, ended_at: datetime | None = None) -> None:
        """End a run; closing it again is harmless.

        Raises:
            TrackingAway: MLflow is away.
        """
        moment = _millis(ended_at or self._clock.now())
        self._rest.post("runs/update", {"run_id": run_id, "status": status.value, "end_time": moment})

    def page(self, run_id: str) -> str:
        """The address of the run's page.

        Raises:
            TrackingAway: MLflow is away.
        """
        return f"{self._rest.uri}/#/experiments/{self._run(run_id)['info']['experiment_id']}/runs/{run_id}"

    def disconnect(self) -> None:
        """Give back the connections."""
        self._rest.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def _experiment(self, name: str) -> str:
        try:
            found = self._rest.get("experiments/get-by-name", {"experiment_name": name})["experiment"]
        except TrackingAway as away:
            if away.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        else:
            if found.get("lifecycle_stage") == "deleted":
                raise TrackingAway(f"MLflow's experiment {name!r} is deleted; restore it, or use another project")
            return str(found["experiment_id"])
        try:
            return str(self._rest.post("experiments/create", {"name": name})["experiment_id"])
        except TrackingAway as away:
            if away.code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(
                self._rest.get("experiments/get-by-name", {"experiment_name": name})["experiment"]["experiment_id"]
            )

    def _run(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self._rest.get("runs/get", {"run_id": run_id})["run"]
        return run

    def _find_or_create(
        self, experiment: str, marks: Mapping[str, str], name: str, started: datetime
    ) -> dict[str, Any]:
        """The run that bears `marks`; when two processes make one at once, the older stays and both get it."""
        found = self._find(experiment, marks)
        if found:
            return found
        tags = {**marks, "mlflow.source.name": "gpucost", "mlflow.source.type": "JOB"}
        body = {
            "experiment_id": experiment,
            "run_name": name,
            "start_time": _millis(started),
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        made: dict[str, Any] = self._rest.post("runs/create", body)["run"]
        first = self._find(experiment, marks) or made
        if first["info"]["run_id"] != made["info"]["run_id"]:
            self._rest.post("runs/delete", {"run_id": made["info"]["run_id"]})
        return first

    def _find(self, experiment: str, marks: Mapping[str, str]) -> dict[str, Any] | None:
        body = {
            "experiment_ids": [experiment],
            "filter": " and ".join(f"tags.`{key}` = '{value}'" for key, value in marks.items()),
            "order_by": ["attributes.start_time ASC", "attributes.run_id ASC"],
            "max_results": 1,
        }
        runs: list[dict[str, Any]] = self._rest.post("runs/search", body).get("runs", [])
        return runs[0] if runs else None

    def _log_metrics(self, run_id: str, metrics: list[dict[str, Any]]) -> None:
        for batch in _batches(metrics, METRICS_PER_CALL):
            self._rest.post("runs/log-batch", {"run_id": run_id, "metrics": batch})


def metric_key(name: str) -> str:
    """`name` as MLflow accepts it: letters, digits and `_-. /:`, a clean relative path; the rest becomes `_`.

    One name that the server refuses would hold back every point after it.
    """
    key = re.sub(r"[^\w\-. /:]", "_", name)[:KEY_LENGTH].strip() or "_"
    clean = posixpath.normpath(key) == key and not key.startswith(("/", ".."))
    return key if clean and key != "." else key.replace("/", "_").replace("..", "__").replace(".", "_")


def _metric(key: str, value: float, at: datetime, step: int) -> dict[str, Any]:
    # JSON has no NaN; MLflow's protobuf reader takes these three words.
    shown = value if math.isfinite(value) else ("NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity")
    return {"key": key, "value": shown, "timestamp": _millis(at), "step": step}


def _millis(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _batches(items: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
