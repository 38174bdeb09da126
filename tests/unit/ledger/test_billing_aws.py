"""The published EC2 rule, by example and by property."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpucost.ledger.billing import Bill, MachineUse, rules_for
from gpucost.ledger.billing.aws import AwsRules, aws_bill
from gpucost.market.pool import CapacityType
from gpucost.market.quote import PricePoint
from gpucost.money import CurrencyMismatch, InstanceHourPrice, Money

LAUNCH = datetime(2026, 11, 30, 12, 0, 7, tzinfo=UTC)
MICRO = Decimal("0.000001")


def price(amount: str | Decimal, currency: str = "USD") -> InstanceHourPrice:
    return InstanceHourPrice(amount=Decimal(amount), currency=currency)


def point(after_seconds: float, amount: str | Decimal, currency: str = "USD") -> PricePoint:
    return PricePoint(since=LAUNCH + timedelta(seconds=after_seconds), price=price(amount, currency))


def use(seconds: float, **changes: Any) -> MachineUse:
    facts = {"capacity_type": CapacityType.SPOT, "ended_by": "us"} | changes
    return MachineUse(launched_at=LAUNCH, ended_at=LAUNCH + timedelta(seconds=seconds), **facts)


def test_seconds_at_a_constant_price() -> None:
    bill = aws_bill(use(1800), [point(-60, "0.526")], price("1.204"))
    assert (bill.amount, bill.on_demand_amount) == (Money.usd("0.263"), Money.usd("0.602"))
    assert (bill.seconds, bill.start, bill.end) == (1800, LAUNCH, LAUNCH + timedelta(seconds=1800))


def test_a_life_of_seconds_is_billed_as_a_minute() -> None:
    bill = aws_bill(use(7), [point(0, "3.6")], price("7.2"))
    assert (bill.seconds, bill.amount, bill.on_demand_amount) == (60, Money.usd("0.06"), Money.usd("0.12"))
    assert [(line.seconds, line.amount) for line in bill.lines] == [(60, "0.06")]


def test_the_price_at_the_beginning_of_each_hour_of_its_life_holds_for_that_hour() -> None:
    moves = [point(-100, "1"), point(1800, "9"), point(3600, "2"), point(3601, "9"), point(7199, "3")]
    bill = aws_bill(use(7200 + 900), moves, None)
    assert [(line.seconds, line.price) for line in bill.lines] == [(3600, "1"), (3600, "2"), (900, "3")]
    assert [line.start for line in bill.lines] == [LAUNCH + timedelta(hours=hour) for hour in range(3)]
    assert bill.amount == Money.usd("3.75")
    assert bill.on_demand_amount is None


def test_an_exact_hour_begins_no_second_one() -> None:
    bill = aws_bill(use(3600), [point(0, "1"), point(3600, "9")], None)
    assert [(line.seconds, line.price) for line in bill.lines] == [(3600, "1")]


@pytest.mark.parametrize(
    ("seconds", "ended_by", "expected"),
    [
        (3599, "provider", "0"),
        (3600, "provider", "3.6"),
        (5000, "provider", "5"),
        (3599, "us", "3.599"),
        (3599, "self", "3.599"),
        (5, "provider", "0"),
    ],
)
def test_only_an_interruption_within_the_first_hour_is_free(seconds: int, ended_by: str, expected: str) -> None:
    bill = aws_bill(use(seconds, ended_by=ended_by), [point(0, "3.6")], price("7.2"))
    assert bill.amount == Money.usd(expected)
    assert bill.on_demand_amount == Money.usd(Decimal(max(seconds, 60)) * Decimal("0.002"))


def test_on_demand_is_billed_by_the_list_price_whoever_ended_it() -> None:
    bill = aws_bill(use(600, capacity_type=CapacityType.ON_DEMAND, ended_by="provider"), [], price("0.6"))
    assert (bill.amount, bill.on_demand_amount) == (Money.usd("0.1"), Money.usd("0.1"))


def test_parts_of_a_second_are_cut_as_the_api_shows_time() -> None:
    life = MachineUse(
        launched_at=LAUNCH.replace(microsecond=900_000),
        ended_at=LAUNCH + timedelta(seconds=100, microseconds=100_000),
        capacity_type=CapacityType.SPOT,
        ended_by="us",
    )
    assert aws_bill(life, [point(0, "36")], None).seconds == 100


def test_the_sum_is_rounded_once_half_to_even() -> None:
    # Each stretch ends on half a micro: rounding each would give 2 x 0.000002, or 2 x 0.000000.
    rules = AwsRules(minimum_seconds=0, price_holds_for=timedelta(seconds=1))
    halves = [point(0, "0.0054"), point(1, "0.0054")]
    assert aws_bill(use(2), halves, None, rules).amount == Money.usd("0.000003")
    assert aws_bill(use(1), [point(0, "0.0018")], None, rules).amount == Money.zero()
    assert aws_bill(use(1), [point(0, "0.0054")], None, rules).amount == Money.usd("0.000002")


@pytest.mark.parametrize(
    ("prices", "on_demand", "capacity", "message"),
    [
        ([], None, "spot", "spot_prices: none in force at the launch.*no price is known"),
        ([point(1, "1")], None, "spot", "spot_prices: none in force at the launch.*first known price is of"),
        ([point(0, "1"), point(0, "2")], None, "spot", "spot_prices: both"),
        ([], None, "on-demand", "on_demand_price: got none"),
    ],
)
def test_a_missing_or_contradictory_price_is_named(
    prices: list[PricePoint], on_demand: InstanceHourPrice | None, capacity: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        aws_bill(use(100, capacity_type=CapacityType(capacity)), prices, on_demand)


def test_currencies_never_mix() -> None:
    with pytest.raises(CurrencyMismatch):
        aws_bill(use(100), [point(0, "1"), point(50, "1", "CNY")], None)
    with pytest.raises(CurrencyMismatch, match="on_demand_price"):
        aws_bill(use(100), [point(0, "1", "CNY")], price("2"))


def test_a_machine_cannot_end_before_it_began() -> None:
    with pytest.raises(ValidationError, match="ended_at"):
        use(-1)


def test_a_provider_without_a_rule_is_named() -> None:
    assert rules_for("aws") is aws_bill
    with pytest.raises(ValueError, match="'gcp'"):
        rules_for("gcp")


amounts = st.decimals(min_value="0.0001", max_value="99", places=6).filter(lambda amount: amount > 0)
lives = st.integers(min_value=0, max_value=30 * 3600)
enders = st.sampled_from(["provider", "us", "self"])


@st.composite
def histories(draw: st.DrawFn) -> list[PricePoint]:
    moves = draw(st.dictionaries(st.integers(1, 30 * 3600), amounts, max_size=40))
    history = [point(draw(st.integers(-5000, 0)), draw(amounts)), *(point(at, amount) for at, amount in moves.items())]
    return draw(st.permutations(history))


def billed(seconds: int, history: list[PricePoint], ended_by: str = "us") -> Bill:
    return aws_bill(use(seconds, ended_by=ended_by), history, price("1.5"))


@given(lives, histories(), enders)
def test_a_bill_is_never_negative_and_equals_its_lines(seconds: int, history: list[PricePoint], ended_by: str) -> None:
    bill = billed(seconds, history, ended_by)
    assert bill.amount.amount >= 0
    assert sum(line.seconds for line in bill.lines) == bill.seconds == max(seconds, 60)
    exact = sum((Fraction(line.price) * line.seconds / 3600 for line in bill.lines), Fraction(0))
    free = ended_by == "provider" and seconds < 3600
    assert bill.amount.amount == (0 if free else Decimal(round(exact * 10**6)) * MICRO)
    shown = sum((Decimal(line.amount) for line in bill.lines), Decimal(0))
    assert abs(shown - bill.amount.amount) <= MICRO / 2 + len(bill.lines) * Decimal("1e-12")


@given(lives, st.integers(0, 5000), histories())
def test_a_longer_life_never_costs_less(seconds: int, more: int, history: list[PricePoint]) -> None:
    assert billed(seconds, history).amount <= billed(seconds + more, history).amount


@given(lives, amounts)
def test_a_constant_price_is_price_times_seconds(seconds: int, amount: Decimal) -> None:
    expected = Fraction(amount) * max(seconds, 60) / 3600
    assert billed(seconds, [point(-1, amount)]).amount.amount == Decimal(round(expected * 10**6)) * MICRO


@given(lives, histories(), enders)
def test_nothing_is_free_unless_the_provider_ended_it_in_the_first_hour(
    seconds: int, history: list[PricePoint], ended_by: str
) -> None:
    waived = all(Decimal(line.amount) == 0 for line in billed(seconds, history, ended_by).lines)
    assert waived == (ended_by == "provider" and seconds < 3600)
