"""A quote is a pool's price at one moment, with where it comes from."""

from __future__ import annotations

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpucost.market.pool import InstanceType, Pool
from gpucost.money import InstanceHourPrice


class Quote(BaseModel):
    """What one machine of a pool costs per instance-hour, as of when, according to whom."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: Pool
    instance: InstanceType
    price: InstanceHourPrice
    as_of: AwareDatetime = Field(description="Since when the price has been in force, or when it was noted down.")
    source: str = Field(min_length=1, description="Which API or snapshot said so.")


class PricePoint(BaseModel):
    """From `since` on, until the next point, the pool costs `price`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    since: AwareDatetime
    price: InstanceHourPrice
