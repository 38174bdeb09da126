"""An MLflow that notes what it is told, and can be away."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from gpucost.clock import ManualClock
from gpucost.jobstore import MetricPoint
from gpucost.tracking.mlflow_tracker import RunStatus, Tracker, TrackingAway
from tests.fakes.rooms import START


class FakeTracker:
    """Stands in for `Tracker`.

    `open` is cleared to let MLflow hang; `points` is what was told, in order: metric, step, value.
    """

    def __init__(self) -> None:
        self.away = False
        self.open = threading.Event()
        self.open.set()
        self.points: list[tuple[str, int, float]] = []
        self.calls = 0
        self.costs: dict[str, dict[str, Any]] = {}
        self.closed: dict[str, RunStatus] = {}
        self.texts: list[str] = []

    @property
    def steps(self) -> list[int]:
        """The steps that were told."""
        return [step for _, step, _ in self.points]

    def _answer(self) -> None:
        self.calls += 1
        self.open.wait(timeout=20)
        if self.away:
            raise TrackingAway("connection refused")

    def job_run(self, job: str, **_: Any) -> str:
        self._answer()
        return f"run of {job}"

    def attempt_run(self, run_id: str, number: int, **_: Any) -> str:
        self._answer()
        return f"attempt {number}"

    def log_points(self, run_id: str, points: Iterable[MetricPoint], logged: Mapping[str, int]) -> dict[str, int]:
        """As the real one, whose choice of what is new is used."""
        self._answer()
        real = Tracker("http://mlflow", clock=ManualClock(START), transport=httpx.MockTransport(self._receive))
        return real.log_points(run_id, points, logged)

    def _receive(self, request: httpx.Request) -> httpx.Response:
        for metric in json.loads(request.content).get("metrics", []):
            self.points.append((metric["key"], metric["step"], metric["value"]))
        return httpx.Response(200, json={})

    def log_costs(self, run_id: str, step: int, costs: dict[str, Any]) -> None:
        self._answer()
        self.costs.setdefault(run_id, {}).update(costs)

    def set_tags(self, run_id: str, tags: Any) -> None:
        self._answer()

    def log_text(self, run_id: str, path: str, text: str) -> None:
        self._answer()
        self.texts.append(text)

    def close(self, run_id: str, status: RunStatus, at: Any = None) -> None:
        self._answer()
        self.closed[run_id] = status
