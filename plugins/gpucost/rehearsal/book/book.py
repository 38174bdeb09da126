"""Who owns which instance? The one owner of fleet and instance state; every change goes through its lock.

Times are whole seconds of the rehearsal clock, the resolution that the API shows and the invoice uses. Callers
get copies (`Instance` is frozen): what they hold never changes under them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Protocol

from gpucost.clock import Clock, floor_second
from gpucost.rehearsal.book.records import (
    FROM_INSIDE,
    HOLDING,
    LIVING,
    Ending,
    Fleet,
    Instance,
    Lifecycle,
    Order,
    State,
)
from gpucost.rehearsal.market.market import Market, PoolKey


class TokenReused(ValueError):
    """A client token came again with other parameters."""


class Journal(Protocol):
    """Where every change is written down, in order."""

    def write(self, event: str, **facts: Any) -> None:
        """Append one event."""
        ...


Plan = tuple[list[Order], Callable[[list[list[Instance]]], dict[str, Any]]]
"""Orders, and the function that makes the answer from the instances launched for each of them."""


class Book:
    """The owner of fleets and instances.

    Args:
        market: what is sold and how many.
        clock: the rehearsal clock.
        journal: every change is appended to it, inside the lock, so that it tells the true order.
        visible_s: how long terminated instances are shown, rehearsal seconds.
        new_id: makes ids from a prefix; injected in tests.
    """

    def __init__(
        self,
        market: Market,
        clock: Clock,
        journal: Journal,
        *,
        visible_s: float = 3600.0,
        new_id: Callable[[str], str] = lambda prefix: f"{prefix}-{secrets.token_hex(9)[:17]}",
    ) -> None:
        self._market = market
        self._clock = clock
        self._journal = journal
        self._visible = timedelta(seconds=visible_s)
        self._new_id = new_id
        self._lock = threading.RLock()
        self._instances: dict[str, Instance] = {}
        self._fleets: dict[str, Fleet] = {}
        self._fleet_of_token: dict[str, str] = {}

    def now(self) -> datetime:
        """The present second of the rehearsal clock."""
        return floor_second(self._clock.now())

    def create_fleet(
        self,
        token: str,
        digest: str,
        request: Mapping[str, Any],
        tags: Mapping[str, str],
        plan: Callable[[datetime], Plan],
    ) -> Fleet:
        """Launch what `plan` decides, once for each client token, however many ask at the same time.

        Args:
            token: the client token; empty for none.
            digest: of the request; the same token with another digest is refused.
            request: the parsed request, kept for DescribeFleets.
            tags: of the fleet.
            plan: called inside the lock with the present time: what it sees free is still free when it is launched.

        Raises:
            TokenReused: the token belongs to another request.
        """
        with self._lock:
            known = self._fleets.get(self._fleet_of_token.get(token, ""))
            if known is not None:
                if known.digest != digest:
                    raise TokenReused(token)
                return known
            now = self.now()
            orders, answer = plan(now)
            fleet_id = self._new_id("fleet")
            launched = [self._launch(order, fleet_id, token, now) for order in orders]
            fleet = Fleet(fleet_id, token, digest, now, dict(tags), dict(request), answer(launched))
            self._fleets[fleet_id] = fleet
            if token:
                self._fleet_of_token[token] = fleet_id
            self._journal.write(
                "fleet", id=fleet_id, token=token, at=now, instances=[i.id for group in launched for i in group]
            )
            return fleet

    def _launch(self, order: Order, fleet_id: str, token: str, now: datetime) -> list[Instance]:
        if order.count > self.free(order.pool, order.lifecycle):
            raise ValueError(f"count: got {order.count} of {order.pool}, more than are free: the plan is wrong")
        made = []
        for _ in range(order.count):
            spot = order.lifecycle == "spot"
            instance = Instance(
                id=self._new_id("i"),
                number=len(self._instances),
                fleet_id=fleet_id,
                client_token=token,
                pool=order.pool,
                lifecycle=order.lifecycle,
                spec=order.spec,
                tags={**order.spec.tags, "aws:ec2:fleet-id": fleet_id},
                launched=now,
                spot_request_id=self._new_id("sir")[:12] if spot else None,
                max_price=order.max_price,
            )
            self._instances[instance.id] = instance
            self._journal.write(
                "launch",
                id=instance.id,
                at=now,
                zone=order.pool.zone,
                type=order.pool.instance_type,
                lifecycle=order.lifecycle,
                fleet=fleet_id,
                tags=dict(instance.tags),
            )
            made.append(instance)
        return made

    def free(self, pool: PoolKey, lifecycle: Lifecycle) -> int:
        """How many more instances the pool can hold now."""
        with self._lock:
            held = sum(
                1
                for instance in self._instances.values()
                if instance.pool == pool and instance.lifecycle == lifecycle and instance.state in HOLDING
            )
            return max(0, self._market.capacity(pool, lifecycle) - held)

    def get(self, instance_id: str) -> Instance | None:
        """The instance, or None for an unknown id."""
        with self._lock:
            return self._instances.get(instance_id)

    def every(self) -> list[Instance]:
        """Every instance that ever was, in order of launch."""
        with self._lock:
            return list(self._instances.values())

    def shown(self) -> list[Instance]:
        """What the API shows: everything but what terminated longer ago than `visible_s`."""
        with self._lock:
            oldest = self.now() - self._visible
            return [i for i in self._instances.values() if i.gone is None or i.state == "stopped" or i.gone >= oldest]

    def fleets(self) -> list[Fleet]:
        """Every fleet, in order of creation."""
        with self._lock:
            return list(self._fleets.values())

    def mark_running(self, instance_id: str) -> bool:
        """pending -> running; False when it is not pending any more."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state != "pending":
                return False
            self._set(instance, state="running")
            return True

    def begin_end(self, instance_id: str, ending: Ending, *, abrupt: bool = False) -> Instance | None:
        """Start the end of a living instance: from this second on it is not billed.

        Args:
            instance_id: a known instance.
            ending: why.
            abrupt: the power is cut; otherwise its programs are asked to end first.

        Returns:
            The instance as it was before, or None when it was ending already (the first reason stands).
        """
        with self._lock:
            before = self._instances[instance_id]
            if before.state not in LIVING:
                return None
            stops = ending is FROM_INSIDE and before.spec.shutdown_behavior == "stop"
            state: State = "stopping" if stops else "shutting-down"
            self._set(before, state=state, ending=ending, ended=self.now(), abrupt=abrupt)
            return before

    def mark_ended(self, instance_id: str) -> None:
        """Its last process is gone: shutting-down -> terminated, stopping -> stopped."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state == "shutting-down":
                self._set(instance, state="terminated", gone=self.now())
            elif instance.state == "stopping":
                self._set(instance, state="stopped", gone=self.now())

    def terminate_stopped(self, instance_id: str) -> None:
        """stopped -> terminated: nothing runs any more, it only leaves the list later."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state == "stopped":
                self._set(instance, state="terminated", gone=self.now())

    def give_notice(self, instance_id: str, action_at: datetime) -> Instance | None:
        """Write down that EC2 will interrupt it at `action_at`; None when it has a notice or is ending."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state not in LIVING or instance.action_at is not None:
                return None
            return self._set(instance, notice_at=self.now(), action_at=floor_second(action_at))

    def add_tags(self, ids: Iterable[str], tags: Mapping[str, str]) -> list[str]:
        """Set tags on instances and fleets; returns the ids that are unknown, and then changes nothing."""
        with self._lock:
            ids = list(ids)
            unknown = [i for i in ids if i not in self._instances and i not in self._fleets]
            if unknown:
                return unknown
            for resource in ids:
                if resource in self._instances:
                    instance = self._instances[resource]
                    self._set(instance, tags={**instance.tags, **tags})
                else:
                    fleet = self._fleets[resource]
                    self._fleets[resource] = replace(fleet, tags={**fleet.tags, **tags})
            return []

    def _set(self, instance: Instance, **changes: Any) -> Instance:
        after = replace(instance, **changes)
        self._instances[instance.id] = after
        facts = {key: value.code if isinstance(value, Ending) else value for key, value in changes.items()}
        self._journal.write("change", id=instance.id, at=self.now(), **facts)
        return after
