"""The invoice against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from gpucost.rehearsal.invoice.rule import Usage, as_json, bill

START = datetime(2026, 11, 30, 16, 20, 0, tzinfo=UTC)


def flat(price: str) -> Callable[[datetime], Decimal]:
    return lambda _moment: Decimal(price)


def used(
    seconds: int | None,
    price_at: Callable[[datetime], Decimal],
    *,
    lifecycle: str = "spot",
    interrupted: bool = False,
) -> Usage:
    ended = None if seconds is None else START + timedelta(seconds=seconds)
    return Usage("i-1", "g4dn.xlarge", "us-east-1a", lifecycle, START, ended, interrupted, price_at)


@pytest.mark.parametrize(
    ("seconds", "interrupted", "amount"),
    [
        (1800, False, "0.105000"),  # half an hour at 0.21
        (59, False, "0.003500"),  # the minimum of 60 s: 0.21 / 60
        (0, False, "0.003500"),
        (60, False, "0.003500"),
        (61, False, "0.003558"),  # 0.21 * 61 / 3600 = 0.00355833...
        (3599, True, "0.000000"),  # EC2 took it back within the first hour
        (3600, True, "0.210000"),  # after a full hour it is charged
        (5400, True, "0.315000"),
    ],
)
def test_seconds_minimum_and_the_free_first_hour(seconds: int, interrupted: bool, amount: str) -> None:
    line = bill(used(seconds, flat("0.21"), interrupted=interrupted), START + timedelta(days=1))
    assert str(line.amount) == amount


def test_on_demand_has_no_free_first_hour() -> None:
    line = bill(used(600, flat("0.526"), lifecycle="on-demand"), START)
    assert line.amount == Decimal("0.087667")  # 0.526 / 6 = 0.0876666...


def test_each_instance_hour_costs_the_price_in_force_when_it_begins() -> None:
    def price_at(moment: datetime) -> Decimal:
        # moves at 16:50 (inside the first instance-hour) and at 18:20 (as the third begins)
        if moment < START + timedelta(minutes=30):
            return Decimal("0.2000")
        return Decimal("0.3000") if moment < START + timedelta(hours=2) else Decimal("0.1000")

    line = bill(used(2 * 3600 + 900, price_at), START)
    # hour 1 at .2, hour 2 at .3, a quarter of hour 3 at .1
    assert [(part.seconds, str(part.price)) for part in line.segments] == [
        (3600, "0.2000"),
        (3600, "0.3000"),
        (900, "0.1000"),
    ]
    assert line.amount == Decimal("0.525000")


def test_rounding_is_half_to_even_once_for_each_instance() -> None:
    # 9 s short of nothing: price * 60 / 3600 = price / 60; .00003 / 60 = .0000005, exactly between 0 and .000001
    assert bill(used(60, flat("0.00003")), START).amount == Decimal("0.000000")
    assert bill(used(60, flat("0.00009")), START).amount == Decimal("0.000002")


def test_a_living_instance_is_billed_until_now_and_the_total_adds_rounded_lines() -> None:
    now = START + timedelta(seconds=61)
    lines = [bill(used(None, flat("0.21")), now) for _ in range(3)]
    document = as_json(lines, now)
    assert document["lines"][0]["ended"] is None
    assert document["lines"][0]["amount"] == "0.003558"
    assert document["total"] == "0.010674"


def test_an_end_before_the_launch_and_fractions_of_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="before its launch"):
        bill(used(-1, flat("0.21")), START)
    with pytest.raises(ValueError, match=r"expected whole seconds"):
        bill(used(None, flat("0.21")), START + timedelta(microseconds=1))
