"""The decision log: each compromise with its reason, its options, and when somebody looks at it again.

Every placement has its own table; only compromises come here, or the weekly review would drown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from sqlalchemy import select

from gpucost.db.engine import Database
from gpucost.db.tables import DecisionRow, JobRow


class DecisionState(StrEnum):
    """Where a decision is in its life."""

    OPEN = "open"
    REVIEWED = "reviewed"
    CLOSED = "closed"


class Decision(BaseModel):
    """One compromise."""

    model_config = ConfigDict(frozen=True)

    id: int
    job: str | None = Field(description="Key of the job that it was made for; None for one that people wrote.")
    at: AwareDatetime
    author: str
    title: str
    why: str
    options: tuple[dict[str, Any], ...] = Field(description="What else was possible.")
    state: DecisionState
    review_at: AwareDatetime | None
    reviewer: str | None


class DecisionLog:
    """Writes and reads decisions.

    Args:
        db: gpucost's database, migrated.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    def record(
        self,
        title: str,
        why: str,
        options: Sequence[Mapping[str, Any]],
        author: str,
        now: datetime,
        job: str | None = None,
        review_at: datetime | None = None,
        reviewer: str | None = None,
    ) -> int:
        """Write a compromise down; the same title for the same job is written once.

        Args:
            title: what was done, at most 200 characters.
            why: the reason, with its numbers.
            options: what else was possible, values that JSON can hold.
            author: a person, or "gpucost".
            now: when.
            job: the job's key, where it was made for one.
            review_at: when somebody looks at it again.
            reviewer: who does.

        Returns:
            The decision's id; that of the first when it was there already.

        Raises:
            ValueError: `title`, `why` or `author` is empty or too long.
            LookupError: no such job.
        """
        for field, value, most in (("title", title, 200), ("why", why, 10_000), ("author", author, 100)):
            if not value.strip() or len(value) > most:
                raise ValueError(f"{field}: got {len(value)} characters, expected 1 to {most}")
        with self._db.transaction() as session:
            if job is not None:
                # The lock on the job makes two who record at once follow each other.
                locked = select(JobRow.key).where(JobRow.key == job).with_for_update()
                if session.scalar(locked) is None:
                    raise LookupError(f"job: {job!r} has no row; record the job first, or leave job out")
                same = select(DecisionRow.id).where(DecisionRow.job == job, DecisionRow.title == title)
                known = session.scalar(same)
                if known is not None:
                    return known
            row = DecisionRow(
                job=job,
                at=now,
                author=author,
                title=title,
                why=why,
                options=[dict(option) for option in options],
                state=DecisionState.OPEN.value,
                review_at=review_at,
                reviewer=reviewer,
            )
            session.add(row)
            session.flush()
            return row.id

    def open_decisions(self, job: str | None = None) -> list[Decision]:
        """Those that nobody closed or reviewed yet, the soonest to review first, those without a date last."""
        query = select(DecisionRow).where(DecisionRow.state == DecisionState.OPEN.value)
        if job is not None:
            query = query.where(DecisionRow.job == job)
        with self._db.transaction() as session:
            found = [_from_row(row) for row in session.scalars(query.order_by(DecisionRow.id))]
        return sorted(found, key=lambda decision: (decision.review_at is None, decision.review_at or decision.at))

    def get(self, decision_id: int) -> Decision:
        """One decision.

        Raises:
            LookupError: there is none with this id.
        """
        with self._db.transaction() as session:
            return _from_row(_present(session.get(DecisionRow, decision_id), decision_id))

    def move(self, decision_id: int, state: DecisionState, reviewer: str, review_at: datetime | None = None) -> None:
        """Set a decision's state; `review_at` is the next review, where there is one.

        Raises:
            LookupError: there is none with this id.
        """
        with self._db.transaction() as session:
            row = _present(session.get(DecisionRow, decision_id), decision_id)
            row.state, row.reviewer, row.review_at = state.value, reviewer, review_at or row.review_at


def _present(row: DecisionRow | None, decision_id: int) -> DecisionRow:
    if row is None:
        raise LookupError(f"decision: {decision_id} does not exist; list the open ones")
    return row


def _from_row(row: DecisionRow) -> Decision:
    return Decision(
        id=row.id,
        job=row.job,
        at=row.at,
        author=row.author,
        title=row.title,
        why=row.why,
        options=tuple(row.options),
        state=DecisionState(row.state),
        review_at=row.review_at,
        reviewer=row.reviewer,
    )
