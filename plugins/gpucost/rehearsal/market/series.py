"""What moves over time: the spot price of a pool, and how many machines it holds. Steps, told by their beginnings."""

from __future__ import annotations

import bisect
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Generic, Protocol, TypeVar

from gpucost.clock import floor_second, require_utc

SEASONS_KEPT = 8
"""Of one series, in memory. What else is asked for is made again."""


@dataclass(frozen=True)
class PricePoint:
    """From `at` on, the pool's spot price is `price` US dollars per instance-hour."""

    at: datetime
    price: Decimal

    @property
    def value(self) -> Decimal:
        """The price."""
        return self.price


@dataclass(frozen=True)
class CapacityPoint:
    """From `at` on, the pool holds at most `count` instances."""

    at: datetime
    count: int

    @property
    def value(self) -> int:
        """The count."""
        return self.count


Point = TypeVar("Point", PricePoint, CapacityPoint)


class PriceSeries(Protocol):
    """The spot price of one pool over time."""

    @property
    def start(self) -> datetime:
        """The first moment with a price."""
        ...

    def at(self, moment: datetime) -> Decimal:
        """The price in force at `moment`, US dollars per instance-hour; raises ValueError before `start`."""
        ...

    def between(self, first: datetime, last: datetime) -> list[PricePoint]:
        """The price in force at `first` and every change after it up to and with `last`, oldest first."""
        ...


class CapacitySeries(Protocol):
    """How many instances one pool holds over time; before it begins, as many as at its beginning."""

    def at(self, moment: datetime) -> int:
        """The most instances that the pool holds at `moment`."""
        ...

    def between(self, first: datetime, last: datetime) -> list[CapacityPoint]:
        """The capacity at `first` and every change after it up to and with `last`, oldest first."""
        ...


@dataclass(frozen=True)
class Steady:
    """A capacity that never changes."""

    count: int

    def at(self, moment: datetime) -> int:  # noqa: ARG002 (the same at any moment)
        """The count."""
        return self.count

    def between(self, first: datetime, last: datetime) -> list[CapacityPoint]:
        """One point, at `first`."""
        return [] if last < first else [CapacityPoint(first, self.count)]


class Seasons(ABC, Generic[Point]):
    """A series without end, made in pieces where somebody looks.

    Time is cut into seasons of equal length from `start` on. A season is made from its index alone, so that what
    is answered never depends on who asked before, and a look at any moment costs one season, however far away.

    Args:
        start: when the first season begins; cut to whole seconds.
        length: of each season.
    """

    def __init__(self, start: datetime, length: timedelta) -> None:
        self._start = floor_second(require_utc(start, "start"))
        self._length = length
        self._lock = threading.Lock()
        self._seasons: dict[int, list[Point]] = {}

    @abstractmethod
    def _made(self, index: int) -> list[Point]:
        """The points of a season, oldest first; the first lies at the season's very beginning."""

    @property
    def start(self) -> datetime:
        """The beginning of the first season."""
        return self._start

    def in_force(self, moment: datetime) -> Point:
        """The point in force at `moment`; raises ValueError before the start."""
        moment = require_utc(moment, "moment")
        if moment < self._start:
            raise ValueError(f"moment: got {moment.isoformat()}, expected {self._start.isoformat()} or later")
        points = self._season(self._index(moment))
        return points[bisect.bisect_right(points, moment, key=lambda point: point.at) - 1]

    def points(self, first: datetime, last: datetime) -> list[Point]:
        """The point in force at `first` and every one after it up to and with `last`, oldest first."""
        if last < self._start or last < first:
            return []
        first = max(first, self._start)
        found = [self.in_force(first)]
        for index in range(self._index(first), self._index(last) + 1):
            season = self._season(index)
            begin = bisect.bisect_right(season, found[-1].at, key=lambda point: point.at)
            end = bisect.bisect_right(season, last, key=lambda point: point.at)
            if begin == 0 and end > 0 and season[0].value == found[-1].value:
                begin = 1  # a season that begins as the last one ended brings no change
            found.extend(season[begin:end])
        return found

    def _index(self, moment: datetime) -> int:
        return (moment - self._start) // self._length

    def _season(self, index: int) -> list[Point]:
        with self._lock:
            if index not in self._seasons:
                if len(self._seasons) >= SEASONS_KEPT:
                    del self._seasons[next(iter(self._seasons))]
                self._seasons[index] = self._made(index)
            return self._seasons[index]


class SeasonalPrices(Seasons[PricePoint]):
    """Prices made season by season; a `PriceSeries`."""

    def at(self, moment: datetime) -> Decimal:
        """The price in force at `moment`; raises ValueError before the start."""
        return self.in_force(moment).price

    def between(self, first: datetime, last: datetime) -> list[PricePoint]:
        """The price in force at `first` and every change after it up to and with `last`, oldest first."""
        return self.points(first, last)


class SeasonalCapacity(Seasons[CapacityPoint]):
    """Capacities made season by season; a `CapacitySeries`."""

    def at(self, moment: datetime) -> int:
        """The most instances that the pool holds at `moment`."""
        return self.in_force(max(moment, self._start)).count

    def between(self, first: datetime, last: datetime) -> list[CapacityPoint]:
        """The capacity at `first` and every change after it up to and with `last`, oldest first."""
        if last < first:
            return []
        later = [point for point in self.points(first, last) if point.at > first]
        return [CapacityPoint(first, self.at(first)), *later]
