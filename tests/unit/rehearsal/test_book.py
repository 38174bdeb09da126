"""The owner of instances: tokens, capacity, states, and its memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.clock import ManualClock
from gpucost.rehearsal.book.book import Book, Plan, TokenReused, visible_s
from gpucost.rehearsal.book.records import BY_USER, FROM_INSIDE, NO_CAPACITY, Instance, LaunchSpec, Order
from gpucost.rehearsal.market.series import Steady
from tests.fakes.rehearsal import ORIGIN, OTHER, POOL, MemoryJournal, buy, market
from tests.fakes.rehearsal import instance as known

BEGIN = ORIGIN + timedelta(seconds=0.25)
TWO_PLACES = market(spot=Steady(2), plain=Steady(1))
Kind = Literal["fleet", "reservation"]


def new_book(clock: ManualClock, journal: MemoryJournal, first_id: int = 0) -> Book:
    numbers = itertools.count(first_id)
    return Book(TWO_PLACES, clock, journal, new_id=lambda prefix: f"{prefix}-{next(numbers):04}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(BEGIN)


@pytest.fixture
def book(clock: ManualClock) -> Book:
    return new_book(clock, MemoryJournal())


def one_machine(_now: datetime) -> Plan:
    """A plan for one machine."""
    return [Order(POOL, "spot", 1, LaunchSpec())], lambda made: {"ids": [one.id for group in made for one in group]}


def at_once(work: Callable[[int], object]) -> None:
    """Twenty threads do it at the same time."""
    start = threading.Barrier(20)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_token_is_one_launch_under_threads(book: Book) -> None:
    ids: list[str] = []
    at_once(lambda _n: ids.append(book.launch_once("fleet", "us-east-1", "token", "d", {}, {}, one_machine).id))
    assert len(ids) == 20
    assert len(set(ids)) == 1
    assert len(book.every()) == 1


def test_tokens_of_fleets_reservations_and_regions_are_apart(book: Book) -> None:
    places: list[tuple[Kind, str]] = [("fleet", "us-east-1"), ("reservation", "us-east-1")]
    made = {book.launch_once(kind, region, "token", "d", {}, {}, one_machine).id for kind, region in places}
    assert len(made) == 2
    with pytest.raises(ValueError, match="more than are free"):
        book.launch_once("fleet", "eu-west-1", "token", "d", {}, {}, one_machine)


def test_the_same_token_with_another_request_is_refused(book: Book) -> None:
    book.launch_once("fleet", "us-east-1", "token", "one", {}, {}, one_machine)
    with pytest.raises(TokenReused):
        book.launch_once("fleet", "us-east-1", "token", "another", {}, {}, one_machine)


def test_a_plan_that_raises_launches_nothing_and_keeps_no_token(book: Book) -> None:
    def refuse(_now: datetime) -> Plan:
        raise LookupError("nothing to be had")

    with pytest.raises(LookupError):
        book.launch_once("reservation", "us-east-1", "token", "d", {}, {}, refuse)
    assert book.every() == []
    assert len(book.launch_once("reservation", "us-east-1", "token", "other", {}, {}, one_machine).answer["ids"]) == 1


def test_capacity_is_never_oversold_under_threads(book: Book) -> None:
    at_once(lambda number: buy(book, token=f"token-{number}"))
    assert len(book.every()) == 2, "the pool holds two"
    assert book.free(POOL, "spot", book.now()) == 0
    assert book.free(POOL, "on-demand", book.now()) == 1


def test_a_place_is_free_again_when_the_last_process_is_gone(book: Book) -> None:
    first, _ = buy(book, 2)
    book.begin_end(first, BY_USER)
    assert buy(book) == [], "shutting down still holds the place"
    book.mark_ended(first)
    assert len(buy(book)) == 1
    assert first not in {one.id for one in book.holding()}


def test_times_are_whole_seconds_and_the_first_reason_to_end_stands(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    assert book.mark_running(one)
    clock.advance(timedelta(seconds=90.5))
    assert book.begin_end(one, NO_CAPACITY, abrupt=True) is not None
    clock.advance(timedelta(seconds=5))
    assert book.begin_end(one, BY_USER) is None
    book.mark_ended(one)
    ended = known(book, one)
    assert (ended.launched.microsecond, ended.ended) == (0, ORIGIN + timedelta(seconds=90))
    assert (ended.ending, ended.state, ended.abrupt) == (NO_CAPACITY, "terminated", True)
    assert not book.mark_running(one), "nothing wakes the dead"


def test_shutdown_from_inside_follows_the_template_of_an_on_demand_instance(clock: ManualClock) -> None:
    book = Book(market(spot=Steady(2), plain=Steady(3)), clock, MemoryJournal())
    (stops,) = buy(book, lifecycle="on-demand", spec=LaunchSpec(shutdown_behavior="stop"))
    (ends,) = buy(book, lifecycle="on-demand", spec=LaunchSpec(shutdown_behavior="terminate"))
    (changed,) = buy(book, lifecycle="on-demand", spec=LaunchSpec(shutdown_behavior="stop"))
    book.set_shutdown_behavior(changed, "terminate")
    for one in (stops, ends, changed):
        book.begin_end(one, FROM_INSIDE)
        book.mark_ended(one)
    assert [known(book, one).state for one in (stops, ends, changed)] == ["stopped", "terminated", "terminated"]
    book.terminate_stopped(stops)
    assert known(book, stops).state == "terminated"


def test_a_spot_instance_that_shuts_itself_down_is_terminated_whatever_its_template_says(book: Book) -> None:
    (one,) = buy(book, spec=LaunchSpec(shutdown_behavior="stop"))
    book.begin_end(one, FROM_INSIDE)
    book.mark_ended(one)
    ended = known(book, one)
    assert (ended.state, ended.ending) == ("terminated", FROM_INSIDE)


def test_what_is_switched_on_late_was_launched_then(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    clock.advance(timedelta(seconds=700))
    assert (known(book, one).launched, known(book, one).billed_until) == (ORIGIN, ORIGIN), "nothing of it lives yet"
    book.mark_on(one)
    on = known(book, one)
    assert (on.launched, on.created, on.billed_until) == (ORIGIN + timedelta(seconds=700), ORIGIN, None)
    clock.advance(timedelta(seconds=5))
    assert book.mark_on(one) is None, "it is launched once"
    assert known(book, one).launched == on.launched


def test_what_was_never_switched_on_did_not_live(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    clock.advance(timedelta(seconds=700))
    book.begin_end(one, BY_USER)
    ended = known(book, one)
    assert ended.launched == ended.ended == ORIGIN + timedelta(seconds=700)


def test_a_terminated_instance_is_shown_for_a_real_minute_at_any_speed() -> None:
    assert visible_s(3600, speed=1) == 3600
    assert visible_s(3600, speed=3600) == 60 * 3600


class FullDisk(MemoryJournal):
    """Takes nothing once it is full."""

    full = False

    def write(self, event: str, **facts: Any) -> None:
        if self.full:
            raise OSError("no space left")
        super().write(event, **facts)


def test_what_the_journal_cannot_take_has_not_happened(clock: ManualClock) -> None:
    journal = FullDisk()
    book = new_book(clock, journal)
    (one,) = buy(book, tags={"a": "b"})
    before = contents(book)
    journal.full = True
    changes: list[Callable[[], object]] = [
        lambda: buy(book, token="again"),
        lambda: book.mark_on(one),
        lambda: book.mark_running(one),
        lambda: book.begin_end(one, BY_USER),
        lambda: book.give_notice(one, clock.now(), NO_CAPACITY),
        lambda: book.add_tags([one], {"c": "d"}),
        lambda: book.delete_launch(known(book, one).launch_id),
    ]
    for change in changes:
        with pytest.raises(OSError, match="no space left"):
            change()
    assert contents(book) == before
    journal.full = False
    (another,) = buy(book, token="again")
    restored = new_book(clock, MemoryJournal(), first_id=100)
    restored.restore(journal.events())
    assert contents(restored) == contents(book)
    (third,) = buy(restored, pool=OTHER)
    assert len({known(restored, each).number for each in (one, another, third)}) == 3, "no two share an address"


def test_a_stopped_instance_starts_a_second_life(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book, lifecycle="on-demand")
    book.mark_running(one)
    clock.advance(timedelta(seconds=100))
    book.begin_stop(one, BY_USER)
    book.mark_ended(one)
    assert book.free(POOL, "on-demand", book.now()) == 1, "a stopped instance holds no place"
    clock.advance(timedelta(seconds=100))
    again = book.start_again(one)
    assert again is not None
    assert (again.state, again.launched, again.ending) == ("pending", ORIGIN + timedelta(seconds=200), None)
    assert again.earlier == ((ORIGIN, ORIGIN + timedelta(seconds=100)),)
    assert book.start_again(one) is None


def test_terminating_while_it_stops_ends_it_for_good(book: Book) -> None:
    (one,) = buy(book, lifecycle="on-demand")
    book.begin_stop(one, BY_USER)
    book.terminate_stopped(one)
    book.mark_ended(one)
    assert known(book, one).state == "terminated"


def test_the_terminated_are_shown_for_an_hour(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    book.begin_end(one, BY_USER)
    book.mark_ended(one)
    clock.advance(timedelta(minutes=59))
    assert [shown.id for shown in book.shown()] == [one]
    clock.advance(timedelta(minutes=2))
    assert book.shown() == []
    assert [every.id for every in book.every()] == [one]


def test_a_notice_is_given_once_and_not_to_the_dying(book: Book, clock: ManualClock) -> None:
    first, second = buy(book, 2)
    at = clock.now() + timedelta(minutes=2)
    assert book.give_notice(first, at, NO_CAPACITY) is not None
    assert book.give_notice(first, at, NO_CAPACITY) is None
    assert book.give_notice(first, at, None) is None
    book.withdraw_notice(first)
    assert book.give_notice(first, at, NO_CAPACITY) is not None
    book.begin_end(second, BY_USER)
    assert book.give_notice(second, at, NO_CAPACITY) is None


def test_a_notice_for_nothing_gives_way_to_a_real_one(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    assert book.give_notice(one, clock.now() + timedelta(minutes=2), None) is not None
    assert book.give_notice(one, clock.now() + timedelta(minutes=2), None) is None, "it was told that already"
    clock.advance(timedelta(minutes=1))
    real = book.give_notice(one, clock.now() + timedelta(minutes=2), NO_CAPACITY)
    assert real is not None
    assert (real.notice_at, real.action_at) == (ORIGIN + timedelta(minutes=1), ORIGIN + timedelta(minutes=3))
    assert real.noticed_for == NO_CAPACITY


def test_a_request_is_cancelled_once_and_the_instance_lives(book: Book, clock: ManualClock) -> None:
    (one,) = buy(book)
    book.cancel_spot_request(one)
    clock.advance(timedelta(seconds=9))
    book.cancel_spot_request(one)
    assert (known(book, one).request_cancelled, known(book, one).living) == (ORIGIN, True)


def test_tags_are_set_on_all_or_on_none_and_removed_by_key_or_value(book: Book) -> None:
    (one,) = buy(book)
    (fleet,) = book.launches("fleet", "us-east-1")
    assert book.add_tags([one, "i-none"], {"a": "b"}) == ["i-none"]
    assert "a" not in known(book, one).tags
    assert book.add_tags([one, fleet.id], {"a": "b", "c": "d"}) == []
    assert book.remove_tags([one, fleet.id], {"a": None, "c": "another value"}) == []
    assert {key: value for key, value in known(book, one).tags.items() if ":" not in key} == {"c": "d"}
    assert book.launches("fleet", "us-east-1")[0].tags == {"c": "d"}


def test_nobody_can_change_what_was_handed_out(book: Book) -> None:
    (one,) = buy(book, tags={"a": "b"})
    before = known(book, one)
    book.add_tags([one], {"a": "changed"})
    assert before.tags["a"] == "b"


STEPS = ["buy", "buy on demand", "reserve", "on", "run", "end", "stop", "die", "start", "tag", "untag", "notice",
         "withdraw", "rebalance", "cancel", "behave", "delete", "wait"]  # fmt: skip


class Life:
    """A book, and what may happen to it."""

    def __init__(self) -> None:
        self.clock = ManualClock(BEGIN)
        self.journal = MemoryJournal()
        self.book = new_book(self.clock, self.journal)
        self.tokens = 0

    def step(self, name: str, which: int) -> None:
        self.clock.advance(timedelta(seconds=which * 7.3))
        every = self.book.every()
        if name in {"buy", "buy on demand", "reserve"}:
            self._launch(name, which)
        elif name == "delete":
            fleets = self.book.launches("fleet", "us-east-1")
            if fleets:
                self.book.delete_launch(fleets[which % len(fleets)].id)
        elif name != "wait" and every:
            self._change(name, every[which % len(every)])

    def _launch(self, name: str, which: int) -> None:
        self.tokens += 1
        lifecycle: Literal["spot", "on-demand"] = "on-demand" if name == "buy on demand" else "spot"
        kind: Kind = "reservation" if name == "reserve" else "fleet"

        def plan(now: datetime) -> Plan:
            count = min(which, self.book.free(POOL, lifecycle, now))
            spec = LaunchSpec(user_data=bytes([which]), tags={"n": str(which)}, image_id="ami-1")
            return [Order(POOL, lifecycle, count, spec)] if count else [], lambda made: {"n": [len(g) for g in made]}

        tags = {"of": name}
        self.book.launch_once(kind, "us-east-1", f"t{self.tokens}", name, {"asked": which}, tags, plan)

    def _change(self, name: str, one: Instance) -> None:
        book, later = self.book, self.clock.now() + timedelta(minutes=2)
        changes: dict[str, Callable[[], object]] = {
            "on": lambda: book.mark_on(one.id),
            "run": lambda: book.mark_running(one.id),
            "end": lambda: book.begin_end(one.id, BY_USER, abrupt=True),
            "stop": lambda: book.begin_stop(one.id, FROM_INSIDE),
            "die": lambda: book.mark_ended(one.id),
            "start": lambda: book.free(one.pool, one.lifecycle, book.now()) and book.start_again(one.id),
            "tag": lambda: book.add_tags([one.id, one.launch_id], {"k": "v"}),
            "untag": lambda: book.remove_tags([one.id, one.launch_id], {"k": None}),
            "notice": lambda: book.give_notice(one.id, later, NO_CAPACITY),
            "withdraw": lambda: book.withdraw_notice(one.id),
            "rebalance": lambda: book.recommend_rebalance(one.id),
            "cancel": lambda: book.cancel_spot_request(one.id),
            "behave": lambda: book.set_shutdown_behavior(one.id, "terminate"),
        }
        changes[name]()


def contents(book: Book) -> dict[str, Any]:
    return {
        "instances": book.every(),
        "holding": sorted(one.id for one in book.holding()),
        "launches": [*book.launches("fleet", "us-east-1"), *book.launches("reservation", "us-east-1")],
        "free": [book.free(POOL, lifecycle, book.now()) for lifecycle in ("spot", "on-demand")],
    }


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(min_value=0, max_value=3)), max_size=30))
def test_a_book_restored_from_its_journal_is_the_same_book(steps: list[tuple[str, int]]) -> None:
    life = Life()
    for name, which in steps:
        life.step(name, which)
    restored = new_book(life.clock, MemoryJournal())
    restored.restore(life.journal.events())
    assert contents(restored) == contents(life.book)
    for launch in life.book.launches("fleet", "us-east-1"):
        known_again = restored.launch_once("fleet", "us-east-1", launch.client_token, launch.digest, {}, {}, never)
        assert known_again == launch, "its token still means the same launch"


def never(_now: datetime) -> Plan:
    raise AssertionError("a known token plans nothing")


def test_a_restored_book_goes_on_counting() -> None:
    clock, journal = ManualClock(BEGIN), MemoryJournal()
    buy(new_book(clock, journal), 2)
    restored = new_book(clock, MemoryJournal(), first_id=100)
    restored.restore(journal.events())
    (third,) = buy(restored, pool=OTHER)
    assert sorted(one.number for one in restored.every()) == [0, 1, 2]
    assert known(restored, third).number == 2, "two machines never share an address"
