"""The course of a job, from wanting to done, over everything that gets in between."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpucost.capacity.buyer import UNSEEN_GRACE
from gpucost.capacity.lease import Lease, LeaseState
from gpucost.capacity.providers.base import ProviderError
from gpucost.capacity.store import NotOwner
from gpucost.db.engine import Database
from gpucost.job import JobId
from gpucost.jobstore import Command, FencedOut, Manifest
from gpucost.lifecycle.course import TICK, Course
from gpucost.lifecycle.steps import CourseEnded, Event, EventKind, Finished, Pause, Step, Watch
from gpucost.market.pool import CapacityType
from gpucost.money import Money
from gpucost.reasons import Reason
from gpucost.tracking.mlflow_tracker import TrackingAway
from tests.fakes.crash import OBJECT_CALLS, PROVIDER_CALLS, Crash, Fragile, FragileDatabase, Fuse
from tests.fakes.provider import pool
from tests.fakes.rooms import START, TASK, World, wanted

CLEARED = 4
"""Airflow's `max_tries` after a clear."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print('training')\n")
    return code


class Drive:
    """One job driven through fakes, as the operator would.

    Args:
        world: the rooms.
        folder: the program's.
        job: changes of the job that is wanted.
    """

    def __init__(self, world: World, folder: Path, **job: Any) -> None:
        self.world = world
        self.folder = folder
        self.job = wanted(**job)
        self.course = self.take("first")

    def take(self, owner: str, task: JobId = TASK) -> Course:
        """Another try of the task."""
        self.course = Course(self.world.services, task, self.job, owner)
        return self.course

    def begin(self) -> Step:
        self.course.begin(self.folder)
        return self.course.pursue()

    def bought(self) -> Lease:
        """Begin, and expect a machine."""
        return self.lease(self.begin())

    def lease(self, step: Step) -> Lease:
        """The lease that a step watches."""
        assert isinstance(step, Watch), step
        lease = self.world.services.leases.get(step.lease_id)
        assert lease.owner == self.course.owner
        return lease

    def hear(self, kind: EventKind, lease: Lease | None = None, note: str = "seen") -> Step:
        """What the trigger hands back, through JSON."""
        event = Event(kind=kind, lease_id=lease.id if lease else None, at=self.world.clock.now(), note=note)
        return self.course.handle(Event.model_validate_json(event.model_dump_json()))

    def complete(self, lease: Lease) -> Step:
        """The program ends well, and its machine with it."""
        self.world.exit(lease.id, Reason.COMPLETED, results={"accuracy": 0.97}, saved_step=100, weights_digest="w")
        return self.hear(EventKind.EXITED, lease)

    def interrupt(self, lease: Lease, *, step: int, saved: int | None = None) -> Step:
        """The provider takes the machine back, at a step, after a checkpoint."""
        if saved is not None:
            self.world.save(lease.id, step=saved)
        self.world.beat(lease.id, step=step, saved_step=saved, resumed_step=0)
        self.world.provider.interrupt(str(lease.instance_id))
        return self.hear(EventKind.OVER, lease)


@pytest.fixture
def drive(world: World, folder: Path) -> Drive:
    return Drive(world, folder)


def left(world: World) -> tuple[int, list[Lease]]:
    """Machines that run and leases that may cost."""
    return len(world.provider.alive()), world.services.leases.open()


# The straight way.


def test_a_job_that_nothing_gets_in_the_way_of(drive: Drive) -> None:
    lease = drive.bought()
    assert (lease.pool, lease.attempt) == (pool("a"), 1)
    drive.world.pass_hours(2.0)
    done = drive.complete(lease)
    assert isinstance(done, Finished)
    assert done.summary == {
        "job": TASK.key,
        "reason": "completed",
        "cost": "0.600000",  # two hours at 0.30
        "currency": "USD",
        "on_demand": "2.000000",
        "savings": pytest.approx(0.7),
        "hours": pytest.approx(2.0),
        "interruptions": 0,
        "lost_steps": 0,
        "attempts": 1,
        "results": {"accuracy": 0.97},
        "weights_digest": "w",
        "mlflow_run_id": None,
    }
    assert left(drive.world) == (0, [])
    assert drive.world.services.jobs.ended_as(TASK.key) is Reason.COMPLETED


def test_a_node_finds_everything_in_the_store_before_its_machine_is_bought(drive: Drive) -> None:
    store = drive.world.services.store(TASK.key)
    launch = drive.world.provider.launch

    def looking(request: Any) -> Any:
        lease_id = request.tags["gpucost:lease"]
        assert store.attempt(1).members[0].lease_id == lease_id
        assert store.code(store.spec().code_digest)
        assert store.head().fence == 1
        assert drive.world.objects.get(drive.world.services.agent.key)
        return launch(request)

    drive.world.provider.launch = looking  # type: ignore[method-assign]
    lease = drive.bought()
    assert store.attempt(1).expires_at == lease.expires_at
    # Planned: 2.1 h; half as long again, and an hour.
    assert lease.expires_at == START + timedelta(hours=2.1 * 1.5 + 1)


def test_the_decision_is_kept_with_its_alternatives(drive: Drive) -> None:
    drive.bought()
    [row] = drive.world.services.jobs.placements(TASK.key)
    assert (row.action, row.pool, row.policy) == ("run_spot", pool("a").key, "greedy")
    assert row.expected_cost == Decimal("0.63")
    assert len(row.alternatives) == 6
    assert drive.world.services.decisions.open_decisions(TASK.key) == [], "spot is no compromise"


def test_on_demand_is_a_compromise_and_is_written_down(world: World, folder: Path) -> None:
    drive = Drive(world, folder, deadline=START + timedelta(hours=2.15))
    lease = drive.bought()
    assert lease.pool.capacity_type is CapacityType.ON_DEMAND
    [decision] = world.services.decisions.open_decisions(TASK.key)
    assert decision.title == "On-demand instead of spot"
    assert "h left" in decision.why
    assert decision.review_at == START + timedelta(days=7)


# Interruptions.


def test_an_interruption_leads_to_another_pool_and_the_next_attempt(drive: Drive) -> None:
    first = drive.bought()
    drive.world.pass_hours(1.5)
    second = drive.lease(drive.interrupt(first, step=60, saved=50))
    assert (second.pool, second.attempt) == (pool("b"), 2)
    assert drive.world.services.store(TASK.key).head().fence == 2
    drive.world.beat(second.id, step=51, resumed_step=50)
    drive.world.pass_hours(1.0)
    done = drive.complete(second)
    assert isinstance(done, Finished)
    # 1.5 h at 0.30 and 1 h at 0.35.
    assert done.summary["cost"] == "0.800000"
    assert (done.summary["interruptions"], done.summary["lost_steps"], done.summary["attempts"]) == (1, 10, 2)
    attempts = drive.world.services.leases.attempts(TASK.key)
    assert [(a.number, a.reason, a.last_step, a.saved_step) for a in attempts] == [
        (1, Reason.INTERRUPTED, 60, 50),
        (2, Reason.COMPLETED, 100, 100),
    ]


def test_what_is_saved_is_not_planned_again(drive: Drive) -> None:
    first = drive.bought()
    drive.world.pass_hours(1.0)
    drive.interrupt(first, step=60, saved=50)
    placements = drive.world.services.jobs.placements(TASK.key)
    assert placements[-1].expected_cost == Decimal("0.385")  # (2 h x 0.5 + 0.1 h) at 0.35


def test_an_interruption_in_the_first_hour_is_free_and_one_that_the_node_forestalled_is_not(
    world: World, folder: Path
) -> None:
    drive = Drive(world, folder)
    first = drive.bought()
    world.pass_hours(0.5)
    second = drive.lease(drive.interrupt(first, step=10, saved=10))
    assert world.services.books.job_cost(TASK.key) == Money.zero()
    # On a notice the agent saves and leaves: the machine ended itself, and AWS charges for that.
    world.pass_hours(0.5)
    world.exit(second.id, Reason.INTERRUPTED, step=20, saved_step=20)
    world.provider.shut_down(str(second.instance_id))
    third = drive.lease(drive.hear(EventKind.OVER, second))
    assert world.services.books.job_cost(TASK.key) == Money.usd("0.175")
    assert world.services.leases.attempts(TASK.key)[1].reason is Reason.INTERRUPTED
    assert third.attempt == 3


def test_a_silent_node_is_ended_and_replaced(drive: Drive) -> None:
    first = drive.bought()
    drive.world.beat(first.id, step=10, resumed_step=0)
    second = drive.lease(drive.hear(EventKind.SILENT, first, "no heartbeat for 120 s"))
    assert (second.attempt, second.pool) == (2, pool("b"))
    [attempt, _] = drive.world.services.leases.attempts(TASK.key)
    assert (attempt.reason, attempt.message) == (Reason.NODE_LOST, "no heartbeat for 120 s")
    assert len(drive.world.provider.alive()) == 1


def test_why_an_end_was_asked_for_outlasts_the_wait_for_it(drive: Drive) -> None:
    drive.world.provider.end_takes = timedelta(minutes=2)
    lease = drive.bought()
    drive.world.beat(lease.id, step=10)
    watching = drive.hear(EventKind.EXPIRED, lease)
    assert drive.lease(watching).state is LeaseState.TERMINATING
    drive.world.pass_hours(0.1)
    drive.lease(drive.hear(EventKind.OVER, lease))
    assert drive.world.services.leases.attempts(TASK.key)[0].reason is Reason.EXPIRED


def test_until_the_cloud_confirms_the_end_nothing_else_is_bought(drive: Drive) -> None:
    drive.world.provider.end_takes = timedelta(minutes=2)
    lease = drive.bought()
    for _ in range(3):
        assert drive.lease(drive.hear(EventKind.SILENT, lease)).id == lease.id
    assert len(drive.world.provider.machines) == 1


def test_a_change_of_plan_asks_the_node_to_save_and_leave_and_buys_when_it_has(drive: Drive) -> None:
    first = drive.bought()
    assert drive.lease(drive.hear(EventKind.REPLAN, first, "too late for spot")).id == first.id
    store = drive.world.services.store(TASK.key)
    control = store.control(1)
    assert (control.command, control.sequence, control.why) == (Command.SAVE_AND_STOP, 1, "too late for spot")
    drive.hear(EventKind.REPLAN, first, "again")
    assert store.control(1) == control, "asked once"
    drive.world.pass_hours(5.8)
    drive.world.beat(first.id, step=0)
    drive.world.exit(first.id, Reason.STOPPED, step=5, saved_step=5)
    second = drive.lease(drive.hear(EventKind.EXITED, first))
    assert second.pool.capacity_type is CapacityType.ON_DEMAND


# No capacity, no quota, no cloud.


def test_when_every_spot_pool_refuses_it_pauses_and_asks_again_later(drive: Drive) -> None:
    for zone in "abc":
        drive.world.provider.refuse(pool(zone), Reason.NO_CAPACITY)
    step = drive.begin()
    assert isinstance(step, Pause)
    assert step.until == START + TICK
    assert "time to wait" in step.why
    asked = {call[1] for call in drive.world.provider.named("launch")}
    assert asked == {pool(zone).key for zone in "abc"}, "breadth first, every pool once"
    assert left(drive.world) == (0, [])
    # While they are left out, nobody asks them again; then they are asked.
    drive.world.pass_hours(0.1)
    assert isinstance(drive.hear(EventKind.TIME), Pause)
    assert len(drive.world.provider.named("launch")) == 3
    drive.world.provider.always.clear()
    drive.world.pass_hours(0.2)
    assert drive.lease(drive.hear(EventKind.TIME)).attempt == 1, "refusals cost no attempt"


def test_one_refusal_leads_to_the_next_cheapest(drive: Drive) -> None:
    drive.world.provider.refuse(pool("a"), Reason.PRICE_TOO_LOW)
    assert drive.bought().pool == pool("b")


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (Reason.NOT_AUTHORIZED, "give the connection's identity the permission"),
        (Reason.BAD_REQUEST, "correct the job's field or the site's setting"),
    ],
)
def test_what_only_a_person_can_mend_ends_the_job_with_advice(drive: Drive, reason: Reason, advice: str) -> None:
    drive.world.provider.refuse_all(reason, "VcpuLimitExceeded: 0 vCPU of G instances")
    with pytest.raises(CourseEnded, match="VcpuLimitExceeded: 0 vCPU of G instances") as ended:
        drive.begin()
    assert ended.value.reason is reason
    assert advice in str(ended.value)
    assert len(drive.world.provider.named("launch")) == 1, "what cannot help is not tried for ever"
    assert left(drive.world) == (0, [])
    assert drive.world.services.jobs.ended_as(TASK.key) is reason, "its books are closed"


def test_a_quota_leaves_out_every_pool_that_it_counts_for(drive: Drive) -> None:
    for zone in "abc":
        drive.world.provider.refuse(pool(zone), Reason.QUOTA)
    assert isinstance(drive.begin(), Pause)
    assert len(drive.world.provider.named("launch")) == 1, "the other zones' spot counts for the same quota"
    drive.world.pass_hours(5.8)
    assert drive.lease(drive.hear(EventKind.TIME)).pool.capacity_type is CapacityType.ON_DEMAND


def test_a_job_with_quotas_in_every_way_ends_and_names_them(drive: Drive) -> None:
    drive.world.provider.refuse_all(Reason.QUOTA, "VcpuLimitExceeded: 0 vCPU of G instances")
    assert isinstance(drive.begin(), Pause)
    drive.world.pass_hours(5.8)
    with pytest.raises(
        CourseEnded, match=r"VcpuLimitExceeded: 0 vCPU of G instances.*ask the provider to raise"
    ) as ended:
        drive.hear(EventKind.TIME)
    assert ended.value.reason is Reason.QUOTA


def test_a_stale_try_acts_on_nothing_that_the_next_one_holds(drive: Drive) -> None:
    lease = drive.bought()
    stale = drive.course
    drive.take("second")
    drive.lease(drive.begin())
    for kind in EventKind:
        drive.course = stale
        with pytest.raises(NotOwner):
            drive.hear(kind, None if kind is EventKind.TIME else lease)
    with pytest.raises(NotOwner):
        stale.pursue()
    assert len(drive.world.provider.alive()) == 1
    assert drive.world.services.store(TASK.key).control(1).command is Command.RUN
    assert drive.world.services.leases.get(lease.id).owner == "second"


def test_a_job_that_was_cancelled_in_mid_purchase_buys_nothing(drive: Drive) -> None:
    drive.course.begin(drive.folder)
    assert drive.course.stop(Reason.CANCELLED) is True
    with pytest.raises(NotOwner):
        drive.course.pursue()
    assert drive.world.provider.named("launch") == []


def test_a_running_job_whose_budget_is_used_up_is_asked_to_leave(drive: Drive) -> None:
    lease = drive.bought()
    assert drive.course.reason_to_leave(lease) is None
    drive.world.pass_hours(17)
    why = drive.course.reason_to_leave(lease)
    assert why is not None
    assert "all of $5.0000" in why


@pytest.mark.parametrize(
    "job",
    [
        {"world_size": 2},
        {"environment": {"image": "ami-1"}},
        {"world_size": 5, "gpu": {"kinds": ("T4",), "count": 4}},
        {"sensitivity": "confidential"},
    ],
)
def test_what_no_node_could_do_yet_is_refused_before_a_machine_is_bought(
    world: World, folder: Path, job: dict[str, Any]
) -> None:
    drive = Drive(world, folder, **job)
    with pytest.raises(ValueError, match=f"not there yet: {next(iter(job))}.*nothing was bought"):
        drive.begin()
    assert world.provider.calls == []


def test_a_lost_answer_buys_once(drive: Drive) -> None:
    drive.world.provider.lose = 1
    assert isinstance(drive.begin(), Pause)
    drive.world.pass_hours(0.1)
    lease = drive.lease(drive.hear(EventKind.TIME))
    assert (lease.state, len(drive.world.provider.machines)) == (LeaseState.ACTIVE, 1)


def test_while_nobody_answers_nothing_is_bought_elsewhere(drive: Drive) -> None:
    drive.world.provider.lose, drive.world.provider.invisible_for = 1, timedelta(minutes=8)
    assert isinstance(drive.begin(), Pause)
    drive.world.hand.advance(TICK)
    # The cloud still answers nothing to an order, though prices can be had.
    drive.world.provider.refuse_all(Reason.CLOUD_ERROR, "timed out")
    launch = drive.world.provider.launch

    def unanswered(request: Any) -> Any:
        launch(request)
        raise ProviderError(Reason.CLOUD_ERROR, "timed out")

    drive.world.provider.launch = unanswered  # type: ignore[method-assign]
    step = drive.hear(EventKind.TIME)
    assert isinstance(step, Pause), "the first order may have been carried out"
    assert len(drive.world.services.leases.of_job(TASK.key)) == 1
    drive.world.hand.advance(TICK)
    assert drive.lease(drive.hear(EventKind.TIME)).state is LeaseState.ACTIVE
    assert len(drive.world.provider.machines) == 1


def test_an_api_outage_pauses_and_costs_no_attempt(drive: Drive) -> None:
    drive.world.provider.away = ProviderError(Reason.CLOUD_ERROR, "503")
    assert isinstance(drive.begin(), Pause)
    drive.world.provider.away = None
    first = drive.lease(drive.hear(EventKind.TIME))
    drive.world.provider.away = ProviderError(Reason.THROTTLED, "slow down")
    drive.world.exit(first.id, Reason.COMPLETED)
    step = drive.hear(EventKind.EXITED, first)
    assert isinstance(step, Pause), "the machine is not ended yet, and the task has not failed"
    drive.world.provider.away = None
    assert drive.lease(drive.hear(EventKind.TIME)).id == first.id
    assert isinstance(drive.hear(EventKind.EXITED, first), Finished)
    assert left(drive.world) == (0, [])


def test_losing_every_machine_before_its_first_step_ends_in_a_failure_not_in_a_bill(drive: Drive) -> None:
    lease = drive.bought()
    for _ in range(2):
        drive.world.pass_hours(0.3)
        lease = drive.lease(drive.hear(EventKind.SILENT, lease))
    drive.world.pass_hours(0.3)
    with pytest.raises(CourseEnded, match="node_lost"):
        drive.hear(EventKind.SILENT, lease)
    assert len(drive.world.provider.machines) == 3
    assert left(drive.world) == (0, [])


def test_a_job_whose_machines_expire_without_a_new_checkpoint_ends(drive: Drive) -> None:
    lease = drive.bought()
    for _ in range(2):
        drive.world.beat(lease.id, step=60, saved_step=50, resumed_step=50)
        drive.world.pass_hours(0.1)
        lease = drive.lease(drive.hear(EventKind.EXPIRED, lease))
    drive.world.beat(lease.id, step=60, saved_step=50, resumed_step=50)
    with pytest.raises(CourseEnded, match="expired"):
        drive.hear(EventKind.EXPIRED, lease)
    assert left(drive.world) == (0, [])


def test_interruptions_however_early_never_end_a_job(drive: Drive) -> None:
    drive.job = drive.job.model_copy(update={"deadline": START + timedelta(hours=80)})
    lease = drive.bought()
    for _ in range(6):
        drive.world.pass_hours(0.3)
        lease = drive.lease(drive.interrupt(lease, step=3))
    assert lease.attempt == 7


# What cannot be done is said before a cent is spent.


@pytest.mark.parametrize(
    ("job", "reason", "words"),
    [
        ({"deadline": START + timedelta(hours=1)}, Reason.DEADLINE_IMPOSSIBLE, "would finish at 2026-11-30 14:06 UTC"),
        ({"budget": "0.50 USD"}, Reason.BUDGET_EXHAUSTED, r"raise the budget to \$0.6300"),
        ({"gpu": {"kinds": ("H100",)}}, Reason.BAD_REQUEST, "no pool fits the job"),
    ],
)
def test_what_cannot_be_done_costs_nothing(
    world: World, folder: Path, job: dict[str, Any], reason: Reason, words: str
) -> None:
    drive = Drive(world, folder, **job)
    with pytest.raises(CourseEnded, match=words) as ended:
        drive.begin()
    assert ended.value.reason is reason
    assert world.provider.named("launch") == []
    assert world.services.leases.of_job(TASK.key) == []


def test_a_program_that_is_not_there_costs_nothing(world: World, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"program: 'other\.py' is not in"):
        Drive(world, folder, program="other.py").begin()
    assert world.provider.calls == []


# Failures of the program.


@pytest.mark.parametrize("reason", [Reason.BAD_PROGRAM, Reason.OUT_OF_MEMORY])
def test_a_failed_program_ends_the_attempt_and_its_machine_and_the_retry_goes_on(drive: Drive, reason: Reason) -> None:
    first = drive.bought()
    drive.world.save(first.id, step=50)
    drive.world.pass_hours(1.0)
    drive.world.exit(first.id, reason, step=60, message="Traceback: ValueError")
    with pytest.raises(CourseEnded, match="Traceback: ValueError") as ended:
        drive.hear(EventKind.EXITED, first)
    assert ended.value.reason is reason
    assert left(drive.world) == (0, [])
    assert drive.world.services.books.job_cost(TASK.key) == Money.usd("0.30")
    drive.take("second")
    second = drive.bought()
    assert (second.job, second.attempt) == (first.job, 2)
    assert drive.world.services.jobs.ended_as(TASK.key) is None


# Crashes, retries, clears.


def test_a_retry_adopts_what_runs(drive: Drive) -> None:
    first = drive.bought()
    drive.take("second")
    again = drive.lease(drive.begin())
    assert (again.id, again.owner) == (first.id, "second")
    assert len(drive.world.provider.machines) == 1


def test_a_retry_settles_what_ended_meanwhile(drive: Drive) -> None:
    first = drive.bought()
    drive.world.pass_hours(1.5)
    drive.world.exit(first.id, Reason.COMPLETED)
    drive.world.provider.shut_down(str(first.instance_id))
    drive.take("second")
    lease = drive.lease(drive.begin())
    done = drive.hear(EventKind.OVER, lease)
    assert isinstance(done, Finished)
    assert done.summary["cost"] == "0.450000"


def test_clearing_after_success_starts_the_next_generation(drive: Drive) -> None:
    done = drive.complete(drive.bought())
    assert isinstance(done, Finished)
    following = drive.world.services.jobs.current(TASK, CLEARED)
    assert following == TASK.next_generation()
    drive.take("second", following)
    lease = drive.bought()
    assert (lease.job, lease.attempt) == (following.key, 1)
    assert drive.world.services.store(following.key).head().checkpoints == ()


def test_clearing_a_failed_job_goes_on_with_it(drive: Drive) -> None:
    first = drive.bought()
    drive.world.exit(first.id, Reason.BAD_PROGRAM)
    with pytest.raises(CourseEnded):
        drive.hear(EventKind.EXITED, first)
    assert drive.world.services.jobs.current(TASK, CLEARED) == TASK


def test_clearing_while_it_runs_lets_the_new_try_go_on_and_the_old_one_end_nothing(drive: Drive) -> None:
    # Airflow runs the new try before the old trigger's on_kill.
    old = drive.course
    lease = drive.bought()
    drive.take("second")
    drive.lease(drive.begin())
    assert old.stop(Reason.CANCELLED) is True
    assert len(drive.world.provider.alive()) == 1
    assert drive.world.services.jobs.ended_as(TASK.key) is None, "the job goes on"
    assert isinstance(drive.complete(lease), Finished)
    with pytest.raises(NotOwner):
        drive.world.services.buyer.release(lease, Reason.CANCELLED)


def test_cancelling_ends_the_machine_charges_it_and_a_later_clear_goes_on(drive: Drive) -> None:
    first = drive.bought()
    drive.world.save(first.id, step=50)
    drive.world.beat(first.id, step=60, saved_step=50)
    drive.world.pass_hours(1.0)
    assert drive.course.stop(Reason.CANCELLED) is True
    assert left(drive.world) == (0, [])
    assert drive.world.services.books.job_cost(TASK.key) == Money.usd("0.30")
    assert drive.world.services.jobs.ended_as(TASK.key) is Reason.CANCELLED
    assert drive.course.stop(Reason.CANCELLED) is True
    assert drive.world.services.jobs.current(TASK, CLEARED) == TASK
    drive.take("second")
    assert drive.bought().attempt == 2


def test_cancelling_waits_for_the_cloud_s_word(drive: Drive) -> None:
    drive.world.provider.end_takes = timedelta(minutes=2)
    lease = drive.bought()
    assert drive.course.stop(Reason.CANCELLED) is False
    assert drive.world.services.jobs.ended_as(TASK.key) is None
    drive.world.pass_hours(0.1)
    assert drive.course.stop(Reason.CANCELLED) is True
    assert drive.world.services.leases.get(lease.id).state is LeaseState.TERMINATED


def test_a_clear_while_a_cancelled_machine_still_ends_goes_on_with_the_job(drive: Drive) -> None:
    drive.world.provider.end_takes = timedelta(minutes=2)
    first = drive.bought()
    assert drive.course.stop(Reason.CANCELLED) is False
    drive.take("second")
    assert drive.lease(drive.begin()).id == first.id
    drive.world.pass_hours(0.1)
    assert drive.lease(drive.hear(EventKind.OVER, first)).attempt == 2


def test_cancelling_a_job_that_is_done_leaves_it_done(drive: Drive) -> None:
    assert isinstance(drive.complete(drive.bought()), Finished)
    assert drive.course.stop(Reason.CANCELLED) is True
    assert drive.world.services.jobs.ended_as(TASK.key) is Reason.COMPLETED


def test_a_charge_that_could_not_be_computed_while_cancelling_is_made_up_for(drive: Drive) -> None:
    drive.bought()
    drive.world.pass_hours(1.0)
    history = drive.world.provider.price_history

    def away(*_: Any) -> Any:
        raise ProviderError(Reason.THROTTLED, "slow down")

    drive.world.provider.price_history = away  # type: ignore[method-assign]
    with pytest.raises(ProviderError):
        drive.course.stop(Reason.CANCELLED)
    drive.world.provider.price_history = history  # type: ignore[method-assign]
    assert drive.course.stop(Reason.CANCELLED) is True
    assert drive.world.services.books.job_cost(TASK.key) == Money.usd("0.30")


def test_the_same_event_twice_charges_once_and_buys_once(drive: Drive) -> None:
    first = drive.bought()
    drive.world.pass_hours(1.5)
    second = drive.lease(drive.interrupt(first, step=60, saved=50))
    again = drive.lease(drive.hear(EventKind.OVER, first))
    assert again.id == second.id
    assert drive.world.services.books.job_cost(TASK.key) == Money.usd("0.45")
    assert len(drive.world.services.books.charges(job=TASK.key)) == 1
    assert len(drive.world.provider.alive()) == 1
    done, same = drive.complete(second), drive.hear(EventKind.EXITED, second)
    assert isinstance(done, Finished)
    assert done == same
    assert len(drive.world.services.books.charges(job=TASK.key)) == 2


def test_a_zombie_of_an_older_attempt_commits_nothing(drive: Drive) -> None:
    first = drive.bought()
    drive.interrupt(first, step=60, saved=50)
    late = Manifest(job=TASK.key, attempt=1, step=70, created_at=drive.world.clock.now(), parts=())
    with pytest.raises(FencedOut):
        drive.world.services.store(TASK.key).commit(late)


# MLflow.


class Away:
    """An MLflow that never answers."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise TrackingAway("connection refused")

        return refuse


def test_mlflow_being_away_fails_nothing(database: Database, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    drive = Drive(World(database, tracker=Away()), folder)
    with caplog.at_level(logging.WARNING):
        lease = drive.bought()
        drive.world.upload_metrics(lease.id, 1, 2, 3)
        done = drive.complete(lease)
    assert isinstance(done, Finished)
    assert done.summary["mlflow_run_id"] is None
    assert "MLflow was not told this time: connection refused" in caplog.text


# A crash at every line.


def fragile(world: World, fuse: Fuse) -> World:
    """The same world behind a fuse in every database transaction, cloud call and write to the store."""
    services = world.services
    broken = object.__new__(World)
    broken.services = type(services)(
        clock=services.clock,
        database=FragileDatabase(services.database, fuse),  # type: ignore[arg-type]
        objects=Fragile(services.objects, fuse, OBJECT_CALLS),  # type: ignore[arg-type]
        provider=Fragile(world.provider, fuse, PROVIDER_CALLS),  # type: ignore[arg-type]
        agent=services.agent,
        tracker=None,
    )
    return broken


Act = Callable[[Drive], Step]


def first_purchase(drive: Drive) -> Step:
    return drive.begin()


def interruption(drive: Drive) -> Step:
    [lease] = drive.world.services.leases.open()
    return drive.hear(EventKind.OVER, lease)


def completion(drive: Drive) -> Step:
    [lease] = drive.world.services.leases.open()
    return drive.hear(EventKind.EXITED, lease)


@pytest.mark.parametrize("act", [first_purchase, interruption, completion])
def test_a_crash_at_every_line_is_survived_by_the_next_try(
    emptied: Callable[[], Database], folder: Path, act: Act
) -> None:
    for line in range(120):
        world = World(emptied())
        drive = Drive(world, folder)
        if act is not first_purchase:
            lease = drive.bought()
            world.pass_hours(1.5)
            if act is interruption:
                world.save(lease.id, step=50)
                world.beat(lease.id, step=60, saved_step=50)
                world.provider.interrupt(str(lease.instance_id))
            else:
                world.exit(lease.id, Reason.COMPLETED)
        # To die before one call is to die after the one before it: one side of each is enough.
        fuse = Fuse(line, done=False)
        crashed = Drive(fragile(world, fuse), folder)
        with suppress(Crash):
            act_on(crashed, act, world)
        finish(world, folder, f"{act.__name__}, line {line}")
        if not fuse.blown:
            assert line > 10, "the fuse was in hardly any call"
            return
    pytest.fail("more lines than expected")


def act_on(crashed: Drive, act: Act, world: World) -> None:
    crashed.world.clock = world.clock
    act(crashed)


def finish(world: World, folder: Path, where: str) -> None:
    """The next try goes on from wherever the dead one stood, to the end."""
    drive = Drive(world, folder)
    task = world.services.jobs.current(TASK, 0)
    if task != TASK:
        assert world.services.jobs.ended_as(TASK.key) is Reason.COMPLETED, where
    else:
        drive.take("second")
        step = drive.begin()
        assert len(world.provider.alive()) <= 1, f"bought twice: {where}"
        for _ in range(5):
            if isinstance(step, Finished):
                break
            if isinstance(step, Pause):
                world.hand.advance(UNSEEN_GRACE)
                step = drive.hear(EventKind.TIME)
                continue
            lease = drive.lease(step)
            announced = world.services.store(TASK.key).attempt(lease.attempt)
            assert [member.lease_id for member in announced.members] == [lease.id], f"its node would refuse: {where}"
            if world.services.store(TASK.key).exit_record(lease.attempt) is not None:
                step = drive.hear(EventKind.EXITED, lease)
            elif lease.instance_id in {machine.instance_id for machine in world.provider.alive()}:
                step = drive.complete(lease)
            else:
                step = drive.hear(EventKind.OVER, lease)
        assert isinstance(step, Finished), where
    assert left(world) == (0, []), where
    leases = [lease for lease in world.services.leases.of_job(TASK.key) if lease.state is LeaseState.TERMINATED]
    charged = {charge.lease_id for charge in world.services.books.charges(job=TASK.key)}
    assert charged == {lease.id for lease in leases}, f"every lease is charged: {where}"
    assert len(world.services.books.charges(job=TASK.key)) == len(leases), f"once: {where}"
    assert len({machine.client_token for machine in world.provider.machines.values()}) == len(leases), where
