"""The reaper: whatever happened to those who bought, no machine outlives its purpose.

It ends, after taking the lease over in one step: leases whose job is over, leases past their expiry, leases whose
end was asked for and never confirmed, and machines that carry our tag but belong to no open lease. It never ends a
lease whose job still runs and whose time is not up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from gpucost.capacity.access import TAG_LEASE
from gpucost.capacity.buyer import Buyer
from gpucost.capacity.lease import Lease, LeaseState, new_owner_token
from gpucost.capacity.providers.base import Machine, Provider
from gpucost.capacity.store import LeaseStore, NotOwner
from gpucost.clock import Clock
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason


@dataclass(frozen=True)
class Finding:
    """A machine that should not be there.

    Args:
        lease_id: its lease, if it has one.
        instance_id: the machine, if one is known.
        why: what is wrong with it.
        at_stake: what it costs per instance-hour while it stays; None where that is not known.
        ended: the lease as it stands after the reaper acted; None for a machine without a lease, or in a dry run.
    """

    lease_id: str | None
    instance_id: str | None
    region: str
    why: str
    at_stake: InstanceHourPrice | None
    ended: Lease | None = None


class Reaper:
    """Finds and ends what should not be there.

    Args:
        provider: sells machines.
        store: the leases' book.
        clock: tells the time.
        regions: where to look for machines with our tag.
    """

    def __init__(self, provider: Provider, store: LeaseStore, clock: Clock, regions: Iterable[str]) -> None:
        self._provider = provider
        self._store = store
        self._clock = clock
        self._regions = tuple(regions)
        self._buyer = Buyer(provider, store, clock)
        self._owner = new_owner_token()

    def find(self, jobs_over: Iterable[str]) -> list[Finding]:
        """What should not be there; nothing is changed.

        Args:
            jobs_over: keys of jobs that have ended.
        """
        over = frozenset(jobs_over)
        now = self._clock.now()
        open_leases = self._store.open()
        found = [
            Finding(lease.id, lease.instance_id, lease.pool.region, why, lease.price)
            for lease in open_leases
            if (why := _overdue(lease, now, over))
        ]
        known = {lease.id for lease in open_leases}
        for region in self._regions:
            found += [
                _stray(machine) for machine in self._provider.owned(region) if machine.tags[TAG_LEASE] not in known
            ]
        return found

    def end(self, finding: Finding) -> Finding:
        """End one finding; call it again until the cloud confirms."""
        if finding.lease_id is None:
            self._provider.terminate(finding.region, [finding.instance_id] if finding.instance_id else [])
            return finding
        lease = self._store.get(finding.lease_id)
        try:
            if lease.owner != self._owner:
                lease = self._store.adopt(lease, self._owner, self._clock.now())
            lease = self._buyer.release(lease, Reason.CANCELLED)
        except NotOwner:
            # Somebody took it over at this moment and will decide; the next round looks again.
            lease = self._store.get(finding.lease_id)
        return Finding(lease.id, lease.instance_id, finding.region, finding.why, finding.at_stake, ended=lease)


def _overdue(lease: Lease, now: datetime, over: frozenset[str]) -> str | None:
    if lease.job in over:
        return "its job is over"
    if lease.state is LeaseState.TERMINATING:
        return "its end was asked for and not confirmed"
    if now > lease.expires_at:
        return f"it was to end by {lease.expires_at:%Y-%m-%d %H:%M} UTC"
    return None


def _stray(machine: Machine) -> Finding:
    return Finding(
        None,
        machine.instance_id,
        machine.pool.region,
        f"no open lease {machine.tags.get(TAG_LEASE)!r} in the books",
        None,
    )
