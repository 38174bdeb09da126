"""One round of the reaper over all jobs; what it ends is charged and written down as any other end."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpucost.capacity.lease import LeaseState
from gpucost.capacity.reaper import Finding, Reaper
from gpucost.job import JobId
from gpucost.lifecycle import settlement
from gpucost.lifecycle.services import Services
from gpucost.reasons import Reason

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
    """
    abandoned = {job for job in _open_jobs(services) if not is_wanted(services.jobs.load(job)[0])}
    reaper = Reaper(services.provider, services.leases, services.clock, services.provider.regions())
    findings = reaper.find(abandoned | set(services.jobs.over()))
    if dry_run:
        return findings
    done = [reaper.end(finding) for finding in findings]
    for _ in range(LOOKS):
        if not any(_may_still_cost(finding) for finding in done):
            break
        sleep(LOOK_SECONDS)
        done = [reaper.end(finding) if _may_still_cost(finding) else finding for finding in done]
    for finding in done:
        if finding.ended is not None and finding.ended.state is LeaseState.TERMINATED:
            settlement.settle_attempt(services, finding.ended.job, finding.ended)
    for job in abandoned - _open_jobs(services):
        if services.jobs.ended_as(job) is None:
            settlement.finish(services, job, Reason.CANCELLED)
    return done


def _may_still_cost(finding: Finding) -> bool:
    return finding.ended is not None and finding.ended.state.may_cost


def _open_jobs(services: Services) -> set[str]:
    return {lease.job for lease in services.leases.open()}
