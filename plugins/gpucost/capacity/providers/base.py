"""What every provider of machines can do, and how it says no."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpucost.market.pool import InstanceType, Pool
from gpucost.market.quote import PricePoint, Quote
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason


class ProviderError(Exception):
    """The provider did not do what was asked.

    Args:
        reason: what to make of it; its row in the reason table says what follows.
        message: what the provider said, and what to do.
        code: the provider's own error code.
    """

    def __init__(self, reason: Reason, message: str, code: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code


class LaunchRequest(BaseModel):
    """One machine to buy.

    The client token makes asking twice the same as asking once; the tags are how a lost answer, or a machine
    that nobody remembers, is found again.
    """

    model_config = ConfigDict(frozen=True)

    pool: Pool
    client_token: str = Field(max_length=64)
    tags: dict[str, str]
    max_price: InstanceHourPrice | None = Field(default=None, description="For spot; None: the on-demand price.")


class Machine(BaseModel):
    """A machine as the provider's API shows it."""

    model_config = ConfigDict(frozen=True)

    instance_id: str
    state: Literal["pending", "running", "stopping", "stopped", "shutting-down", "terminated"]
    pool: Pool
    client_token: str = ""
    tags: dict[str, str] = {}
    launched_at: AwareDatetime | None = Field(default=None, description="None while the API does not show it yet.")
    ended_at: AwareDatetime | None = None
    ended_by: Literal["provider", "us", "self"] | None = Field(
        default=None, description="Who ended it: an interruption, our call, or a shutdown from inside."
    )
    end_code: str = Field(default="", description="The provider's own word for it.")

    @property
    def over(self) -> bool:
        """Whether the provider confirms that it is gone."""
        return self.state == "terminated"


class Provider(Protocol):
    """Sells machines. Every call may block; nothing here is called on an event loop."""

    name: str

    def regions(self) -> list[str]:
        """Where it may buy."""
        ...

    def quotes(self, at: AwareDatetime) -> list[Quote]:
        """Prices in force at `at`, over all sites, spot and on-demand."""
        ...

    def instance_types(self, names: Sequence[str]) -> dict[str, InstanceType]:
        """What machines of these types have."""
        ...

    def launch(self, request: LaunchRequest) -> Machine:
        """Buy one machine.

        Raises:
            ProviderError: it was not bought.
        """
        ...

    def find(self, region: str, client_token: str) -> Machine | None:
        """The machine that was bought with this token, if any."""
        ...

    def describe(self, region: str, instance_ids: Sequence[str]) -> dict[str, Machine]:
        """The machines by id; one that the provider does not know (yet) is missing from the answer."""
        ...

    def owned(self, region: str) -> list[Machine]:
        """Every machine that carries our tag and is not over, whoever bought it."""
        ...

    def terminate(self, region: str, instance_ids: Sequence[str]) -> None:
        """Ask for their end; asking again is no error, nor is an id that is gone."""
        ...

    def price_history(self, pool: Pool, start: AwareDatetime, end: AwareDatetime) -> list[PricePoint]:
        """The pool's prices from the one in force at `start` until `end`, oldest first."""
        ...
