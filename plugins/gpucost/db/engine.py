"""Opening the database, and short transactions in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.orm import Session, sessionmaker

MIGRATIONS = Path(__file__).parent / "migrations"


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
        """Bring the schema to `revision`; nothing happens when it is there already."""
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with self.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)

    def close(self) -> None:
        """Give back the connections."""
        self.engine.dispose()


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
