"""How much money is it? Exact amounts that never mix currencies or units.

Amounts are `Decimal`. A price per *instance*-hour and a price per *GPU*-hour are different types: an
8-GPU machine billed at eight times the price that was shown is a mistake that people have made.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

MICRO = Decimal("0.000001")
"""The resolution of a charge: one millionth of a unit of currency."""


def _exact(value: Any) -> Decimal:
    """Accept what is exact (str, int, Decimal); a float has already lost cents."""
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise ValueError(f"got {value!r} ({type(value).__name__}), expected a string such as '12.50' or an integer")
    try:
        amount = Decimal(value)
    except InvalidOperation as wrong:
        raise ValueError(f"got {value!r}, expected a number such as '12.50'") from wrong
    if not amount.is_finite():
        raise ValueError(f"got {value!r}, expected a finite amount")
    return amount


def _currency(value: str) -> str:
    if len(value) != 3 or not value.isascii() or not value.isalpha() or not value.isupper():
        raise ValueError(f"got {value!r}, expected a three-letter ISO 4217 code such as 'USD'")
    return value


ExactDecimal = Annotated[Decimal, BeforeValidator(_exact), PlainSerializer(str, return_type=str, when_used="json")]
Currency = Annotated[str, AfterValidator(_currency)]


def _written(value: Any) -> Any:
    """Accept what people write: '12.50 USD'."""
    if value is None or isinstance(value, int | float | Decimal):
        raise ValueError(f"got {value!r} ({type(value).__name__}), expected text such as '12.50 USD'")
    if isinstance(value, str):
        amount, _, currency = value.strip().partition(" ")
        return {"amount": amount, "currency": currency.strip()} if currency else {"amount": amount}
    return value


class CurrencyMismatch(ValueError):
    """Two amounts of different currencies met without an exchange rate."""


class Money(BaseModel):
    """An exact amount in one currency: `Money(amount="12.50", currency="USD")`, or in a file "12.50 USD".

    Raises:
        CurrencyMismatch: when amounts of different currencies are added, subtracted or compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    amount: ExactDecimal
    currency: Currency = "USD"

    _from_text = model_validator(mode="before")(_written)

    @classmethod
    def usd(cls, amount: str | int | Decimal) -> Self:
        """`amount` US dollars."""
        return cls(amount=_exact(amount), currency="USD")

    @classmethod
    def zero(cls, currency: str = "USD") -> Self:
        """Nothing, in `currency`."""
        return cls(amount=Decimal(0), currency=currency)

    def _same(self, other: Money) -> Decimal:
        if not isinstance(other, Money):
            raise TypeError(f"expected Money, got {type(other).__name__}")
        if other.currency != self.currency:
            raise CurrencyMismatch(
                f"currency: {self.currency} met {other.currency}; convert one of them with a dated exchange rate first"
            )
        return other.amount

    def __add__(self, other: Money) -> Money:
        return Money(amount=self.amount + self._same(other), currency=self.currency)

    def __sub__(self, other: Money) -> Money:
        return Money(amount=self.amount - self._same(other), currency=self.currency)

    def __mul__(self, factor: int | Decimal) -> Money:
        return Money(amount=self.amount * _exact(factor), currency=self.currency)

    def __lt__(self, other: Money) -> bool:
        return self.amount < self._same(other)

    def __le__(self, other: Money) -> bool:
        return self.amount <= self._same(other)

    def __gt__(self, other: Money) -> bool:
        return self.amount > self._same(other)

    def __ge__(self, other: Money) -> bool:
        return self.amount >= self._same(other)

    def rounded(self, step: Decimal = MICRO) -> Money:
        """To a multiple of `step` (a power of ten), half to even."""
        return Money(amount=self.amount.quantize(step, rounding=ROUND_HALF_EVEN), currency=self.currency)

    def __str__(self) -> str:
        sign = "$" if self.currency == "USD" else f"{self.currency} "
        return f"{sign}{self.amount.quantize(Decimal('0.0001'))}"


class InstanceHourPrice(BaseModel):
    """What one whole instance costs for one hour, however many GPUs it has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    amount: Annotated[ExactDecimal, Field(gt=0, description="Currency units per instance-hour; never zero.")]
    currency: Currency = "USD"

    _from_text = model_validator(mode="before")(_written)

    def per_gpu(self, gpu_count: int) -> GpuHourPrice:
        """The same price per GPU-hour, for an instance with `gpu_count` GPUs."""
        if gpu_count < 1:
            raise ValueError(f"gpu_count: got {gpu_count}, expected 1 or more")
        return GpuHourPrice(amount=self.amount / gpu_count, currency=self.currency)

    def for_hours(self, hours: Decimal) -> Money:
        """The cost of `hours` instance-hours, unrounded."""
        return Money(amount=self.amount * hours, currency=self.currency)

    def __str__(self) -> str:
        return f"{Money(amount=self.amount, currency=self.currency)}/h"


class GpuHourPrice(BaseModel):
    """What one GPU costs for one hour; for comparison only, nobody sells it alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    amount: Annotated[ExactDecimal, Field(gt=0, description="Currency units per GPU-hour; never zero.")]
    currency: Currency = "USD"

    def per_instance(self, gpu_count: int) -> InstanceHourPrice:
        """The price of an instance with `gpu_count` such GPUs."""
        if gpu_count < 1:
            raise ValueError(f"gpu_count: got {gpu_count}, expected 1 or more")
        return InstanceHourPrice(amount=self.amount * gpu_count, currency=self.currency)
