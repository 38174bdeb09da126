"""The owner of instances: tokens, capacity, states."""

from __future__ import annotations

import itertools
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpucost.clock import ManualClock
from gpucost.rehearsal.book.book import Book, Plan, TokenReused
from gpucost.rehearsal.book.records import BY_USER, FROM_INSIDE, NO_CAPACITY, Instance, LaunchSpec, Order
from gpucost.rehearsal.market.market import Market, PoolKey, load_market

ORIGIN = datetime(2026, 11, 30, 16, 0, 0, 250_000, tzinfo=UTC)
POOL = PoolKey("us-east-1a", "p3.2xlarge")
FILE = Path(__file__).resolve().parents[3] / "include/market/three_zones.json"


class Notes:
    """A journal that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(ORIGIN)


@pytest.fixture
def book(clock: ManualClock) -> Book:
    numbers = itertools.count()
    return Book(Market(load_market(FILE), ORIGIN), clock, Notes(), new_id=lambda prefix: f"{prefix}-{next(numbers):04}")


def answer(launched: list[list[Instance]]) -> dict[str, Any]:
    return {"ids": [one.id for group in launched for one in group]}


def take(book: Book, count: int, spec: LaunchSpec | None = None) -> Any:
    """A plan for as many of `count` as are free."""

    def plan(_now: datetime) -> Plan:
        free = min(count, book.free(POOL, "spot"))
        return [Order(POOL, "spot", free, spec or LaunchSpec())] if free else [], answer

    return plan


def buy(book: Book, token: str = "", count: int = 1, spec: LaunchSpec | None = None) -> list[str]:
    ids: list[str] = book.create_fleet(token, "digest", {}, {}, take(book, count, spec)).answer["ids"]
    return ids


def state(book: Book, instance_id: str) -> str:
    instance = book.get(instance_id)
    assert instance is not None
    return instance.state


def test_one_token_is_one_fleet_under_threads(book: Book) -> None:
    start = threading.Barrier(20)
    ids: list[str] = []

    def ask() -> None:
        start.wait()
        ids.append(book.create_fleet("token", "digest", {}, {}, take(book, 1)).id)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 1
    assert len(book.every()) == 1


def test_the_same_token_with_another_request_is_refused(book: Book) -> None:
    buy(book, "token")
    with pytest.raises(TokenReused):
        book.create_fleet("token", "another", {}, {}, take(book, 1))


def test_capacity_is_never_oversold_under_threads(book: Book) -> None:
    start = threading.Barrier(20)

    def ask(number: int) -> None:
        start.wait()
        buy(book, f"token-{number}")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(book.every()) == 2, "the pool holds two"
    assert book.free(POOL, "spot") == 0
    assert book.free(POOL, "on-demand") == 1


def test_a_place_is_free_again_when_the_last_process_is_gone(book: Book) -> None:
    first, _ = buy(book, count=2)
    book.begin_end(first, BY_USER)
    assert buy(book) == [], "shutting down still holds the place"
    book.mark_ended(first)
    assert len(buy(book)) == 1


def test_times_are_whole_seconds_and_the_first_reason_to_end_stands(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    assert book.mark_running(one)
    clock.advance(timedelta(seconds=90.5))
    assert book.begin_end(one, NO_CAPACITY, abrupt=True) is not None
    clock.advance(timedelta(seconds=5))
    assert book.begin_end(one, BY_USER) is None
    book.mark_ended(one)
    instance = book.get(one)
    assert instance is not None
    assert (instance.launched.microsecond, instance.ended) == (0, ORIGIN.replace(microsecond=0) + timedelta(seconds=90))
    assert (instance.ending, instance.state, instance.abrupt) == (NO_CAPACITY, "terminated", True)
    assert not book.mark_running(one), "nothing wakes the dead"


def test_shutdown_from_inside_follows_the_template_and_the_api_always_terminates(book: Book) -> None:
    stops, ends = (
        buy(book, count=1, spec=LaunchSpec(shutdown_behavior="stop"))[0],
        buy(book, count=1, spec=LaunchSpec(shutdown_behavior="terminate"))[0],
    )
    for one in (stops, ends):
        book.begin_end(one, FROM_INSIDE)
        book.mark_ended(one)
    assert (state(book, stops), state(book, ends)) == ("stopped", "terminated")
    book.terminate_stopped(stops)
    assert state(book, stops) == "terminated"


def test_the_terminated_are_shown_for_an_hour(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    book.begin_end(one, BY_USER)
    book.mark_ended(one)
    clock.advance(timedelta(minutes=59))
    assert [instance.id for instance in book.shown()] == [one]
    clock.advance(timedelta(minutes=2))
    assert book.shown() == []
    assert [instance.id for instance in book.every()] == [one]


def test_a_notice_is_given_once_and_not_to_the_dying(book: Book, clock: ManualClock) -> None:
    first, second = buy(book, count=2)
    at = clock.now() + timedelta(minutes=2)
    assert book.give_notice(first, at) is not None
    assert book.give_notice(first, at) is None
    book.begin_end(second, BY_USER)
    assert book.give_notice(second, at) is None


def test_tags_are_set_on_all_or_on_none(book: Book) -> None:
    (one,) = buy(book)
    assert book.add_tags([one, "i-none"], {"a": "b"}) == ["i-none"]
    instance = book.get(one)
    assert instance is not None
    assert "a" not in instance.tags
    assert book.add_tags([one], {"a": "b"}) == []
    instance = book.get(one)
    assert instance is not None
    assert instance.tags["a"] == "b"
