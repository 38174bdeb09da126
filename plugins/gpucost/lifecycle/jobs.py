"""The jobs' book: which generation a task is in, its specification, its placements, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import select, tuple_, update

from gpucost.db.engine import Database
from gpucost.db.tables import JobRow, PlacementRow
from gpucost.job import JobId, TrainingJob
from gpucost.placement.planner import Plan
from gpucost.reasons import Reason


@dataclass(frozen=True)
class Logged:
    """How far MLflow has a job's metrics.

    Args:
        attempt: number of the attempt whose metrics were sent last; 0: none were.
        chunk: index of that attempt's chunk that was sent last.
        steps: metric as MLflow names it -> the highest step that it has there.
    """

    attempt: int = 0
    chunk: int = -1
    steps: Mapping[str, int] = field(default_factory=dict)


class Jobs:
    """Jobs and their placements in the database.

    Args:
        database: gpucost's own.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def current(self, task: JobId, tries_allowed: int) -> JobId:
        """The job that a try of `task` works on: one that succeeded is followed, after a clear, by the next generation.

        Args:
            task: the task, of any generation.
            tries_allowed: Airflow's `max_tries`, which grows when a task is cleared and stays when it is retried. A
                retry after the job succeeded (its worker died before it could say so) finds the same job, done.
        """
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
            cleared = tries_allowed > newest.tries_allowed
            return found.next_generation() if newest.reason == Reason.COMPLETED and cleared else found

    def begin(self, job_id: JobId, job: TrainingJob, owner: str, tries_allowed: int, now: datetime) -> None:
        """Write the job down, or open it again with what is wanted now; from here on only `owner` works on it."""
        spec = job.model_dump(mode="json")
        with self._db.transaction() as session:
            row = session.get(JobRow, job_id.key)
            if row is not None:
                row.spec, row.deadline, row.ended_at, row.reason = spec, job.deadline, None, None
                row.owner, row.tries_allowed = owner, tries_allowed
                return
            session.add(
                JobRow(
                    key=job_id.key,
                    **job_id.model_dump(),
                    owner=owner,
                    tries_allowed=tries_allowed,
                    name=job.name,
                    project=job.project,
                    team=job.team,
                    spec=spec,
                    created_at=now,
                    deadline=job.deadline,
                )
            )

    def known(self, key: str) -> bool:
        """Whether the job was ever begun."""
        with self._db.transaction() as session:
            return session.get(JobRow, key) is not None

    def owner(self, key: str) -> str:
        """Owner token of the try that works on the job."""
        return self._get(key).owner

    def take_over(self, key: str, seen: str, owner: str) -> bool:
        """Make `owner` the job's, if it is still the one that was `seen`; says whether it is."""
        with self._db.transaction() as session:
            changed = session.execute(update(JobRow).where(JobRow.key == key, JobRow.owner == seen).values(owner=owner))
            return bool(changed.rowcount)  # type: ignore[attr-defined]

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

    def end(self, key: str, owner: str, reason: Reason, now: datetime) -> bool:
        """Write down how the job ended, as the try that works on it; the first word stands until it is begun again.

        Returns:
            Whether this was the word; False for a job that has ended, or that another try goes on with.
        """
        with self._db.transaction() as session:
            changed = session.execute(
                update(JobRow)
                .where(JobRow.key == key, JobRow.owner == owner, JobRow.ended_at.is_(None))
                .values(ended_at=now, reason=str(reason))
            )
            return bool(changed.rowcount)  # type: ignore[attr-defined]

    def ended_as(self, key: str) -> Reason | None:
        """How the job ended; None while it goes on, or before it was begun."""
        with self._db.transaction() as session:
            reason = session.scalar(select(JobRow.reason).where(JobRow.key == key))
        return Reason(reason) if reason else None

    def over(self) -> list[str]:
        """Keys of the jobs that have ended."""
        with self._db.transaction() as session:
            return list(session.scalars(select(JobRow.key).where(JobRow.ended_at.is_not(None))).all())

    def policy_state(self, key: str) -> dict[str, Any] | None:
        """The policy's memory after the last plan."""
        return self._get(key).policy_state

    def remember(self, key: str, policy_state: dict[str, Any]) -> None:
        """Keep the policy's memory after a decision that changed nothing."""
        self._set(key, policy_state=policy_state)

    def tracked(self, key: str) -> tuple[str | None, Logged]:
        """The job's MLflow run, and which metrics are there."""
        row = self._get(key)
        return row.mlflow_run_id, Logged(row.logged_attempt, row.logged_chunk, row.logged_steps)

    def set_tracked(self, key: str, run_id: str) -> None:
        """Note the MLflow run."""
        self._set(key, mlflow_run_id=run_id)

    def set_logged(self, key: str, logged: Logged) -> None:
        """Note which metrics are in MLflow; when two send at once, the one that is further counts."""
        reached = tuple_(JobRow.logged_attempt, JobRow.logged_chunk)
        with self._db.transaction() as session:
            session.execute(
                update(JobRow)
                .where(JobRow.key == key, reached < (logged.attempt, logged.chunk))
                .values(logged_attempt=logged.attempt, logged_chunk=logged.chunk, logged_steps=dict(logged.steps))
            )

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
