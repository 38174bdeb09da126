"""What is to be done at this step boundary? Wishes of the agent, of a signal and of the plan, agreed by all processes.

A signal reaches one process and not another, a request is read by one a moment before another: each process brings
its wish, and the strongest is what all of them do, at the same boundary.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import IntEnum
from types import FrameType
from typing import Any

from gpucost.jobstore import Command
from gpucost.training.program.reporting import Reporter
from gpucost.training.ranks import Ranks
from gpucost.training.workdir import Request


class Wish(IntEnum):
    """What to do at a boundary; a higher one wins."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


class Boundary:
    """Finds out what is wished, and agrees on it.

    Args:
        reporter: hears the agent's requests.
        ranks: the processes of this training; rank 0 hears the agent.
    """

    def __init__(self, reporter: Reporter, ranks: Ranks) -> None:
        self._reporter = reporter
        self._ranks = ranks
        self._told = threading.Event()
        self._old_handler: Any = None
        self._save_wanted = False
        self.gone_by: datetime | None = None
        """Real time by which this process must have ended, on rank 0; None: nobody said."""

    def listen(self) -> None:
        """Take SIGTERM for a wish to stop, until `give_back`."""
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def give_back(self) -> None:
        """Leave SIGTERM to whoever had it."""
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None

    def agree(self, due: bool, *, may_save: bool = True) -> Wish:
        """What all processes do at this boundary; all of them ask at the same one.

        Args:
            due: whether the plan wants a checkpoint here.
            may_save: whether this is the end of a step; a mere save that is wished between micro-steps waits for it.
        """
        wish = Wish.SAVE if due else Wish.GO_ON
        if request := self._reporter.asked():
            wish = max(wish, self._heard(request))
        if self._told.is_set():
            wish = Wish.STOP
        wish = Wish(self._ranks.highest(max(wish, Wish.SAVE if self._save_wanted else Wish.GO_ON)))
        self._save_wanted = wish is Wish.SAVE and not may_save
        return Wish.GO_ON if self._save_wanted else wish

    def fits(self, seconds: float | None, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> bool:
        """Whether something that takes so many real seconds is done before this process must have ended."""
        fits = self.gone_by is None or seconds is None or (self.gone_by - now()).total_seconds() >= seconds
        return bool(self._ranks.broadcast(fits))

    def _heard(self, request: Request) -> Wish:
        if request.command is Command.SAVE_AND_STOP:
            self.gone_by = request.gone_by
            return Wish.STOP
        return Wish.SAVE

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._told.set()


class Plan:
    """When is a checkpoint due? Every so many steps, and within bounds of real time.

    Args:
        every_steps: optimizer steps between two.
        min_seconds: not within so many real seconds of the one before.
        max_seconds: no later than so many after it; None: as the steps come.
        ranks: rank 0's watch counts where time matters.
        real: real seconds, monotonic.
    """

    def __init__(
        self,
        every_steps: int,
        min_seconds: float,
        max_seconds: float | None,
        ranks: Ranks,
        real: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = every_steps
        self._min_seconds = min_seconds
        self._max_seconds = max_seconds
        self._by_time = bool(min_seconds) or max_seconds is not None
        self._first = ranks.rank == 0
        self._real = real
        self._saved_at = real()
        self._waiting = False

    def saved(self) -> None:
        """A checkpoint was tried just now."""
        self._saved_at = self._real()
        self._waiting = False

    def due(self, step: int) -> bool:
        """Whether the end of this step wants one; where time matters, rank 0 alone says so."""
        by_steps = step % self._every_steps == 0
        if not self._by_time:
            return by_steps
        if not self._first:
            return False
        # One that came too early is made up for once the time has passed, not an interval later.
        self._waiting = self._waiting or by_steps
        past = self._real() - self._saved_at
        return (self._waiting and past >= self._min_seconds) or (
            self._max_seconds is not None and past >= self._max_seconds
        )
