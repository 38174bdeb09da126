"""The jobs' book: which generation a task is in, its specification, its placements, how it ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import select, update

from gpucost.db.engine import Database
from gpucost.db.tables import JobRow, PlacementRow
from gpucost.job import JobId, TrainingJob
from gpucost.placement.planner import Plan
from gpucost.reasons import Reason


class Jobs:
    """Jobs and their placements in the database.

    Args:
        database: gpucost's own.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def current(self, task: JobId) -> JobId:
        """The job that a try of `task` works on: a job that succeeded is followed by the next generation."""
        with self._db.transaction() as session:
            newest = session.scalars(
                select(JobRow)
                .where(
                    JobRow.dag_id == task.dag_id,
                    JobRow.run_id == task.run_id,
                    JobRow.task_id == task.task_id,
                    JobRow.map_index == task.map_index,
                )
                .order_by(JobRow.generation.desc())
                .limit(1)
            ).first()
            if newest is None:
                return task
            found = task.model_copy(update={"generation": newest.generation})
            return found.next_generation() if newest.reason == Reason.COMPLETED else found

    def begin(self, job_id: JobId, job: TrainingJob, now: datetime) -> None:
        """Write the job down, or open it again with what is wanted now."""
        spec = job.model_dump(mode="json")
        with self._db.transaction() as session:
            row = session.get(JobRow, job_id.key)
            if row is not None:
                row.spec, row.deadline, row.ended_at, row.reason = spec, job.deadline, None, None
                return
            session.add(
                JobRow(
                    key=job_id.key,
                    **job_id.model_dump(),
                    name=job.name,
                    project=job.project,
                    team=job.team,
                    spec=spec,
                    created_at=now,
                    deadline=job.deadline,
                )
            )

    def load(self, key: str) -> tuple[JobId, TrainingJob, datetime]:
        """The job as it was begun, and when.

        Raises:
            KeyError: there is none of that key.
        """
        row = self._get(key)
        names = ("dag_id", "run_id", "task_id", "map_index", "generation")
        return (
            JobId(**{name: getattr(row, name) for name in names}),
            TrainingJob.model_validate(row.spec),
            row.created_at,
        )

    def end(self, key: str, reason: Reason, now: datetime) -> None:
        """Write down how the job ended; the first word stands until the job is begun again."""
        with self._db.transaction() as session:
            session.execute(
                update(JobRow)
                .where(JobRow.key == key, JobRow.ended_at.is_(None))
                .values(ended_at=now, reason=str(reason))
            )

    def ended_as(self, key: str) -> Reason | None:
        """How the job ended; None while it goes on."""
        reason = self._get(key).reason
        return Reason(reason) if reason else None

    def over(self) -> list[str]:
        """Keys of the jobs that have ended."""
        with self._db.transaction() as session:
            return list(session.scalars(select(JobRow.key).where(JobRow.ended_at.is_not(None))).all())

    def policy_state(self, key: str) -> dict[str, Any] | None:
        """The policy's memory after the last plan."""
        return self._get(key).policy_state

    def tracked(self, key: str) -> tuple[str | None, int]:
        """The job's MLflow run, and the last step whose metrics are there."""
        row = self._get(key)
        return row.mlflow_run_id, row.logged_step

    def set_tracked(self, key: str, run_id: str, logged_step: int) -> None:
        """Note the MLflow run and the last step whose metrics are there."""
        self._set(key, mlflow_run_id=run_id, logged_step=logged_step)

    def place(self, key: str, plan: Plan, now: datetime) -> None:
        """Write down a decision with its alternatives, and the policy's memory after it."""
        chosen = plan.chosen
        with self._db.transaction() as session:
            session.add(
                PlacementRow(
                    job=key,
                    at=now,
                    policy=plan.policy,
                    action=plan.action.kind.name.lower(),
                    pool=chosen.quote.pool.key if chosen else None,
                    reason=plan.action.reason,
                    expected_cost=chosen.expected_cost.amount if chosen else None,
                    currency=plan.ranked[0].quote.price.currency,
                    alternatives=[alternative.as_row() for alternative in plan.ranked]
                    + [{"pool": pool, "verdict": f"left out: {why}"} for pool, why in plan.left_out],
                )
            )
            session.execute(update(JobRow).where(JobRow.key == key).values(policy_state=plan.policy_state))

    def placements(self, key: str) -> list[PlacementRow]:
        """The job's decisions, in order."""
        with self._db.transaction() as session:
            return list(
                session.scalars(select(PlacementRow).where(PlacementRow.job == key).order_by(PlacementRow.id)).all()
            )

    def _get(self, key: str) -> JobRow:
        with self._db.transaction() as session:
            row = session.get(JobRow, key)
            if row is None:
                raise KeyError(f"job: none with key {key!r}")
            return row

    def _set(self, key: str, **values: Any) -> None:
        with self._db.transaction() as session:
            session.execute(update(JobRow).where(JobRow.key == key).values(**values))
