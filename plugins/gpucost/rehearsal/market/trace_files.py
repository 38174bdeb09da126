"""What does one trace file say? When a pool had machines and what they cost, in seconds from the trace's beginning."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpucost.clock import floor_second, require_utc
from gpucost.rehearsal.market.file import MarketError, PositivePrice
from gpucost.rehearsal.market.places import PoolKey, region_of
from gpucost.rehearsal.wording import in_one_line

HOUR = timedelta(hours=1)

Value = TypeVar("Value", bool, Decimal)


@dataclass(frozen=True)
class Trace:
    """One pool's history.

    Args:
        path: the file.
        key: zone and instance type.
        gpu: for people: which GPU; empty when the file does not say.
        on_demand: list price, US dollars per instance-hour, when the file has it.
        length_s: of the whole, seconds; then it is over.
        available: (second, whether machines are to be had from then on); the first at 0.
        prices: (second, spot price from then on, US dollars per instance-hour); the first at 0.
    """

    path: Path
    key: PoolKey
    gpu: str
    on_demand: Decimal | None
    length_s: int
    available: Sequence[tuple[int, bool]]
    prices: Sequence[tuple[int, Decimal]]


def _zone(name: str) -> str:
    region_of(name)
    return name


class _Metadata(BaseModel):
    model_config = ConfigDict(frozen=True)

    gap_seconds: int = Field(gt=0, description="Between two ticks.")
    zone: Annotated[str, AfterValidator(_zone)]
    instance_type: str = Field(min_length=1)
    gpu: str = ""
    count: int | None = Field(default=None, ge=1, description="GPUs of one instance.")
    on_demand_usd_per_hour: PositivePrice | None = None


class _TickFile(BaseModel):
    """A tick every `gap_seconds`: whether machines were to be had, and the spot price; null where it is not known."""

    model_config = ConfigDict(frozen=True)

    metadata: _Metadata
    data: list[Literal[0, 1]] = Field(min_length=1)
    prices: list[PositivePrice | None]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.prices) != len(self.data):
            raise ValueError(f"prices: got {len(self.prices)} of them, expected {len(self.data)}, one for each of data")
        if not any(self.prices):
            raise ValueError("prices: got only nulls, expected one price at least")
        return self


def read_ticks(path: Path) -> Trace:
    """A JSON file: `metadata`, `data` (1 = to be had), `prices`. What a tick says holds until the next one.

    A tick without a price (null or NaN) has the last known one; before the first known one, that one.

    Raises:
        MarketError: the file is not of that kind; the message names it and every field at fault.
    """
    try:
        file = _TickFile.model_validate(
            json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal, parse_constant=lambda _: None)
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MarketError(f"market: {path} is not JSON: {error}; a folder of traces holds traces only") from error
    except ValidationError as error:
        raise MarketError(
            f"market: {path} is not a trace: {in_one_line(error)}. A market file is given by its own path, not by its "
            "folder"
        ) from error
    meta = file.metadata
    price = next(known for known in file.prices if known is not None)
    prices = []
    for at in file.prices:
        price = price if at is None else at
        prices.append(price)
    return Trace(
        path=path,
        key=PoolKey(meta.zone, meta.instance_type),
        gpu=f"{meta.count}x {meta.gpu}" if meta.count and meta.gpu else meta.gpu,
        on_demand=meta.on_demand_usd_per_hour,
        length_s=len(file.data) * meta.gap_seconds,
        available=_changes([value == 1 for value in file.data], meta.gap_seconds),
        prices=_changes(prices, meta.gap_seconds),
    )


def _changes(ticks: Sequence[Value], gap_s: int) -> list[tuple[int, Value]]:
    return [(index * gap_s, value) for index, value in enumerate(ticks) if index == 0 or value != ticks[index - 1]]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True)

    timestamp: AwareDatetime
    spot_usd_per_hour: PositivePrice


@dataclass(frozen=True)
class History:
    """A CSV file's price changes; it says nothing of availability."""

    path: Path
    key: PoolKey
    rows: Sequence[tuple[datetime, Decimal]]


def read_history(path: Path) -> History:
    """A CSV file `TYPE_ZONE.csv` of `timestamp,spot_usd_per_hour`: each row is a change. Rows without a price
    (an empty cell: not known) change nothing.

    Raises:
        MarketError: the file is not of that kind; the message names it, the line and the field at fault.
    """
    key = _key_of(path)
    rows: list[tuple[datetime, Decimal]] = []
    with path.open(encoding="utf-8", newline="") as text:
        for line, cells in enumerate(csv.DictReader(text), start=2):
            if cells.get("spot_usd_per_hour") == "":
                continue
            row = _row(path, line, cells)
            moment = floor_second(require_utc(row.timestamp, "timestamp"))
            if rows and moment <= rows[-1][0]:
                raise MarketError(
                    f"market: {path} line {line}: timestamp: got {moment.isoformat()}, expected later than the line "
                    "before: sort the rows by time, one a second at most"
                )
            rows.append((moment, row.spot_usd_per_hour))
    if not rows:
        raise MarketError(f"market: {path}: got no price, expected rows of timestamp,spot_usd_per_hour")
    return History(path, key, rows)


def _row(path: Path, line: int, cells: dict[str | Any, str | Any]) -> _Row:
    try:
        return _Row.model_validate(cells)
    except ValidationError as error:
        raise MarketError(
            f"market: {path} line {line}: {in_one_line(error)}; expected timestamp,spot_usd_per_hour such as "
            "2015-03-11 16:53:20+00:00,0.0652"
        ) from error


def _key_of(path: Path) -> PoolKey:
    instance_type, _, zone = path.stem.rpartition("_")
    try:
        region_of(zone)
    except ValueError as error:
        raise MarketError(
            f"market: {path}: its name is not TYPE_ZONE.csv, such as g2.2xlarge_us-east-1a.csv"
        ) from error
    if not instance_type:
        raise MarketError(f"market: {path}: its name has no type, expected TYPE_ZONE.csv")
    return PoolKey(zone, instance_type)


def aligned(histories: Iterable[History]) -> list[Trace]:
    """Histories of one folder as traces: they begin with the earliest row of all, and end with the latest, rounded
    up to a whole hour. Before a pool's own first row that row's price holds, as nothing else is known.
    """
    histories = list(histories)
    if not histories:
        return []
    begin = min(history.rows[0][0] for history in histories)
    span = max(history.rows[-1][0] for history in histories) - begin
    length_s = int((span // HOUR + 1) * HOUR.total_seconds())
    return [
        Trace(
            path=history.path,
            key=history.key,
            gpu="",
            on_demand=None,
            length_s=length_s,
            available=[(0, True)],
            prices=_from_zero([(int((at - begin).total_seconds()), price) for at, price in history.rows]),
        )
        for history in histories
    ]


def _from_zero(prices: list[tuple[int, Decimal]]) -> list[tuple[int, Decimal]]:
    return prices if prices[0][0] == 0 else [(0, prices[0][1]), *prices]
