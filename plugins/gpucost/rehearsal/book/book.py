"""Who owns which instance? The one owner of fleet and instance state; every change goes through its lock.

Times are whole seconds of the rehearsal clock, the resolution that the API shows and the invoice uses. Callers
get copies (`Instance` is frozen): what they hold never changes under them. Every change is in the journal before
the lock is given back; `restore` makes the same book from the journal of an earlier life.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal

from gpucost.clock import Clock, floor_second
from gpucost.rehearsal.book.launching import Plan as Plan
from gpucost.rehearsal.book.launching import TokenReused as TokenReused
from gpucost.rehearsal.book.launching import check, instances_of
from gpucost.rehearsal.book.pages import Journal, Pages
from gpucost.rehearsal.book.records import FROM_INSIDE, LIVING, Ending, Instance, Launch, Lifecycle, State
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.places import PoolKey

VISIBLE_FLOOR_REAL_S = 60.0
"""A terminated instance is shown for at least that long: at high speeds an hour is over before anybody asks."""


def visible_s(wanted_s: float, speed: float) -> float:
    """How long a terminated instance is shown, rehearsal seconds: `wanted_s`, or the floor of 60 real seconds."""
    return max(wanted_s, VISIBLE_FLOOR_REAL_S * speed)


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
        self._visible = timedelta(seconds=visible_s)
        self._new_id = new_id
        self._lock = threading.RLock()
        self._pages = Pages(journal, self.now, on_change)
        self._numbers = itertools.count()

    def restore(self, events: Iterable[dict[str, Any]]) -> None:
        """Take up what an earlier life wrote into its journal; events of other kinds are left out."""
        with self._lock:
            self._pages.restore(events)
            self._numbers = itertools.count(self._pages.next_number())

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
            known = self._pages.of_token(kind, region, token)
            if known is not None:
                if known.digest != digest:
                    raise TokenReused(token)
                return known
            now = self.now()
            orders, answer = plan(now)
            check(orders, lambda pool, lifecycle: self.free(pool, lifecycle, now))
            launch_id = self._new_id("fleet" if kind == "fleet" else "r")
            launch = Launch(launch_id, kind, region, token, digest, now, dict(tags), dict(request), answer={})
            made = [instances_of(order, launch, lambda: next(self._numbers), self._new_id) for order in orders]
            launch = replace(launch, answer=answer(made))
            in_order = (one for group in made for one in group)
            self._pages.add(launch, [replace(one, index=index) for index, one in enumerate(in_order)])
            return launch

    def free(self, pool: PoolKey, lifecycle: Lifecycle, moment: datetime) -> int:
        """How many more instances the pool can hold at `moment`, if nothing else changes until then."""
        with self._lock:
            held = sum(1 for one in self._pages.holding.values() if one.pool == pool and one.lifecycle == lifecycle)
            return max(0, self._market.capacity(pool, lifecycle, moment) - held)

    def get(self, instance_id: str) -> Instance | None:
        """The instance, or None for an unknown id."""
        with self._lock:
            return self._pages.instances.get(instance_id)

    def every(self) -> list[Instance]:
        """Every instance that ever was, in order of launch."""
        with self._lock:
            return list(self._pages.instances.values())

    def holding(self) -> list[Instance]:
        """Every instance that occupies a place: all whose processes may live, in order of launch."""
        with self._lock:
            return list(self._pages.holding.values())

    def shown(self, region: str | None = None) -> list[Instance]:
        """What the API shows: everything but what terminated longer ago than `visible_s`."""
        with self._lock:
            oldest = self.now() - self._visible
            return [
                one
                for one in self._pages.instances.values()
                if region in {None, one.region} and (one.gone is None or one.state == "stopped" or one.gone >= oldest)
            ]

    def launches(self, kind: Literal["fleet", "reservation"], region: str) -> list[Launch]:
        """Every launch of a kind, in order of creation."""
        with self._lock:
            return [one for one in self._pages.launches.values() if one.kind == kind and one.region == region]

    def delete_launch(self, launch_id: str) -> None:
        """DeleteFleets: the fleet is deleted; its instances are not touched."""
        with self._lock:
            self._pages.change_launch(self._pages.launches[launch_id], deleted=self.now())

    def mark_on(self, instance_id: str) -> Instance | None:
        """The first process of a pending instance lives: this is its launch, and what is billed begins now.

        A busy host switches machines on some time after they were sold. Until then the API shows the second of the
        sale as LaunchTime, as in the answer of RunInstances; afterwards it shows this one.

        Returns:
            The instance as it is now; None when it is not pending any more, or was on already.
        """
        with self._lock:
            instance = self._pages.instances[instance_id]
            if instance.state != "pending" or instance.on:
                return None
            now = self.now()
            late = {"launched": now} if now != instance.launched else {}
            return self._pages.change(instance, on=True, **late)

    def mark_running(self, instance_id: str) -> bool:
        """pending -> running; False when it is not pending any more."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            if instance.state != "pending":
                return False
            self._pages.change(instance, state="running")
            return True

    def begin_end(
        self, instance_id: str, ending: Ending, *, abrupt: bool = False, at: datetime | None = None
    ) -> Instance | None:
        """Start the end of a living instance: from this second on it is not billed.

        A shutdown from inside ends a spot instance for good, whatever its shutdown behavior is: only those of
        persistent requests can be stopped. Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/, pages
        spot-request-status.html and using-spot-instances-request.html, "Stop a Spot Instance".

        Args:
            instance_id: a known instance.
            ending: why.
            abrupt: the power is cut; otherwise its programs are asked to end first.
            at: when it ended, for one that ended while nobody looked; left out: now.

        Returns:
            The instance as it was before, or None when it was ending already (the first reason stands).
        """
        with self._lock:
            before = self._pages.instances[instance_id]
            if before.state not in LIVING:
                return None
            # a spot instance of a one-time request, and there are no others here, cannot be stopped
            stops = ending == FROM_INSIDE and before.spec.shutdown_behavior == "stop" and before.lifecycle != "spot"
            self._end(before, ending, "stopping" if stops else "shutting-down", at or self.now(), abrupt=abrupt)
            return before

    def begin_stop(self, instance_id: str, ending: Ending) -> Instance | None:
        """StopInstances: like `begin_end`, but the instance can be started again."""
        with self._lock:
            before = self._pages.instances[instance_id]
            if before.state not in LIVING:
                return None
            self._end(before, ending, "stopping", self.now(), abrupt=False)
            return before

    def _end(self, before: Instance, ending: Ending, state: State, at: datetime, *, abrupt: bool) -> None:
        ended = max(floor_second(at), before.launched)
        # what was never switched on has not lived, and no second of it is billed
        never_on = {"launched": ended} if before.waits_for_power else {}
        self._pages.change(before, state=state, ending=ending, ended=ended, abrupt=abrupt, **never_on)

    def mark_ended(self, instance_id: str) -> None:
        """Its last process is gone: shutting-down -> terminated, stopping -> stopped."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            if instance.state == "shutting-down":
                self._pages.change(instance, state="terminated", gone=self.now())
            elif instance.state == "stopping":
                self._pages.change(instance, state="stopped", gone=self.now())

    def terminate_stopped(self, instance_id: str) -> None:
        """stopped -> terminated: nothing runs any more, it only leaves the list later; stopping -> shutting-down."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            if instance.state == "stopped":
                self._pages.change(instance, state="terminated", gone=self.now())
            elif instance.state == "stopping":
                self._pages.change(instance, state="shutting-down")

    def set_shutdown_behavior(self, instance_id: str, behavior: Literal["stop", "terminate"]) -> None:
        """ModifyInstanceAttribute: what a shutdown from inside does from now on."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            self._pages.change(instance, spec=replace(instance.spec, shutdown_behavior=behavior))

    def delete_volume(self, instance_id: str, device: str) -> None:
        """DeleteVolume: a volume that outlived its instance ends now."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            self._pages.change(instance, deleted_volumes={**instance.deleted_volumes, device: self.now()})

    def tag_volume(self, instance_id: str, device: str, tags: Mapping[str, str]) -> None:
        """CreateTags, DeleteTags: all the tags that a volume has from now on."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            self._pages.change(instance, volume_tags={**instance.volume_tags, device: dict(tags)})

    def cancel_spot_request(self, instance_id: str) -> None:
        """CancelSpotInstanceRequests: the request of a living instance is cancelled; the instance is not touched."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            if instance.state in LIVING and instance.request_cancelled is None:
                self._pages.change(instance, request_cancelled=self.now())

    def start_again(self, instance_id: str) -> Instance | None:
        """stopped -> pending, a new life of the same instance; None when it is not stopped.

        The caller has seen that the pool has a place, inside `locked`.
        """
        with self._lock:
            before = self._pages.instances[instance_id]
            if before.state != "stopped" or before.ended is None:
                return None
            return self._pages.change(
                before,
                state="pending",
                earlier=(*before.earlier, (before.launched, before.ended)),
                launched=self.now(),
                on=False,
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
            instance = self._pages.instances[instance_id]
            if instance.state not in LIVING or instance.rebalance_at is not None:
                return None
            return self._pages.change(instance, rebalance_at=self.now())

    def give_notice(self, instance_id: str, action_at: datetime, ending: Ending | None) -> Instance | None:
        """Write down that EC2 will interrupt it at `action_at`; None when it has a notice or is ending.

        A notice that comes to nothing does not shield from a real one, which takes its place.

        Args:
            instance_id: a known instance.
            action_at: when.
            ending: why; None for a notice that comes to nothing.
        """
        with self._lock:
            instance = self._pages.instances[instance_id]
            if instance.state not in LIVING or instance.noticed_for is not None:
                return None
            if instance.action_at is not None and ending is None:
                return None
            action_at = floor_second(action_at)
            return self._pages.change(instance, notice_at=self.now(), action_at=action_at, noticed_for=ending)

    def withdraw_notice(self, instance_id: str) -> None:
        """The moment of a notice passed and nothing happened: it is as if there had been none."""
        with self._lock:
            instance = self._pages.instances[instance_id]
            if instance.state in LIVING:
                self._pages.change(instance, notice_at=None, action_at=None, noticed_for=None)

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
            return self._pages.retag(list(ids), change)
