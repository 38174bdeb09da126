"""Runs gpucost's migrations; its own version table keeps it apart from Airflow's in a shared database."""

from __future__ import annotations

from alembic import context

from gpucost.db.engine import VERSION_TABLE
from gpucost.db.tables import Base

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
