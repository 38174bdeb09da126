"""Who owns which instance? The one owner of fleet and instance state; every change goes through its lock.

Times are whole seconds of the rehearsal clock, the resolution that the API shows and the invoice uses. Callers
get copies (`Instance` is frozen): what they hold never changes under them. Every change is in the journal before
the lock is given back; `restore` makes the same book from the journal of an earlier life.
"""

from __future__ import annotations

import functools
import itertools
import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter

from gpucost.clock import Clock, floor_second
from gpucost.rehearsal.book.records import (
    FROM_INSIDE,
    HOLDING,
    LIVING,
    Ending,
    Instance,
    Launch,
    Lifecycle,
    Order,
    State,
)
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.places import PoolKey


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
        on_change: told of each instance before (None for a new one) and after a change, inside the lock: be quick.
        new_id: makes ids from a prefix; injected in tests.
    """

    def __init__(
        self,
        market: Market,
        clock: Clock,
        journal: Journal,
        *,
        visible_s: float = 3600.0,
        on_change: Callable[[Instance | None, Instance], None] = lambda _before, _after: None,
        new_id: Callable[[str], str] = lambda prefix: f"{prefix}-{secrets.token_hex(9)[:17]}",
    ) -> None:
        self._market = market
        self._clock = clock
        self._journal = journal
        self._visible = timedelta(seconds=visible_s)
        self._on_change = on_change
        self._new_id = new_id
        self._lock = threading.RLock()
        self._instances: dict[str, Instance] = {}
        self._holding: dict[str, Instance] = {}
        self._launches: dict[str, Launch] = {}
        self._of_token: dict[tuple[str, str, str], str] = {}
        self._numbers = itertools.count()

    def restore(self, events: Iterable[dict[str, Any]]) -> None:
        """Take up what an earlier life wrote into its journal; events of other kinds are left out."""
        instances: dict[str, dict[str, Any]] = {}
        launches: dict[str, dict[str, Any]] = {}
        for event in events:
            if event["event"] == "launch":
                launches[event["launch"]["id"]] = event["launch"]
                instances |= {one["id"]: one for one in event["instances"]}
            elif event["event"] == "change":
                kept = instances if event["id"] in instances else launches
                kept[event["id"]] |= event["changes"]
        with self._lock:
            for launch in launches.values():
                self._keep_launch(_launches().validate_json(json.dumps(launch)))
            for instance in instances.values():
                self._keep(_instances().validate_json(json.dumps(instance)))
            self._numbers = itertools.count(len(self._instances))

    def now(self) -> datetime:
        """The present second of the rehearsal clock."""
        return floor_second(self._clock.now())

    def launch_once(
        self,
        kind: Literal["fleet", "reservation"],
        region: str,
        token: str,
        digest: str,
        request: Mapping[str, Any],
        tags: Mapping[str, str],
        plan: Callable[[datetime], Plan],
    ) -> Launch:
        """Launch what `plan` decides, once for each client token, however many ask at the same time.

        Args:
            kind: what asks; tokens of one kind and region are apart from those of others.
            region: where.
            token: the client token; empty for none.
            digest: of the request; the same token with another digest is refused.
            request: the parsed request, plain JSON values, kept for DescribeFleets.
            tags: of the fleet.
            plan: called inside the lock with the present time: what it sees free is still free when it is launched.
                What it raises launches nothing and keeps no token.

        Raises:
            TokenReused: the token belongs to another request.
        """
        with self._lock:
            known = self._launches.get(self._of_token.get((kind, region, token), ""))
            if known is not None:
                if known.digest != digest:
                    raise TokenReused(token)
                return known
            now = self.now()
            orders, answer = plan(now)
            self._check(orders, now)
            launch_id = self._new_id("fleet" if kind == "fleet" else "r")
            made = [self._made(order, kind, launch_id, token, now) for order in orders]
            launch = Launch(launch_id, kind, region, token, digest, now, dict(tags), dict(request), answer(made))
            launched = [replace(one, index=index) for index, one in enumerate(one for group in made for one in group)]
            self._journal.write(
                "launch",
                at=now,
                launch=_launches().dump_python(launch, mode="json"),
                instances=[_instances().dump_python(one, mode="json") for one in launched],
            )
            self._keep_launch(launch)
            for instance in launched:
                self._keep(instance)
                self._on_change(None, instance)
            return launch

    def _made(self, order: Order, kind: str, launch_id: str, token: str, now: datetime) -> list[Instance]:
        spot = order.lifecycle == "spot"
        fleet_tag = {"aws:ec2:fleet-id": launch_id} if kind == "fleet" else {}
        return [
            Instance(
                id=self._new_id("i"),
                number=next(self._numbers),
                launch_id=launch_id,
                client_token=token,
                pool=order.pool,
                lifecycle=order.lifecycle,
                spec=order.spec,
                tags={**order.spec.tags, **fleet_tag},
                created=now,
                launched=now,
                spot_request_id=self._new_id("sir")[:12] if spot else None,
                max_price=order.max_price if spot else None,
            )
            for _ in range(order.count)
        ]

    def _check(self, orders: list[Order], now: datetime) -> None:
        wanted = Counter[tuple[PoolKey, Lifecycle]]()
        for order in orders:
            wanted[order.pool, order.lifecycle] += order.count
        for (pool, lifecycle), count in wanted.items():
            if count > self.free(pool, lifecycle, now):
                raise ValueError(f"count: got {count} of {pool}, more than are free: the plan is wrong")

    def free(self, pool: PoolKey, lifecycle: Lifecycle, moment: datetime) -> int:
        """How many more instances the pool can hold at `moment`, if nothing else changes until then."""
        with self._lock:
            held = sum(1 for one in self._holding.values() if one.pool == pool and one.lifecycle == lifecycle)
            return max(0, self._market.capacity(pool, lifecycle, moment) - held)

    def get(self, instance_id: str) -> Instance | None:
        """The instance, or None for an unknown id."""
        with self._lock:
            return self._instances.get(instance_id)

    def every(self) -> list[Instance]:
        """Every instance that ever was, in order of launch."""
        with self._lock:
            return list(self._instances.values())

    def holding(self) -> list[Instance]:
        """Every instance that occupies a place: all whose processes may live, in order of launch."""
        with self._lock:
            return list(self._holding.values())

    def shown(self, region: str | None = None) -> list[Instance]:
        """What the API shows: everything but what terminated longer ago than `visible_s`."""
        with self._lock:
            oldest = self.now() - self._visible
            return [
                one
                for one in self._instances.values()
                if region in {None, one.region} and (one.gone is None or one.state == "stopped" or one.gone >= oldest)
            ]

    def launches(self, kind: Literal["fleet", "reservation"], region: str) -> list[Launch]:
        """Every launch of a kind, in order of creation."""
        with self._lock:
            return [one for one in self._launches.values() if one.kind == kind and one.region == region]

    def delete_launch(self, launch_id: str) -> None:
        """DeleteFleets: the fleet is deleted; its instances are not touched."""
        with self._lock:
            launch = replace(self._launches[launch_id], deleted=self.now())
            self._change(launch_id, _launches().dump_python(launch, mode="json", include={"deleted"}))
            self._keep_launch(launch)

    def launch_late(self, instance_id: str) -> None:
        """A pending instance could not be switched on when it was launched: its launch is now."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state == "pending":
                self._set(instance, launched=self.now())

    def mark_running(self, instance_id: str) -> bool:
        """pending -> running; False when it is not pending any more."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state != "pending":
                return False
            self._set(instance, state="running")
            return True

    def begin_end(
        self, instance_id: str, ending: Ending, *, abrupt: bool = False, at: datetime | None = None
    ) -> Instance | None:
        """Start the end of a living instance: from this second on it is not billed.

        Args:
            instance_id: a known instance.
            ending: why.
            abrupt: the power is cut; otherwise its programs are asked to end first.
            at: when it ended, for one that ended while nobody looked; left out: now.

        Returns:
            The instance as it was before, or None when it was ending already (the first reason stands).
        """
        with self._lock:
            before = self._instances[instance_id]
            if before.state not in LIVING:
                return None
            stops = ending == FROM_INSIDE and before.spec.shutdown_behavior == "stop"
            self._end(before, ending, "stopping" if stops else "shutting-down", at or self.now(), abrupt=abrupt)
            return before

    def begin_stop(self, instance_id: str, ending: Ending) -> Instance | None:
        """StopInstances: like `begin_end`, but the instance can be started again."""
        with self._lock:
            before = self._instances[instance_id]
            if before.state not in LIVING:
                return None
            self._end(before, ending, "stopping", self.now(), abrupt=False)
            return before

    def _end(self, before: Instance, ending: Ending, state: State, at: datetime, *, abrupt: bool) -> None:
        ended = max(floor_second(at), before.launched)
        self._set(before, state=state, ending=ending, ended=ended, abrupt=abrupt)

    def mark_ended(self, instance_id: str) -> None:
        """Its last process is gone: shutting-down -> terminated, stopping -> stopped."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state == "shutting-down":
                self._set(instance, state="terminated", gone=self.now())
            elif instance.state == "stopping":
                self._set(instance, state="stopped", gone=self.now())

    def terminate_stopped(self, instance_id: str) -> None:
        """stopped -> terminated: nothing runs any more, it only leaves the list later; stopping -> shutting-down."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state == "stopped":
                self._set(instance, state="terminated", gone=self.now())
            elif instance.state == "stopping":
                self._set(instance, state="shutting-down")

    def set_shutdown_behavior(self, instance_id: str, behavior: Literal["stop", "terminate"]) -> None:
        """ModifyInstanceAttribute: what a shutdown from inside does from now on."""
        with self._lock:
            instance = self._instances[instance_id]
            self._set(instance, spec=replace(instance.spec, shutdown_behavior=behavior))

    def cancel_spot_request(self, instance_id: str) -> None:
        """CancelSpotInstanceRequests: the request of a living instance is cancelled; the instance is not touched."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state in LIVING and instance.request_cancelled is None:
                self._set(instance, request_cancelled=self.now())

    def start_again(self, instance_id: str) -> Instance | None:
        """stopped -> pending, a new life of the same instance; None when it is not stopped.

        The caller has seen that the pool has a place, inside `locked`.
        """
        with self._lock:
            before = self._instances[instance_id]
            if before.state != "stopped" or before.ended is None:
                return None
            return self._set(
                before,
                state="pending",
                earlier=(*before.earlier, (before.launched, before.ended)),
                launched=self.now(),
                ending=None,
                ended=None,
                gone=None,
                rebalance_at=None,
                notice_at=None,
                action_at=None,
                noticed_for=None,
                abrupt=False,
            )

    @property
    def locked(self) -> threading.RLock:
        """The lock, for callers that look and change in one step: `with book.locked:`."""
        return self._lock

    def recommend_rebalance(self, instance_id: str) -> Instance | None:
        """Write down that EC2 sees a higher risk; None when it said so before, or the instance is ending."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state not in LIVING or instance.rebalance_at is not None:
                return None
            return self._set(instance, rebalance_at=self.now())

    def give_notice(self, instance_id: str, action_at: datetime, ending: Ending | None) -> Instance | None:
        """Write down that EC2 will interrupt it at `action_at`; None when it has a notice or is ending.

        Args:
            instance_id: a known instance.
            action_at: when.
            ending: why; None for a notice that comes to nothing.
        """
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state not in LIVING or instance.action_at is not None:
                return None
            action_at = floor_second(action_at)
            return self._set(instance, notice_at=self.now(), action_at=action_at, noticed_for=ending)

    def withdraw_notice(self, instance_id: str) -> None:
        """The moment of a notice passed and nothing happened: it is as if there had been none."""
        with self._lock:
            instance = self._instances[instance_id]
            if instance.state in LIVING:
                self._set(instance, notice_at=None, action_at=None, noticed_for=None)

    def add_tags(self, ids: Iterable[str], tags: Mapping[str, str]) -> list[str]:
        """Set tags on instances and fleets; returns the ids that are unknown, and then changes nothing."""
        return self._retag(ids, lambda kept: {**kept, **tags})

    def remove_tags(self, ids: Iterable[str], tags: Mapping[str, str | None]) -> list[str]:
        """Remove tags: by key, or by key and value when the value is not None; returns unknown ids as `add_tags`."""
        return self._retag(
            ids, lambda kept: {k: v for k, v in kept.items() if k not in tags or tags[k] not in {None, v}}
        )

    def _retag(self, ids: Iterable[str], change: Callable[[Mapping[str, str]], dict[str, str]]) -> list[str]:
        with self._lock:
            ids = list(ids)
            unknown = [i for i in ids if i not in self._instances and i not in self._launches]
            if unknown:
                return unknown
            for resource in ids:
                if resource in self._instances:
                    instance = self._instances[resource]
                    self._set(instance, tags=change(instance.tags))
                else:
                    launch = replace(self._launches[resource], tags=change(self._launches[resource].tags))
                    self._change(resource, {"tags": dict(launch.tags)})
                    self._keep_launch(launch)
            return []

    def _set(self, instance: Instance, **changes: Any) -> Instance:
        after = replace(instance, **changes)
        self._change(instance.id, _instances().dump_python(after, mode="json", include=set(changes)))
        self._keep(after)
        self._on_change(instance, after)
        return after

    def _change(self, resource: str, changes: dict[str, Any]) -> None:
        self._journal.write("change", id=resource, at=self.now(), changes=changes)

    def _keep(self, instance: Instance) -> None:
        self._instances[instance.id] = instance
        if instance.state in HOLDING:
            self._holding[instance.id] = instance
        else:
            self._holding.pop(instance.id, None)

    def _keep_launch(self, launch: Launch) -> None:
        self._launches[launch.id] = launch
        if launch.client_token:
            self._of_token[launch.kind, launch.region, launch.client_token] = launch.id


@functools.cache
def _instances() -> TypeAdapter[Instance]:
    return TypeAdapter(Instance)


@functools.cache
def _launches() -> TypeAdapter[Launch]:
    return TypeAdapter(Launch)
