"""One round of the reaper over all jobs, with the ended leases charged as any other."""

from __future__ import annotations

from gpucost.capacity.lease import LeaseState
from gpucost.capacity.reaper import Finding, Reaper
from gpucost.lifecycle import settlement
from gpucost.lifecycle.services import Services


def reap(services: Services, *, dry_run: bool = False) -> list[Finding]:
    """Find what should not be there and end it.

    Args:
        dry_run: only say what would be ended.

    Returns:
        Every finding; with `ended` set where a lease was acted on.
    """
    reaper = Reaper(services.provider, services.leases, services.clock, services.provider.regions())
    findings = reaper.find(services.jobs.over())
    if dry_run:
        return findings
    done = [reaper.end(finding) for finding in findings]
    for finding in done:
        if finding.ended is not None and finding.ended.state is LeaseState.TERMINATED:
            settlement.settle_attempt(services, finding.ended.job, finding.ended)
    return done
