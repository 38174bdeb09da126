"""Which market is meant by a path? A market file, or a folder of traces."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from gpucost.rehearsal.market.file import MarketError, load_market
from gpucost.rehearsal.market.market import Market, from_file
from gpucost.rehearsal.market.traces import from_traces

SPOT_CAPACITY = 4
"""Instances that a pool holds while its trace says that there are any: the traces do not say how many."""

ON_DEMAND_CAPACITY = 2
"""Instances that a pool holds on demand, of which traces say nothing."""


def open_market(
    path: Path,
    origin: datetime,
    *,
    offset: timedelta = timedelta(0),
    spot_capacity: int | None = None,
    on_demand_capacity: int | None = None,
) -> Market:
    """The market at `path`: a market file, or a folder of traces.

    Args:
        path: the file or the folder.
        origin: what the rehearsal's first clock showed at its start.
        offset: traces only: how far into them the rehearsal begins.
        spot_capacity, on_demand_capacity: traces only: instances of one pool; default SPOT_CAPACITY and
            ON_DEMAND_CAPACITY.

    Raises:
        MarketError: there is nothing, it is wrong, or a market file was given what only traces need.
    """
    if path.is_dir():
        return from_traces(
            path,
            origin,
            offset,
            SPOT_CAPACITY if spot_capacity is None else spot_capacity,
            ON_DEMAND_CAPACITY if on_demand_capacity is None else on_demand_capacity,
        )
    file = load_market(path)
    given = {"offset": offset or None, "spot_capacity": spot_capacity, "on_demand_capacity": on_demand_capacity}
    for name, value in given.items():
        if value is not None:
            raise MarketError(
                f"{name}: got {value} for {path}, expected none: only a folder of traces needs it, a market file says "
                "everything itself"
            )
    return from_file(file, origin)
