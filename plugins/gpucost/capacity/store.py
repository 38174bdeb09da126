"""The leases' book: every step is one compare-and-set, and leaves a row in the history.

Two who act on one lease at once cannot both succeed: a step names the states it may start from and the owner
token it acts under, in the statement itself.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from gpucost.capacity.lease import ALLOWED, Allocation, Attempt, Lease, LeaseState
from gpucost.db.engine import Database
from gpucost.db.tables import AllocationRow, AttemptRow, JobRow, LeaseEventRow, LeaseRow
from gpucost.market.pool import CapacityType, Pool
from gpucost.money import InstanceHourPrice
from gpucost.reasons import RULES, Reason


class NotOwner(RuntimeError):
    """Somebody else holds the lease now, or it has moved on; whoever gets this leaves it alone."""


class LeaseStore:
    """Leases, attempts and allocations in the database.

    Args:
        database: gpucost's own.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def intend(self, lease: Lease) -> None:
        """Write the intent, before the cloud is called.

        Raises:
            NotOwner: another try works on the job now, or it has ended; nothing may be bought for it.
        """
        with self._db.transaction() as session:
            # Writing the owner to itself locks the row: no other try can take the job over before the intent is there.
            held = session.execute(
                update(JobRow)
                .where(JobRow.key == lease.job, JobRow.owner == lease.owner, JobRow.ended_at.is_(None))
                .values(owner=lease.owner)
            )
            if held.rowcount != 1:  # type: ignore[attr-defined]
                raise NotOwner(f"job {lease.job}: {lease.owner} does not work on it any more; nothing was bought")
            session.add(_row(lease))
            session.flush()
            session.add(
                AllocationRow(
                    lease_id=lease.id, job=lease.job, attempt=lease.attempt, share=Decimal(1), start=lease.requested_at
                )
            )
            _note(session, lease.id, lease.requested_at, LeaseState.REQUESTED, lease.owner, lease.pool.key)

    def activate(self, lease: Lease, instance_id: str, launched_at: datetime | None, now: datetime) -> Lease:
        """The cloud sold it: note the instance.

        Raises:
            NotOwner: it was taken over, or ended, in the meantime.
        """
        changes = {"instance_id": instance_id, "launched_at": launched_at}
        with self._db.transaction() as session:
            _step(session, lease, LeaseState.ACTIVE, now, note=instance_id, **changes)
            _allocated_from(session, lease.id, launched_at or now)
        return self.get(lease.id)

    def fail(self, lease: Lease, reason: Reason, note: str, now: datetime) -> Lease:
        """Nothing was bought, and nothing can come of it any more."""
        with self._db.transaction() as session:
            _step(session, lease, LeaseState.FAILED, now, note=note, end_reason=str(reason))
        return self.get(lease.id)

    def terminating(self, lease: Lease, reason: Reason, now: datetime) -> Lease:
        """We want its end; asked for until the cloud confirms."""
        with self._db.transaction() as session:
            _step(session, lease, LeaseState.TERMINATING, now, note=str(reason), end_reason=str(reason))
        return self.get(lease.id)

    def terminated(self, lease: Lease, instance_id: str, ended_at: datetime, reason: Reason, now: datetime) -> Lease:
        """The cloud confirms the machine's end at `ended_at`."""
        values = {"instance_id": instance_id, "ended_at": ended_at, "end_reason": str(reason)}
        with self._db.transaction() as session:
            _step(session, lease, LeaseState.TERMINATED, now, note=str(reason), **values)
            session.execute(
                update(AllocationRow)
                .where(AllocationRow.lease_id == lease.id, AllocationRow.end.is_(None))
                .values(end=ended_at)
            )
        return self.get(lease.id)

    def seen(self, lease: Lease, launched_at: datetime) -> Lease:
        """Note the launch time that the cloud's API shows, once it does; the first word stands."""
        with self._db.transaction() as session:
            changed = session.execute(
                update(LeaseRow)
                .where(LeaseRow.id == lease.id, LeaseRow.launched_at.is_(None))
                .values(launched_at=launched_at)
            )
            if changed.rowcount == 1:  # type: ignore[attr-defined]
                _allocated_from(session, lease.id, launched_at)
        return self.get(lease.id)

    def adopt(self, lease: Lease, new_owner: str, now: datetime) -> Lease:
        """Take a lease over from the owner that `lease` names; from then on the old owner's steps are refused.

        Raises:
            NotOwner: somebody else was faster.
        """
        with self._db.transaction() as session:
            changed = session.execute(
                update(LeaseRow).where(LeaseRow.id == lease.id, LeaseRow.owner == lease.owner).values(owner=new_owner)
            )
            if changed.rowcount != 1:  # type: ignore[attr-defined]
                raise NotOwner(f"lease {lease.id}: no longer held by {lease.owner}; not adopted")
            _note(session, lease.id, now, "adopted", new_owner, f"from {lease.owner}")
        return self.get(lease.id)

    def get(self, lease_id: str) -> Lease:
        """One lease.

        Raises:
            KeyError: there is none of that id.
        """
        with self._db.transaction() as session:
            row = session.get(LeaseRow, lease_id)
            if row is None:
                raise KeyError(f"lease: none with id {lease_id!r}")
            return _lease(row)

    def of_job(self, job: str) -> list[Lease]:
        """All leases of a job, oldest first."""
        return self._select(LeaseRow.job == job)

    def open(self, job: str | None = None) -> list[Lease]:
        """Leases for which a machine may be running and billed; of one job, or all."""
        states = [state for state in LeaseState if state.may_cost]
        conditions: list[Any] = [LeaseRow.state.in_([str(state) for state in states])]
        if job is not None:
            conditions.append(LeaseRow.job == job)
        return self._select(*conditions)

    def unsettled(self) -> list[Lease]:
        """Leases whose machine is gone, while nobody has written down how their attempt ended."""
        with self._db.transaction() as session:
            rows = session.scalars(
                select(LeaseRow)
                .join(AttemptRow, (AttemptRow.job == LeaseRow.job) & (AttemptRow.number == LeaseRow.attempt))
                .where(LeaseRow.state == str(LeaseState.TERMINATED), AttemptRow.ended_at.is_(None))
                .order_by(LeaseRow.requested_at)
            ).all()
            return [_lease(row) for row in rows]

    def refused_between(self, since: datetime, now: datetime) -> list[tuple[Lease, datetime]]:
        """Leases that ended without our wish since then, with the moment: pools to leave out for a while."""
        ended = [str(reason) for reason, rule in RULES.items() if rule.leave_out_hours > 0]
        with self._db.transaction() as session:
            rows = session.execute(
                select(LeaseRow, LeaseEventRow.at)
                .join(LeaseEventRow, LeaseEventRow.lease_id == LeaseRow.id)
                .where(
                    LeaseRow.end_reason.in_(ended),
                    LeaseEventRow.event.in_([str(LeaseState.FAILED), str(LeaseState.TERMINATED)]),
                    LeaseEventRow.at >= since,
                    LeaseEventRow.at <= now,
                )
            ).all()
            return [(_lease(row), at) for row, at in rows]

    def history(self, lease_id: str) -> list[tuple[datetime, str, str]]:
        """A lease's transitions: when, what, note."""
        with self._db.transaction() as session:
            rows = session.scalars(
                select(LeaseEventRow).where(LeaseEventRow.lease_id == lease_id).order_by(LeaseEventRow.id)
            ).all()
            return [(row.at, row.event, row.note) for row in rows]

    def begin_attempt(self, attempt: Attempt) -> None:
        """Write down that an attempt begins; writing it again changes nothing."""
        with self._db.transaction() as session:
            if session.get(AttemptRow, (attempt.job, attempt.number)) is None:
                session.add(AttemptRow(job=attempt.job, number=attempt.number, started_at=attempt.started_at))

    def end_attempt(self, attempt: Attempt) -> None:
        """Write down how it ended; the first word stands."""
        with self._db.transaction() as session:
            row = session.get(AttemptRow, (attempt.job, attempt.number))
            if row is None or row.ended_at is not None:
                return
            row.ended_at, row.reason = attempt.ended_at, str(attempt.reason)
            row.first_step, row.last_step, row.saved_step = attempt.first_step, attempt.last_step, attempt.saved_step
            row.message = attempt.message

    def attempts(self, job: str) -> list[Attempt]:
        """A job's attempts, in order."""
        with self._db.transaction() as session:
            rows = session.scalars(select(AttemptRow).where(AttemptRow.job == job).order_by(AttemptRow.number)).all()
            return [_attempt(row) for row in rows]

    def allocations(self, lease_id: str) -> list[Allocation]:
        """Who has which share of a lease."""
        with self._db.transaction() as session:
            rows = session.scalars(select(AllocationRow).where(AllocationRow.lease_id == lease_id)).all()
            return [
                Allocation(lease_id=r.lease_id, job=r.job, attempt=r.attempt, share=r.share, start=r.start, end=r.end)
                for r in rows
            ]

    def _select(self, *conditions: Any) -> list[Lease]:
        with self._db.transaction() as session:
            rows = session.scalars(select(LeaseRow).where(*conditions).order_by(LeaseRow.requested_at)).all()
            return [_lease(row) for row in rows]


def _step(session: Session, lease: Lease, to: LeaseState, now: datetime, *, note: str, **values: Any) -> None:
    """One step of the state machine, as a compare-and-set under the lease's owner token."""
    sources = [str(state) for state, following in ALLOWED.items() if to in following]
    changed = session.execute(
        update(LeaseRow)
        .where(LeaseRow.id == lease.id, LeaseRow.owner == lease.owner, LeaseRow.state.in_(sources))
        .values(state=str(to), **values)
    )
    if changed.rowcount != 1:  # type: ignore[attr-defined]
        row = session.get(LeaseRow, lease.id)
        found = f"state {row.state}, owner {row.owner}" if row else "no such lease"
        raise NotOwner(f"lease {lease.id}: {to} refused to {lease.owner} ({found})")
    _note(session, lease.id, now, to, lease.owner, note)


def _note(session: Session, lease_id: str, at: datetime, event: str, owner: str, note: str) -> None:
    session.add(LeaseEventRow(lease_id=lease_id, at=at, event=str(event), owner=owner, note=note))


def _allocated_from(session: Session, lease_id: str, start: datetime) -> None:
    session.execute(update(AllocationRow).where(AllocationRow.lease_id == lease_id).values(start=start))


def _row(lease: Lease) -> LeaseRow:
    pool = lease.pool
    return LeaseRow(
        id=lease.id,
        job=lease.job,
        attempt=lease.attempt,
        provider=pool.provider,
        region=pool.region,
        zone=pool.zone,
        zone_id=pool.zone_id,
        instance_type=pool.instance_type,
        capacity_type=str(pool.capacity_type),
        state=str(lease.state),
        owner=lease.owner,
        client_token=lease.client_token,
        price=lease.price.amount,
        on_demand_price=lease.on_demand_price.amount if lease.on_demand_price else None,
        currency=lease.price.currency,
        requested_at=lease.requested_at,
        expires_at=lease.expires_at,
    )


def _lease(row: LeaseRow) -> Lease:
    return Lease(
        id=row.id,
        job=row.job,
        attempt=row.attempt,
        pool=Pool(
            provider=row.provider,
            region=row.region,
            zone=row.zone,
            zone_id=row.zone_id,
            instance_type=row.instance_type,
            capacity_type=CapacityType(row.capacity_type),
        ),
        state=LeaseState(row.state),
        owner=row.owner,
        client_token=row.client_token,
        instance_id=row.instance_id,
        price=InstanceHourPrice(amount=row.price, currency=row.currency),
        on_demand_price=(
            InstanceHourPrice(amount=row.on_demand_price, currency=row.currency) if row.on_demand_price else None
        ),
        requested_at=row.requested_at,
        expires_at=row.expires_at,
        launched_at=row.launched_at,
        ended_at=row.ended_at,
        end_reason=Reason(row.end_reason) if row.end_reason else None,
    )


def _attempt(row: AttemptRow) -> Attempt:
    return Attempt(
        job=row.job,
        number=row.number,
        started_at=row.started_at,
        ended_at=row.ended_at,
        reason=Reason(row.reason) if row.reason else None,
        first_step=row.first_step,
        last_step=row.last_step,
        saved_step=row.saved_step,
        message=row.message,
    )
