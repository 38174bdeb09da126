"""A lease is a machine that we pay for, or asked for and may have to pay for.

Its life, every step a compare-and-set on the row, and a row of its own in the history:

    requested --> active --> terminating --> terminated
        |            (the cloud took it) ------^
        +--> failed: nothing was bought

`requested` is written before the cloud is called. Whatever happens after that, the row says what to look
for: the client token. Only the holder of the owner token may act on a lease; taking over is one step.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpucost.market.pool import Pool
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason


class LeaseState(StrEnum):
    """Where a lease is in its life."""

    REQUESTED = "requested"
    ACTIVE = "active"
    TERMINATING = "terminating"
    TERMINATED = "terminated"
    FAILED = "failed"

    @property
    def may_cost(self) -> bool:
        """Whether a machine may be running and billed for a lease in this state."""
        return self in (LeaseState.REQUESTED, LeaseState.ACTIVE, LeaseState.TERMINATING)


ALLOWED: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.REQUESTED: frozenset({LeaseState.ACTIVE, LeaseState.FAILED, LeaseState.TERMINATING}),
    LeaseState.ACTIVE: frozenset({LeaseState.TERMINATING, LeaseState.TERMINATED}),
    LeaseState.TERMINATING: frozenset({LeaseState.TERMINATED, LeaseState.FAILED}),
    LeaseState.TERMINATED: frozenset(),
    LeaseState.FAILED: frozenset(),
}
"""State -> states that may follow."""


class Lease(BaseModel):
    """One machine, from the intent to buy it until the cloud confirmed its end."""

    model_config = ConfigDict(frozen=True)

    id: str
    job: str = Field(description="Key of the job that it was bought for.")
    attempt: int = Field(ge=1)
    pool: Pool
    state: LeaseState
    owner: str = Field(description="Owner token: who may act on it.")
    client_token: str = Field(description="What makes asking the cloud twice the same as asking once.")
    instance_id: str | None = None
    price: InstanceHourPrice = Field(description="The quote that it was bought at, per instance-hour.")
    on_demand_price: InstanceHourPrice | None = Field(default=None, description="For comparison, per instance-hour.")
    requested_at: AwareDatetime
    expires_at: AwareDatetime = Field(description="The node ends itself then, and the reaper ends the lease.")
    launched_at: AwareDatetime | None = Field(default=None, description="As the cloud's API shows it.")
    ended_at: AwareDatetime | None = Field(default=None, description="As the cloud's API shows it.")
    end_reason: Reason | None = None


class Allocation(BaseModel):
    """Which job has which share of which lease, and when; a lease can serve several small jobs."""

    model_config = ConfigDict(frozen=True)

    lease_id: str
    job: str
    attempt: int
    share: Decimal = Field(default=Decimal(1), gt=0, le=1, description="Part of the lease's cost this job carries.")
    start: AwareDatetime
    end: AwareDatetime | None = None


class Attempt(BaseModel):
    """One run of the program on 1..N leases; its number is the fencing number."""

    model_config = ConfigDict(frozen=True)

    job: str
    number: int = Field(ge=1)
    started_at: AwareDatetime
    ended_at: AwareDatetime | None = None
    reason: Reason | None = None
    first_step: int | None = Field(default=None, description="The step it went on from.")
    last_step: int | None = Field(default=None, description="The last step that it reported.")
    saved_step: int | None = Field(default=None, description="The newest checkpoint that it left behind.")
    message: str = ""


def new_owner_token() -> str:
    """A token for one try of one task; nobody else can guess or repeat it."""
    return secrets.token_hex(8)


def new_lease_id(job: str, attempt: int, now: datetime) -> str:
    """An id that names job and attempt to a person and is unique."""
    return f"{job}-a{attempt}-{now:%H%M%S}{secrets.token_hex(3)}"
