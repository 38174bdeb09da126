"""The processes of a training as threads of one, so that a test can fail each of them where it likes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

PATIENCE = 20.0
"""Real seconds until a thread that the others left alone says so, instead of waiting for ever."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[bytes] = [b""] * size


class ThreadRanks:
    """One of the threads; what is told goes through pickle, as it does between processes."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = len(meeting.values)
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value; fails if not all come."""
        self._meeting.values[self.rank] = pickle.dumps(value)
        self._meeting.barrier.wait(PATIENCE)
        values = [pickle.loads(told) for told in self._meeting.values]  # noqa: S301 - our own
        self._meeting.barrier.wait(PATIENCE)
        return values

    def broadcast(self, value: Any) -> Any:
        """What rank 0 passed; fails if not all come."""
        return self.gather(value)[0]

    def highest(self, number: int) -> int:
        """The highest; fails if not all come."""
        return max(self.gather(number))


def on_all(size: int, work: Callable[[ThreadRanks], Result]) -> list[Result | Exception]:
    """What `work` returned or raised on each of `size` ranks."""
    meeting = _Meeting(size)

    def one(rank: int) -> Result | Exception:
        try:
            return work(ThreadRanks(rank, meeting))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
