"""The reaper: whatever happened to those who bought, no machine outlives its purpose.

It ends, after taking the lease over in one step: leases whose job is over, leases past their expiry, leases whose
end was asked for and never confirmed, and machines that carry our tag but belong to no open lease. It never ends a
lease whose job still runs and whose time is not up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

from gpucost.capacity.access import TAG_LEASE
from gpucost.capacity.buyer import Buyer
from gpucost.capacity.lease import Lease, LeaseState, new_owner_token
from gpucost.capacity.providers.base import Machine, Provider
from gpucost.capacity.store import LeaseStore, NotOwner
from gpucost.clock import Clock
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason

GRACE = timedelta(minutes=30)
"""A job's own task ends its machine at the expiry, and asks until the cloud confirms; the reaper comes this later."""


@dataclass(frozen=True)
class Finding:
    """A machine that should not be there.

    Args:
        lease_id: its lease, if it has one.
        instance_id: the machine, if one is known.
        why: what is wrong with it.
        at_stake: what it costs per instance-hour while it stays; None where that is not known.
        owner: who held the lease when it was found; whoever takes it over afterwards has decided to go on with it.
        ended: the lease as it stands after the reaper acted; None for a machine without a lease, or one left alone.
    """

    lease_id: str | None
    instance_id: str | None
    region: str
    why: str
    at_stake: InstanceHourPrice | None
    owner: str | None = None
    ended: Lease | None = None


class Reaper:
    """Finds and ends what should not be there.

    Args:
        provider: sells machines.
        store: the leases' book.
        clock: tells the time.
        regions: where to look for machines with our tag.
        buyer: gives machines back; over the same provider and store.
    """

    def __init__(
        self, provider: Provider, store: LeaseStore, clock: Clock, regions: Iterable[str], buyer: Buyer
    ) -> None:
        self._provider = provider
        self._store = store
        self._clock = clock
        self._regions = tuple(regions)
        self._buyer = buyer
        self.owner = new_owner_token()

    @property
    def regions(self) -> tuple[str, ...]:
        """Where it looks for machines with our tag."""
        return self._regions

    def overdue(self, jobs_over: Iterable[str]) -> list[Finding]:
        """Open leases that should not be there; nothing is changed.

        Args:
            jobs_over: keys of jobs that have ended.
        """
        over = frozenset(jobs_over)
        return [
            Finding(lease.id, lease.instance_id, lease.pool.region, why, lease.price, lease.owner)
            for lease in self._store.open()
            if (why := self._overdue(lease, over))
        ]

    def _overdue(self, lease: Lease, over: frozenset[str]) -> str | None:
        if lease.job in over:
            return "its job is over"
        late = self._clock.now() - GRACE
        if lease.expires_at < late:
            return f"it was to end by {lease.expires_at:%Y-%m-%d %H:%M} UTC"
        asked, event, _ = self._store.history(lease.id)[-1]
        if event == LeaseState.TERMINATING and asked < late:
            return f"its end was asked for at {asked:%Y-%m-%d %H:%M} UTC and is not confirmed"
        return None

    def strays(self, region: str) -> list[Finding]:
        """Machines in `region` that carry our tag but belong to no open lease; nothing is changed.

        Raises:
            ProviderError: the region cannot be asked.
        """
        # Machines first, leases second: an intent is in the books before its machine is bought, so that one bought
        # between the two looks is never taken for a stray.
        machines = self._provider.owned(region)
        known = {lease.id for lease in self._store.open()}
        return [_stray(machine) for machine in machines if machine.tags.get(TAG_LEASE) not in known]

    def end(self, finding: Finding) -> Finding:
        """End one finding; call it again until the cloud confirms."""
        if finding.lease_id is None:
            self._provider.terminate(finding.region, [finding.instance_id] if finding.instance_id else [])
            return finding
        lease = self._store.get(finding.lease_id)
        if lease.owner not in (finding.owner, self.owner):
            return finding
        try:
            if lease.owner != self.owner:
                lease = self._store.adopt(lease, self.owner, self._clock.now())
            lease = self._buyer.release(lease, Reason.CANCELLED)
        except NotOwner:
            return finding
        return replace(finding, instance_id=lease.instance_id, ended=lease)


def _stray(machine: Machine) -> Finding:
    return Finding(
        None,
        machine.instance_id,
        machine.pool.region,
        f"no open lease {machine.tags.get(TAG_LEASE)!r} in the books",
        None,
    )
