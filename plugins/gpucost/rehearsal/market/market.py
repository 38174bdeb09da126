"""What is sold here, at which price, when? The market file and the prices that move.

A market file lists zones, instance types with their on-demand list price, and pools (one zone x one type) with
a spot price and a capacity. Every price carries its source and date. Spot prices then move on the rehearsal
clock by a seeded generator: the same file and the same origin always give the same prices.
"""

from __future__ import annotations

import bisect
import math
import random
import threading
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpucost.clock import floor_second, require_utc
from gpucost.money import ExactDecimal

PRICE_STEP = Decimal("0.0001")
"""Spot prices have four significant decimals, as DescribeSpotPriceHistory shows them."""

REVERSION_PER_CHANGE = 0.15
"""How far each change pulls the price back towards its base: it wanders, but does not run away."""

MIN_CHANGE_S = 300.0
"""Two changes of one pool lie at least this far apart, in rehearsal seconds."""

SEASON = timedelta(days=30)
"""Prices are made in pieces of this length, so that no price costs a walk through all the time before it."""

SEASONS_KEPT = 8
"""Of one pool, in memory; more than the 90 days that a price history spans. The rest is made again when needed."""

PositivePrice = Annotated[ExactDecimal, Field(gt=0)]


class MarketError(ValueError):
    """A market file that cannot be used; the message names the field, its value and what was expected."""


class PoolKey(NamedTuple):
    """One spot pool: a zone and an instance type."""

    zone: str
    instance_type: str

    def __str__(self) -> str:
        return f"{self.instance_type} in {self.zone}"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourcedPrice(_Model):
    """A price per instance-hour with where it comes from."""

    usd_per_hour: PositivePrice = Field(description="US dollars per instance-hour, as a string such as '0.2043'.")
    source: str = Field(min_length=1, description="Where the figure was read.")
    as_of: str = Field(min_length=1, description="The date or revision of that source.")


class Zone(_Model):
    """An availability zone: its name in this account, and the id that is the same for everybody."""

    name: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]$", description="For example us-east-1a.")
    zone_id: str = Field(pattern=r"^[a-z]{3}\d-az\d+$", description="For example use1-az6.")


class TypeOffer(_Model):
    """An instance type and its on-demand list price in the region."""

    name: str = Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$", description="For example g4dn.xlarge.")
    gpu: str = Field(min_length=1, description="For people: which GPU it has.")
    on_demand: SourcedPrice
    describe: dict[str, Any] | None = Field(
        default=None,
        description="DescribeInstanceTypes' answer for a type that moto does not know, in the API's own field names.",
    )


class Moves(_Model):
    """How the spot price of a pool moves."""

    mean_hours_between_changes: float = Field(default=2.0, gt=0, le=240)
    relative_step: float = Field(default=0.03, ge=0, le=0.5, description="Standard deviation of one change, of 1.")


class Capacity(_Model):
    """How many instances the pool holds at once."""

    spot: int = Field(ge=0)
    on_demand: int = Field(ge=0)


class PoolOffer(_Model):
    """One pool: a zone, a type, a spot price to start from, its moves, its capacity."""

    zone: str
    instance_type: str
    spot: SourcedPrice
    moves: Moves = Moves()
    capacity: Capacity

    @property
    def key(self) -> PoolKey:
        """The pool's zone and type."""
        return PoolKey(self.zone, self.instance_type)


class MarketFile(_Model):
    """The whole market file. See `include/market/three_zones.json`."""

    label: str = Field(min_length=1, description="What these figures are, for people.")
    region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")
    seed: int = Field(ge=0, description="Prices that move are a function of this and of the clock's origin.")
    history_hours: int = Field(default=48, ge=24, le=2160, description="Price history before the start.")
    zones: list[Zone] = Field(min_length=1)
    instance_types: list[TypeOffer] = Field(min_length=1)
    pools: list[PoolOffer] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        zones = {zone.name for zone in self.zones}
        prices = {offer.name: offer.on_demand.usd_per_hour for offer in self.instance_types}
        seen: set[PoolKey] = set()
        for index, pool in enumerate(self.pools):
            where = f"pools.{index}"
            if pool.zone not in zones:
                raise ValueError(f"{where}.zone: got {pool.zone!r}, expected one of zones: {sorted(zones)}")
            if pool.instance_type not in prices:
                raise ValueError(
                    f"{where}.instance_type: got {pool.instance_type!r}, expected one of instance_types: "
                    f"{sorted(prices)}"
                )
            if pool.spot.usd_per_hour > prices[pool.instance_type]:
                raise ValueError(
                    f"{where}.spot.usd_per_hour: got {pool.spot.usd_per_hour}, expected at most the on-demand price "
                    f"{prices[pool.instance_type]} of {pool.instance_type}"
                )
            if pool.key in seen:
                raise ValueError(f"{where}: {pool.key} is listed twice, expected one entry for each zone and type")
            seen.add(pool.key)
        return self


def load_market(path: Path) -> MarketFile:
    """Read and check a market file.

    Raises:
        MarketError: the file is away or wrong; the message names the file and every field at fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MarketError(f"market: cannot read {path}: {error.strerror}; give a market file with --market") from error
    try:
        return MarketFile.model_validate_json(text)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'file'}: {fault['msg']}" for fault in error.errors()
        )
        raise MarketError(f"market: {path} is not a market file: {faults}") from error


@dataclass(frozen=True)
class PricePoint:
    """From `at` on, the pool's spot price is `price` US dollars per instance-hour."""

    at: datetime
    price: Decimal


class PriceSeries:
    """The spot price of one pool over time: change points, made where somebody looks.

    The logarithm of price / base makes a random step at each change and is pulled back towards zero, so that
    prices wander around the base; times between changes are exponential. Time is cut into seasons of `SEASON`
    from `start` on, each with its own generator: what is answered never depends on who asked before, and a look
    at any moment costs one season, however long ago the start is.

    Args:
        base: the price to wander around, US dollars per instance-hour.
        ceiling: never above this: the on-demand list price.
        moves: how often and how far it moves.
        start: the first change point; earlier times have no price.
        seed: makes the series repeatable.
    """

    def __init__(self, *, base: Decimal, ceiling: Decimal, moves: Moves, start: datetime, seed: str) -> None:
        self._base = base
        self._ceiling = ceiling
        self._moves = moves
        self._seed = seed
        self._start = floor_second(start)
        self._lock = threading.Lock()
        self._seasons: dict[int, list[PricePoint]] = {}

    @property
    def start(self) -> datetime:
        """The first moment with a price."""
        return self._start

    def at(self, moment: datetime) -> Decimal:
        """The price in force at `moment`.

        Raises:
            ValueError: `moment` lies before the history.
        """
        return self.in_force(moment).price

    def in_force(self, moment: datetime) -> PricePoint:
        """The change point whose price is in force at `moment`; raises ValueError before the history."""
        moment = require_utc(moment, "moment")
        if moment < self.start:
            raise ValueError(f"moment: got {moment.isoformat()}, expected {self.start.isoformat()} or later")
        points = self._season((moment - self.start) // SEASON)
        return points[bisect.bisect_right(points, moment, key=lambda point: point.at) - 1]

    def between(self, first: datetime, last: datetime) -> list[PricePoint]:
        """The price in force at `first` and every change after it up to and with `last`, oldest first."""
        if last < self.start or last < first:
            return []
        found = [self.in_force(max(first, self.start))]
        for index in range((found[0].at - self.start) // SEASON, (last - self.start) // SEASON + 1):
            for point in self._season(index):
                if found[-1].at < point.at <= last and point.price != found[-1].price:
                    found.append(point)
        return found

    def _season(self, index: int) -> list[PricePoint]:
        with self._lock:
            if index not in self._seasons:
                if len(self._seasons) >= SEASONS_KEPT:
                    del self._seasons[next(iter(self._seasons))]
                self._seasons[index] = self._made(index)
            return self._seasons[index]

    def _made(self, index: int) -> list[PricePoint]:
        moment = self.start + index * SEASON
        # no change so late that the first of the next season would come too soon after it
        end = moment + SEASON - timedelta(seconds=MIN_CHANGE_S)
        chance = random.Random(f"{self._seed}/{index}" if index else self._seed)  # noqa: S311 (prices, not secrets)
        mean_s = self._moves.mean_hours_between_changes * 3600
        keep = 1.0 - REVERSION_PER_CHANGE
        # later seasons begin as far from the base as prices are in the long run: the deviation of this process
        level = chance.gauss(0.0, self._moves.relative_step / math.sqrt(1.0 - keep**2)) if index else 0.0
        points = [PricePoint(moment, self._price(level))]
        while True:
            gap = max(MIN_CHANGE_S, chance.expovariate(1.0) * mean_s)
            moment = floor_second(moment + timedelta(seconds=gap))
            if moment > end:
                return points
            level = keep * level + chance.gauss(0.0, self._moves.relative_step)
            price = self._price(level)
            if price != points[-1].price:
                points.append(PricePoint(moment, price))

    def _price(self, level: float) -> Decimal:
        price = (self._base * Decimal(math.exp(level))).quantize(PRICE_STEP)
        return min(max(price, PRICE_STEP), self._ceiling)


class Market:
    """A market that is open: prices of every pool on the rehearsal clock.

    Args:
        file: what is sold.
        origin: what the rehearsal's first clock showed at its start; price history reaches back before it.
    """

    def __init__(self, file: MarketFile, origin: datetime) -> None:
        self.file = file
        self.region = file.region
        self._zone_ids = {zone.name: zone.zone_id for zone in file.zones}
        self._types = {offer.name: offer for offer in file.instance_types}
        self._pools = {pool.key: pool for pool in file.pools}
        start = require_utc(origin, "origin") - timedelta(hours=file.history_hours)
        self._series = {
            key: PriceSeries(
                base=pool.spot.usd_per_hour,
                ceiling=self._types[key.instance_type].on_demand.usd_per_hour,
                moves=pool.moves,
                start=start,
                seed=f"{file.seed}/{key.zone}/{key.instance_type}",
            )
            for key, pool in self._pools.items()
        }

    @property
    def pools(self) -> list[PoolKey]:
        """Every pool that is sold, in the file's order."""
        return list(self._pools)

    @property
    def zones(self) -> dict[str, str]:
        """Zone name -> zone id."""
        return dict(self._zone_ids)

    def sells(self, key: PoolKey) -> bool:
        """Whether the pool is in the market."""
        return key in self._pools

    def prices(self, key: PoolKey) -> PriceSeries:
        """The spot prices of a pool."""
        return self._series[key]

    def on_demand(self, instance_type: str) -> Decimal:
        """The on-demand list price, US dollars per instance-hour."""
        return self._types[instance_type].on_demand.usd_per_hour

    def capacity(self, key: PoolKey, lifecycle: str) -> int:
        """How many instances of `lifecycle` ('spot' or 'on-demand') the pool holds at once."""
        capacity = self._pools[key].capacity
        return capacity.spot if lifecycle == "spot" else capacity.on_demand
