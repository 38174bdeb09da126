"""The trigger: no event earlier than Airflow can take it, and no machine ended that another try goes on with."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.triggers.base import BaseTrigger

import gpucost.hooks.tasks
from gpucost.capacity.lease import Lease, LeaseState
from gpucost.capacity.providers.base import ProviderError
from gpucost.clock import ClockSpec, SpecClock
from gpucost.lifecycle.steps import Event, EventKind
from gpucost.reasons import Reason
from gpucost.triggers import training
from gpucost.triggers.training import KILL_SECONDS, KILLS, LEAST_SECONDS, RETRY_SECONDS, TrainingTrigger, stop_job
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World, wanted

CONNECTIONS = {"db_conn_id": "gpucost_db", "mlflow_conn_id": None}


def trigger(**changes: Any) -> TrainingTrigger:
    arguments: dict[str, Any] = {"job": TASK.key, "owner": "me", "connections": CONNECTIONS}
    return TrainingTrigger(**(arguments | changes))


def test_a_trigger_survives_the_database() -> None:
    before = trigger(policy="greedy", lease_id="lease-1", until=START.isoformat())
    path, arguments = before.serialize()
    assert path == f"{TrainingTrigger.__module__}.{TrainingTrigger.__name__}"
    after = TrainingTrigger(**json.loads(json.dumps(arguments)))
    assert after.serialize() == before.serialize()


def test_a_trigger_of_an_older_release_still_loads() -> None:
    old = TrainingTrigger(job=TASK.key, owner="me", connections=CONNECTIONS)
    assert (old.policy, old.lease_id, old.until) == ("greedy", None, None)


def test_a_triggerer_that_restarts_ends_no_machine() -> None:
    assert TrainingTrigger.cleanup is BaseTrigger.cleanup


class Time:
    """Real time, moved by whoever waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept = 0.0
        monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        waiting = SimpleNamespace(sleep=self.sleep_async, get_running_loop=asyncio.get_running_loop)
        monkeypatch.setattr(training, "asyncio", waiting)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def heard(monkeypatch: pytest.MonkeyPatch, hub: Any, of: TrainingTrigger) -> list[dict[str, Any]]:
    """The events that a trigger yields."""

    class Hubs:
        async def get(self, connections: Any) -> Any:
            assert connections == CONNECTIONS
            return hub

    monkeypatch.setattr(training, "_hubs", Hubs())

    async def run() -> list[dict[str, Any]]:
        return [event.payload async for event in of.run()]

    return asyncio.run(run())


@pytest.mark.parametrize(("took", "waits"), [(0.0, 10.0), (0.5, 9.5), (9.9, 0.1), (10.0, 0.0), (3600.0, 0.0)])
def test_no_event_comes_earlier_than_airflow_can_take_it(
    monkeypatch: pytest.MonkeyPatch, time: Time, took: float, waits: float
) -> None:
    event = Event(kind=EventKind.OVER, lease_id="lease-1", at=START, note="gone")

    class Hub:
        async def watch(self, *asked: str) -> Event:
            assert asked == ("lease-1", "me", "greedy")
            time.now += took
            return event

    [payload] = heard(monkeypatch, Hub(), trigger(lease_id="lease-1"))
    assert time.slept == pytest.approx(waits)
    assert time.now - 100.0 >= LEAST_SECONDS
    assert Event.model_validate(json.loads(json.dumps(payload))) == event


def test_a_pause_lasts_as_long_as_it_takes_on_the_job_s_clock(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    clock = SpecClock(ClockSpec(origin_real=START, origin=START, speed=60), real_now=lambda: START)
    hub = SimpleNamespace(services=SimpleNamespace(clock=clock))
    until = START + timedelta(hours=1)
    [payload] = heard(monkeypatch, hub, trigger(until=until.isoformat()))
    assert time.slept == 60.0, "an hour, sixty times as fast"
    assert Event.model_validate(payload).kind is EventKind.TIME


@pytest.mark.parametrize("until", [None, (START - timedelta(hours=1)).isoformat()])
def test_a_pause_that_is_over_still_takes_what_airflow_needs(
    monkeypatch: pytest.MonkeyPatch, time: Time, until: str | None
) -> None:
    hub = SimpleNamespace(services=SimpleNamespace(clock=SpecClock(real_now=lambda: START)))
    heard(monkeypatch, hub, trigger(until=until))
    assert time.slept == LEAST_SECONDS


@pytest.mark.parametrize("where", ["connections", "watch"])
def test_what_is_away_is_waited_for_however_long(
    monkeypatch: pytest.MonkeyPatch, time: Time, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    event = Event(kind=EventKind.OVER, lease_id="lease-1", at=START, note="gone")
    failures = iter(range(100))

    def fail_at(place: str) -> None:
        if place == where and next(failures, None) is not None:
            raise OSError("the store is away")

    class Hub:
        async def watch(self, *asked: str) -> Event:
            fail_at("watch")
            return event

    class Hubs:
        async def get(self, connections: Any) -> Any:
            fail_at("connections")
            return Hub()

    monkeypatch.setattr(training, "_hubs", Hubs())

    async def run() -> list[Any]:
        return [found.payload async for found in trigger(lease_id="lease-1").run()]

    [payload] = asyncio.run(run())
    assert Event.model_validate(payload) == event
    assert time.slept == pytest.approx(100 * RETRY_SECONDS)
    assert f"Job {TASK.key}: cannot be watched now; tried again in 15 s" in caplog.text


def test_an_ended_trigger_tries_no_more(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    async def cancelled(connections: Any) -> Any:
        raise asyncio.CancelledError

    monkeypatch.setattr(training, "_hubs", SimpleNamespace(get=cancelled))

    async def run() -> list[Any]:
        return [event async for event in trigger(lease_id="lease-1").run()]

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert time.slept == 0.0


def test_many_ends_at_once_leave_the_loop_s_own_threads_free(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(KILLS + 1, timeout=20)

    class Hubs:
        async def get(self, _: Any) -> Any:
            return SimpleNamespace(services=None)

    monkeypatch.setattr(training, "_hubs", Hubs())
    monkeypatch.setattr(training, "goes_on", lambda services, job: False)
    monkeypatch.setattr(training, "stop_job", lambda services, job, owner: together.wait())

    async def all_at_once() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        ends = [asyncio.create_task(trigger(job=str(number)).on_kill()) for number in range(KILLS)]
        await asyncio.to_thread(together.wait)
        await asyncio.gather(*ends)

    asyncio.run(all_at_once())
    assert not together.broken, "every end and the loop's own thread met at once"


# Ending what a user ended.


def buy(world: World) -> Lease:
    world.services.jobs.begin(TASK, wanted(), "me", 3, START)
    expires = START + timedelta(hours=5)
    buyer = world.services.buyer
    return buyer.buy(buyer.intend(TASK.key, 1, quote(pool(), "0.30", START), None, "me", expires))


def kill(monkeypatch: pytest.MonkeyPatch, world: World, of: TrainingTrigger, *, goes_on: bool = False) -> None:
    class Hubs:
        async def get(self, _: Any) -> Any:
            return SimpleNamespace(services=world.services)

    monkeypatch.setattr(training, "_hubs", Hubs())
    monkeypatch.setattr(gpucost.hooks.tasks, "is_wanted", lambda job: goes_on)
    asyncio.run(of.on_kill())


def test_a_task_that_is_marked_failed_ends_its_machine(
    monkeypatch: pytest.MonkeyPatch, world: World, time: Time
) -> None:
    lease = buy(world)
    kill(monkeypatch, world, trigger(lease_id=lease.id))
    assert world.provider.alive() == []
    assert world.services.leases.get(lease.id).end_reason is Reason.CANCELLED


def test_a_late_trigger_ends_nothing_that_another_try_owns(
    monkeypatch: pytest.MonkeyPatch, world: World, time: Time
) -> None:
    lease = buy(world)
    world.services.leases.adopt(lease, "next", START)
    kill(monkeypatch, world, trigger(lease_id=lease.id))
    assert len(world.provider.alive()) == 1
    assert world.services.jobs.ended_as(TASK.key) is None


def test_a_cleared_task_s_machine_waits_for_the_next_try(
    monkeypatch: pytest.MonkeyPatch, world: World, time: Time
) -> None:
    lease = buy(world)
    kill(monkeypatch, world, trigger(lease_id=lease.id), goes_on=True)
    assert len(world.provider.alive()) == 1


def test_when_airflow_does_not_say_the_machine_is_ended(
    monkeypatch: pytest.MonkeyPatch, world: World, time: Time
) -> None:
    lease = buy(world)

    def silent(job: Any) -> bool:
        raise ConnectionError("api-server is away")

    class Hubs:
        async def get(self, _: Any) -> Any:
            return SimpleNamespace(services=world.services)

    monkeypatch.setattr(training, "_hubs", Hubs())
    monkeypatch.setattr(gpucost.hooks.tasks, "is_wanted", silent)
    asyncio.run(trigger(lease_id=lease.id).on_kill())
    assert world.provider.alive() == []


def test_ending_waits_for_the_cloud_and_gives_up_in_time(world: World, time: Time) -> None:
    lease = buy(world)
    world.provider.end_takes = None
    assert stop_job(world.services, TASK.key, "me") is False
    assert KILL_SECONDS <= time.slept < 30, "Airflow gives on_kill 30 seconds"
    assert world.services.leases.get(lease.id).state is LeaseState.TERMINATING
    assert len(world.provider.named("terminate")) > 10, "asked for again and again"


def test_ending_goes_on_through_an_outage_of_the_api(world: World, time: Time) -> None:
    buy(world)
    terminate = world.provider.terminate
    failures = iter([True, True])

    def sometimes(region: str, ids: Any) -> None:
        if next(failures, False):
            raise ProviderError(Reason.THROTTLED, "slow down")
        terminate(region, ids)

    world.provider.terminate = sometimes  # type: ignore[method-assign]
    assert stop_job(world.services, TASK.key, "me") is True
    assert world.provider.alive() == []
