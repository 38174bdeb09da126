"""How AWS bills a Linux instance on EC2. Pure.

Sources. The User Guide and the whitepaper were read on 2026-11-30; the pricing page, the blog post and the FAQ are
cited as others quote them, and are still to be read at their source:

- Per second, at least 60 seconds: https://aws.amazon.com/ec2/pricing/ ("one-second increments, with a minimum
  of 60 seconds").
- Interrupted by EC2 in the first hour: no charge; later, or ended by the customer at any time: the seconds
  used. EC2 User Guide, "Billing for interrupted Spot Instances", Windows and Linux without RHEL and SUSE:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/billing-for-interrupted-spot-instances.html. The first hour
  is one "before a full hour of running time" (whitepaper "Cost optimization: leveraging EC2 Spot Instances", "How
  Spot Instances work"), so an interruption after exactly 3600 seconds is charged.
- The spot price "in effect at the beginning of each instance-hour" holds for that hour: AWS News Blog, "New Amazon
  EC2 Spot pricing model", 2018-03, and the Spot FAQ.
- Times come in whole seconds from DescribeInstances (LaunchTime, StateTransitionReason); a finer one is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise

from gpucost.clock import floor_second
from gpucost.ledger.billing.rule import SECONDS_PER_HOUR, Bill, ChargeLine, MachineUse, cost, line
from gpucost.market.pool import CapacityType
from gpucost.market.quote import PricePoint
from gpucost.money import CurrencyMismatch, InstanceHourPrice, Money


@dataclass(frozen=True)
class AwsRules:
    """The numbers in AWS's rule; see the module for their sources.

    Args:
        minimum_seconds: a shorter life is billed as this long.
        free_first_hour: a spot instance that EC2 takes back before this hour is over costs nothing.
        price_holds_for: the spot price at the beginning of each such stretch of an instance's life holds for it.
        name: how charges name the rule.
    """

    minimum_seconds: int = 60
    free_first_hour: bool = True
    price_holds_for: timedelta = timedelta(hours=1)
    name: str = "aws-linux-per-second-2018-03"


PUBLISHED = AwsRules()


def aws_bill(
    use: MachineUse,
    spot_prices: Sequence[PricePoint],
    on_demand_price: InstanceHourPrice | None,
    rules: AwsRules = PUBLISHED,
) -> Bill:
    """What one EC2 Linux instance costs; see `BillingRule`.

    Raises:
        ValueError: no spot price is known at the launch, two differ for one moment, or an on-demand instance comes
            without its price.
        CurrencyMismatch: prices in more than one currency.
    """
    start, end = floor_second(use.launched_at), floor_second(use.ended_at)
    lived = int((end - start).total_seconds())
    seconds = max(lived, rules.minimum_seconds)
    if use.capacity_type is CapacityType.ON_DEMAND:
        if on_demand_price is None:
            raise ValueError(f"on_demand_price: got none for an on-demand machine launched at {start.isoformat()}")
        price, currency = on_demand_price.amount, on_demand_price.currency
        weighted = price * seconds
        lines: tuple[ChargeLine, ...] = (line(start, seconds, price),)
    else:
        free = rules.free_first_hour and use.ended_by == "provider" and lived < SECONDS_PER_HOUR
        lines, weighted, currency = _spot_lines(start, lived, seconds, spot_prices, rules, waived=free)
    return Bill(
        rule=rules.name,
        start=start,
        end=end,
        seconds=seconds,
        amount=cost(weighted, currency),
        on_demand_amount=_comparison(on_demand_price, seconds, currency),
        lines=lines,
    )


def _spot_lines(
    start: datetime, lived: int, seconds: int, spot_prices: Sequence[PricePoint], rules: AwsRules, *, waived: bool
) -> tuple[tuple[ChargeLine, ...], Decimal, str]:
    """The stretches at one price each, the sum of price x seconds, and the currency.

    A minimum lengthens the last stretch that was lived; it begins no new one.
    """
    history = sorted(spot_prices, key=lambda point: point.since)
    _check(history, start)
    hold = int(rules.price_holds_for.total_seconds())
    lines: list[ChargeLine] = []
    weighted = Decimal(0)
    for begin in range(0, max(lived, 1), hold):
        stop = begin + hold
        length = (seconds if stop >= lived else stop) - begin
        moment = start + timedelta(seconds=begin)
        price = history[bisect_right(history, moment, key=lambda point: point.since) - 1].price.amount
        lines.append(line(moment, length, price, waived=waived))
        weighted += 0 if waived else price * length
    return tuple(lines), weighted, history[0].price.currency


def _check(history: list[PricePoint], launch: datetime) -> None:
    if not history or history[0].since > launch:
        known = f"the first known price is of {history[0].since.isoformat()}" if history else "no price is known"
        raise ValueError(
            f"spot_prices: none in force at the launch {launch.isoformat()}; {known}; "
            "ask for the pool's price history back to the launch"
        )
    for one, two in pairwise(history):
        if one.price.currency != two.price.currency:
            raise CurrencyMismatch(f"spot_prices: {one.price.currency} met {two.price.currency} in one history")
        if one.since == two.since and one.price != two.price:
            raise ValueError(
                f"spot_prices: both {one.price} and {two.price} since {one.since.isoformat()}, expected one price; "
                "look whether the history mixes zones or products"
            )


def _comparison(on_demand_price: InstanceHourPrice | None, seconds: int, currency: str) -> Money | None:
    if on_demand_price is None:
        return None
    if on_demand_price.currency != currency:
        raise CurrencyMismatch(f"on_demand_price: {on_demand_price.currency} met {currency} of the spot prices")
    return cost(on_demand_price.amount * seconds, currency)
