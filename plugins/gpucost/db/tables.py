"""The tables: jobs, leases with their history, allocations, attempts, placements, charges, decisions.

Rows about money are never changed: a late fact makes a new revision. `docs/reference/tables.md` explains each column
to those who report from here.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

from sqlalchemy import JSON, ForeignKey, Index, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from gpucost.db.types import ExactText, Micros, UtcDateTime

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Every table of gpucost."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar = {datetime: UtcDateTime, dict[str, Any]: JSON, list[dict[str, Any]]: JSON}


class JobRow(Base):
    """One job over all its interruptions, retries and clears."""

    __tablename__ = "gpucost_job"

    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    dag_id: Mapped[str] = mapped_column(String(250))
    run_id: Mapped[str] = mapped_column(String(250))
    task_id: Mapped[str] = mapped_column(String(250))
    map_index: Mapped[int]
    generation: Mapped[int]
    owner: Mapped[str] = mapped_column(String(64))
    tries_allowed: Mapped[int]
    name: Mapped[str] = mapped_column(String(100))
    project: Mapped[str] = mapped_column(String(64))
    team: Mapped[str] = mapped_column(String(64))
    spec: Mapped[dict[str, Any]]
    policy_state: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime]
    deadline: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    reason: Mapped[str | None] = mapped_column(String(40))
    mlflow_run_id: Mapped[str | None] = mapped_column(String(64))
    logged_attempt: Mapped[int] = mapped_column(default=0)
    logged_chunk: Mapped[int] = mapped_column(default=-1)
    logged_steps: Mapped[dict[str, Any]] = mapped_column(default=dict)

    __table_args__ = (UniqueConstraint("dag_id", "run_id", "task_id", "map_index", "generation"),)


class LeaseRow(Base):
    """One machine that we pay for, or may have to; see `capacity.lease.Lease`."""

    __tablename__ = "gpucost_lease"

    id: Mapped[str] = mapped_column(String(160), primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("gpucost_job.key"), index=True)
    attempt: Mapped[int]
    provider: Mapped[str] = mapped_column(String(40))
    region: Mapped[str] = mapped_column(String(40))
    zone: Mapped[str] = mapped_column(String(40))
    zone_id: Mapped[str] = mapped_column(String(40))
    instance_type: Mapped[str] = mapped_column(String(60))
    capacity_type: Mapped[str] = mapped_column(String(20))
    state: Mapped[str] = mapped_column(String(20), index=True)
    owner: Mapped[str] = mapped_column(String(64))
    client_token: Mapped[str] = mapped_column(String(64), unique=True)
    instance_id: Mapped[str | None] = mapped_column(String(64), index=True)
    price: Mapped[Decimal] = mapped_column(ExactText)
    on_demand_price: Mapped[Decimal | None] = mapped_column(ExactText)
    currency: Mapped[str] = mapped_column(String(3))
    requested_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    launched_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None] = mapped_column(String(40))


class LeaseEventRow(Base):
    """One transition of a lease: what, when, by whom."""

    __tablename__ = "gpucost_lease_event"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    lease_id: Mapped[str] = mapped_column(ForeignKey("gpucost_lease.id"), index=True)
    at: Mapped[datetime]
    event: Mapped[str] = mapped_column(String(40))
    owner: Mapped[str] = mapped_column(String(64))
    note: Mapped[str] = mapped_column(Text, default="")


class AllocationRow(Base):
    """Which job has which share of which lease, and when."""

    __tablename__ = "gpucost_allocation"

    lease_id: Mapped[str] = mapped_column(ForeignKey("gpucost_lease.id"), primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("gpucost_job.key"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    share: Mapped[Decimal] = mapped_column(ExactText)
    start: Mapped[datetime]
    end: Mapped[datetime | None]


class AttemptRow(Base):
    """One run of the program; its number is the fencing number."""

    __tablename__ = "gpucost_attempt"

    job: Mapped[str] = mapped_column(ForeignKey("gpucost_job.key"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    reason: Mapped[str | None] = mapped_column(String(40))
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    saved_step: Mapped[int | None]
    message: Mapped[str] = mapped_column(Text, default="")


class PlacementRow(Base):
    """One decision of the planner, with its ranked alternatives and its reason."""

    __tablename__ = "gpucost_placement"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(ForeignKey("gpucost_job.key"), index=True)
    at: Mapped[datetime]
    policy: Mapped[str] = mapped_column(String(60))
    action: Mapped[str] = mapped_column(String(20))
    pool: Mapped[str | None] = mapped_column(String(160))
    reason: Mapped[str] = mapped_column(Text)
    expected_cost: Mapped[Decimal | None] = mapped_column(Micros)
    currency: Mapped[str] = mapped_column(String(3))
    alternatives: Mapped[list[dict[str, Any]]]


class ChargeRow(Base):
    """What one lease cost one job, by one kind; frozen. A late fact makes the next revision."""

    __tablename__ = "gpucost_charge"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    lease_id: Mapped[str] = mapped_column(ForeignKey("gpucost_lease.id"))
    job: Mapped[str] = mapped_column(ForeignKey("gpucost_job.key"))
    kind: Mapped[str] = mapped_column(String(20))
    revision: Mapped[int] = mapped_column(default=1)
    amount: Mapped[Decimal] = mapped_column(Micros)
    on_demand_amount: Mapped[Decimal | None] = mapped_column(Micros)
    currency: Mapped[str] = mapped_column(String(3))
    fx_rate: Mapped[Decimal] = mapped_column(ExactText, default=Decimal(1))
    start: Mapped[datetime]
    end: Mapped[datetime]
    seconds: Mapped[int]
    rule: Mapped[str] = mapped_column(String(60))
    source: Mapped[str] = mapped_column(Text)
    as_of: Mapped[datetime]
    lines: Mapped[list[dict[str, Any]]]

    __table_args__ = (
        UniqueConstraint("lease_id", "job", "kind", "revision"),
        Index("ix_gpucost_charge_job", "job"),
    )


class DecisionRow(Base):
    """A compromise: what was done, why, what else was possible, until when, who reviews it."""

    __tablename__ = "gpucost_decision"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job: Mapped[str | None] = mapped_column(ForeignKey("gpucost_job.key"), index=True)
    at: Mapped[datetime]
    author: Mapped[str] = mapped_column(String(100))
    title: Mapped[str] = mapped_column(String(200))
    why: Mapped[str] = mapped_column(Text)
    options: Mapped[list[dict[str, Any]]]
    state: Mapped[str] = mapped_column(String(20))
    review_at: Mapped[datetime | None]
    reviewer: Mapped[str | None] = mapped_column(String(100))

    __table_args__ = (UniqueConstraint("job", "title"),)
