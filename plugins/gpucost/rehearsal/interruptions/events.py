"""What does EC2 tell the world of its instances? Interruption warnings, rebalance recommendations, state changes.

Each is an event in EventBridge's envelope, with times of the rehearsal clock. They are delivered by a thread of their
own: as on AWS they come soon and on a best effort basis, and nobody who ends a machine waits for them or fails with
them. Sources of names and shapes: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/, pages
spot-instance-termination-notices.html, rebalance-recommendations.html, monitoring-instance-state-changes.html.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from gpucost.rehearsal.book.records import Instance

log = logging.getLogger(__name__)

WARNING = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
STATE_CHANGE = "EC2 Instance State-change Notification"

Envelope = dict[str, Any]
"""An event as EventBridge passes it on."""


class Bus(Protocol):
    """Where events go."""

    def put_event(self, region: str, event: Envelope) -> None:
        """Put an event on the default bus of a region."""
        ...


class Announcer:
    """Puts events of instances on the bus, in the order in which they were announced.

    Args:
        bus: where they go.
        now: the rehearsal clock.
        account: the account's number.
        new_id: makes events' ids.
    """

    def __init__(
        self,
        bus: Bus,
        now: Callable[[], datetime],
        account: str,
        *,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._bus = bus
        self._now = now
        self._account = account
        self._new_id = new_id
        self._waiting: queue.SimpleQueue[tuple[str, Envelope] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="announcer", daemon=True)
        self._thread.start()

    def warn(self, instance: Instance) -> None:
        """EC2 will interrupt the instance at its `action_at`."""
        # another ARN than elsewhere, with the zone and without the account: AWS's page notes it
        resource = f"arn:aws:ec2:{instance.pool.zone}:instance/{instance.id}"
        detail = {"instance-id": instance.id, "instance-action": "terminate"}
        self._announce(instance, WARNING, resource, detail, instance.notice_at)

    def recommend(self, instance: Instance) -> None:
        """The instance is at an elevated risk of interruption."""
        resource = f"arn:aws:ec2:{instance.pool.zone}:instance/{instance.id}"
        self._announce(instance, REBALANCE, resource, {"instance-id": instance.id}, instance.rebalance_at)

    def state_changed(self, instance: Instance) -> None:
        """The instance has another state than before, the one that it is in."""
        resource = f"arn:aws:ec2:{instance.region}:{self._account}:instance/{instance.id}"
        self._announce(instance, STATE_CHANGE, resource, {"instance-id": instance.id, "state": instance.state}, None)

    def changed(self, before: Instance | None, after: Instance) -> None:
        """Tell of a change when it is one of state; `before` is None for a new instance. Quick: may hold any lock."""
        if before is None or before.state != after.state:
            self.state_changed(after)

    def stop(self) -> None:
        """Deliver what waits, and end."""
        self._waiting.put(None)
        self._thread.join()

    def _announce(
        self, instance: Instance, kind: str, resource: str, detail: dict[str, str], at: datetime | None
    ) -> None:
        event = {
            "version": "0",
            "id": self._new_id(),
            "detail-type": kind,
            "source": "aws.ec2",
            "account": self._account,
            "time": (at or self._now()).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "region": instance.region,
            "resources": [resource],
            "detail": detail,
        }
        self._waiting.put((instance.region, event))

    def _deliver(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            region, event = waiting
            try:
                self._bus.put_event(region, event)
            except Exception as error:  # noqa: BLE001 (events are best effort: the next one must still go)
                log.warning("%s of %s could not be put on the event bus: %s",
                            event["detail-type"], event["detail"]["instance-id"], error)  # fmt: skip
