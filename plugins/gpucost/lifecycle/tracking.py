"""Telling MLflow how a job goes. MLflow being away fails nothing and loses nothing: what was not told is told later.

The last piece of metrics that is known to be there stands in the database, so that whoever goes on (the hub, a
resumed task, the end of the job) reads and sends just what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from gpucost.capacity.lease import Attempt, Lease
from gpucost.job import JobId, TrainingJob
from gpucost.jobstore import ExitRecord, MetricPoint
from gpucost.ledger.report import JobReport
from gpucost.lifecycle.jobs import Logged
from gpucost.lifecycle.services import Services
from gpucost.reasons import Reason
from gpucost.tracking.mlflow_tracker import RunStatus, Tracker, TrackingAway

log = logging.getLogger(__name__)

T = TypeVar("T")

CHUNKS_AT_ONCE = 100
"""Pieces of metrics read and sent together: what a failure makes us read again."""

STATUS = {Reason.COMPLETED: RunStatus.FINISHED, Reason.CANCELLED: RunStatus.KILLED}


def job_began(services: Services, job_id: JobId, job: TrainingJob) -> None:
    """Open the job's run, or find it again."""
    _told(services, job_id.key, lambda tracker: _open_run(services, tracker, job_id, job))


def forward_metrics(services: Services, key: str) -> bool:
    """Send the metrics that nodes have uploaded and MLflow does not have yet.

    Returns:
        Whether MLflow has all of them now; False: it was away.
    """

    def tell(tracker: Tracker) -> bool:
        run_id, logged = _run_of(services, tracker, key)
        for attempt, chunk, points in _unsent(services, key, logged):
            logged = Logged(attempt, chunk, tracker.log_points(run_id, points, logged.steps))
            services.jobs.set_logged(key, logged)
        return True

    return services.tracker is None or _told(services, key, tell) is True


def _unsent(services: Services, key: str, logged: Logged) -> Iterator[tuple[int, int, list[MetricPoint]]]:
    """The metrics after those in `logged`, in order: attempt, its last chunk among them, points."""
    store = services.store(key)
    for attempt in services.leases.attempts(key):
        if attempt.number < logged.attempt:
            continue
        after = logged.chunk if attempt.number == logged.attempt else -1
        while chunks := store.metrics(attempt.number, after, most=CHUNKS_AT_ONCE):
            after = chunks[-1][0]
            yield attempt.number, after, [point for _, chunk in chunks for point in chunk]
            if len(chunks) < CHUNKS_AT_ONCE:
                break


def attempt_ended(services: Services, key: str, attempt: Attempt) -> None:
    """Write the attempt's child run and close it."""

    def tell(tracker: Tracker) -> None:
        run_id, _ = _run_of(services, tracker, key)
        lease = _lease_of(services, key, attempt.number)
        tags: dict[str, object] = {"gpucost.reason": attempt.reason or ""}
        if lease is not None:
            tags |= {"gpucost.pool": lease.pool.key, "gpucost.instance_id": lease.instance_id or ""}
        child = tracker.attempt_run(run_id, attempt.number, tags=tags, started_at=attempt.started_at)
        charge = services.books.lease_charge(lease.id) if lease is not None else None
        if charge is not None:
            tracker.log_costs(child, attempt.last_step or 0, {_cost_name(charge.amount.currency): charge.amount})
        completed = attempt.reason is Reason.COMPLETED
        tracker.close(child, RunStatus.FINISHED if completed else RunStatus.KILLED, attempt.ended_at)

    forward_metrics(services, key)
    _told(services, key, tell)


def job_ended(services: Services, key: str, reason: Reason, report: JobReport, record: ExitRecord | None) -> str | None:
    """Log quality and dollars side by side, store the report, and close the job's run.

    Returns:
        The run's id, or None where nothing is tracked.
    """
    last_step = max((line.last_step or 0 for line in report.attempts), default=0)

    def tell(tracker: Tracker) -> str:
        run_id, _ = _run_of(services, tracker, key)
        costs: dict[str, float] = {
            _cost_name(report.cost.currency): float(report.cost.amount),
            "gpucost.machine_hours": report.hours,
            "gpucost.interruptions": report.interruptions,
            "gpucost.lost_steps": report.lost_steps,
        }
        if report.savings is not None:
            costs["gpucost.savings"] = report.savings
        tracker.log_costs(run_id, last_step, costs)
        if record is not None:
            tracker.log_costs(run_id, last_step, {f"final.{name}": value for name, value in record.results.items()})
            tracker.set_tags(run_id, {"gpucost.weights_digest": record.weights_digest or ""})
        tracker.set_tags(run_id, {"gpucost.reason": reason})
        tracker.log_text(run_id, "gpucost/report.md", report.markdown())
        tracker.close(run_id, STATUS.get(reason, RunStatus.FAILED))
        return run_id

    forward_metrics(services, key)
    _told(services, key, tell)
    return services.jobs.tracked(key)[0]


def _run_of(services: Services, tracker: Tracker, key: str) -> tuple[str, Logged]:
    """The job's run and which metrics it has; opened now if MLflow was away when the job began."""
    run_id, logged = services.jobs.tracked(key)
    if run_id is not None:
        return run_id, logged
    job_id, job, _ = services.jobs.load(key)
    return _open_run(services, tracker, job_id, job), logged


def _open_run(services: Services, tracker: Tracker, job_id: JobId, job: TrainingJob) -> str:
    run_id = tracker.job_run(
        job_id.key,
        project=job.project,
        name=job.name,
        params={
            "program": job.program,
            "arguments": " ".join(job.arguments),
            "seed": job.seed,
            "world_size": job.world_size,
            "threads": job.threads,
            "gpu_count": job.gpu.count,
            **{f"recipe.{name}": value for name, value in job.recipe.chosen().items()},
        },
        tags={
            "gpucost.team": job.team,
            "gpucost.dag_id": job_id.dag_id,
            "gpucost.dag_run_id": job_id.run_id,
            "gpucost.deadline": job.deadline.isoformat(),
        },
    )
    services.jobs.set_tracked(job_id.key, run_id)
    return run_id


def _told(services: Services, key: str, tell: Callable[[Tracker], T]) -> T | None:
    """Tell MLflow; being away is a warning, and whoever comes next tells what is missing."""
    if services.tracker is None:
        return None
    try:
        return tell(services.tracker)
    except TrackingAway as away:
        log.warning("Job %s: MLflow was not told this time: %s", key, away)
        return None


def _lease_of(services: Services, key: str, attempt: int) -> Lease | None:
    leases = [lease for lease in services.leases.of_job(key) if lease.attempt == attempt and lease.instance_id]
    return leases[-1] if leases else None


def _cost_name(currency: str) -> str:
    return f"gpucost.cost_{currency.lower()}"
