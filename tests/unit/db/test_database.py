"""gpucost's database: exact money, UTC times, and migrations that end where the models stand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import event, func, inspect, select, text
from sqlalchemy.exc import IntegrityError, StatementError

from gpucost.db.engine import VERSION_TABLE, Database, DatabaseTooNew
from gpucost.db.tables import AttemptRow, Base, ChargeRow, DecisionRow, JobRow, LeaseRow, PlacementRow
from tests.fakes.rows import job_row

NOW = datetime(2026, 11, 30, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/gpucost.db")
    database.migrate()
    yield database
    database.close()


def job(key: str = "job", **changes: Any) -> JobRow:
    return job_row(key, NOW, **({"spec": {"seed": 1, "arguments": ["--epochs", "3"]}} | changes))


def lease(id: str = "lease", **changes: Any) -> LeaseRow:
    words = ("provider", "region", "zone", "zone_id", "instance_type", "capacity_type", "state", "owner")
    facts: dict[str, Any] = dict.fromkeys(words, "x") | {
        "job": "job",
        "attempt": 1,
        "client_token": id,
        "price": Decimal("0.1578"),
        "currency": "USD",
        "requested_at": NOW,
        "expires_at": NOW,
    }
    return LeaseRow(id=id, **(facts | changes))


def charge(**changes: Any) -> ChargeRow:
    facts: dict[str, Any] = {
        "lease_id": "lease",
        "job": "job",
        "kind": "compute",
        "amount": Decimal("0.1"),
        "currency": "USD",
        "start": NOW,
        "end": NOW,
        "seconds": 60,
        "rule": "r",
        "source": "s",
        "as_of": NOW,
        "lines": [],
    }
    return ChargeRow(**(facts | changes))


def differences(db: Database) -> list[Any]:
    with db.engine.connect() as connection:
        options = {"compare_type": True, "version_table": VERSION_TABLE}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata))


def test_the_migrations_end_where_the_models_stand(db: Database) -> None:
    assert differences(db) == []


def test_a_missing_column_would_be_seen(db: Database) -> None:
    with db.engine.begin() as connection:
        connection.execute(text("ALTER TABLE gpucost_attempt DROP COLUMN message"))
    assert [difference[0] for difference in differences(db)] == ["add_column"]


def test_migrating_again_keeps_what_is_there(db: Database) -> None:
    with db.transaction() as session:
        session.add(job())
    db.migrate()
    with db.transaction() as session:
        assert session.get(JobRow, "job") is not None
        assert session.scalars(text(f"SELECT version_num FROM {VERSION_TABLE}")).all() != []  # noqa: S608


def test_many_who_open_an_empty_database_at_once_all_find_it_ready(tmp_path: Path) -> None:
    def open_it(_: int) -> set[str]:
        mine = Database(f"sqlite:///{tmp_path}/new.db")
        mine.migrate()
        tables = set(inspect(mine.engine).get_table_names())
        mine.close()
        return tables

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(open_it, range(4))) == [{*Base.metadata.tables, VERSION_TABLE}] * 4


def test_a_database_that_is_up_to_date_is_left_alone(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "upgrade", lambda *_: pytest.fail("there is nothing to do"))
    db.migrate()


def test_a_newer_database_is_refused_with_what_to_do(db: Database) -> None:
    with db.engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0999'"))  # noqa: S608
    with pytest.raises(DatabaseTooNew, match=r"got revision '0999', expected one up to '0001'; .*install that release"):
        db.migrate()


def test_on_postgresql_the_schema_changes_under_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(f"sqlite:///{tmp_path}/new.db")
    said: list[str] = []

    @event.listens_for(database.engine, "before_cursor_execute", retval=True)
    def _note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        said.append(statement)
        return ("SELECT 1", ()) if "pg_advisory" in statement else (statement, parameters)

    @event.listens_for(database.engine, "begin")
    def _call_it_postgresql(connection: Any) -> None:
        monkeypatch.setattr(connection.dialect, "name", "postgresql")

    monkeypatch.setattr(command, "upgrade", lambda *_: said.append("upgrade"))
    database.migrate()
    locked = next(place for place, statement in enumerate(said) if "pg_advisory_xact_lock" in statement)
    assert locked < said.index("upgrade")
    database.close()


def test_an_empty_file_gets_every_table_and_its_own_version_table(db: Database) -> None:
    assert set(inspect(db.engine).get_table_names()) == {*Base.metadata.tables, VERSION_TABLE}


def test_money_comes_back_exact_and_sums_exactly(db: Database) -> None:
    amounts = [Decimal("0.1"), Decimal("0.2"), Decimal("123456789.000001")]
    with db.transaction() as session:
        session.add_all([job(), lease()])
        session.flush()
        session.add_all([charge(revision=number, amount=amount) for number, amount in enumerate(amounts, start=1)])
    with db.transaction() as session:
        assert list(session.scalars(select(ChargeRow.amount).order_by(ChargeRow.revision))) == amounts
        assert session.scalar(select(func.sum(ChargeRow.amount))) == Decimal("123456789.300001")


def test_an_amount_finer_than_a_micro_is_refused(db: Database) -> None:
    with db.transaction() as session:
        session.add_all([job(), lease()])
    with pytest.raises(StatementError, match=r"expected a multiple of 0\.000001"), db.transaction() as session:
        session.add(charge(amount=Decimal("0.0000001")))


@pytest.mark.parametrize("price", ["0.1578", "0.10", "1234.000000000001", "0.0000000000000000001"])
def test_a_price_keeps_every_digit(db: Database, price: str) -> None:
    with db.transaction() as session:
        session.add(job())
        session.flush()
        session.add(lease(price=Decimal(price)))
    with db.transaction() as session:
        stored = session.get_one(LeaseRow, "lease").price
    assert stored == Decimal(price)
    assert stored.as_tuple() == Decimal(price).as_tuple()


def test_a_moment_comes_back_in_utc_whatever_zone_it_was_given_in(db: Database) -> None:
    with db.transaction() as session:
        session.add(job(deadline=NOW.astimezone(timezone(timedelta(hours=8)))))
    with db.transaction() as session:
        row = session.get_one(JobRow, "job")
        assert (row.deadline, row.deadline.tzinfo) == (NOW, UTC)
        assert session.scalars(select(JobRow.key).where(JobRow.deadline >= NOW)).all() == ["job"]
        assert session.scalars(select(JobRow.key).where(JobRow.deadline > NOW)).all() == []


def test_a_moment_without_a_zone_is_refused(db: Database) -> None:
    with pytest.raises(StatementError, match="without a time zone"), db.transaction() as session:
        session.add(job(deadline=NOW.replace(tzinfo=None)))


def test_documents_come_back_as_they_were(db: Database) -> None:
    ranked = [{"pool": "a", "cost": "1.5"}, {"pool": "b", "cost": None}]
    with db.transaction() as session:
        session.add(job(policy_state=None))
        session.flush()
        session.add(
            PlacementRow(
                job="job", at=NOW, policy="greedy", action="buy", reason="cheapest", currency="USD", alternatives=ranked
            )
        )
    with db.transaction() as session:
        assert session.scalars(select(PlacementRow)).one().alternatives == ranked
        row = session.get_one(JobRow, "job")
        assert (row.spec, row.policy_state) == ({"seed": 1, "arguments": ["--epochs", "3"]}, None)
        assert (row.logged_attempt, row.logged_chunk, row.logged_steps, row.mlflow_run_id) == (0, -1, {}, None)


def test_an_error_leaves_nothing_of_its_transaction(db: Database) -> None:
    def fail_half_way() -> None:
        with db.transaction() as session:
            session.add(job())
            session.flush()
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    with db.transaction() as session:
        assert session.get(JobRow, "job") is None


@pytest.mark.parametrize(
    "row",
    [
        AttemptRow(job="nobody", number=1, started_at=NOW),
        DecisionRow(job="nobody", at=NOW, author="a", title="t", why="w", options=[], state="open"),
    ],
)
def test_a_row_of_an_unknown_job_is_refused(db: Database, row: Base) -> None:
    with pytest.raises(IntegrityError), db.transaction() as session:
        session.add(row)


def test_a_revision_and_a_client_token_exist_once(db: Database) -> None:
    with db.transaction() as session:
        session.add(job())
        session.flush()
        session.add(lease())
        session.flush()
        session.add(charge())
    with pytest.raises(IntegrityError), db.transaction() as session:
        session.add(charge())
    with pytest.raises(IntegrityError), db.transaction() as session:
        session.add(lease("other", client_token="lease"))


def test_processes_that_read_and_then_write_follow_each_other(db: Database, tmp_path: Path) -> None:
    with db.transaction() as session:
        session.add(job())

    def count_up() -> None:
        mine = Database(f"sqlite:///{tmp_path}/gpucost.db")
        for _ in range(10):
            with mine.transaction() as session:
                row = session.get_one(JobRow, "job")
                row.logged_chunk += 1
        mine.close()

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.transaction() as session:
        assert session.get_one(JobRow, "job").logged_chunk == 39
