"""A charge: what one lease cost one job, by one kind, with everything needed to compute it again."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from gpucost.ledger.billing.rule import ChargeLine
from gpucost.money import MICRO, Money

__all__ = ["Charge", "ChargeKind", "ChargeLine"]


class ChargeKind(StrEnum):
    """What was paid for."""

    COMPUTE = "compute"
    DISK = "disk"
    EGRESS = "egress"
    REQUESTS = "requests"


def _to_a_micro(value: Money) -> Money:
    if value != value.rounded():
        raise ValueError(f"got {value.amount}, expected a multiple of {MICRO}; round it by the billing rule first")
    return value


MicroMoney = Annotated[Money, AfterValidator(_to_a_micro)]


class Charge(BaseModel):
    """What one lease cost one job; frozen, as is its row.

    Raises:
        pydantic.ValidationError: an amount finer than a millionth, or two currencies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease_id: str
    job: str = Field(description="The job's key.")
    kind: ChargeKind = ChargeKind.COMPUTE
    amount: MicroMoney
    on_demand_amount: MicroMoney | None = Field(description="The same seconds at the on-demand price.")
    start: AwareDatetime
    end: AwareDatetime
    seconds: int = Field(ge=0, description="Billed seconds of the lease, minimum included.")
    rule: str = Field(description="Name of the billing rule.")
    source: str = Field(min_length=1, description="Where times and prices come from.")
    as_of: AwareDatetime = Field(description="When it was computed.")
    lines: tuple[ChargeLine, ...] = ()

    @model_validator(mode="after")
    def _one_currency(self) -> Self:
        if self.on_demand_amount and self.on_demand_amount.currency != self.amount.currency:
            raise ValueError(
                f"on_demand_amount: got {self.on_demand_amount.currency}, expected {self.amount.currency} as in amount"
            )
        return self

    def same_facts(self, other: Charge) -> bool:
        """Whether both say the same, whenever and from whichever answer they were computed."""
        when = {"source", "as_of"}
        return self.model_dump(exclude=when) == other.model_dump(exclude=when)
