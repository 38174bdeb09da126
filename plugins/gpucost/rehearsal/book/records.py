"""What the book holds: instances, fleets, orders, and why an instance ends. Plain frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from gpucost.rehearsal.market.market import PoolKey

Lifecycle = Literal["spot", "on-demand"]
State = Literal["pending", "running", "shutting-down", "terminated", "stopping", "stopped"]

LIVING: frozenset[State] = frozenset({"pending", "running"})
"""The states that are billed."""

HOLDING: frozenset[State] = frozenset({"pending", "running", "shutting-down", "stopping"})
"""The states that occupy a place in the pool."""


@dataclass(frozen=True)
class LaunchSpec:
    """What an instance is started with: the launch template, already merged with the override."""

    image_id: str | None = None
    user_data: bytes | None = None
    profile: str | None = None
    metadata_tags: bool = False
    shutdown_behavior: Literal["stop", "terminate"] = "stop"
    tags: Mapping[str, str] = field(default_factory=dict)
    subnet_id: str | None = None
    vpc_id: str | None = None
    template_id: str | None = None
    template_version: str | None = None


@dataclass(frozen=True)
class Ending:
    """Why an instance ends, in the words that EC2 uses.

    `code` and `message` make StateReason; `spot_status` is the code of the spot request; `transition` is the text
    before the time in StateTransitionReason.
    """

    code: str
    message: str
    transition: str
    spot_status: str
    spot_message: str

    @property
    def by_ec2(self) -> bool:
        """Whether EC2 interrupted the instance; matters for the free first hour."""
        return self.code.startswith("Server.Spot")


BY_USER = Ending(
    "Client.UserInitiatedShutdown",
    "Client.UserInitiatedShutdown: User initiated shutdown",
    "User initiated",
    "instance-terminated-by-user",
    "Spot Instance terminated due to user-initiated termination.",
)
FROM_INSIDE = Ending(
    "Client.InstanceInitiatedShutdown",
    "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
    "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
    "instance-terminated-by-user",
    "Spot Instance terminated due to user-initiated termination.",
)
NO_CAPACITY = Ending(
    "Server.SpotInstanceTermination",
    "Server.SpotInstanceTermination: Spot instance termination",
    "Server.SpotInstanceTermination",
    "instance-terminated-no-capacity",
    "Your Spot Instance was terminated because there is no Spot capacity available.",
)


@dataclass(frozen=True)
class Instance:
    """One machine, as it was when it was asked for."""

    id: str
    number: int
    fleet_id: str
    client_token: str
    pool: PoolKey
    lifecycle: Lifecycle
    spec: LaunchSpec
    tags: Mapping[str, str]
    launched: datetime
    state: State = "pending"
    spot_request_id: str | None = None
    max_price: str | None = None
    ending: Ending | None = None
    ended: datetime | None = None
    gone: datetime | None = None
    notice_at: datetime | None = None
    action_at: datetime | None = None
    abrupt: bool = False

    @property
    def living(self) -> bool:
        """Whether it is being billed."""
        return self.state in LIVING


@dataclass(frozen=True)
class Order:
    """`count` instances to be launched in one pool."""

    pool: PoolKey
    lifecycle: Lifecycle
    count: int
    spec: LaunchSpec
    max_price: str | None = None


@dataclass(frozen=True)
class Fleet:
    """One CreateFleet request with its answer, kept for its client token."""

    id: str
    client_token: str
    digest: str
    created: datetime
    tags: Mapping[str, str]
    request: Mapping[str, Any]
    answer: Mapping[str, Any]
