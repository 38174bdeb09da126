"""Buying and giving back: whatever dies at whatever line, nothing is bought twice and nothing is left running."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from gpucost.capacity.buyer import LEAST_REAL_GRACE, UNSEEN_GRACE, Buyer, may_ask_elsewhere, unseen_grace
from gpucost.capacity.lease import Lease, LeaseState
from gpucost.capacity.providers.base import ProviderError
from gpucost.capacity.store import LeaseStore, NotOwner
from gpucost.db.engine import Database
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason
from tests.fakes.crash import PROVIDER_CALLS, Crash, Fragile, FragileDatabase, Fuse
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World, wanted

ON_DEMAND = InstanceHourPrice(amount="1.00")


@pytest.fixture
def world(database: Database) -> World:
    return ready(database)


def ready(database: Database, speed: float = 1.0) -> World:
    world = World(database, speed=speed)
    world.services.jobs.begin(TASK, wanted(), "me", 3, START)
    return world


def intend(buyer: Buyer, owner: str = "me") -> Lease:
    return buyer.intend(TASK.key, 1, quote(pool(), "0.30", START), ON_DEMAND, owner, START + timedelta(hours=5))


def buy(world: World) -> Lease:
    return world.services.buyer.buy(intend(world.services.buyer))


def test_the_intent_is_written_before_the_cloud_is_called(world: World) -> None:
    lease = intend(world.services.buyer)
    assert world.services.leases.get(lease.id).state is LeaseState.REQUESTED
    assert world.provider.named("launch") == []


def test_buying_notes_the_machine_and_how_to_find_it_again(world: World) -> None:
    lease = buy(world)
    [machine] = world.provider.alive()
    assert (lease.state, lease.instance_id) == (LeaseState.ACTIVE, machine.instance_id)
    assert machine.client_token == lease.client_token
    assert machine.tags["gpucost:lease"] == lease.id
    assert machine.tags["gpucost:job"] == TASK.key
    assert machine.tags["gpucost:attempt"] == "1"
    assert machine.tags["gpucost:expires"] == "2026-11-30T17:00:00+00:00"


def test_asking_twice_buys_once(world: World) -> None:
    lease = intend(world.services.buyer)
    world.services.buyer.buy(lease)
    with pytest.raises(NotOwner):
        world.services.buyer.buy(lease)
    assert len(world.provider.machines) == 1


@pytest.mark.parametrize("reason", [Reason.NO_CAPACITY, Reason.QUOTA, Reason.THROTTLED, Reason.NOT_AUTHORIZED])
def test_a_clear_no_ends_the_intent(world: World, reason: Reason) -> None:
    world.provider.refuse(pool(), reason, "the cloud's words")
    lease = intend(world.services.buyer)
    with pytest.raises(ProviderError):
        world.services.buyer.buy(lease)
    failed = world.services.leases.get(lease.id)
    assert (failed.state, failed.end_reason) == (LeaseState.FAILED, reason)
    assert world.services.leases.history(lease.id)[-1][2] == "the cloud's words"


def test_a_lost_answer_is_found_by_its_token_and_not_bought_again(world: World) -> None:
    world.provider.lose = 1
    lease = intend(world.services.buyer)
    with pytest.raises(ProviderError, match="answer was lost"):
        world.services.buyer.buy(lease)
    assert world.services.leases.get(lease.id).state is LeaseState.REQUESTED
    found = world.services.buyer.look_up(lease)
    assert (found.state, found.instance_id) == (LeaseState.ACTIVE, world.provider.alive()[0].instance_id)
    assert world.services.buyer.look_up(found) == found
    assert len(world.provider.machines) == 1


def test_an_order_that_nobody_carried_out_is_given_up_after_the_grace(world: World) -> None:
    lease = intend(world.services.buyer)
    assert world.services.buyer.look_up(lease).state is LeaseState.REQUESTED
    world.hand.advance(UNSEEN_GRACE + timedelta(seconds=1))
    assert world.services.buyer.look_up(lease).state is LeaseState.FAILED


def test_how_long_an_answer_took_does_not_count_against_what_it_did_not_show(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = intend(world.services.buyer)

    def slowly(_region: str, _token: str) -> None:
        world.hand.advance(UNSEEN_GRACE + timedelta(seconds=1))

    monkeypatch.setattr(world.provider, "find", slowly)
    assert world.services.buyer.look_up(lease).state is LeaseState.REQUESTED
    assert world.services.buyer.look_up(lease).state is LeaseState.FAILED, "a look that began after the grace"


def test_the_grace_is_ten_minutes_and_a_minute_of_real_time_at_least() -> None:
    assert unseen_grace(1) == unseen_grace(10) == UNSEEN_GRACE == timedelta(minutes=10)
    assert unseen_grace(120) == timedelta(hours=2)


def test_on_a_fast_clock_a_machine_that_is_not_visible_yet_is_neither_given_up_nor_taken_for_gone(
    database: Database,
) -> None:
    # An hour a second, as in a replay of traces: the moment in which the API hides a new machine is a day long.
    world = ready(database, speed=3600)
    buyer = world.services.buyer
    world.provider.invisible_for = timedelta(days=1)
    world.provider.lose = 1
    lost = intend(buyer)
    with pytest.raises(ProviderError, match="answer was lost"):
        buyer.buy(lost)

    world.hand.advance(timedelta(seconds=20))
    assert buyer.look_up(lost).state is LeaseState.REQUESTED
    assert buyer.release(lost, Reason.CANCELLED).state is LeaseState.TERMINATING
    [machine] = world.provider.alive()

    world.hand.advance(timedelta(seconds=5))
    buyer.release(world.services.leases.get(lost.id), Reason.CANCELLED)
    lease = buyer.release(world.services.leases.get(lost.id), Reason.CANCELLED)
    assert (lease.state, lease.instance_id) == (LeaseState.TERMINATED, machine.instance_id)
    assert world.provider.alive() == []


def test_on_a_fast_clock_what_nobody_carried_out_is_given_up_after_a_minute(database: Database) -> None:
    world = ready(database, speed=3600)
    lease = intend(world.services.buyer)
    world.hand.advance(LEAST_REAL_GRACE)
    assert world.services.buyer.look_up(lease).state is LeaseState.REQUESTED
    world.hand.advance(timedelta(seconds=1))
    assert world.services.buyer.look_up(lease).state is LeaseState.FAILED


def test_a_new_id_that_is_not_visible_yet_is_bought_all_the_same(world: World) -> None:
    world.provider.invisible_for = timedelta(minutes=1)
    lease = buy(world)
    assert (lease.state, lease.launched_at) == (LeaseState.ACTIVE, None)
    lease = world.services.buyer.release(lease, Reason.STOPPED)
    assert lease.state is LeaseState.TERMINATING, "what is not visible is not taken for gone"
    world.hand.advance(timedelta(minutes=2))
    assert world.services.buyer.release(lease, Reason.STOPPED).state is LeaseState.TERMINATED
    assert world.services.leases.get(lease.id).launched_at == START, "it is charged from when the cloud launched it"


def test_terminating_lasts_until_the_cloud_agrees(world: World) -> None:
    world.provider.end_takes = timedelta(minutes=2)
    lease = world.services.buyer.release(buy(world), Reason.STOPPED)
    assert (lease.state, lease.ended_at) == (LeaseState.TERMINATING, None)
    world.hand.advance(timedelta(minutes=5))
    lease = world.services.buyer.release(lease, Reason.STOPPED)
    assert (lease.state, lease.end_reason) == (LeaseState.TERMINATED, Reason.STOPPED)
    assert lease.ended_at == START + timedelta(minutes=2), "the time that the cloud shows, not when we looked"


def test_a_termination_that_the_cloud_ignores_is_asked_for_again(world: World) -> None:
    world.provider.end_takes = None
    lease = buy(world)
    for _ in range(3):
        lease = world.services.buyer.release(lease, Reason.STOPPED)
    assert lease.state is LeaseState.TERMINATING
    assert len(world.provider.named("terminate")) == 3


def test_releasing_what_is_over_changes_nothing(world: World) -> None:
    over = world.services.buyer.release(buy(world), Reason.STOPPED)
    calls, history = len(world.provider.calls), world.services.leases.history(over.id)
    assert world.services.buyer.release(over, Reason.CANCELLED) == over
    assert (len(world.provider.calls), world.services.leases.history(over.id)) == (calls, history)


def test_an_interruption_is_the_cloud_s_word_whatever_we_wanted(world: World) -> None:
    lease = buy(world)
    world.provider.interrupt(str(lease.instance_id))
    lease = world.services.buyer.release(lease, Reason.NODE_LOST)
    assert (lease.state, lease.end_reason) == (LeaseState.TERMINATED, Reason.INTERRUPTED)
    assert world.provider.named("terminate") == []


def test_releasing_an_intent_whose_answer_was_lost_ends_its_machine(world: World) -> None:
    world.provider.lose = 1
    lease = intend(world.services.buyer)
    with pytest.raises(ProviderError):
        world.services.buyer.buy(lease)
    assert world.services.buyer.release(lease, Reason.CANCELLED).state is LeaseState.TERMINATED
    assert world.provider.alive() == []


def test_releasing_an_intent_that_may_still_turn_up_waits_for_it(world: World) -> None:
    world.provider.lose, world.provider.invisible_for = 1, timedelta(minutes=1)
    lease = intend(world.services.buyer)
    with pytest.raises(ProviderError):
        world.services.buyer.buy(lease)
    lease = world.services.buyer.release(lease, Reason.CANCELLED)
    assert lease.state is LeaseState.TERMINATING
    world.hand.advance(timedelta(minutes=2))
    lease = world.services.buyer.release(lease, Reason.CANCELLED)
    assert world.provider.alive() == []
    assert world.services.buyer.release(lease, Reason.CANCELLED).state is LeaseState.TERMINATED


def test_releasing_an_intent_that_was_never_carried_out_ends_in_failed_after_the_grace(world: World) -> None:
    lease = intend(world.services.buyer)
    lease = world.services.buyer.release(lease, Reason.CANCELLED)
    assert lease.state is LeaseState.TERMINATING
    world.hand.advance(UNSEEN_GRACE + timedelta(seconds=1))
    assert world.services.buyer.release(lease, Reason.CANCELLED).state is LeaseState.FAILED


def test_a_machine_that_the_cloud_has_forgotten_is_over_and_charged_until_its_expiry_at_most(world: World) -> None:
    # EC2 shows a terminated machine for about an hour; whoever comes later must not wait for it for ever.
    lease = buy(world)
    world.provider.forget(str(lease.instance_id))
    lease = world.services.buyer.release(lease, Reason.NODE_LOST)
    assert lease.state is LeaseState.TERMINATING, "a moment after the purchase it may only be invisible"
    world.pass_hours(9)
    lease = world.services.buyer.release(lease, Reason.NODE_LOST)
    assert (lease.state, lease.end_reason) == (LeaseState.TERMINATED, Reason.NODE_LOST)
    assert lease.ended_at == lease.expires_at


def test_while_the_api_is_away_nothing_is_taken_for_gone(world: World) -> None:
    lease = buy(world)
    world.pass_hours(9)
    world.provider.away = ProviderError(Reason.CLOUD_ERROR, "503")
    with pytest.raises(ProviderError):
        world.services.buyer.release(lease, Reason.STOPPED)
    assert world.services.leases.get(lease.id).state.may_cost


@pytest.mark.parametrize("reason", Reason)
def test_another_pool_is_asked_only_where_it_may_help(reason: Reason) -> None:
    helps = {Reason.NO_CAPACITY, Reason.PRICE_TOO_LOW, Reason.QUOTA, Reason.THROTTLED, Reason.CLOUD_ERROR}
    assert may_ask_elsewhere(ProviderError(reason, "no")) is (reason in helps)


def test_nothing_is_bought_for_a_job_that_another_try_works_on_or_that_has_ended(world: World) -> None:
    services = world.services
    services.jobs.begin(TASK, wanted(), "next try", 3, START)
    with pytest.raises(NotOwner, match="nothing was bought"):
        intend(services.buyer)
    assert services.jobs.end(TASK.key, "next try", Reason.CANCELLED, START)
    with pytest.raises(NotOwner):
        intend(services.buyer, "next try")
    assert services.leases.of_job(TASK.key) == []


# A crash at every line.


def crashes(run: Callable[[World, Buyer], None], world: World, fuse: Fuse) -> bool:
    """Run with a fuse in every database write and cloud call; whether it blew."""
    database = FragileDatabase(world.services.database, fuse)
    provider = Fragile(world.provider, fuse, PROVIDER_CALLS)
    buyer = Buyer(provider, LeaseStore(database), world.clock)  # type: ignore[arg-type]
    try:
        run(world, buyer)
    except Crash:
        return True
    return False


def take_over(world: World) -> list[Lease]:
    """What the next try finds and takes over."""
    return [world.services.leases.adopt(lease, "next", world.clock.now()) for lease in world.services.leases.open()]


def end_all(world: World) -> None:
    for _ in range(4):
        for lease in world.services.leases.open():
            world.services.buyer.release(lease, Reason.CANCELLED)
        world.hand.advance(UNSEEN_GRACE)


LINES = 40


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("slow", [False, True], ids=["at-once", "slow"])
def test_a_crash_at_every_line_of_buying_buys_once_and_leaves_nothing(
    emptied: Callable[[], Database], done: bool, slow: bool
) -> None:
    def run(world: World, buyer: Buyer) -> None:
        buyer.buy(intend(buyer))

    for line in range(LINES):
        world = ready(emptied())
        if slow:
            world.provider.invisible_for = timedelta(seconds=30)
            world.provider.end_takes = timedelta(minutes=1)
        blew = crashes(run, world, Fuse(line, done=done))
        world.hand.advance(timedelta(minutes=1))
        for lease in take_over(world):
            found = world.services.buyer.look_up(lease)
            if found.state is LeaseState.REQUESTED:
                found = world.services.buyer.buy(found)
            assert found.state is LeaseState.ACTIVE
        assert len(world.provider.machines) <= 1, f"bought twice after a crash at line {line}"
        known = {lease.instance_id for lease in world.services.leases.open()}
        assert {machine.instance_id for machine in world.provider.alive()} == known, f"line {line}"
        end_all(world)
        assert (world.provider.alive(), world.services.leases.open()) == ([], []), f"line {line}"
        if not blew:
            assert line > 3, "the fuse was in no call at all"
            return
    pytest.fail(f"buying takes more than {LINES} lines")


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("state", ["active", "lost", "intent"])
@pytest.mark.parametrize("slow", [False, True], ids=["at-once", "slow"])
def test_a_crash_at_every_line_of_releasing_leaves_nothing(
    emptied: Callable[[], Database], done: bool, state: str, slow: bool
) -> None:
    def run(world: World, buyer: Buyer) -> None:
        [lease] = world.services.leases.open()
        buyer.release(lease, Reason.CANCELLED)

    for line in range(LINES):
        world = ready(emptied())
        lease = intend(world.services.buyer)
        if slow:
            world.provider.end_takes = timedelta(minutes=1)
        if state == "active":
            world.services.buyer.buy(lease)
        elif state == "lost":
            world.provider.lose = 1
            with pytest.raises(ProviderError):
                world.services.buyer.buy(lease)
        blew = crashes(run, world, Fuse(line, done=done))
        take_over(world)
        end_all(world)
        assert (world.provider.alive(), world.services.leases.open()) == ([], []), f"line {line}"
        [lease] = world.services.leases.of_job(TASK.key)
        assert lease.state is (LeaseState.FAILED if state == "intent" else LeaseState.TERMINATED)
        if not blew:
            assert line > 2, "the fuse was in no call at all"
            return
    pytest.fail(f"releasing takes more than {LINES} lines")
