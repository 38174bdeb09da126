"""What did it cost? The rehearsal cloud's own bill, by AWS's published rules for Linux instances.

THE RULE, to be implemented from this text by anybody who checks the bill:

1. Times are the whole seconds that the API shows. `launch` is LaunchTime; `end` is the time in
   StateTransitionReason (the instance leaves pending/running); for a living instance `end` is now.
   seconds = end - launch. Pending time is billed here, as LaunchTime is the only start that the API shows.
2. Spot, interrupted by EC2 (StateReason Server.SpotInstance...) with seconds < 3600: nothing is charged.
   Ended by its owner, from inside or by the API: the seconds used are charged.
3. billed = max(seconds, 60): per second, with a minimum of 60 seconds. The minimum extends the last segment.
4. The billed time is cut into instance-hours [launch + k h, launch + (k + 1) h), k = 0, 1, ...
   Spot: each instance-hour costs the spot price in force at its beginning (the last price change at or before
   that moment). On demand: the list price.
5. amount = sum over instance-hours of price * seconds / 3600, in exact arithmetic, then rounded once for each
   instance to 0.000001, half to even. The total is the sum of the rounded amounts.

Sources: EC2 User Guide, "Billing for interrupted Spot Instances" (2., and seconds used); EC2 pricing, "Per Second
Billing" (3.); EC2 Spot FAQ, price of the instance-hour (4.). Disks and traffic are not on this invoice yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from typing import Any

HOUR_S = 3600
MINIMUM_S = 60
MICRO = Decimal("0.000001")


@dataclass(frozen=True)
class Usage:
    """One instance, as the invoice sees it.

    `price_at` gives the US dollars per instance-hour in force at a moment; constant for on-demand.
    `interrupted` is whether EC2 ended a spot instance.
    """

    instance_id: str
    instance_type: str
    zone: str
    lifecycle: str
    launched: datetime
    ended: datetime | None
    interrupted: bool
    price_at: Callable[[datetime], Decimal]


@dataclass(frozen=True)
class Segment:
    """A part of one instance-hour: `seconds` from `start` at `price` US dollars per hour."""

    start: datetime
    seconds: int
    price: Decimal


@dataclass(frozen=True)
class Line:
    """One instance on the invoice; `amount` is in US dollars, to the micro-dollar."""

    usage: Usage
    end: datetime
    seconds: int
    billed_seconds: int
    segments: tuple[Segment, ...]
    free: bool
    amount: Decimal


def bill(usage: Usage, now: datetime) -> Line:
    """The line of one instance, up to its end or to `now`; the rule is in this module's docstring.

    Raises:
        ValueError: a time with fractions of a second, or an end before the launch.
    """
    end = usage.ended or now
    for name, moment in (("launched", usage.launched), ("ended", end)):
        if moment.microsecond:
            raise ValueError(f"{name}: got {moment.isoformat()} of {usage.instance_id}, expected whole seconds")
    if end < usage.launched:
        raise ValueError(f"ended: got {end.isoformat()} of {usage.instance_id}, before its launch")
    seconds = int((end - usage.launched).total_seconds())
    if usage.lifecycle == "spot" and usage.interrupted and seconds < HOUR_S:
        return Line(usage, end, seconds, 0, (), True, Decimal(0).quantize(MICRO))
    billed = max(seconds, MINIMUM_S)
    segments = tuple(_segments(usage, billed))
    exact = sum((Fraction(part.price) * part.seconds / HOUR_S for part in segments), Fraction(0))
    return Line(usage, end, seconds, billed, segments, False, _micro(exact))


def _segments(usage: Usage, billed: int) -> list[Segment]:
    parts = []
    for offset in range(0, billed, HOUR_S):
        start = usage.launched + timedelta(seconds=offset)
        parts.append(Segment(start, min(HOUR_S, billed - offset), usage.price_at(start)))
    return parts


def _micro(exact: Fraction) -> Decimal:
    """To the micro-dollar, half to even; exact where a Decimal quotient would already have been rounded."""
    return (Decimal(round(exact * 1_000_000)) * MICRO).quantize(MICRO, rounding=ROUND_HALF_EVEN)


def as_json(lines: list[Line], now: datetime) -> dict[str, Any]:
    """The invoice as JSON: amounts and prices are strings, times ISO 8601."""
    total = sum((line.amount for line in lines), Decimal(0)).quantize(MICRO)
    return {
        "currency": "USD",
        "as_of": now.isoformat(),
        "lines": [_line_json(line) for line in lines],
        "total": str(total),
    }


def _line_json(line: Line) -> dict[str, Any]:
    usage = line.usage
    return {
        "instance_id": usage.instance_id,
        "instance_type": usage.instance_type,
        "zone": usage.zone,
        "lifecycle": usage.lifecycle,
        "launched": usage.launched.isoformat(),
        "ended": usage.ended.isoformat() if usage.ended else None,
        "interrupted_by_ec2": usage.interrupted,
        "seconds": line.seconds,
        "billed_seconds": line.billed_seconds,
        "free_first_hour": line.free,
        "segments": [
            {"start": part.start.isoformat(), "seconds": part.seconds, "usd_per_hour": str(part.price)}
            for part in line.segments
        ],
        "amount": str(line.amount),
    }
