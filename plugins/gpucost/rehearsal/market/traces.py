"""A market that replays recorded history: a folder of trace files, from any moment of it on, again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

from gpucost.clock import require_utc
from gpucost.rehearsal.market.catalogue import LIST_PRICES, Catalogue, catalogue
from gpucost.rehearsal.market.file import MarketError, SourcedPrice, TypeOffer, Zone
from gpucost.rehearsal.market.market import Market, PoolMarket
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.market.series import CapacityPoint, PricePoint, SeasonalCapacity, SeasonalPrices, Steady
from gpucost.rehearsal.market.trace_files import Trace, aligned, read_history, read_ticks


class ReplayedPrices(SeasonalPrices):
    """A trace's prices from `start` on; after its end it begins again: every season is the whole trace."""

    def __init__(self, trace: Trace, start: datetime) -> None:
        super().__init__(start, timedelta(seconds=trace.length_s))
        self._trace = trace

    def _made(self, index: int) -> list[PricePoint]:
        begin = self.start + timedelta(seconds=index * self._trace.length_s)
        return [PricePoint(begin + timedelta(seconds=at), price) for at, price in self._trace.prices]


class ReplayedCapacity(SeasonalCapacity):
    """A trace's availability from `start` on, `count` machines while there are any; repeats as the prices do."""

    def __init__(self, trace: Trace, start: datetime, count: int) -> None:
        super().__init__(start, timedelta(seconds=trace.length_s))
        self._trace = trace
        self._count = count

    def _made(self, index: int) -> list[CapacityPoint]:
        begin = self.start + timedelta(seconds=index * self._trace.length_s)
        return [
            CapacityPoint(begin + timedelta(seconds=at), self._count * there) for at, there in self._trace.available
        ]


def from_traces(
    folder: Path, origin: datetime, offset: timedelta, spot_capacity: int, on_demand_capacity: int
) -> Market:
    """The market of a folder of traces, and of the folders in it.

    At `origin` every trace is `offset` after its beginning; the part before it is the price history. Files of one
    folder begin together. A trace that is over begins again, each after its own length (files of equal length stay
    in step); an `offset` beyond the end lies in a later round. Prices are the files' own digits.

    Args:
        folder: holds `*.json` (ticks) and `TYPE_ZONE.csv` (price changes); optionally `list_prices.json`.
        origin: what the rehearsal's first clock showed at its start.
        offset: how far into the traces that is; zero or more.
        spot_capacity: instances that a pool holds while its trace says 1.
        on_demand_capacity: instances that a pool holds on demand, always.

    Raises:
        MarketError: a file is wrong, two tell of one pool, or a list price is missing; the message says what to do.
    """
    if offset < timedelta(0):
        raise MarketError(f"offset: got {offset}, expected zero or more: how far into the traces the rehearsal begins")
    if spot_capacity < 1 or on_demand_capacity < 0:
        raise MarketError(
            f"spot_capacity, on_demand_capacity: got {spot_capacity}, {on_demand_capacity}, expected at least 1, 0"
        )
    traces = read_folder(folder)
    lists = catalogue(_files(folder, LIST_PRICES))
    assert lists.disk is not None  # noqa: S101 (the packaged list has one)
    start = require_utc(origin, "origin") - offset
    zones = sorted({trace.key.zone for trace in traces})
    return Market(
        label=f"Replay of {len(traces)} traces in {folder.name}, {offset / timedelta(hours=1):g} h after they begin",
        zones=[Zone(name=name, zone_id=lists.zone_id(name)) for name in zones],
        types=_types(traces, lists),
        pools={
            trace.key: PoolMarket(
                trace.key,
                _list_price(trace, lists).usd_per_hour,
                ReplayedPrices(trace, start),
                ReplayedCapacity(trace, start, spot_capacity),
                Steady(on_demand_capacity),
            )
            for trace in traces
        },
        disk=lists.disk,
        fingerprint=_fingerprint(traces, [offset, spot_capacity, on_demand_capacity, lists]),
    )


def _fingerprint(traces: Sequence[Trace], settings: list[object]) -> str:
    digest = hashlib.sha256(repr(settings).encode())
    for trace in traces:
        digest.update(repr(trace.key).encode())
        digest.update(trace.path.read_bytes())
    return digest.hexdigest()


def read_folder(folder: Path) -> list[Trace]:
    """Every trace of a folder and the folders in it, in the order of their paths.

    Raises:
        MarketError: there is none, one is wrong, or two tell of one pool.
    """
    ticks = [read_ticks(path) for path in _files(folder, "*.json") if path.name != LIST_PRICES]
    histories = [read_history(path) for path in _files(folder, "*.csv")]
    places = dict.fromkeys(history.path.parent for history in histories)
    traces = [*ticks, *(one for place in places for one in aligned(h for h in histories if h.path.parent == place))]
    if not traces:
        raise MarketError(f"market: {folder} holds no trace, expected *.json or TYPE_ZONE.csv files in it or below")
    seen: dict[PoolKey, Path] = {}
    for trace in traces:
        if trace.key in seen:
            raise MarketError(
                f"market: {trace.path} and {seen[trace.key]} both tell of {trace.key}, expected one: take one away, or "
                "give a folder that holds only one of them"
            )
        seen[trace.key] = trace.path
    return sorted(traces, key=lambda trace: trace.path)


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.rglob(pattern))
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _types(traces: Sequence[Trace], lists: Catalogue) -> list[TypeOffer]:
    prices: dict[str, dict[str, SourcedPrice]] = {}
    gpus: dict[str, str] = {}
    for trace in traces:
        listed, key = _list_price(trace, lists), trace.key
        before = prices.setdefault(key.instance_type, {}).setdefault(key.region, listed)
        if before.usd_per_hour != listed.usd_per_hour:
            raise MarketError(
                f"market: {trace.path}: {key.instance_type} costs {listed.usd_per_hour} on demand, but "
                f"{before.usd_per_hour} by {before.source}; expected one list price in {key.region}"
            )
        gpus.setdefault(key.instance_type, trace.gpu or "unknown")
    offers = []
    for name, on_demand in prices.items():
        known = lists.offer(name)
        offers.append(
            TypeOffer(
                name=name,
                gpu=known.gpu if known else gpus[name],
                on_demand=on_demand,
                describe=known.describe if known else None,
            )
        )
    return offers


def _list_price(trace: Trace, lists: Catalogue) -> SourcedPrice:
    if trace.on_demand is not None:
        return _from_trace(trace, trace.on_demand)
    known = lists.offer(trace.key.instance_type)
    listed = known.on_demand.get(trace.key.region) if known else None
    if listed is None:
        raise MarketError(
            f"market: {trace.path} has no on-demand price and none is known of {trace.key.instance_type} in "
            f"{trace.key.region}; write it into {LIST_PRICES} in that folder (docs/reference/rehearsal-market.md)"
        )
    return listed


def _from_trace(trace: Trace, price: Decimal) -> SourcedPrice:
    source = f"{trace.path.parent.name}/{trace.path.name}: metadata.on_demand_usd_per_hour"
    return SourcedPrice(usd_per_hour=price, source=source, as_of="as recorded in the trace")
