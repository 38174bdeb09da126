"""What did the instances cost? The rehearsal cloud's own bill, by AWS's published rules for Linux instances.

THE RULE, to be implemented from this text by anybody who checks the bill:

1. An instance has one or more running periods: from its launch, or from a later start, to the next moment at which
   it leaves `running`. Times are the whole seconds that the API shows. `start` is LaunchTime (which a later start
   sets anew); `end` is the time in StateTransitionReason (the instance leaves pending/running); for a living
   instance `end` is now. seconds = end - start. AWS does not bill `pending`; but the API shows no other start
   than LaunchTime, and here the machine's process lives from LaunchTime on, so `pending` is billed.
2. Spot, and EC2 interrupted the period (StateReason Server....: it terminates, stops or hibernates, for want of
   capacity, by price, or as the host failed) with seconds < 3600, before a full hour of running: not charged.
   Ended by its owner, from inside or by the API: the seconds used are charged. A later start begins a new first
   hour: AWS is silent on this.
3. billed = max(seconds, 60): per second, with a minimum of 60 seconds for each period. The minimum extends the
   period's last segment.
4. The billed time is cut into instance-hours [start + k h, start + (k + 1) h), k = 0, 1, ... of each period.
   Spot: each instance-hour costs the spot price in force at its beginning (the last price change at or before
   that moment). On demand: the list price.
5. amount = sum over all instance-hours of price * seconds / 3600, in exact arithmetic, then rounded once for each
   instance to 0.000001, half to even. The total is the sum of the rounded amounts.

Sources: EC2 User Guide, "Instance lifecycle" (1., pending is not billed) and "Billing for interrupted Spot
Instances": interrupted by EC2 in the first hour, no charge; afterwards, or ended by you, the seconds used; the
whitepaper "Overview of Amazon EC2 Spot Instances", How Spot Instances work: before a full hour of running time
(2.); EC2 API Reference, StartInstances: each start is charged a minimum of one minute and then by the second (3.);
EC2 Spot FAQ and the announcement of 2017-11 of the present spot prices: the price in effect at the beginning of
each instance-hour (4.). Disks have their own rule in `disks`. Traffic is not on this invoice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction

from gpucost.rehearsal.invoice.disks import DiskLine, Volume, bill_volume
from gpucost.rehearsal.invoice.measure import HOUR_S, MINIMUM_S, elapsed, rounded

PriceAt = Callable[[datetime], Decimal]


@dataclass(frozen=True)
class Period:
    """One time of running: from `launched` to `ended` (None: still running); whether EC2 `interrupted` it."""

    launched: datetime
    ended: datetime | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Usage:
    """One instance, as the invoice sees it.

    Args:
        instance_id: its id.
        instance_type: for example g4dn.xlarge.
        zone: for example us-east-1a.
        lifecycle: 'spot' or 'on-demand'.
        periods: when it ran, oldest first; only the last may be open.
        price_at: US dollars per instance-hour in force at a moment; constant for on-demand.
        on_demand: the list price, US dollars per instance-hour, which the Cost and Usage Report shows beside the
            price paid; None where it is not known.
        volumes: its disks.
        tags: of the instance.

    Raises:
        ValueError: no period, or periods out of order.
    """

    instance_id: str
    instance_type: str
    zone: str
    lifecycle: str
    periods: tuple[Period, ...]
    price_at: PriceAt
    on_demand: Decimal | None = None
    volumes: tuple[Volume, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.periods:
            raise ValueError(f"periods: got none of {self.instance_id}, expected at least its launch")
        for before, after in zip(self.periods, self.periods[1:], strict=False):
            if before.ended is None or after.launched < before.ended:
                raise ValueError(
                    f"periods: {self.instance_id} starts at {after.launched.isoformat()} before it ended; "
                    "expected the oldest first, and only the last one open"
                )


@dataclass(frozen=True)
class Segment:
    """A part of one instance-hour: `seconds` from `start` at `price` US dollars per hour."""

    start: datetime
    seconds: int
    price: Decimal


@dataclass(frozen=True)
class BilledPeriod:
    """One running period on the invoice; without segments when it is free."""

    period: Period
    end: datetime
    seconds: int
    billed_seconds: int
    segments: tuple[Segment, ...]
    free: bool


@dataclass(frozen=True)
class Line:
    """One instance on the invoice with its disks; amounts are in US dollars, to the micro-dollar.

    `amount` is compute alone; `disk_amount` is the sum of its disks' amounts.
    """

    usage: Usage
    periods: tuple[BilledPeriod, ...]
    amount: Decimal
    disks: tuple[DiskLine, ...]

    @property
    def seconds(self) -> int:
        """Of running, in all periods."""
        return sum(one.seconds for one in self.periods)

    @property
    def billed_seconds(self) -> int:
        """Of running, charged: with the minimum, without what is free."""
        return sum(one.billed_seconds for one in self.periods)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of all periods."""
        return tuple(part for one in self.periods for part in one.segments)

    @property
    def free(self) -> bool:
        """Whether compute was not charged at all."""
        return all(one.free for one in self.periods)

    @property
    def disk_amount(self) -> Decimal:
        """What its disks cost."""
        return sum((disk.amount for disk in self.disks), rounded(Fraction(0)))


def bill(usage: Usage, now: datetime) -> Line:
    """The line of one instance, up to its end or to `now`; the rule is in this module's docstring.

    Raises:
        ValueError: a time with fractions of a second, or an end before its start.
    """
    periods = tuple(_bill_period(usage, period, now) for period in usage.periods)
    exact = sum((Fraction(part.price) * part.seconds / HOUR_S for one in periods for part in one.segments), Fraction(0))
    return Line(usage, periods, rounded(exact), tuple(bill_volume(volume, now) for volume in usage.volumes))


def _bill_period(usage: Usage, period: Period, now: datetime) -> BilledPeriod:
    end = period.ended or now
    seconds = elapsed(period.launched, end, usage.instance_id)
    if usage.lifecycle == "spot" and period.interrupted and seconds < HOUR_S:
        return BilledPeriod(period, end, seconds, 0, (), free=True)
    billed = max(seconds, MINIMUM_S)
    return BilledPeriod(period, end, seconds, billed, tuple(_segments(usage, period, billed)), free=False)


def _segments(usage: Usage, period: Period, billed: int) -> list[Segment]:
    parts = []
    for offset in range(0, billed, HOUR_S):
        start = period.launched + timedelta(seconds=offset)
        parts.append(Segment(start, min(HOUR_S, billed - offset), usage.price_at(start)))
    return parts
