"""A small made-up market, a clock that a test turns, and a journal in memory, for the rehearsal's own tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from gpucost.clock import ClockSpec, SpecClock
from gpucost.rehearsal.book.book import Book, Plan
from gpucost.rehearsal.book.records import Instance, LaunchSpec, Lifecycle, Order
from gpucost.rehearsal.market.file import DiskPrice, SourcedPrice, TypeOffer, Zone
from gpucost.rehearsal.market.market import Market, PoolMarket
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.market.series import (
    CapacityPoint,
    CapacitySeries,
    PricePoint,
    SeasonalCapacity,
    SeasonalPrices,
    Steady,
)

ORIGIN = datetime(2026, 11, 30, 16, 0, tzinfo=UTC)
POOL = PoolKey("us-east-1a", "g4dn.xlarge")
OTHER = PoolKey("us-east-1b", "g4dn.xlarge")
SOURCE = {"source": "made up for a test", "as_of": "2026-11-30"}


def at(**since: float) -> datetime:
    """A moment after ORIGIN: `at(minutes=5)`."""
    return ORIGIN + timedelta(**since)


AGES = timedelta(days=3650)


class ToldPrices(SeasonalPrices):
    """Prices that a test tells, all in one season."""

    def __init__(self, points: list[PricePoint]) -> None:
        super().__init__(points[0].at, AGES)
        self._told = points

    def _made(self, index: int) -> list[PricePoint]:
        return self._told


class ToldCapacity(SeasonalCapacity):
    """Capacities that a test tells, all in one season."""

    def __init__(self, points: list[CapacityPoint]) -> None:
        super().__init__(points[0].at, AGES)
        self._told = points

    def _made(self, index: int) -> list[CapacityPoint]:
        return self._told


def capacity(*counts: tuple[datetime, int]) -> CapacitySeries:
    """A capacity that changes at these moments; the first lies at or before everything that asks."""
    return ToldCapacity([CapacityPoint(moment, count) for moment, count in counts])


def market(
    spot: CapacitySeries | None = None,
    prices: Sequence[tuple[datetime, str]] = ((ORIGIN - timedelta(days=1), "0.2"),),
    pools: Sequence[PoolKey] = (POOL, OTHER),
    plain: CapacitySeries | None = None,
) -> Market:
    """g4dn.xlarge at 0.526 US dollars on demand; all pools alike."""
    series = ToldPrices([PricePoint(moment, Decimal(price)) for moment, price in prices])
    offer = TypeOffer(
        name="g4dn.xlarge", gpu="T4", on_demand={"us-east-1": SourcedPrice(usd_per_hour=Decimal("0.526"), **SOURCE)}
    )
    made = {key: PoolMarket(key, Decimal("0.526"), series, spot or Steady(4), plain or Steady(2)) for key in pools}
    zones = [Zone(name="us-east-1a", zone_id="use1-az6"), Zone(name="us-east-1b", zone_id="use1-az1")]
    disk = DiskPrice(usd_per_gib_month=Decimal("0.08"), **SOURCE)
    return Market(label="made up", zones=zones, types=[offer], pools=made, disk=disk, seed=7)


class Watch:
    """A rehearsal clock that a test turns; real time goes `speed` times slower."""

    def __init__(self, speed: float = 60.0) -> None:
        self._real = ORIGIN
        spec = ClockSpec(origin_real=ORIGIN, origin=ORIGIN, speed=speed)
        self.clock = SpecClock(spec, real_now=lambda: self._real, real_sleep=lambda _seconds: None)

    def set(self, moment: datetime) -> None:
        """Let the rehearsal clock show `moment`."""
        self._real = self.clock.spec.real_at(moment)


class MemoryJournal:
    """A journal that keeps its lines, as they would stand in the file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, event: str, **facts: Any) -> None:
        self.lines.append(json.dumps({"event": event, **facts}, default=lambda value: value.isoformat()))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def buy(
    book: Book,
    count: int = 1,
    *,
    pool: PoolKey = POOL,
    lifecycle: Lifecycle = "spot",
    cap: str | None = None,
    token: str = "",
    tags: dict[str, str] | None = None,
    spec: LaunchSpec | None = None,
) -> list[str]:
    """Launch as many of `count` as are free; their ids."""

    def plan(now: datetime) -> Plan:
        given = min(count, book.free(pool, lifecycle, now))
        price = Decimal(cap) if cap else None
        order = Order(pool, lifecycle, given, spec or LaunchSpec(tags=tags or {}), price)
        return [order] if given else [], lambda made: {"ids": [one.id for group in made for one in group]}

    ids: list[str] = book.launch_once("fleet", "us-east-1", token, "digest", {}, {}, plan).answer["ids"]
    return ids


def instance(book: Book, instance_id: str) -> Instance:
    """The instance, which must be there."""
    found = book.get(instance_id)
    assert found is not None
    return found
