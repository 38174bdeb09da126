"""A lease's life: no step but the allowed ones, each under its owner, each with a row of its own."""

from __future__ import annotations

import threading
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucost.capacity.lease import ALLOWED, Attempt, Lease, LeaseState, new_lease_id, new_owner_token
from gpucost.capacity.store import LeaseStore, NotOwner
from gpucost.db.engine import Database
from gpucost.lifecycle.jobs import Jobs
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason
from tests.fakes.provider import pool
from tests.fakes.rooms import START, TASK, open_database, wanted

LATER = START + timedelta(hours=1)


@pytest.fixture
def store(database: Database) -> LeaseStore:
    Jobs(database).begin(TASK, wanted(), "me", 3, START)
    return LeaseStore(database)


def intent(number: int = 1, owner: str = "me") -> Lease:
    return Lease(
        id=f"lease-{number}",
        job=TASK.key,
        attempt=1,
        pool=pool(),
        state=LeaseState.REQUESTED,
        owner=owner,
        client_token=f"token-{number}",
        price=InstanceHourPrice(amount="0.30"),
        on_demand_price=InstanceHourPrice(amount="1.00"),
        requested_at=START,
        expires_at=START + timedelta(hours=5),
    )


def go(store: LeaseStore, lease: Lease, to: LeaseState) -> Lease:
    """Try one step."""
    if to is LeaseState.ACTIVE:
        return store.activate(lease, "i-1", START, LATER)
    if to is LeaseState.FAILED:
        return store.fail(lease, Reason.NO_CAPACITY, "none left", LATER)
    if to is LeaseState.TERMINATING:
        return store.terminating(lease, Reason.STOPPED, LATER)
    return store.terminated(lease, "i-1", LATER, Reason.STOPPED, LATER)


STEPS = st.lists(st.sampled_from([state for state in LeaseState if state is not LeaseState.REQUESTED]), max_size=8)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_only_allowed_steps_are_taken_and_each_leaves_a_row(store: LeaseStore, steps: list[LeaseState]) -> None:
    number = len(store.of_job(TASK.key)) + 1
    store.intend(intent(number))
    lease, taken = store.get(f"lease-{number}"), [LeaseState.REQUESTED]
    for to in steps:
        if to in ALLOWED[taken[-1]]:
            lease = go(store, lease, to)
            taken.append(to)
        else:
            with pytest.raises(NotOwner, match=rf"{to} refused to me \(state {taken[-1]}, owner me\)"):
                go(store, lease, to)
        assert store.get(lease.id).state is taken[-1]
    assert [event for _, event, _ in store.history(lease.id)] == [str(state) for state in taken]


def test_every_state_says_whether_it_may_cost() -> None:
    assert {state for state in LeaseState if not state.may_cost} == {LeaseState.TERMINATED, LeaseState.FAILED}
    assert all(not ALLOWED[state] for state in LeaseState if not state.may_cost), "what is over stays over"


def test_what_was_written_is_read(store: LeaseStore) -> None:
    store.intend(intent())
    assert store.get("lease-1") == intent()
    [part] = store.allocations("lease-1")
    assert (part.job, part.attempt, part.share, part.start, part.end) == (TASK.key, 1, Decimal(1), START, None)


def test_the_bill_s_times_are_the_cloud_s(store: LeaseStore) -> None:
    store.intend(intent())
    lease = store.activate(intent(), "i-1", None, LATER)
    assert (lease.instance_id, lease.launched_at) == ("i-1", None)
    assert store.seen(lease, START).launched_at == START
    assert store.seen(lease, LATER).launched_at == START, "the first word stands"
    ended = START + timedelta(minutes=30)
    lease = store.terminated(store.get("lease-1"), "i-1", ended, Reason.INTERRUPTED, LATER)
    assert (lease.ended_at, lease.end_reason) == (ended, Reason.INTERRUPTED)
    [part] = store.allocations("lease-1")
    assert (part.start, part.end) == (START, ended)


def test_after_adoption_only_the_new_owner_acts(store: LeaseStore) -> None:
    store.intend(intent())
    old = store.get("lease-1")
    new = store.adopt(old, "new", LATER)
    with pytest.raises(NotOwner, match=r"terminating refused to me \(state requested, owner new\)"):
        store.terminating(old, Reason.CANCELLED, LATER)
    assert store.terminating(new, Reason.STOPPED, LATER).state is LeaseState.TERMINATING
    assert [(event, note) for _, event, note in store.history("lease-1")][1] == ("adopted", "from me")


def test_of_two_who_adopt_one_wins(store: LeaseStore) -> None:
    store.intend(intent())
    old = store.get("lease-1")
    store.adopt(old, "first", LATER)
    with pytest.raises(NotOwner, match="no longer held by me; not adopted"):
        store.adopt(old, "second", LATER)
    assert store.get("lease-1").owner == "first"


def test_of_many_processes_that_race_for_a_lease_one_wins(store: LeaseStore, database: Database) -> None:
    store.intend(intent())
    old = store.get("lease-1")
    won: list[str] = []

    def adopt(name: str) -> None:
        mine = open_database(database.url.database)  # type: ignore[arg-type]
        try:
            won.append(LeaseStore(mine).adopt(old, name, LATER).owner)
        except NotOwner:
            pass
        finally:
            mine.close()

    threads = [threading.Thread(target=adopt, args=(f"owner-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("lease-1").owner == won[0]


def test_a_lease_that_nobody_knows_is_named(store: LeaseStore) -> None:
    with pytest.raises(KeyError, match="lease: none with id 'nobody'"):
        store.get("nobody")


def test_open_leases_are_those_that_may_cost(store: LeaseStore) -> None:
    for number, path in enumerate(
        ([], ["active"], ["active", "terminating"], ["active", "terminated"], ["failed"]), start=1
    ):
        store.intend(intent(number))
        for state in path:
            go(store, store.get(f"lease-{number}"), LeaseState(state))
    assert {lease.id for lease in store.open(TASK.key)} == {"lease-1", "lease-2", "lease-3"}
    assert {lease.id for lease in store.open()} == {"lease-1", "lease-2", "lease-3"}
    assert store.open("another job") == []


def test_pools_that_failed_us_lately_are_known_with_the_moment(store: LeaseStore) -> None:
    store.intend(intent(1))
    store.fail(intent(1), Reason.NO_CAPACITY, "none left", LATER)
    store.intend(intent(2))
    store.fail(intent(2), Reason.CLOUD_ERROR, "503", LATER)
    assert [(lease.id, at) for lease, at in store.refused_between(START, LATER)] == [("lease-1", LATER)]
    assert store.refused_between(LATER + timedelta(seconds=1), LATER + timedelta(hours=1)) == []


def test_an_attempt_s_first_word_stands(store: LeaseStore) -> None:
    begun = Attempt(job=TASK.key, number=1, started_at=START)
    store.begin_attempt(begun)
    store.begin_attempt(begun.model_copy(update={"started_at": LATER}))
    assert store.attempts(TASK.key) == [begun]
    ended = begun.model_copy(
        update={"ended_at": LATER, "reason": Reason.INTERRUPTED, "saved_step": 40, "last_step": 55}
    )
    store.end_attempt(ended)
    store.end_attempt(ended.model_copy(update={"reason": Reason.COMPLETED}))
    assert store.attempts(TASK.key) == [ended]


def test_ids_and_tokens_are_unique_and_say_what_they_are_for() -> None:
    ids = {new_lease_id("job", 3, START) for _ in range(100)}
    assert len(ids) == 100
    assert all(one.startswith("job-a3-120000") for one in ids)
    assert len({new_owner_token() for _ in range(100)}) == 100
