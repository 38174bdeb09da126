"""Between the tables and the ledger's own types: rows in, rows out, and which revision counts."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, aliased

from gpucost.capacity.lease import Allocation
from gpucost.db.tables import AllocationRow, AttemptRow, ChargeRow, LeaseRow
from gpucost.ledger.charge import Charge, ChargeKind, ChargeLine
from gpucost.ledger.report import AttemptFacts, LeaseFacts
from gpucost.money import Money


def to_row(charge: Charge, revision: int) -> ChargeRow:
    """A charge as the row of one revision."""
    return ChargeRow(
        lease_id=charge.lease_id,
        job=charge.job,
        kind=charge.kind.value,
        revision=revision,
        amount=charge.amount.amount,
        on_demand_amount=charge.on_demand_amount.amount if charge.on_demand_amount else None,
        currency=charge.amount.currency,
        fx_rate=Decimal(1),
        start=charge.start,
        end=charge.end,
        seconds=charge.seconds,
        rule=charge.rule,
        source=charge.source,
        as_of=charge.as_of,
        lines=[line.model_dump(mode="json") for line in charge.lines],
    )


def from_row(row: ChargeRow) -> Charge:
    """The charge that a row holds."""
    on_demand = row.on_demand_amount
    return Charge(
        lease_id=row.lease_id,
        job=row.job,
        kind=ChargeKind(row.kind),
        amount=Money(amount=row.amount, currency=row.currency),
        on_demand_amount=None if on_demand is None else Money(amount=on_demand, currency=row.currency),
        start=row.start,
        end=row.end,
        seconds=row.seconds,
        rule=row.rule,
        source=row.source,
        as_of=row.as_of,
        lines=tuple(ChargeLine.model_validate(line) for line in row.lines),
    )


def newest_only(*wanted: ColumnElement[bool]) -> list[ColumnElement[bool]]:
    """`wanted`, and no later revision of the same charge exists."""
    later = aliased(ChargeRow)
    superseded = select(later.id).where(
        later.lease_id == ChargeRow.lease_id,
        later.job == ChargeRow.job,
        later.kind == ChargeRow.kind,
        later.revision > ChargeRow.revision,
    )
    return [*wanted, ~superseded.exists()]


def newest(session: Session, *wanted: ColumnElement[bool]) -> list[ChargeRow]:
    """The rows that count among those `wanted`, oldest first."""
    query = select(ChargeRow).where(*newest_only(*wanted)).order_by(ChargeRow.start, ChargeRow.id)
    return list(session.scalars(query))


def allocations_of(session: Session, lease_ids: Sequence[str]) -> list[Allocation]:
    """Who had which part of these leases."""
    rows = session.scalars(select(AllocationRow).where(AllocationRow.lease_id.in_(lease_ids)))
    return [
        Allocation(
            lease_id=row.lease_id, job=row.job, attempt=row.attempt, share=row.share, start=row.start, end=row.end
        )
        for row in rows
    ]


def leases_of(session: Session, job: str) -> list[tuple[LeaseRow, int]]:
    """The leases that `job` had a part of or that were bought for it, each with the attempt that it served first."""
    served = (
        select(AllocationRow.lease_id, func.min(AllocationRow.attempt).label("attempt"))
        .where(AllocationRow.job == job)
        .group_by(AllocationRow.lease_id)
        .subquery()
    )
    query = (
        select(LeaseRow, func.coalesce(served.c.attempt, LeaseRow.attempt))
        .outerjoin(served, served.c.lease_id == LeaseRow.id)
        .where((LeaseRow.job == job) | served.c.lease_id.is_not(None))
        .order_by(LeaseRow.requested_at)
    )
    return [(lease, number) for lease, number in session.execute(query)]


def attempt_facts(row: AttemptRow) -> AttemptFacts:
    """An attempt, for the report."""
    return AttemptFacts(
        number=row.number,
        started_at=row.started_at,
        ended_at=row.ended_at,
        reason=row.reason,
        first_step=row.first_step,
        last_step=row.last_step,
        saved_step=row.saved_step,
    )


def lease_facts(row: LeaseRow, attempt: int) -> LeaseFacts:
    """A lease, for the report."""
    pool = f"{row.provider}/{row.zone_id}/{row.instance_type}/{row.capacity_type}"
    return LeaseFacts(id=row.id, attempt=attempt, pool=pool, launched_at=row.launched_at, ended_at=row.ended_at)
