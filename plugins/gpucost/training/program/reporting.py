"""What does a running program tell? Its progress, its metrics, its last word, at a bounded rate.

On a node this goes to the work folder, where the agent picks it up; elsewhere to stderr.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping

from gpucost.clock import SpecClock
from gpucost.jobstore import MetricPoint, Phase
from gpucost.training.workdir import Progress, Request, Result, Workdir

PROGRESS_SECONDS = 0.2
"""Real seconds between two writes of the progress while only steps went by; a thousand steps a second are
then no more work than five."""
RATE_SECONDS = 1.0
"""Real seconds over which steps per second are measured."""


def say(line: str) -> None:
    """A line for people, in the program's log."""
    print(f"gpucost: {line}", file=sys.stderr, flush=True)  # noqa: T201


class Reporter:
    """Tells progress and metrics, and hears requests.

    Args:
        workdir: shared with the agent; None outside gpucost.
        clock: the job's clock; times and rates are told in its time.
        real: real seconds, monotonic.
        silent: tell nothing; of several processes, one speaks.
    """

    def __init__(
        self,
        workdir: Workdir | None,
        clock: SpecClock,
        real: Callable[[], float] = time.monotonic,
        *,
        silent: bool = False,
    ) -> None:
        self._workdir = None if silent else workdir
        self._silent = silent
        self._clock = clock
        self._real = real
        self._written = -math.inf
        self._rate: float | None = None
        self._rate_from: tuple[float, int] | None = None
        self._mark = 0
        self._sequence = 0
        self._loss: float | None = None
        self.total_steps: int | None = None
        self.resumed_step: int | None = None
        self.saved_step: int | None = None
        self.quickest_save: float | None = None
        """Real seconds of this run's quickest save; None before the first."""
        self._save_seconds: float | None = None
        self._unwritten: set[str] = set()

    def say(self, line: str) -> None:
        """A line for people, in the program's log."""
        if not self._silent:
            say(line)

    def saved(self, step: int, seconds: float) -> None:
        """A step was saved, in so many real seconds."""
        self.saved_step = step
        self._save_seconds = seconds
        self.quickest_save = min(seconds, self.quickest_save or seconds)

    def due(self) -> bool:
        """Whether it is time to write the progress again."""
        return self._real() - self._written >= PROGRESS_SECONDS

    def progress(self, phase: Phase, step: int, epoch: int, loss: float | None = None) -> None:
        """Write the progress now."""
        if loss is not None:
            self._loss = loss
        self._measure_rate(phase, step)
        self._written = self._real()
        if self._workdir is None:
            return
        progress = Progress(
            step=step,
            epoch=epoch,
            at=self._clock.now(),
            phase=phase,
            total_steps=self.total_steps,
            loss=self._loss,
            steps_per_second=self._rate,
            resumed_step=self.resumed_step,
            saved_step=self.saved_step,
            save_seconds=self._save_seconds,
        )
        self._write("progress", lambda workdir: workdir.write_progress(progress))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of one step; a NaN is a metric, too."""
        if self._workdir is None:
            self.say(f"step {step}: " + ", ".join(f"{name} {value:.5g}" for name, value in values.items()))
        else:
            point = MetricPoint(step=step, at=self._clock.now(), values=dict(values))
            self._write("metrics", lambda workdir: workdir.add_metrics(point))

    def result(self, result: Result) -> None:
        """Leave the last word."""
        if self._workdir is not None:
            self._workdir.write_result(result)

    def asked(self) -> Request | None:
        """A request that was not seen before, or None."""
        if self._workdir is None or (mark := self._workdir.request_mark()) == self._mark:
            return None
        self._mark = mark
        request = self._workdir.request()
        if request is None or request.sequence <= self._sequence:
            return None
        self._sequence = request.sequence
        return request

    def _write(self, what: str, write: Callable[[Workdir], None]) -> None:
        """Training is worth more than a word about it: a full disk is said once, and does not end it."""
        if self._workdir is None:
            return
        try:
            write(self._workdir)
        except OSError as full:
            if what not in self._unwritten:
                self.say(f"{what} cannot be written; training goes on: {full}")
            self._unwritten.add(what)
        else:
            self._unwritten.discard(what)

    def _measure_rate(self, phase: Phase, step: int) -> None:
        now = self._real()
        if phase is Phase.STARTING or phase is Phase.RESTORING:
            # What is restored was not done now: the count begins at the first step after it.
            self._rate_from = None
            return
        if self._rate_from is None:
            self._rate_from = (now, step)
            return
        began, first = self._rate_from
        if now - began >= RATE_SECONDS:
            self._rate = (step - first) / (now - began) / self._clock.spec.speed
            self._rate_from = (now, step)
