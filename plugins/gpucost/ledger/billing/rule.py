"""What every billing rule takes and gives, whoever the provider is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Literal, Protocol, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from gpucost.market.pool import CapacityType
from gpucost.market.quote import PricePoint
from gpucost.money import MICRO, InstanceHourPrice, Money

EndedBy = Literal["provider", "us", "self"]
"""Who ended a machine: the provider took it back, we terminated it, or it shut itself down."""

SECONDS_PER_HOUR = 3600


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MachineUse(_Frozen):
    """One machine's life as the provider's API shows it.

    Raises:
        pydantic.ValidationError: it ended before it began.
    """

    launched_at: AwareDatetime
    ended_at: AwareDatetime = Field(description="When the API says that it went down, or the moment to bill up to.")
    capacity_type: CapacityType
    ended_by: EndedBy

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.ended_at < self.launched_at:
            raise ValueError(
                f"ended_at: got {self.ended_at.isoformat()}, expected {self.launched_at.isoformat()} (launched_at) "
                "or later"
            )
        return self


class ChargeLine(_Frozen):
    """One stretch of time at one price.

    `price * seconds / 3600` is exact; `amount` shows it to twelve places, for people. Rounding to money
    happens once, over the whole lease.
    """

    start: AwareDatetime
    seconds: int = Field(ge=0)
    price: str = Field(description="Per instance-hour, every digit.")
    amount: str = Field(description="What this stretch costs, to twelve places; 0 where the provider waives it.")
    share: str = Field(default="1", description="The job's part of it, a fraction such as '1/3'.")


class Bill(_Frozen):
    """What one machine's life costs by a provider's rule."""

    rule: str = Field(description="Name and version of the rule.")
    start: AwareDatetime
    end: AwareDatetime = Field(description="As the API shows it; a minimum may bill for longer than that.")
    seconds: int = Field(ge=0, description="Billed seconds, minimum included.")
    amount: Money
    on_demand_amount: Money | None = Field(description="The same seconds at the on-demand price.")
    lines: tuple[ChargeLine, ...]


class BillingRule(Protocol):
    """A provider's rule, as a pure function."""

    def __call__(
        self, use: MachineUse, spot_prices: Sequence[PricePoint], on_demand_price: InstanceHourPrice | None
    ) -> Bill:
        """What `use` costs.

        Args:
            use: the machine's life.
            spot_prices: the pool's price history, in any order, back to the launch; empty for on-demand.
            on_demand_price: the list price; needed for on-demand, a comparison for spot.

        Raises:
            ValueError: a price that the rule needs is missing or contradicts itself.
        """
        ...


def cost(weighted: Decimal, currency: str) -> Money:
    """Money for `weighted` (the sum of price x seconds): divided by 3600 and rounded once, half to even.

    Fractions keep the division exact, so that the rounding sees the true value.
    """
    micros = round(Fraction(weighted) / SECONDS_PER_HOUR / Fraction(MICRO))
    return Money(amount=Decimal(micros) * MICRO, currency=currency)


def line(start: datetime, seconds: int, price: Decimal, *, waived: bool = False) -> ChargeLine:
    """One stretch, with its amount shown to twelve places."""
    trillionths = 0 if waived else round(Fraction(price) * seconds / SECONDS_PER_HOUR * 10**12)
    shown = f"{Decimal(trillionths).scaleb(-12).normalize():f}"
    return ChargeLine(start=start, seconds=seconds, price=str(price), amount=shown)
