"""What the book holds: instances, launches, orders, and why an instance ends. Plain frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from gpucost.rehearsal.market.places import PoolKey

Lifecycle = Literal["spot", "on-demand"]
State = Literal["pending", "running", "shutting-down", "terminated", "stopping", "stopped"]

LIVING: frozenset[State] = frozenset({"pending", "running"})
"""The states that are billed."""

HOLDING: frozenset[State] = frozenset({"pending", "running", "shutting-down", "stopping"})
"""The states that occupy a place in the pool."""


@dataclass(frozen=True)
class Disk:
    """A volume that is made with the instance."""

    device: str = "/dev/xvda"
    gib: int = 8
    kind: str = "gp3"
    delete_on_termination: bool = True


@dataclass(frozen=True)
class LaunchSpec:
    """What an instance is started with: the launch template, already merged with the override."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

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
    key_name: str | None = None
    security_groups: tuple[str, ...] = ()
    disks: tuple[Disk, ...] = (Disk(),)
    volume_tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """Why an instance ends, in the words that EC2 uses.

    `code` and `message` make StateReason; `spot_status` is the code of the spot request; `transition` is the text
    before the time in StateTransitionReason.

    Sources: the codes of StateReason are those of
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html, the status codes of spot requests those
    of https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html. AWS publishes no texts for
    `message`, `transition` and `spot_message`: nobody should read them, but for the time in `transition`.
    """

    code: str
    message: str
    transition: str
    spot_status: str
    spot_message: str

    @property
    def by_ec2(self) -> bool:
        """Whether EC2 ended the instance; matters for the free first hour of spot instances."""
        return self.code.startswith("Server.")


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
"""AWS has a status for the shutdown command only where it stops: instance-stopped-by-user. Ended, it is the user's."""

NO_CAPACITY = Ending(
    "Server.SpotInstanceTermination",
    "Server.SpotInstanceTermination: Spot instance termination",
    "Server.SpotInstanceTermination",
    "instance-terminated-no-capacity",
    "Your Spot Instance was terminated because there is no Spot capacity available.",
)
PRICE = Ending(
    "Server.SpotInstanceTermination",
    "Server.SpotInstanceTermination: Spot instance termination",
    "Server.SpotInstanceTermination",
    "instance-terminated-by-price",
    "Your Spot Instance was terminated because your maximum price is lower than the current Spot price.",
)
LOST = Ending(
    "Server.InternalError",
    "Server.InternalError: Internal error",
    "Server.InternalError",
    "system-error",
    "There was an unexpected system error: the host of your Spot Instance failed.",
)
"""The host failed: this rehearsal was away for longer than its machines go on without it, or a machine's first process
was killed. AWS names no status for that; of its codes only system-error blames neither capacity, price nor user."""


@dataclass(frozen=True)
class Instance:
    """One machine: what was asked for, and how it stands.

    Times are whole seconds of the rehearsal clock. `launched` is the beginning of its latest life: when its first
    process was there (`on`), until then when it was sold or started. `earlier` are the (start, end) of lives before a
    stop; `ended` is when it left pending or running, `gone` when its last process
    had ended. A notice names the moment `action_at` and why (`noticed_for`, None for a notice that comes to nothing).
    `request_cancelled` is when its spot request was cancelled; the instance itself runs on. `volume_tags` and
    `deleted_volumes` are by device: the tags of its volumes, and when their owner deleted those that outlived it.
    """

    id: str
    number: int
    launch_id: str
    client_token: str
    pool: PoolKey
    lifecycle: Lifecycle
    spec: LaunchSpec
    tags: Mapping[str, str]
    created: datetime
    launched: datetime
    on: bool = False
    index: int = 0
    state: State = "pending"
    spot_request_id: str | None = None
    max_price: Decimal | None = None
    earlier: tuple[tuple[datetime, datetime], ...] = ()
    ending: Ending | None = None
    ended: datetime | None = None
    gone: datetime | None = None
    rebalance_at: datetime | None = None
    notice_at: datetime | None = None
    action_at: datetime | None = None
    noticed_for: Ending | None = None
    abrupt: bool = False
    request_cancelled: datetime | None = None
    volume_tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    deleted_volumes: Mapping[str, datetime] = field(default_factory=dict)

    @property
    def living(self) -> bool:
        """Whether it is being billed."""
        return self.state in LIVING

    @property
    def waits_for_power(self) -> bool:
        """Whether it was sold or started, and no process of it lives yet."""
        return self.state == "pending" and not self.on

    @property
    def billed_until(self) -> datetime | None:
        """The end of its latest life: not before it has begun; None while it goes on."""
        return self.launched if self.waits_for_power else self.ended

    @property
    def region(self) -> str:
        """The region that it runs in."""
        return self.pool.region


@dataclass(frozen=True)
class Order:
    """`count` instances to be launched in one pool; `max_price` in US dollars per instance-hour, for spot."""

    pool: PoolKey
    lifecycle: Lifecycle
    count: int
    spec: LaunchSpec
    max_price: Decimal | None = None


@dataclass(frozen=True)
class Launch:
    """One request that launched instances, kept with its answer for its client token.

    A `fleet` comes from CreateFleet, a `reservation` from RunInstances; tokens of the two are apart, as on EC2.
    """

    id: str
    kind: Literal["fleet", "reservation"]
    region: str
    client_token: str
    digest: str
    created: datetime
    tags: Mapping[str, str]
    request: Mapping[str, Any]
    answer: Mapping[str, Any]
    deleted: datetime | None = None
