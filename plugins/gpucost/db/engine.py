"""Opening the database, and short transactions in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.orm import Session, sessionmaker

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "gpucost_alembic_version"

MIGRATION_LOCK = 0x67707563_6F7374
"""Key of PostgreSQL's advisory lock under which the schema changes: the letters of our name."""

_migrating = threading.Lock()
"""Alembic keeps its state in module variables: one migration at a time in a process."""


class DatabaseTooNew(RuntimeError):
    """A newer release has changed the schema; this one does not know what it means now."""


class Database:
    """gpucost's own database; never Airflow's.

    Args:
        url: an SQLAlchemy URL, e.g. `postgresql+psycopg2://…` or `sqlite:////path/gpucost.db`.
    """

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self.engine = _engine(url)
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A short transaction: committed at the end, rolled back on an error. No network calls inside."""
        with self._sessions.begin() as session:
            yield session

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema to `revision`; nothing happens when it is there already.

        Raises:
            DatabaseTooNew: the schema is at a revision that this release does not have.
        """
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        script = ScriptDirectory.from_config(config)
        with _migrating, self.engine.begin() as connection:
            if _revision(connection) == script.as_revision_number(revision):
                return
            if connection.dialect.name == "postgresql":
                # Two first tasks at once: the second waits here, and then finds the work done. SQLite's transaction
                # holds the write lock already.
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            _refuse_newer(script, _revision(connection))
            config.attributes["connection"] = connection
            command.upgrade(config, revision)

    def close(self) -> None:
        """Give back the connections."""
        self.engine.dispose()


def _revision(connection: Connection) -> str | None:
    from alembic.migration import MigrationContext

    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _refuse_newer(script: ScriptDirectory, found: str | None) -> None:
    known = {revision.revision for revision in script.walk_revisions()}
    if found is not None and found not in known:
        raise DatabaseTooNew(
            f"gpucost's database: got revision {found!r}, expected one up to {script.get_current_head()!r}; a newer "
            "gpucost has changed it: install that release here too (scheduler, workers and triggerer alike)"
        )


def _engine(url: str) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def _prepare(connection, _record):  # type: ignore[no-untyped-def]
        # Several processes share the file: readers must not wait for the writer, nor fail at once.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA busy_timeout=30000")

    @event.listens_for(engine, "begin")
    def _begin(connection):  # type: ignore[no-untyped-def]
        # Take the write lock at the start: two transactions that read first and write then could both fail.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
