"""One round of the reaper over all jobs; what it ends is charged and written down as any other end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gpucost.capacity.lease import Lease, LeaseState
from gpucost.capacity.providers.base import ProviderError
from gpucost.capacity.reaper import Finding, Reaper
from gpucost.job import JobId
from gpucost.lifecycle import settlement
from gpucost.lifecycle.services import Services
from gpucost.reasons import Reason

log = logging.getLogger(__name__)

LOOKS = 20
LOOK_SECONDS = 2.0
"""How often, and how many real seconds apart, one round looks whether the cloud confirms an end."""


def reap(
    services: Services,
    *,
    is_wanted: Callable[[JobId], bool] = lambda _job: True,
    dry_run: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Finding]:
    """Find what should not be there and end it.

    Args:
        is_wanted: whether anybody still comes back to a job; where Airflow cannot be asked, every job counts as wanted.
        dry_run: only say what would be ended.
        sleep: waits real seconds.

    Returns:
        Every finding; with `ended` set where a lease was acted on.

    Raises:
        ProviderError: the cloud refused something; raised after everything else was done.
    """
    refused: list[ProviderError] = []
    reaper = Reaper(services.provider, services.leases, services.clock, services.provider.regions(), services.buyer)
    abandoned = {job for job in _unclosed_jobs(services) if _abandoned(services, job, reaper, is_wanted, dry_run)}
    jobs_over = abandoned | set(services.jobs.over())
    findings = _find(reaper, jobs_over, refused)
    if not dry_run:
        findings = _end(reaper, findings, refused, sleep)
        gone = [one.ended for one in findings if one.ended is not None and one.ended.state is LeaseState.TERMINATED]
        earlier = [lease for lease in services.leases.unsettled() if lease.job in jobs_over]
        _settle(services, gone + [lease for lease in earlier if lease not in gone], refused)
        for job in abandoned - _unclosed_jobs(services):
            if services.jobs.ended_as(job) is None:
                settlement.finish(services, job, reaper.owner, Reason.CANCELLED)
    if refused:
        raise refused[0]
    return findings


def _abandoned(services: Services, job: str, reaper: Reaper, is_wanted: Callable[[JobId], bool], dry_run: bool) -> bool:
    """Whether nobody comes back to a job; if so it is taken over, so that a try that was forgotten can do nothing."""
    seen = services.jobs.owner(job)
    if is_wanted(services.jobs.load(job)[0]):
        return False
    return dry_run or services.jobs.take_over(job, seen, reaper.owner)


def _find(reaper: Reaper, jobs_over: set[str], refused: list[ProviderError]) -> list[Finding]:
    findings = reaper.overdue(jobs_over)
    for region in reaper.regions:
        try:
            findings += reaper.strays(region)
        except ProviderError as error:
            log.warning("Region %s was not searched for machines without a lease: %s", region, error)
            refused.append(error)
    return findings


def _end(
    reaper: Reaper, findings: list[Finding], refused: list[ProviderError], sleep: Callable[[float], None]
) -> list[Finding]:
    """End all, and look until the cloud confirms; one that the cloud refuses does not keep the others alive."""
    done: list[Finding] = []
    waiting = findings
    errors: list[ProviderError] = []
    for look in range(LOOKS + 1):
        if not waiting:
            break
        if look:
            sleep(LOOK_SECONDS)
        again: list[Finding] = []
        errors = []
        for finding in waiting:
            try:
                acted = reaper.end(finding)
            except ProviderError as error:
                log.warning("%s was not ended: %s", finding.instance_id or finding.lease_id, error)
                errors.append(error)
                again.append(finding)
            else:
                (again if _may_still_cost(acted) else done).append(acted)
        waiting = again
    refused += errors
    return done + waiting


def _settle(services: Services, leases: list[Lease], refused: list[ProviderError]) -> None:
    """Charge what is over, also what an earlier round ended and did not come to charge."""
    for lease in leases:
        try:
            settlement.settle_attempt(services, lease.job, lease)
        except ProviderError as error:
            log.warning("Lease %s was not charged yet: %s", lease.id, error)
            refused.append(error)


def _may_still_cost(finding: Finding) -> bool:
    return finding.ended is not None and finding.ended.state.may_cost


def _unclosed_jobs(services: Services) -> set[str]:
    """Keys of the jobs for which a machine may run, or is gone and not charged."""
    return {lease.job for lease in services.leases.open() + services.leases.unsettled()}
