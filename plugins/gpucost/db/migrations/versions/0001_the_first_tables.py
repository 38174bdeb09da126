"""The first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

import gpucost.db.types

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gpucost_job",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("dag_id", sa.String(length=250), nullable=False),
        sa.Column("run_id", sa.String(length=250), nullable=False),
        sa.Column("task_id", sa.String(length=250), nullable=False),
        sa.Column("map_index", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("tries_allowed", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("policy_state", sa.JSON(), nullable=True),
        sa.Column("created_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("deadline", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("ended_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("mlflow_run_id", sa.String(length=64), nullable=True),
        sa.Column("logged_attempt", sa.Integer(), nullable=False),
        sa.Column("logged_chunk", sa.Integer(), nullable=False),
        sa.Column("logged_steps", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_gpucost_job")),
        sa.UniqueConstraint(
            "dag_id",
            "run_id",
            "task_id",
            "map_index",
            "generation",
            name=op.f("uq_gpucost_job_dag_id_run_id_task_id_map_index_generation"),
        ),
    )
    op.create_table(
        "gpucost_attempt",
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("started_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("ended_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("first_step", sa.Integer(), nullable=True),
        sa.Column("last_step", sa.Integer(), nullable=True),
        sa.Column("saved_step", sa.Integer(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["gpucost_job.key"], name=op.f("fk_gpucost_attempt_job")),
        sa.PrimaryKeyConstraint("job", "number", name=op.f("pk_gpucost_attempt")),
    )
    op.create_table(
        "gpucost_decision",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job", sa.String(length=128), nullable=True),
        sa.Column("at", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("author", sa.String(length=100), nullable=False),
        sa.Column("title", sa.String(length=200), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("review_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("reviewer", sa.String(length=100), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["gpucost_job.key"], name=op.f("fk_gpucost_decision_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpucost_decision")),
        sa.UniqueConstraint("job", "title", name=op.f("uq_gpucost_decision_job_title")),
    )
    with op.batch_alter_table("gpucost_decision", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gpucost_decision_job"), ["job"], unique=False)

    op.create_table(
        "gpucost_lease",
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("provider", sa.String(length=40), nullable=False),
        sa.Column("region", sa.String(length=40), nullable=False),
        sa.Column("zone", sa.String(length=40), nullable=False),
        sa.Column("zone_id", sa.String(length=40), nullable=False),
        sa.Column("instance_type", sa.String(length=60), nullable=False),
        sa.Column("capacity_type", sa.String(length=20), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("client_token", sa.String(length=64), nullable=False),
        sa.Column("instance_id", sa.String(length=64), nullable=True),
        sa.Column("price", gpucost.db.types.ExactText(length=40), nullable=False),
        sa.Column("on_demand_price", gpucost.db.types.ExactText(length=40), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("requested_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("expires_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("launched_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("ended_at", gpucost.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.String(length=40), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["gpucost_job.key"], name=op.f("fk_gpucost_lease_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpucost_lease")),
        sa.UniqueConstraint("client_token", name=op.f("uq_gpucost_lease_client_token")),
    )
    with op.batch_alter_table("gpucost_lease", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gpucost_lease_instance_id"), ["instance_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_gpucost_lease_job"), ["job"], unique=False)
        batch_op.create_index(batch_op.f("ix_gpucost_lease_state"), ["state"], unique=False)

    op.create_table(
        "gpucost_placement",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("at", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("policy", sa.String(length=60), nullable=False),
        sa.Column("action", sa.String(length=20), nullable=False),
        sa.Column("pool", sa.String(length=160), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("expected_cost", gpucost.db.types.Micros(), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("alternatives", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["gpucost_job.key"], name=op.f("fk_gpucost_placement_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpucost_placement")),
    )
    with op.batch_alter_table("gpucost_placement", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gpucost_placement_job"), ["job"], unique=False)

    op.create_table(
        "gpucost_allocation",
        sa.Column("lease_id", sa.String(length=160), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("share", gpucost.db.types.ExactText(length=40), nullable=False),
        sa.Column("start", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("end", gpucost.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["gpucost_job.key"], name=op.f("fk_gpucost_allocation_job")),
        sa.ForeignKeyConstraint(["lease_id"], ["gpucost_lease.id"], name=op.f("fk_gpucost_allocation_lease_id")),
        sa.PrimaryKeyConstraint("lease_id", "job", "attempt", name=op.f("pk_gpucost_allocation")),
    )
    op.create_table(
        "gpucost_charge",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("lease_id", sa.String(length=160), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("amount", gpucost.db.types.Micros(), nullable=False),
        sa.Column("on_demand_amount", gpucost.db.types.Micros(), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("fx_rate", gpucost.db.types.ExactText(length=40), nullable=False),
        sa.Column("start", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("end", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Integer(), nullable=False),
        sa.Column("rule", sa.String(length=60), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("as_of", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("lines", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["gpucost_job.key"], name=op.f("fk_gpucost_charge_job")),
        sa.ForeignKeyConstraint(["lease_id"], ["gpucost_lease.id"], name=op.f("fk_gpucost_charge_lease_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpucost_charge")),
        sa.UniqueConstraint(
            "lease_id", "job", "kind", "revision", name=op.f("uq_gpucost_charge_lease_id_job_kind_revision")
        ),
    )
    with op.batch_alter_table("gpucost_charge", schema=None) as batch_op:
        batch_op.create_index("ix_gpucost_charge_job", ["job"], unique=False)

    op.create_table(
        "gpucost_lease_event",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("lease_id", sa.String(length=160), nullable=False),
        sa.Column("at", gpucost.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("event", sa.String(length=40), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["lease_id"], ["gpucost_lease.id"], name=op.f("fk_gpucost_lease_event_lease_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpucost_lease_event")),
    )
    with op.batch_alter_table("gpucost_lease_event", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gpucost_lease_event_lease_id"), ["lease_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("gpucost_lease_event", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gpucost_lease_event_lease_id"))

    op.drop_table("gpucost_lease_event")
    with op.batch_alter_table("gpucost_charge", schema=None) as batch_op:
        batch_op.drop_index("ix_gpucost_charge_job")

    op.drop_table("gpucost_charge")
    op.drop_table("gpucost_allocation")
    with op.batch_alter_table("gpucost_placement", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gpucost_placement_job"))

    op.drop_table("gpucost_placement")
    with op.batch_alter_table("gpucost_lease", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gpucost_lease_state"))
        batch_op.drop_index(batch_op.f("ix_gpucost_lease_job"))
        batch_op.drop_index(batch_op.f("ix_gpucost_lease_instance_id"))

    op.drop_table("gpucost_lease")
    with op.batch_alter_table("gpucost_decision", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gpucost_decision_job"))

    op.drop_table("gpucost_decision")
    op.drop_table("gpucost_attempt")
    op.drop_table("gpucost_job")
