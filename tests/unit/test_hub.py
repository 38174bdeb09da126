"""One hub for everything that lives: little asked however many jobs there are, no alarm from our own trouble."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from gpucost import hub as hub_module
from gpucost.capacity.buyer import Buyer
from gpucost.capacity.lease import Attempt, Lease, LeaseState
from gpucost.capacity.providers.base import Machine, ProviderError
from gpucost.db.engine import Database
from gpucost.hub import BOOT_SECONDS, SILENCE_SECONDS, UNSEEN_SECONDS, Hub, Sight, judge
from gpucost.job import JobId
from gpucost.jobstore import Command, Control, Heartbeat, Phase
from gpucost.lifecycle.steps import Event, EventKind
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World, wanted
from tests.fakes.tracker import FakeTracker

LEASE = Lease(
    id="lease-1",
    job=TASK.key,
    attempt=1,
    pool=pool(),
    state=LeaseState.ACTIVE,
    owner="me",
    client_token="token",
    instance_id="i-1",
    price=InstanceHourPrice(amount="0.3"),
    requested_at=START,
    expires_at=START + timedelta(hours=4),
)
ALIVE = Machine(instance_id="i-1", state="running", pool=pool())
BEAT = Heartbeat(lease_id="lease-1", job=TASK.key, attempt=1, sequence=3, at=START, phase=Phase.TRAINING)


def seen(**changes: Any) -> Sight:
    """A machine watched since second 1000, alive, with a heartbeat just now."""
    facts: dict[str, Any] = {
        "lease": LEASE,
        "since": 1000.0,
        "beat": BEAT,
        "beat_at": 2000.0,
        "machine": ALIVE,
        "seen_at": 2000.0,
    }
    return Sight(**(facts | changes))


OVER = ALIVE.model_copy(update={"state": "terminated", "end_code": "Server.SpotInstanceTermination"})
EXITED = BEAT.model_copy(update={"exited": Reason.COMPLETED})
QUIET: dict[str, Any] = {"beat": None, "beat_at": None}


@pytest.mark.parametrize(
    ("changes", "at", "kind", "words"),
    [
        ({}, 2000.0, None, ""),
        ({"machine": OVER}, 2000.0, EventKind.OVER, "i-1 is gone: Server.SpotInstanceTermination"),
        ({"machine": OVER, "beat": EXITED}, 2000.0, EventKind.OVER, "is gone"),
        ({"beat": EXITED}, 2000.0, EventKind.EXITED, "the program ended: completed"),
        ({}, 2000.0 + SILENCE_SECONDS, None, ""),
        ({}, 2001.0 + SILENCE_SECONDS, EventKind.SILENT, "no heartbeat of i-1 for 120 s"),
        (QUIET, 1000.0 + BOOT_SECONDS, None, ""),
        (QUIET, 1001.0 + BOOT_SECONDS, EventKind.SILENT, "no heartbeat within 900 s of buying i-1"),
        ({"machine": None, "beat_at": 2299.0}, 2000.0 + UNSEEN_SECONDS, None, ""),
        ({"machine": None, "beat_at": 2299.0}, 2001.0 + UNSEEN_SECONDS, EventKind.SILENT, "EC2 has not known i-1"),
        ({"machine": None, "seen_at": None} | QUIET, 1000.0 + UNSEEN_SECONDS, None, ""),
        ({"machine": None, "seen_at": None} | QUIET, 1001.0 + UNSEEN_SECONDS, EventKind.SILENT, "has not known"),
    ],
)
def test_what_a_subscriber_hears_of(changes: dict[str, Any], at: float, kind: EventKind | None, words: str) -> None:
    event = judge(seen(**changes), START, at)
    assert (event.kind if event else None) == kind
    if event is not None:
        assert words in event.note
        assert (event.lease_id, event.at) == ("lease-1", START)


def test_a_machine_that_outstays_its_expiry_is_reported() -> None:
    assert judge(seen(), LEASE.expires_at, 2000.0) is None
    event = judge(seen(), LEASE.expires_at + timedelta(seconds=1), 2000.0)
    assert event is not None
    assert (event.kind, event.note) == (EventKind.EXPIRED, "planned to end by 2026-11-30 16:00, and is still there")


# Rounds of a real hub, with time that stands.


class Monotonic:
    """Real seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def world(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(hub_module, "ROUND_SECONDS", 0.002)
    return world


def buy(world: World, task: JobId = TASK) -> Lease:
    """A job with one running machine."""
    world.services.jobs.begin(task, wanted(), "me", 3, world.clock.now())
    buyer: Buyer = world.services.buyer
    expires = START + timedelta(hours=20)
    lease = buyer.intend(task.key, 1, quote(pool(), "0.30", START), InstanceHourPrice(amount="1"), "me", expires)
    return buyer.buy(lease)


def run(scenario: Callable[[Hub, Monotonic], Coroutine[Any, Any, Any]], world: World) -> Any:
    async def go() -> Any:
        seconds = Monotonic()
        hub = Hub(world.services, monotonic=seconds)
        return await asyncio.wait_for(scenario(hub, seconds), timeout=20)

    return asyncio.run(go())


async def rounds(world: World, count: int = 2) -> None:
    """Let the hub look `count` times more."""
    target = len(world.provider.named("describe")) + count
    while len(world.provider.named("describe")) < target:  # noqa: ASYNC110 - the hub tells nobody
        await asyncio.sleep(0.002)


def watch(hub: Hub, lease: Lease) -> asyncio.Task[Event]:
    return asyncio.create_task(hub.watch(lease.id, "me", "greedy"))


def test_an_interruption_is_heard_of(world: World) -> None:
    lease = buy(world)

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        task = watch(hub, lease)
        await rounds(world)
        assert not task.done()
        world.provider.interrupt(str(lease.instance_id))
        return await task

    event = run(scenario, world)
    assert (event.kind, event.lease_id) == (EventKind.OVER, lease.id)


def test_each_subscriber_hears_of_its_own(world: World) -> None:
    one, two = buy(world), buy(world, TASK.model_copy(update={"map_index": 2}))

    async def scenario(hub: Hub, seconds: Monotonic) -> tuple[Event, bool]:
        first, second = watch(hub, one), watch(hub, two)
        world.beat(one.id, step=100, exited=Reason.COMPLETED)
        event = await first
        await rounds(world)
        waiting = not second.done()
        second.cancel()
        return event, waiting

    event, waiting = run(scenario, world)
    assert (event.kind, event.lease_id, waiting) == (EventKind.EXITED, one.id, True)


def test_a_thousand_leases_cost_one_listing_and_one_description_a_round(world: World) -> None:
    # The leases need no rows here: a round asks the store and the cloud, and the rows only when something changed.
    hub = Hub(world.services, monotonic=Monotonic())
    listings = []
    etags = world.objects.scan
    world.objects.scan = lambda prefix: listings.append(prefix) or etags(prefix)  # type: ignore[method-assign,func-returns-value]
    course: Any = None
    later = START + timedelta(hours=1)
    watched = []
    for number in range(1000):
        machine = ALIVE.model_copy(update={"instance_id": f"i-{number}", "launched_at": START})
        world.provider.machines[machine.instance_id] = machine
        world.provider._since[machine.instance_id] = START
        changes = {"id": f"lease-{number}", "instance_id": machine.instance_id, "launched_at": START}
        sight = Sight(LEASE.model_copy(update=changes), since=5000.0)
        watched.append(hub_module._Subscriber(sight, course, course, later))
    assert hub._round(watched) == {}
    assert listings == ["live"]
    assert world.provider.calls == [("describe", "us-east-1", "1000")]
    assert all(subscriber.sight.machine is not None for subscriber in watched)


def test_a_heartbeat_is_read_only_when_it_changed(world: World) -> None:
    lease = buy(world)
    reads: list[str] = []
    get = world.objects.get
    world.objects.get = lambda key: reads.append(key) or get(key)  # type: ignore[method-assign,func-returns-value]

    async def scenario(hub: Hub, seconds: Monotonic) -> None:
        task = watch(hub, lease)
        world.beat(lease.id, step=1)
        reads.clear()
        await rounds(world, 5)
        task.cancel()

    run(scenario, world)
    assert len([key for key in reads if key.startswith("live/")]) <= 1


def test_an_api_that_is_away_declares_no_machine_gone(world: World) -> None:
    lease = buy(world)

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        task = watch(hub, lease)
        world.beat(lease.id, step=1)
        await rounds(world)
        world.provider.away = ProviderError(Reason.CLOUD_ERROR, "503")
        for step in range(2, 8):
            seconds.now += UNSEEN_SECONDS / 3
            world.beat(lease.id, step=step)
            await rounds(world)
        assert not task.done(), task.result()
        world.provider.away = None
        await rounds(world)
        assert not task.done(), task.result()
        world.provider.interrupt(str(lease.instance_id))
        return await task

    assert run(scenario, world).kind is EventKind.OVER


def test_a_new_machine_is_not_given_up_because_the_api_was_away(world: World) -> None:
    world.provider.invisible_for = timedelta(hours=1)
    lease = buy(world)

    async def scenario(hub: Hub, seconds: Monotonic) -> bool:
        task = watch(hub, lease)
        await rounds(world)
        world.provider.away = ProviderError(Reason.CLOUD_ERROR, "503")
        for _ in range(4):
            seconds.now += UNSEEN_SECONDS / 2
            await rounds(world)
        world.provider.away = None
        await rounds(world)
        waiting = not task.done()
        task.cancel()
        return waiting

    assert run(scenario, world)


def test_a_store_that_is_away_makes_no_node_silent(world: World) -> None:
    lease = buy(world)
    etags = world.objects.scan

    def away(prefix: str, after: str | None = None) -> Any:
        raise OSError("503 Slow Down")

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        task = watch(hub, lease)
        world.beat(lease.id, step=1)
        await rounds(world)
        world.objects.scan = away  # type: ignore[method-assign]
        for _ in range(4):
            seconds.now += SILENCE_SECONDS
            await rounds(world)
        world.objects.scan = etags  # type: ignore[method-assign]
        await rounds(world)
        assert not task.done(), "the node was alive all the time; we could not hear it"
        seconds.now += SILENCE_SECONDS + 1
        return await task

    assert run(scenario, world).kind is EventKind.SILENT


def test_a_store_that_is_away_from_the_start_makes_no_new_node_late(world: World) -> None:
    lease = buy(world)
    scan = world.objects.scan

    def away(prefix: str, after: str | None = None) -> Any:
        raise OSError("503 Slow Down")

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        world.objects.scan = away  # type: ignore[method-assign]
        task = watch(hub, lease)
        for _ in range(4):
            await rounds(world)
            seconds.now += BOOT_SECONDS / 2
        world.objects.scan = scan  # type: ignore[method-assign]
        await rounds(world)
        assert not task.done(), "its heartbeats may have been there all the time"
        seconds.now += BOOT_SECONDS + 1
        return await task

    assert run(scenario, world).kind is EventKind.SILENT


def test_a_look_that_takes_long_makes_no_node_silent(world: World) -> None:
    leases = [buy(world, TASK.model_copy(update={"map_index": number})) for number in range(13)]
    services = world.services
    read, describe = services.live.read, world.provider.describe

    async def scenario(hub: Hub, seconds: Monotonic) -> list[bool]:
        def slow_read(live: Any, lease_id: str) -> Any:
            seconds.now += 10.0
            return read(lease_id)

        def slow_describe(region: str, ids: Any) -> Any:
            seconds.now += SILENCE_SECONDS
            for lease in leases:
                world.beat(lease.id, step=1)
            return describe(region, ids)

        tasks = [watch(hub, lease) for lease in leases]
        world.provider.describe = slow_describe  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(services.live), "read", slow_read)
            await rounds(world, 4)
        done = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        return done

    assert run(scenario, world) == [False] * 13, "fresh heartbeats were read in every round"


def test_an_mlflow_that_hangs_holds_up_no_watch(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "ROUND_SECONDS", 0.002)
    tracker = FakeTracker()
    world = World(database, tracker=tracker)
    leases = [buy(world, TASK.model_copy(update={"map_index": number})) for number in range(13)]
    for lease in leases:
        world.services.leases.begin_attempt(Attempt(job=lease.job, number=1, started_at=START))
    tracker.open.clear()

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        tasks = [watch(hub, lease) for lease in leases]
        for step in range(1, 4):
            for lease in leases:
                world.beat(lease.id, step=step)
                world.upload_metrics(lease.id, step)
            await rounds(world)
        assert tracker.calls > 0, "MLflow was asked, and hangs"
        assert tracker.points == []
        assert not any(task.done() for task in tasks)
        world.provider.interrupt(str(leases[7].instance_id))
        event = await tasks[7]
        tracker.open.set()
        while len(tracker.points) < 3 * 13:
            for lease in leases:
                world.beat(lease.id, step=4)
            await rounds(world)
        for task in tasks:
            task.cancel()
        return event

    event = run(scenario, world)
    assert (event.kind, event.lease_id) == (EventKind.OVER, leases[7].id)


def test_a_bad_round_does_not_end_the_watch(world: World) -> None:
    lease = buy(world)
    describe = world.provider.describe
    failures = iter([True, True])

    def sometimes(region: str, ids: Any) -> Any:
        found = describe(region, ids)
        if next(failures, False):
            raise RuntimeError("a mistake somewhere")
        return found

    world.provider.describe = sometimes  # type: ignore[method-assign]

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        task = watch(hub, lease)
        await rounds(world, 3)
        world.provider.interrupt(str(lease.instance_id))
        return await task

    assert run(scenario, world).kind is EventKind.OVER


def test_one_job_s_broken_document_does_not_deafen_the_others(world: World) -> None:
    broken, healthy = buy(world), buy(world, TASK.model_copy(update={"map_index": 2}))

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        first, second = watch(hub, broken), watch(hub, healthy)
        world.objects.put(f"live/{broken.id}.json", b'{"torn')
        await rounds(world)
        world.beat(healthy.id, step=100, exited=Reason.COMPLETED)
        event = await second
        first.cancel()
        return event

    assert run(scenario, world).lease_id == healthy.id


def test_the_launch_time_is_noted_when_the_api_shows_it(world: World) -> None:
    world.provider.invisible_for = timedelta(minutes=1)
    lease = buy(world)
    assert lease.launched_at is None

    async def scenario(hub: Hub, seconds: Monotonic) -> None:
        task = watch(hub, lease)
        await rounds(world)
        world.hand.advance(timedelta(minutes=2))
        await rounds(world, 3)
        task.cancel()

    run(scenario, world)
    assert world.services.leases.get(lease.id).launched_at == START


# Six hours of eight have passed with the work of two undone: spot may no longer be trusted.


def test_when_the_policy_would_leave_the_owner_hears_of_it_once(world: World) -> None:
    lease = buy(world)

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        task = watch(hub, lease)
        world.beat(lease.id, step=0)
        await rounds(world)
        assert not task.done()
        world.pass_hours(5.95)
        return await task

    event = run(scenario, world)
    assert event.kind is EventKind.REPLAN
    assert "on-demand could no longer finish in time" in event.note


def test_a_node_that_was_asked_to_leave_is_not_asked_again(world: World) -> None:
    lease = buy(world)
    world.services.store(lease.job).ask(1, Control(sequence=1, command=Command.SAVE_AND_STOP))

    async def scenario(hub: Hub, seconds: Monotonic) -> bool:
        task = watch(hub, lease)
        world.beat(lease.id, step=0)
        await rounds(world)
        world.pass_hours(5.95)
        await rounds(world, 4)
        waiting = not task.done()
        task.cancel()
        return waiting

    assert run(scenario, world)


def test_prices_that_cannot_be_had_end_no_watch(world: World) -> None:
    lease = buy(world)
    quotes = world.provider.quotes

    def away(at: Any) -> Any:
        raise ProviderError(Reason.THROTTLED, "slow down")

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        world.provider.quotes = away  # type: ignore[method-assign]
        task = watch(hub, lease)
        world.pass_hours(5.95)
        await rounds(world, 3)
        assert not task.done()
        world.provider.quotes = quotes  # type: ignore[method-assign]
        world.pass_hours(0.1)
        return await task

    assert run(scenario, world).kind is EventKind.REPLAN


def test_a_lease_that_nobody_knows_fails_its_own_watch_only(world: World) -> None:
    async def scenario(hub: Hub, seconds: Monotonic) -> None:
        with pytest.raises(KeyError, match="none with id 'nobody'"):
            await hub.watch("nobody", "me", "greedy")

    run(scenario, world)


def test_a_loss_that_diverged_does_not_stop_the_watch(world: World) -> None:
    lease = buy(world)

    async def scenario(hub: Hub, seconds: Monotonic) -> Event:
        task = watch(hub, lease)
        world.beat(lease.id, step=5, loss=math.nan)
        await rounds(world)
        world.beat(lease.id, step=100, loss=math.inf, exited=Reason.COMPLETED)
        return await task

    assert run(scenario, world).kind is EventKind.EXITED
