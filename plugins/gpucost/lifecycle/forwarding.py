"""Keeping MLflow up to date while jobs run, in threads of its own: an MLflow that hangs holds up nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from gpucost.lifecycle import tracking
from gpucost.lifecycle.services import Services

log = logging.getLogger(__name__)

THREADS = 4

FIRST_PAUSE = 4.0
LONGEST_PAUSE = 60.0
"""Real seconds that a job's metrics wait after MLflow was away for them, doubled each time."""


@dataclass(frozen=True)
class _Pause:
    seconds: float
    until: float


class Forwarder:
    """Sends the metrics of many jobs, each job's by one thread at a time.

    Args:
        services: the rooms.
        monotonic: real seconds, for pauses.
        threads: where the sending happens; None: threads of its own.
    """

    def __init__(
        self, services: Services, monotonic: Callable[[], float] = time.monotonic, threads: Executor | None = None
    ) -> None:
        self._services = services
        self._monotonic = monotonic
        self._threads = threads or ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="gpucost-mlflow")
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._pauses: dict[str, _Pause] = {}

    def soon(self, job: str) -> None:
        """There may be something new of `job`; returns at once.

        Nothing is queued while the job's metrics are being sent, or wait for MLflow: whoever comes next, with the
        next heartbeat or at the attempt's end, sends all that is missing.
        """
        if self._services.tracker is None:
            return
        with self._lock:
            pause = self._pauses.get(job)
            if job in self._busy or (pause is not None and self._monotonic() < pause.until):
                return
            self._busy.add(job)
        self._threads.submit(self._forward, job)

    def forget(self, job: str) -> None:
        """The job is not watched any more."""
        with self._lock:
            self._pauses.pop(job, None)

    def _forward(self, job: str) -> None:
        told = False
        try:
            told = tracking.forward_metrics(self._services, job)
        except Exception:
            log.exception("Job %s: its metrics could not be sent to MLflow", job)
        with self._lock:
            self._busy.discard(job)
            last = self._pauses.pop(job, None)
            if not told:
                seconds = min(last.seconds * 2, LONGEST_PAUSE) if last is not None else FIRST_PAUSE
                self._pauses[job] = _Pause(seconds, self._monotonic() + seconds)
