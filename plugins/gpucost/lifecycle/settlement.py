"""The end of an attempt and of a job: why it ended, what it cost, what is written where.

Every function here can be called again for the same attempt or job and changes nothing the second time.
"""

from __future__ import annotations

import logging
import math
from datetime import datetime, timedelta
from typing import Any

from gpucost.capacity.lease import Attempt, Lease, LeaseState
from gpucost.capacity.providers.base import Machine
from gpucost.jobstore import ExitRecord, JobStore
from gpucost.ledger.billing import MachineUse
from gpucost.ledger.billing.rule import EndedBy
from gpucost.lifecycle import tracking
from gpucost.lifecycle.services import Services
from gpucost.lifecycle.steps import Event, EventKind
from gpucost.market.pool import CapacityType
from gpucost.placement.planner import Plan
from gpucost.placement.policies.protocol import ActionKind
from gpucost.reasons import Reason

log = logging.getLogger(__name__)

SOURCE = "EC2 DescribeInstances, DescribeSpotPriceHistory"
REVIEW_AFTER = timedelta(days=7)

SEEN_AS = {EventKind.SILENT: Reason.NODE_LOST, EventKind.EXPIRED: Reason.EXPIRED}


def reason_of(store: JobStore, lease: Lease, event: Event | None) -> Reason:
    """Why an attempt ended: by the agent's own word, else by what the cloud says, else by what was seen."""
    record = store.exit_record(lease.attempt)
    if record is not None:
        return record.reason
    if lease.end_reason is not None:
        # What the cloud said, or why its end was asked for, maybe by an earlier try.
        return lease.end_reason
    return SEEN_AS.get(event.kind, Reason.NODE_LOST) if event is not None else Reason.NODE_LOST


def settle_attempt(services: Services, job: str, lease: Lease, event: Event | None = None) -> Attempt:
    """Charge the lease and write down how its attempt ended.

    Args:
        job: the job's key.
        lease: over, as the cloud confirmed.
        event: what was seen.
    """
    store = services.store(job)
    record = store.exit_record(lease.attempt)
    reason = reason_of(store, lease, event)
    for one in services.leases.of_job(job):
        uncharged = one.id == lease.id or services.books.lease_charge(one.id) is None
        if one.attempt == lease.attempt and one.state is LeaseState.TERMINATED and uncharged:
            charge_lease(services, one)
    beat = services.live.read(lease.id)
    now = services.clock.now()
    attempt = Attempt(
        job=job,
        number=lease.attempt,
        started_at=lease.launched_at or lease.requested_at,
        ended_at=lease.ended_at or now,
        reason=reason,
        first_step=beat.resumed_step if beat else None,
        last_step=max(beat.step if beat else 0, record.step if record else 0) if beat or record else None,
        saved_step=_saved(record, beat.saved_step if beat else None),
        message=(record.message if record else event.note if event else "")[:4000],
    )
    services.leases.end_attempt(attempt)
    log.info("Attempt %s ended: %s at step %s %s", attempt.number, reason, attempt.last_step, attempt.message)
    tracking.attempt_ended(services, job, attempt)
    return attempt


def charge_lease(services: Services, lease: Lease) -> None:
    """Charge a lease that is over by what the API shows; nothing where the machine never was launched."""
    if lease.launched_at is None or lease.ended_at is None:
        return
    machine = _machine(services, lease)
    launched_at = lease.launched_at
    if machine is not None and machine.launched_at is not None:
        # A machine that is switched on late shows a later launch than when it was first seen: that one is billed.
        launched_at = min(machine.launched_at, lease.ended_at)
    use = MachineUse(
        launched_at=launched_at,
        ended_at=lease.ended_at,
        capacity_type=lease.pool.capacity_type,
        ended_by=_ended_by(lease, machine),
    )
    history = services.provider.price_history(lease.pool, launched_at, lease.ended_at)
    spot = history if lease.pool.capacity_type is CapacityType.SPOT else []
    on_demand = lease.price if lease.pool.capacity_type is CapacityType.ON_DEMAND else lease.on_demand_price
    charge = services.books.settle(lease, use, spot, on_demand, services.clock.now(), SOURCE)
    log.info("Charged %s for %s s of %s", charge.amount, charge.seconds, lease.pool.key)


def _machine(services: Services, lease: Lease) -> Machine | None:
    if lease.instance_id is None:
        return None
    return services.provider.describe(lease.pool.region, [lease.instance_id]).get(lease.instance_id)


def _ended_by(lease: Lease, machine: Machine | None) -> EndedBy:
    # An agent that leaves on a notice was interrupted, yet its machine ended itself and is billed as such: only the
    # cloud knows. Once the cloud has forgotten the machine, the lease's reason stands in.
    if machine is not None and machine.ended_by is not None:
        return machine.ended_by
    return "provider" if lease.end_reason is Reason.INTERRUPTED else "us"


def note_compromise(services: Services, job: str, plan: Plan, now: datetime) -> None:
    """On-demand because spot would miss the deadline is a compromise; it goes into the decision log."""
    if plan.action.kind is not ActionKind.RUN_ON_DEMAND or plan.chosen is None:
        return
    services.decisions.record(
        title="On-demand instead of spot",
        why=plan.action.reason,
        options=[alternative.as_row() for alternative in plan.ranked[:5]],
        author="gpucost",
        now=now,
        job=job,
        review_at=now + REVIEW_AFTER,
    )


def finish(services: Services, job: str, owner: str, reason: Reason) -> dict[str, Any]:
    """Close the job's books and its MLflow run; where another try works on the job, or it has ended, only report.

    Args:
        job: the job's key.
        owner: owner token of the try that says so.
        reason: how it ended.

    Returns:
        What Airflow keeps: cost, savings, quality, where to look; JSON values, nothing secret.
    """
    report = services.books.report(job)
    attempts = services.leases.attempts(job)
    record = services.store(job).exit_record(attempts[-1].number) if attempts else None
    services.jobs.end(job, owner, reason, services.clock.now())
    if services.jobs.ended_as(job) is reason:
        tracking.job_ended(services, job, reason, report, record)
    run_id, _ = services.jobs.tracked(job)
    for lease in services.leases.of_job(job):
        # A failed job may go on after a clear, and then needs the last word of its nodes.
        if not lease.state.may_cost and reason in (Reason.COMPLETED, Reason.CANCELLED):
            services.live.forget(lease.id)
    return {
        "job": job,
        "reason": str(reason),
        "cost": str(report.cost.amount),
        "currency": report.cost.currency,
        "on_demand": str(report.on_demand.amount) if report.on_demand else None,
        "savings": report.savings,
        "hours": report.hours,
        "interruptions": report.interruptions,
        "lost_steps": report.lost_steps,
        "attempts": len(report.attempts),
        "results": _json_numbers(record.results) if record else {},
        "weights_digest": record.weights_digest if record else None,
        "mlflow_run_id": run_id,
    }


def _json_numbers(results: dict[str, float]) -> dict[str, float | str]:
    """JSON knows no NaN and no infinity; as words, a diverged metric does not lose the whole result."""
    return {name: value if math.isfinite(value) else str(value) for name, value in results.items()}


def _saved(record: ExitRecord | None, beat: int | None) -> int | None:
    return record.saved_step if record is not None and record.saved_step is not None else beat
