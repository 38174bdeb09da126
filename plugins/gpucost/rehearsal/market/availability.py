"""How much can be bought, and for how long? Capacities that a seeded generator makes.

Two things take a pool's machines away: a shortage that all zones of its region share, and one of its own. Each
alternates between lifetimes and outages whose lengths are drawn from a mixture of two exponentials: many short
ones and a few very long ones, as in real availability histories. The pool has machines while neither is out.
Before they are all gone they get fewer. docs/reference/rehearsal-market.md compares it with real histories.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from gpucost.rehearsal.market.file import Durations, OnOff
from gpucost.rehearsal.market.series import SEASONS_KEPT, CapacityPoint, SeasonalCapacity

SEASON_S = 30 * 86400
"""Capacities are made in pieces of 30 days, each from its index alone."""

MIN_SPELL_S = 600
"""No lifetime and no outage is drawn shorter: the real AWS histories have none under ten minutes."""


class Span(NamedTuple):
    """From `begin` to `end`, seconds of a season; `end` is SEASON_S when it goes on beyond."""

    begin: int
    end: int


class Process:
    """What alternates between lifetimes and outages, season by season.

    A season begins as the process is in the long run: on with its share of the time on, in the short or long
    kind by their share of that time; how long it still lasts needs no past, exponentials have no memory.

    Args:
        law: how long lifetimes and outages last.
        seed: makes it repeatable.
    """

    def __init__(self, law: OnOff, seed: str) -> None:
        self._law = law
        self._seed = seed
        self._lock = threading.Lock()
        self._kept: dict[int, list[Span]] = {}

    def lifetimes(self, index: int) -> list[Span]:
        """When it is on, in season `index`: apart from each other, in order."""
        with self._lock:
            if index not in self._kept:
                if len(self._kept) >= SEASONS_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[index] = list(self._drawn(index))
            return self._kept[index]

    def _drawn(self, index: int) -> Iterator[Span]:
        chance = random.Random(f"{self._seed}/{index}")  # noqa: S311 (capacities, not secrets)
        law = self._law
        on = chance.random() < law.available_share
        law_now = law.lifetimes if on else law.outages
        moment, length = 0, _length(chance, law_now, law_now.short_share_of_time)
        while moment < SEASON_S:
            end = min(moment + length, SEASON_S)
            if on:
                yield Span(moment, end)
            moment, on = end, not on
            law_now = law.lifetimes if on else law.outages
            length = _length(chance, law_now, law_now.short_share)


def _length(chance: random.Random, law: Durations, short_share: float) -> int:
    hours = law.short_hours if chance.random() < short_share else law.long_hours
    return max(MIN_SPELL_S, round(chance.expovariate(1.0) * hours * 3600))


def common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """When both are on."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i].begin, other[j].begin), min(one[i].end, other[j].end)
        if begin < end:
            found.append(Span(begin, end))
        if one[i].end < other[j].end:
            i += 1
        else:
            j += 1
    return found


@dataclass(frozen=True)
class Fading:
    """How a capacity shrinks: in the last `share` of a lifetime, to two thirds, then to one third, never to none."""

    full: int
    share: float

    def levels(self, span: Span) -> Iterator[tuple[int, int]]:
        """(second, count) of each step within a lifetime, from its beginning on."""
        yield span.begin, self.full
        if span.end == SEASON_S:
            return  # it goes on beyond the season; its end is not known here
        length = (span.end - span.begin) * self.share
        before = (span.begin, self.full)
        for third in (2, 1):
            step = (int(span.end - length * third / 2), max(1, -(-self.full * third // 3)))
            if before[0] < step[0] < span.end and step[1] < before[1]:
                yield step
                before = step


class GeneratedCapacity(SeasonalCapacity):
    """How many instances a pool holds over time: `fading.full` or fewer while every process is on, else none.

    Args:
        fading: the full capacity, and how it shrinks before it is gone.
        processes: the pool's own, and those that it shares with others.
        start: the beginning of the first season.
    """

    def __init__(self, fading: Fading, processes: Sequence[Process], start: datetime) -> None:
        super().__init__(start, timedelta(seconds=SEASON_S))
        self._fading = fading
        self._processes = processes

    def _made(self, index: int) -> list[CapacityPoint]:
        spans = [Span(0, SEASON_S)]
        for process in self._processes:
            spans = common(spans, process.lifetimes(index))
        begin = self.start + timedelta(seconds=index * SEASON_S)
        points = [CapacityPoint(begin, 0)] if not spans or spans[0].begin > 0 else []
        for span in spans:
            points += [CapacityPoint(begin + timedelta(seconds=at), n) for at, n in self._fading.levels(span)]
            if span.end < SEASON_S:
                points.append(CapacityPoint(begin + timedelta(seconds=span.end), 0))
        return points
