"""How much is the shipped market like real ones? Prints a Markdown table: recorded histories beside generated ones.

    PYTHONPATH=plugins python -m benchmarks.market_likeness --traces DIR

DIR holds recorded histories in the layout of docs/reference/rehearsal-market.md. Produces the table there. Both
sides are looked at in the same way: through the market's own series, at the recorded ticks, over as many days;
the generated side over `--windows` such stretches, one after another. Spells that a stretch cuts do not count.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.opening import open_market
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.market.trace_files import Trace
from gpucost.rehearsal.market.traces import read_folder

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "include/market/small.json"
ORIGIN = datetime(2026, 12, 1, tzinfo=UTC)
TICK = timedelta(seconds=195)
LIKE = {
    ("p3.2xlarge", "us-east-1"): ("p3.2xlarge", "us-east-1"),
    ("p3.2xlarge", "us-east-2"): ("g5.xlarge", "us-east-1"),
    ("p3.2xlarge", "us-west-2"): ("p3.2xlarge", "us-west-2"),
}
"""Recorded (type, region) -> the (type, region) of the shipped market that is made after it."""


@dataclass
class Seen:
    """What a look at the pools of one type and region gathers; hours and shares."""

    lifetimes: list[float] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)
    available: list[float] = field(default_factory=list)
    alike: list[float] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    pool_days: float = 0.0

    def add(self, market: Market, keys: Sequence[PoolKey], first: datetime, length: timedelta) -> None:
        """Look at `keys` from `first` on for `length`."""
        zones = []
        for key in keys:
            ticks = _ticks(market, key, first, length)
            zones.append(ticks)
            spells = [(there, len(list(run)) * TICK / timedelta(hours=1)) for there, run in itertools.groupby(ticks)]
            self.lifetimes += [hours for there, hours in spells[1:-1] if there]
            self.outages += [hours for there, hours in spells[1:-1] if not there]
            self.available.append(sum(ticks) / len(ticks))
            points = market.prices(key).between(first, first + length)
            self.ratios.append([float(point.price / market.on_demand(key)) for point in points])
            self.steps += [float(after.price / before.price) - 1 for before, after in itertools.pairwise(points)]
            self.pool_days += length / timedelta(days=1)
        self.alike += [
            statistics.correlation(one, other)
            for one, other in itertools.combinations(zones, 2)
            if len(set(one)) == len(set(other)) == 2
        ]


def _ticks(market: Market, key: PoolKey, first: datetime, length: timedelta) -> list[bool]:
    points = market.capacities(key, "spot", first, first + length)
    ends = [point.at for point in points[1:]] + [first + length]
    ticks: list[bool] = []
    for point, end in zip(points, ends, strict=True):
        ticks += [point.count > 0] * (-((first - end) // TICK) - len(ticks))
    return ticks


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _or_none(text: Callable[[Seen], str], needs: Callable[[Seen], Sequence[object]]) -> Callable[[Seen], str]:
    return lambda seen: text(seen) if needs(seen) else "–"


def _spells(of: Callable[[Seen], list[float]]) -> dict[str, Callable[[Seen], str]]:
    return {
        "median, h": _or_none(lambda seen: f"{statistics.median(of(seen)):.2f}", of),
        "mean, h": _or_none(lambda seen: f"{statistics.fmean(of(seen)):.1f}", of),
        "90 % are shorter than, h": _or_none(lambda seen: f"{_quantile(of(seen), 0.9):.1f}", of),
        "99 % are shorter than, h": _or_none(lambda seen: f"{_quantile(of(seen), 0.99):.0f}", of),
        "share under 1 h": _or_none(lambda seen: f"{sum(one < 1 for one in of(seen)) / len(of(seen)):.2f}", of),
    }


ROWS: dict[str, Callable[[Seen], str]] = {
    **{f"lifetimes: {name}": row for name, row in _spells(lambda seen: seen.lifetimes).items()},
    **{f"outages: {name}": row for name, row in _spells(lambda seen: seen.outages).items()},
    "lifetimes a pool and day": lambda seen: f"{len(seen.lifetimes) / seen.pool_days:.1f}",
    "share of time available: mean": lambda seen: f"{statistics.fmean(seen.available):.2f}",
    "… least and most, of pools and stretches": lambda seen: f"{min(seen.available):.2f}–{max(seen.available):.2f}",
    "correlation of two zones' availability": _or_none(
        lambda seen: f"{statistics.fmean(seen.alike):.2f}", lambda seen: seen.alike
    ),
    "spot / on-demand: dearest over cheapest zone": lambda seen: (
        f"{max(statistics.fmean(one) for one in seen.ratios) / min(statistics.fmean(one) for one in seen.ratios):.2f}"
    ),
    "… highest over lowest of one zone in a stretch": lambda seen: (
        f"{statistics.median(max(one) / min(one) for one in seen.ratios):.2f}"
    ),
    "price changes a pool and day": lambda seen: f"{len(seen.steps) / seen.pool_days:.1f}",
    "one change, standard deviation": lambda seen: f"{statistics.pstdev(seen.steps):.4f}" if seen.steps else "–",
}


def recorded(folder: Path) -> dict[tuple[str, str], tuple[Seen, timedelta]]:
    """What the histories show, by type and region, and how long they are."""
    groups: dict[tuple[str, str], list[Trace]] = {}
    for trace in read_folder(folder):
        groups.setdefault((trace.key.instance_type, trace.key.region), []).append(trace)
    market = open_market(folder, ORIGIN)
    found = {}
    for group, traces in groups.items():
        seen, length = Seen(), timedelta(seconds=min(trace.length_s for trace in traces)) - TICK
        seen.add(market, [trace.key for trace in traces], ORIGIN, length)
        found[group] = (seen, length)
    return found


def generated(group: tuple[str, str], length: timedelta, windows: int) -> Seen:
    """What the shipped market shows of a type and region, over stretches of `length`."""
    market = open_market(SHIPPED, ORIGIN)
    keys = [key for key in market.keys(group[1]) if key.instance_type == group[0]]
    seen = Seen()
    for index in range(windows):
        seen.add(market, keys, ORIGIN + index * length, length)
    return seen


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=Path, required=True, help="folder of recorded histories")
    parser.add_argument("--windows", type=int, default=12, help="how many stretches of the generated market")
    options = parser.parse_args()
    columns: dict[str, Seen] = {}
    for group, (seen, length) in recorded(options.traces).items():
        columns[f"recorded {' '.join(group)}"] = seen
        if group in LIKE:
            columns[f"generated {' '.join(LIKE[group])}"] = generated(LIKE[group], length, options.windows)
    sys.stdout.write(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n")
    for name, row in ROWS.items():
        sys.stdout.write(f"| {name} | {' | '.join(row(seen) for seen in columns.values())} |\n")


if __name__ == "__main__":
    main()
