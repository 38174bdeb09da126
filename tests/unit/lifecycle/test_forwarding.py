"""Metrics on their way to MLflow: one thread for each job at a time, and pauses while MLflow is away."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from itertools import pairwise
from typing import Any

import pytest

from gpucost.lifecycle import tracking
from gpucost.lifecycle.forwarding import FIRST_PAUSE, LONGEST_PAUSE, Forwarder
from gpucost.lifecycle.services import Services


class Threads(Executor):
    """Keeps what it is to do until it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.waiting.append(lambda: fn(*args, **kwargs))

    def work(self) -> int:
        """Do it all; how much it was."""
        todo, self.waiting = self.waiting, []
        for one in todo:
            one()
        return len(todo)


class Bench:
    """A forwarder with an MLflow that answers as told."""

    def __init__(self, patch: pytest.MonkeyPatch, services: Services) -> None:
        self.now = 1000.0
        self.told: list[str] = []
        self.answer: Callable[[str], bool] = lambda job: True
        self.threads = Threads()
        self.forwarder = Forwarder(services, lambda: self.now, self.threads)
        patch.setattr(tracking, "forward_metrics", self._forward)

    def _forward(self, services: Services, job: str) -> bool:
        self.told.append(job)
        return self.answer(job)

    def beat(self, *jobs: str) -> int:
        """Heartbeats of these jobs; how many sendings they led to."""
        for job in jobs:
            self.forwarder.soon(job)
        return self.threads.work()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    services: Any = type("Tracked", (), {"tracker": object()})()
    return Bench(monkeypatch, services)


def test_a_job_s_metrics_are_sent_by_one_thread_at_a_time(bench: Bench) -> None:
    assert bench.beat("a", "a", "b", "a") == 2
    assert bench.told == ["a", "b"]
    assert bench.beat("a") == 1, "the next heartbeat sends what came in the meantime"


def test_pauses_grow_while_mlflow_is_away_and_end_when_it_is_back(bench: Bench) -> None:
    bench.answer = lambda job: False
    asked_at: list[float] = []
    for _ in range(260):
        if bench.beat("a"):
            asked_at.append(bench.now)
        bench.now += 1.0
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses == [FIRST_PAUSE, 8.0, 16.0, 32.0, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    bench.now += LONGEST_PAUSE
    bench.answer = lambda job: True
    assert bench.beat("a") == 1
    assert bench.beat("a") == 1


def test_a_job_that_mlflow_refuses_holds_up_no_other(bench: Bench) -> None:
    bench.answer = lambda job: job != "refused"
    assert bench.beat("refused", "b") == 2
    assert bench.beat("refused", "b") == 1
    assert bench.told == ["refused", "b", "b"]


def test_a_failure_is_logged_and_followed_by_a_pause(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(job: str) -> bool:
        raise OSError("the store is away")

    bench.answer = fail
    assert bench.beat("a") == 1
    assert bench.beat("a") == 0
    assert "Job a: its metrics could not be sent to MLflow" in caplog.text
    bench.now += FIRST_PAUSE
    assert bench.beat("a") == 1


def test_a_job_that_is_watched_anew_waits_for_no_old_pause(bench: Bench) -> None:
    bench.answer = lambda job: False
    bench.beat("a")
    bench.forwarder.forget("a")
    assert bench.beat("a") == 1


def test_without_mlflow_no_thread_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    services: Any = type("Untracked", (), {"tracker": None})()
    assert Bench(monkeypatch, services).beat("a", "b") == 0
