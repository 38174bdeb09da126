"""Why it ended, how far it is, and what its end leaves in the books and in MLflow."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from gpucost.capacity.lease import Attempt, Lease, LeaseState
from gpucost.db.engine import Database
from gpucost.jobstore import ExitRecord, JobStore
from gpucost.lifecycle import settlement, tracking
from gpucost.lifecycle.progress import Progress, read_progress
from gpucost.lifecycle.steps import Event, EventKind
from gpucost.money import InstanceHourPrice
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.tracking.mlflow_tracker import RunStatus
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World, wanted
from tests.fakes.tracker import FakeTracker


def lease(state: LeaseState = LeaseState.ACTIVE, end_reason: Reason | None = None) -> Lease:
    return Lease(
        id="lease-1",
        job=TASK.key,
        attempt=1,
        pool=pool(),
        state=state,
        owner="me",
        client_token="token",
        instance_id="i-1",
        price=InstanceHourPrice(amount="0.3"),
        requested_at=START,
        expires_at=START + timedelta(hours=4),
        end_reason=end_reason,
    )


def event(kind: EventKind) -> Event:
    return Event(kind=kind, lease_id="lease-1", at=START)


ENDING, OVER = LeaseState.TERMINATING, LeaseState.TERMINATED


@pytest.mark.parametrize(
    ("record", "of", "seen", "reason"),
    [
        (Reason.COMPLETED, lease(OVER, Reason.INTERRUPTED), EventKind.OVER, Reason.COMPLETED),
        (Reason.OUT_OF_MEMORY, lease(), EventKind.EXITED, Reason.OUT_OF_MEMORY),
        (None, lease(OVER, Reason.INTERRUPTED), EventKind.OVER, Reason.INTERRUPTED),
        (None, lease(OVER, Reason.SELF_ENDED), EventKind.OVER, Reason.SELF_ENDED),
        (None, lease(), EventKind.SILENT, Reason.NODE_LOST),
        (None, lease(), EventKind.EXPIRED, Reason.EXPIRED),
        (None, lease(ENDING, Reason.EXPIRED), EventKind.OVER, Reason.EXPIRED),
        (None, lease(ENDING, Reason.EXPIRED), EventKind.SILENT, Reason.EXPIRED),
        (None, lease(), EventKind.OVER, Reason.NODE_LOST),
        (None, lease(), None, Reason.NODE_LOST),
    ],
)
def test_the_agent_s_word_counts_first_then_the_cloud_s_then_what_was_seen(
    record: Reason | None, of: Lease, seen: EventKind | None, reason: Reason
) -> None:
    store = JobStore(Objects.in_memory(), TASK.key)
    if record is not None:
        store.write_exit(ExitRecord(attempt=1, reason=record, at=START))
    assert settlement.reason_of(store, of, event(seen) if seen else None) is reason


def test_a_machine_that_was_never_launched_costs_nothing(world: World) -> None:
    settlement.charge_lease(world.services, lease(OVER))
    assert world.provider.calls == []


def test_the_launch_that_the_cloud_shows_at_the_end_is_charged(world: World) -> None:
    bought = buy(world)
    assert bought.launched_at == START, "as it was first seen, before the machine was switched on"
    world.pass_hours(0.5)
    machine = world.provider.machines[str(bought.instance_id)]
    world.provider.machines[machine.instance_id] = machine.model_copy(update={"launched_at": world.clock.now()})
    world.pass_hours(1.0)
    over = world.services.buyer.release(bought, Reason.CANCELLED)
    settlement.charge_lease(world.services, over)
    charge = world.services.books.lease_charge(bought.id)
    assert charge is not None
    assert charge.seconds == 3600
    assert str(charge.amount.amount) == "0.300000"


# How far it is.


@pytest.fixture
def running(world: World) -> Lease:
    return buy(world)


def buy(world: World) -> Lease:
    world.services.jobs.begin(TASK, wanted(), "me", 3, START)
    expires = START + timedelta(hours=5)
    buyer = world.services.buyer
    return buyer.buy(buyer.intend(TASK.key, 1, quote(pool(), "0.30", START), None, "me", expires))


def progress(world: World) -> Progress:
    return read_progress(world.services.store(TASK.key), world.services.live, world.services.leases.of_job(TASK.key))


def test_only_what_is_saved_counts_as_done(world: World, running: Lease) -> None:
    assert progress(world) == Progress(saved_step=0, total_steps=None)
    assert progress(world).work_left == 1.0
    world.beat(running.id, step=80, total=100)
    assert progress(world).work_left == 1.0
    world.save(running.id, step=40)
    assert progress(world).work_left == pytest.approx(0.6)


def test_a_checkpoint_whose_manifest_is_gone_gives_way_to_the_one_before(world: World, running: Lease) -> None:
    world.beat(running.id, step=80, total=100)
    world.save(running.id, step=40)
    world.save(running.id, step=80)
    store = world.services.store(TASK.key)
    world.objects.delete([store.head().checkpoints[0]])
    assert progress(world).saved_step == 40


def test_more_steps_than_were_planned_leave_no_negative_work() -> None:
    assert Progress(saved_step=120, total_steps=100).work_left == 0.0


# Telling MLflow.


@pytest.fixture
def tracked(database: Database, tmp_path: Path) -> tuple[World, FakeTracker, Lease]:
    tracker = FakeTracker()
    world = World(database, tracker=tracker)
    bought = buy(world)
    world.services.leases.begin_attempt(Attempt(job=TASK.key, number=1, started_at=START))
    tracking.job_began(world.services, TASK, wanted())
    return world, tracker, bought


def test_a_finished_job_is_closed_with_quality_and_dollars_side_by_side(
    tracked: tuple[World, FakeTracker, Lease],
) -> None:
    world, tracker, bought = tracked
    world.pass_hours(2.0)
    world.exit(bought.id, Reason.COMPLETED, results={"accuracy": 0.97}, saved_step=100)
    over = world.services.buyer.release(bought, Reason.COMPLETED)
    settlement.settle_attempt(world.services, TASK.key, over)
    summary = settlement.finish(world.services, TASK.key, "me", Reason.COMPLETED)
    run = f"run of {TASK.key}"
    assert summary["mlflow_run_id"] == run
    assert tracker.costs[run]["final.accuracy"] == 0.97
    assert tracker.costs[run]["gpucost.cost_usd"] == 0.6
    assert str(tracker.costs["attempt 1"]["gpucost.cost_usd"].amount) == "0.600000"
    assert tracker.closed == {"attempt 1": RunStatus.FINISHED, run: RunStatus.FINISHED}
    [report] = tracker.texts
    assert "0.6" in report
