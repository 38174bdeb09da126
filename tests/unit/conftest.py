"""What holds for every unit test: no network, and no waiting."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_socket
from hypothesis import settings

from gpucost.clock import SpecClock
from gpucost.db.engine import Database
from gpucost.db.tables import Base
from tests.fakes.rooms import World, open_database

LONGEST_SLEEP = 0.05
"""Seconds; a unit test that waits longer is really waiting for something, and should be told the time instead."""

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


def pytest_configure(config: pytest.Config) -> None:
    """Name our marker."""
    config.addinivalue_line("markers", "sleeps: may really sleep; say in the test why it must")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Close the sockets; those of this machine's own files stay, which event loops need."""
    pytest_socket.disable_socket(allow_unix_socket=True)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Open them again for whatever runs after the unit tests in this process."""
    pytest_socket.enable_socket()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Refuse to sleep."""
    if item.get_closest_marker("sleeps"):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", _awake(time.sleep))
        patch.setattr(asyncio, "sleep", _awake_async(asyncio.sleep))
        patch.setitem(SpecClock.__init__.__kwdefaults__, "real_sleep", time.sleep)
        return (yield)


def _awake(sleep: Callable[[float], None]) -> Callable[[float], None]:
    def guarded(seconds: float) -> None:
        _refuse(seconds)
        sleep(seconds)

    return guarded


def _awake_async(sleep: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def guarded(delay: float, result: Any = None) -> Any:
        _refuse(delay)
        return await sleep(delay, result)

    return guarded


def _refuse(seconds: float) -> None:
    if seconds > LONGEST_SLEEP:
        pytest.fail(f"a unit test slept for {seconds} s; pass it a clock or a sleep that only notes it, or mark it")


@pytest.fixture(scope="session")
def _migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "gpucost.db"
    database = open_database(path)
    database.migrate()
    with database.engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
    database.close()
    return path


@pytest.fixture
def database(_migrated: Path, tmp_path: Path) -> Iterator[Database]:
    """A migrated, empty database."""
    path = tmp_path / "gpucost.db"
    shutil.copy(_migrated, path)
    database = open_database(path)
    yield database
    database.close()


@pytest.fixture
def emptied(database: Database) -> Callable[[], Database]:
    """Gives the database with nothing in it, for a test of many rounds; a new one each time would be slower."""

    def empty() -> Database:
        with database.transaction() as session:
            for table in reversed(Base.metadata.sorted_tables):
                session.execute(table.delete())
        return database

    return empty


@pytest.fixture
def world(database: Database) -> World:
    """The rooms without a network, and without MLflow."""
    return World(database)
