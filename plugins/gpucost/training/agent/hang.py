"""Does the program still get anywhere? The usual time of a step, and when too much more than that has passed.

Pure: it is told the progress and the time, and says when the program counts as hung.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from gpucost.job import HangWatch
from gpucost.jobstore import Phase
from gpucost.training.workdir import Progress

RECENT = 31
"""Steps' times that the usual one is the median of."""


@dataclass(frozen=True)
class Hung:
    """That the program counts as hung.

    Args:
        step: it has done so many steps.
        seconds: real seconds since it last got anywhere.
        phase: what it was at.
        usual: real seconds of a step so far, where any was measured.
    """

    step: int
    seconds: float
    phase: Phase
    usual: float | None

    def __str__(self) -> str:
        """For a person."""
        usual = "" if self.usual is None else f", a step usually takes {self.usual:.3g} s"
        return f"the program hung at step {self.step} ({self.phase}): nothing for {self.seconds:.0f} s{usual}"


class Hang:
    """Watches one program.

    Args:
        limits: the job's.
        reports: whether it must report steps; else a program that never does is left alone.
    """

    def __init__(self, limits: HangWatch, *, reports: bool = True) -> None:
        self._limits = limits
        self._reports = reports
        self._times: deque[float] = deque(maxlen=RECENT)
        self._last: Progress | None = None
        self._stepped = False
        self._since = 0.0

    def begin(self, before: Progress | None, now: float) -> None:
        """A program has just been started.

        Args:
            before: what one that ran before it has left.
            now: real seconds, monotonic.
        """
        self._times.clear()
        self._last = before
        self._stepped = False
        self._since = now

    def look(self, progress: Progress | None, now: float) -> Hung | None:
        """Whether it hangs.

        Args:
            progress: its newest.
            now: real seconds, monotonic.
        """
        last, self._last = self._last, progress or self._last
        if progress and _moved(last, progress):
            self._learn(last, progress, now)
        if self._last is None and not self._reports:
            return None
        passed, limit = now - self._since, self._limit()
        if passed <= limit:
            return None
        step, phase = (self._last.step, self._last.phase) if self._last else (0, Phase.STARTING)
        return Hung(step, passed, phase, self.usual)

    @property
    def usual(self) -> float | None:
        """Real seconds of a step: the median of the recent ones; None while none was measured."""
        return statistics.median(self._times) if self._times else None

    def _learn(self, last: Progress | None, progress: Progress, now: float) -> None:
        if self._stepped and last and last.phase is progress.phase is Phase.TRAINING and progress.step > last.step:
            self._times.append((now - self._since) / (progress.step - last.step))
        self._stepped = self._stepped or progress.step > (progress.resumed_step or 0)
        if self._stepped:
            self._since = now

    def _limit(self) -> float:
        # Nothing tells how long the time before the first step may be, nor that after the last one.
        if not self._stepped or (self._last and self._last.phase is Phase.ENDED):
            return self._limits.start_seconds
        if self.usual is None or (self._last and self._last.phase is not Phase.TRAINING):
            return self._limits.at_least_seconds
        return max(self._limits.at_least_seconds, self._limits.times * self.usual)


def _moved(last: Progress | None, progress: Progress) -> bool:
    return last is None or (last.phase, last.step) != (progress.phase, progress.step)
