"""Buying and giving back one machine, so that a crash at any line leaves something that can be found again.

    buy:      intent row -> CreateFleet (idempotent by token) -> active row
    release:  "terminating" row -> TerminateInstances, again and again -> the cloud confirms -> "terminated" row

Both can be called again from any point in between, by whoever owns the lease then.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

from gpucost.capacity.access import TAG_ATTEMPT, TAG_EXPIRES, TAG_JOB, TAG_LEASE
from gpucost.capacity.lease import Lease, LeaseState, new_lease_id
from gpucost.capacity.providers.base import LaunchRequest, Machine, Provider, ProviderError
from gpucost.capacity.store import LeaseStore
from gpucost.clock import Clock
from gpucost.market.quote import Quote
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason, Then, rule_for

UNSEEN_GRACE = timedelta(minutes=10)
"""How long an order whose answer was lost may still turn up under its token before it counts as not bought."""

LEAST_REAL_GRACE = timedelta(seconds=60)
"""Never less than this in real time: a request may take 30 s, and a new machine be invisible for as long after it."""

NOT_OUR_DOING = {"provider": Reason.INTERRUPTED, "self": Reason.SELF_ENDED}


def unseen_grace(speed: float) -> timedelta:
    """The grace on a clock that runs `speed` times as fast as real time: on a fast one, 10 minutes are a moment."""
    return max(UNSEEN_GRACE, LEAST_REAL_GRACE * speed)


class Buyer:
    """Buys from and gives back to one provider.

    Args:
        provider: sells machines.
        store: the leases' book.
        clock: tells the time.
        grace: how long what was bought may be invisible, on that clock; see `unseen_grace`.
    """

    def __init__(self, provider: Provider, store: LeaseStore, clock: Clock, grace: timedelta = UNSEEN_GRACE) -> None:
        self._provider = provider
        self._store = store
        self._clock = clock
        self._grace = grace

    def intend(
        self,
        job: str,
        attempt: int,
        quote: Quote,
        on_demand: InstanceHourPrice | None,
        owner: str,
        expires_at: datetime,
    ) -> Lease:
        """Write down what is about to be bought."""
        now = self._clock.now()
        lease_id = new_lease_id(job, attempt, now)
        lease = Lease(
            id=lease_id,
            job=job,
            attempt=attempt,
            pool=quote.pool,
            state=LeaseState.REQUESTED,
            owner=owner,
            client_token=hashlib.sha256(lease_id.encode()).hexdigest()[:32],
            price=quote.price,
            on_demand_price=on_demand,
            requested_at=now,
            expires_at=expires_at,
        )
        self._store.intend(lease)
        return lease

    def buy(self, lease: Lease) -> Lease:
        """Carry out an intent: ask the cloud under the lease's token; asking twice buys once.

        Raises:
            ProviderError: not bought; the lease is `failed`, or, when nobody answered, still `requested`, to be
                asked again under the same token.
        """
        try:
            machine = self._provider.launch(self._request(lease))
        except ProviderError as error:
            # Nobody answered: the order may have been carried out. Only a clear no ends the intent.
            if error.reason is not Reason.CLOUD_ERROR:
                self._store.fail(lease, error.reason, str(error), self._clock.now())
            raise
        return self._store.activate(lease, machine.instance_id, machine.launched_at, self._clock.now())

    def look_up(self, lease: Lease) -> Lease:
        """What became of an intent whose answer was lost: find the machine by its token.

        An intent for which nothing turns up within the grace is `failed`.
        """
        if lease.state is not LeaseState.REQUESTED:
            return lease
        asked = self._clock.now()
        machine = self._provider.find(lease.pool.region, lease.client_token)
        now = self._clock.now()
        if machine is not None:
            return self._store.activate(lease, machine.instance_id, machine.launched_at, now)
        if self._may_turn_up(lease.requested_at, asked):
            return lease
        return self._store.fail(lease, Reason.CLOUD_ERROR, "no machine turned up under its token", now)

    def release(self, lease: Lease, reason: Reason) -> Lease:
        """Ask for the machine's end, and note it when the cloud confirms; call it again until it is over.

        Returns:
            The lease: `terminated` or `failed` when it is over, `terminating` while the cloud has not confirmed.
        """
        lease = self.look_up(lease)
        if not lease.state.may_cost:
            return lease
        machine = self._look(lease)
        if machine is not None and machine.over:
            return self.confirm(lease, machine, reason)
        if lease.state is not LeaseState.TERMINATING:
            lease = self._store.terminating(lease, reason, self._clock.now())
        if lease.instance_id is None:
            return self._release_unseen(lease)
        self._provider.terminate(lease.pool.region, [lease.instance_id])
        asked = self._clock.now()
        machine = self._look(lease)
        if machine is None:
            return self._forgotten(lease, lease.instance_id, reason, asked)
        return self.confirm(lease, machine, reason) if machine.over else lease

    def confirm(self, lease: Lease, machine: Machine, reason: Reason) -> Lease:
        """Note the end that the cloud confirms, at the time that it shows.

        Args:
            reason: why, if it was ended by us; an interruption, or a shutdown from inside, the cloud tells itself.
        """
        if machine.launched_at is not None and lease.launched_at is None:
            lease = self._store.seen(lease, machine.launched_at)
        why = NOT_OUR_DOING.get(machine.ended_by or "us", reason)
        now = self._clock.now()
        return self._store.terminated(lease, machine.instance_id, machine.ended_at or now, why, now)

    def _look(self, lease: Lease) -> Machine | None:
        if lease.instance_id is None:
            return None
        return self._provider.describe(lease.pool.region, [lease.instance_id]).get(lease.instance_id)

    def _may_turn_up(self, bought: datetime, asked: datetime) -> bool:
        """Whether a look that began at `asked` may have been too early; how long its answer took says nothing."""
        return asked - bought <= self._grace

    def _forgotten(self, lease: Lease, instance_id: str, reason: Reason, asked: datetime) -> Lease:
        # The API answers and no longer knows it: EC2 forgets a machine about an hour after its end. When that was is
        # not known; it is charged until now, and at most until its expiry, when the node ends itself.
        if self._may_turn_up(lease.launched_at or lease.requested_at, asked):
            return lease
        now = self._clock.now()
        return self._store.terminated(lease, instance_id, min(now, lease.expires_at), reason, now)

    def _release_unseen(self, lease: Lease) -> Lease:
        # Terminating, but no machine known: it may still turn up under its token, until the grace is over.
        asked = self._clock.now()
        machine = self._provider.find(lease.pool.region, lease.client_token)
        if machine is None:
            if self._may_turn_up(lease.requested_at, asked):
                return lease
            now = self._clock.now()
            return self._store.fail(lease, Reason.CANCELLED, "no machine turned up under its token", now)
        if not machine.over:
            self._provider.terminate(lease.pool.region, [machine.instance_id])
            return lease
        return self.confirm(lease, machine, Reason.CANCELLED)

    def _request(self, lease: Lease) -> LaunchRequest:
        return LaunchRequest(
            pool=lease.pool,
            client_token=lease.client_token,
            tags={
                "Name": f"gpucost {lease.job}",
                TAG_LEASE: lease.id,
                TAG_JOB: lease.job,
                TAG_ATTEMPT: str(lease.attempt),
                TAG_EXPIRES: lease.expires_at.isoformat(timespec="seconds"),
            },
            max_price=lease.on_demand_price,
        )


def may_ask_elsewhere(error: ProviderError) -> bool:
    """Whether another pool may serve what this one refused."""
    return rule_for(error.reason).then is Then.ASK_AGAIN
