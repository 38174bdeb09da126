"""An open market: prices and capacities of every pool on the rehearsal clock, wherever they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

from gpucost.clock import require_utc
from gpucost.rehearsal.market.availability import Fading, GeneratedCapacity, Process
from gpucost.rehearsal.market.file import DiskPrice, MarketFile, PoolOffer, Quota, TypeOffer, Zone
from gpucost.rehearsal.market.places import PoolKey, region_of
from gpucost.rehearsal.market.prices import GeneratedPrices
from gpucost.rehearsal.market.series import CapacityPoint, CapacitySeries, PriceSeries, Steady


@dataclass(frozen=True)
class PoolMarket:
    """One pool's market: what it costs and how much of it there is.

    Args:
        key: zone and instance type.
        on_demand: list price, US dollars per instance-hour.
        prices: the spot price over time.
        spot: how many spot instances the pool holds over time.
        on_demand_capacity: how many on-demand instances the pool holds over time.
    """

    key: PoolKey
    on_demand: Decimal
    prices: PriceSeries
    spot: CapacitySeries
    on_demand_capacity: CapacitySeries


@dataclass(frozen=True)
class Market:
    """Everything that is sold.

    Args:
        label: what these figures are, for people.
        zones: every zone, of one or more regions.
        types: every instance type.
        pools: in the order in which they are shown.
        quotas: how many vCPUs may run at once; what is not named has no limit.
        disk: US dollars per GiB-month of a gp3 volume.
        seed: of whatever is drawn by chance and belongs to the market.
        fingerprint: the same for markets that tell the same prices and capacities at every moment.
    """

    label: str
    zones: Sequence[Zone]
    types: Sequence[TypeOffer]
    pools: Mapping[PoolKey, PoolMarket]
    disk: DiskPrice
    quotas: Sequence[Quota] = ()
    seed: int = 0
    fingerprint: str = ""
    _zone_ids: dict[str, str] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._zone_ids.update({zone.name: zone.zone_id for zone in self.zones})

    @property
    def regions(self) -> list[str]:
        """Every region, in the order of its first zone."""
        return list(dict.fromkeys(region_of(zone.name) for zone in self.zones))

    def zone_ids(self, region: str | None = None) -> dict[str, str]:
        """Zone name -> zone id, of one region or of all."""
        return {name: ident for name, ident in self._zone_ids.items() if region in {None, region_of(name)}}

    def zone_id(self, zone: str) -> str:
        """The id of a zone that is sold in."""
        return self._zone_ids[zone]

    def keys(self, region: str | None = None) -> list[PoolKey]:
        """Every pool that is sold, of one region or of all."""
        return [key for key in self.pools if region in {None, key.region}]

    def sells(self, key: PoolKey) -> bool:
        """Whether the pool is in the market."""
        return key in self.pools

    def prices(self, key: PoolKey) -> PriceSeries:
        """The spot prices of a pool."""
        return self.pools[key].prices

    def on_demand(self, key: PoolKey) -> Decimal:
        """The on-demand list price, US dollars per instance-hour."""
        return self.pools[key].on_demand

    def capacity(self, key: PoolKey, lifecycle: str, moment: datetime) -> int:
        """How many instances of `lifecycle` ('spot' or 'on-demand') the pool holds at `moment`."""
        return self._series(key, lifecycle).at(moment)

    def capacities(self, key: PoolKey, lifecycle: str, first: datetime, last: datetime) -> list[CapacityPoint]:
        """The capacity at `first` and its changes up to `last`."""
        return self._series(key, lifecycle).between(first, last)

    def _series(self, key: PoolKey, lifecycle: str) -> CapacitySeries:
        pool = self.pools[key]
        return pool.spot if lifecycle == "spot" else pool.on_demand_capacity


def from_file(file: MarketFile, origin: datetime) -> Market:
    """The market of a file, open from `history_hours` before `origin` on.

    Args:
        file: what is sold.
        origin: what the rehearsal's first clock showed at its start; price history reaches back before it.
    """
    start = require_utc(origin, "origin") - timedelta(hours=file.history_hours)
    types = {offer.name: offer for offer in file.instance_types}
    shortages = {
        (short.region, short.instance_type): Process(
            short, f"{file.seed}/{short.region}/{short.instance_type}/shortage"
        )
        for short in file.shortages
    }
    pools = {}
    for pool in file.pools:
        key, on_demand = pool.key, types[pool.instance_type].on_demand[pool.key.region].usd_per_hour
        seed = f"{file.seed}/{key.zone}/{key.instance_type}"
        prices = GeneratedPrices(
            base=pool.spot.usd_per_hour, ceiling=on_demand, moves=pool.moves, start=start, seed=seed
        )
        shortage = shortages.get((key.region, key.instance_type))
        spot = _spot(pool, shortage, start, seed)
        pools[key] = PoolMarket(key, on_demand, prices, spot, _on_demand(pool, start, seed))
    return Market(
        label=file.label,
        zones=file.zones,
        types=file.instance_types,
        pools=pools,
        disk=file.disk,
        quotas=file.quotas,
        seed=file.seed,
        fingerprint=hashlib.sha256(file.model_dump_json(exclude={"label"}).encode()).hexdigest(),
    )


def _spot(pool: PoolOffer, shortage: Process | None, start: datetime, seed: str) -> CapacitySeries:
    processes = [shortage] if shortage is not None else []
    fading = 0.0  # a pool that only shares a shortage loses everything at once
    if pool.availability is not None:
        processes.append(Process(pool.availability, f"{seed}/spot"))
        fading = pool.availability.fading
    if not processes:
        return Steady(pool.capacity.spot)
    return GeneratedCapacity(Fading(pool.capacity.spot, fading), processes, start)


def _on_demand(pool: PoolOffer, start: datetime, seed: str) -> CapacitySeries:
    if pool.on_demand_refusals is None:
        return Steady(pool.capacity.on_demand)
    process = Process(pool.on_demand_refusals, f"{seed}/on-demand")
    return GeneratedCapacity(Fading(pool.capacity.on_demand, 0.0), [process], start)
