"""Money: exact, one currency at a time, and per-GPU never mistaken for per-instance."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from gpucost.money import CurrencyMismatch, GpuHourPrice, InstanceHourPrice, Money

amounts = st.decimals(min_value=-(10**12), max_value=10**12, places=6, allow_nan=False)
prices = st.decimals(min_value=Decimal("0.000001"), max_value=10**6, places=6, allow_nan=False)


class Form(BaseModel):
    budget: Money
    price_cap: InstanceHourPrice | None = None


@pytest.mark.parametrize(
    ("written", "amount", "currency"),
    [
        ("5.00 USD", "5.00", "USD"),
        ("5.00", "5.00", "USD"),
        (" 12.5   EUR ", "12.5", "EUR"),
        ("0 CNY", "0", "CNY"),
        ({"amount": "7", "currency": "USD"}, "7", "USD"),
        ({"amount": 7}, "7", "USD"),
    ],
)
def test_people_write_an_amount_and_a_currency(written: Any, amount: str, currency: str) -> None:
    money = Form(budget=written).budget
    assert (str(money.amount), money.currency) == (amount, currency)


@pytest.mark.parametrize("value", [5.0, 5, None, True, Decimal("5")])
def test_a_bare_number_is_refused_and_the_message_says_what_to_write(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"got .*expected text such as '12\.50 USD'"):
        Form(budget=value)


def test_a_float_is_refused_wherever_it_hides() -> None:
    with pytest.raises(ValidationError, match=r"got 0\.1 \(float\), expected a string such as '12\.50' or an integer"):
        Money(amount=0.1)
    with pytest.raises(ValidationError, match=r"got 0\.1 \(float\)"):
        InstanceHourPrice(amount=0.1)
    with pytest.raises(ValueError, match=r"got 0\.1 \(float\)"):
        Money.usd("1") * 0.1  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["", "five USD", "USD 5", "5,00 USD", "5.00USD", "NaN USD", "Infinity USD", "5 usd", "5 €"]
)
def test_what_is_no_amount_of_a_currency_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match=r"expected a (number|finite|three-letter)"):
        Form(budget=text)


def test_ten_cents_and_twenty_cents_are_thirty() -> None:
    assert Money.usd("0.1") + Money.usd("0.2") == Money.usd("0.3")


@given(amounts, amounts, amounts)
def test_adding_is_exact_in_any_order(a: Decimal, b: Decimal, c: Decimal) -> None:
    one, two, three = Money.usd(a), Money.usd(b), Money.usd(c)
    assert (one + two) + three == one + (two + three)
    assert one + two == two + one
    assert (one + two) - two == one
    assert one + Money.zero() == one


@given(amounts, st.integers(min_value=1, max_value=1000))
def test_a_multiple_is_as_many_sums(a: Decimal, count: int) -> None:
    summed = Money.zero()
    for _ in range(min(count, 20)):
        summed = summed + Money.usd(a)
    assert Money.usd(a) * min(count, 20) == summed


@given(amounts)
def test_money_survives_json_to_the_last_digit(a: Decimal) -> None:
    money = Money(amount=a, currency="CNY")
    text = money.model_dump_json()
    assert json.loads(text)["amount"] == str(a)
    assert Money.model_validate_json(text) == money


@given(st.decimals(min_value=-1000, max_value=1000, places=9, allow_nan=False))
def test_rounding_moves_by_half_a_micro_at_most(a: Decimal) -> None:
    rounded = Money.usd(a).rounded()
    assert abs(rounded.amount - a) <= Decimal("0.0000005")
    assert rounded.rounded() == rounded


def test_rounding_is_half_to_even() -> None:
    assert Money.usd("0.0000005").rounded() == Money.usd("0")
    assert Money.usd("0.0000015").rounded() == Money.usd("0.000002")


@pytest.mark.parametrize("operation", ["__add__", "__sub__", "__lt__", "__le__", "__gt__", "__ge__"])
def test_currencies_never_mix(operation: str) -> None:
    with pytest.raises(CurrencyMismatch, match="currency: USD met CNY; convert one of them with a dated exchange rate"):
        getattr(Money.usd("1"), operation)(Money(amount="1", currency="CNY"))


def test_the_same_number_in_two_currencies_is_not_equal() -> None:
    assert Money.usd("1") != Money(amount="1", currency="EUR")


def test_money_and_a_number_do_not_add() -> None:
    with pytest.raises(TypeError, match="expected Money, got int"):
        Money.usd("1") + 1  # type: ignore[operator]


def test_amounts_compare() -> None:
    assert Money.usd("1.00") == Money.usd("1") <= Money.usd("1.01") > Money.usd("0.99") >= Money.usd("0.99")
    assert Money.usd("1") < Money.usd("2")


@pytest.mark.parametrize(
    ("money", "shown"), [(Money.usd("1.25"), "$1.2500"), (Money(amount="2", currency="CNY"), "CNY 2.0000")]
)
def test_people_see_the_currency(money: Money, shown: str) -> None:
    assert str(money) == shown


@pytest.mark.parametrize("amount", ["0", "-1"])
@pytest.mark.parametrize("kind", [InstanceHourPrice, GpuHourPrice])
def test_nothing_is_free(kind: Any, amount: str) -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        kind(amount=amount)


def test_an_eight_gpu_machine_is_not_billed_at_a_gpu_s_price() -> None:
    machine = InstanceHourPrice(amount="24.48")
    assert machine.per_gpu(8) == GpuHourPrice(amount="3.06")
    assert not isinstance(machine.per_gpu(8), InstanceHourPrice)
    with pytest.raises(ValidationError, match="price_cap"):
        Form(budget="1 USD", price_cap=machine.per_gpu(8))
    assert not hasattr(machine.per_gpu(8), "for_hours")


@given(prices, st.sampled_from([1, 2, 4, 8, 16]))
def test_per_gpu_and_back_is_the_same_price(amount: Decimal, count: int) -> None:
    gpu = GpuHourPrice(amount=amount)
    assert gpu.per_instance(count).per_gpu(count) == gpu


@pytest.mark.parametrize("count", [0, -1])
def test_a_price_per_gpu_needs_a_gpu(count: int) -> None:
    with pytest.raises(ValueError, match=f"gpu_count: got {count}, expected 1 or more"):
        InstanceHourPrice(amount="1").per_gpu(count)
    with pytest.raises(ValueError, match=f"gpu_count: got {count}, expected 1 or more"):
        GpuHourPrice(amount="1").per_instance(count)


def test_hours_of_a_price_are_money_in_its_currency() -> None:
    assert InstanceHourPrice(amount="0.36", currency="CNY").for_hours(Decimal("2.5")) == Money(
        amount="0.9", currency="CNY"
    )
    assert Form(budget="1 USD", price_cap="0.5 USD").price_cap == InstanceHourPrice(amount="0.5")


def test_money_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Money.usd("1").amount = Decimal(2)
