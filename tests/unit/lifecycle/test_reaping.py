"""One round of the reaper: what it ends is charged and closed, and one refusal keeps nothing else alive."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpucost.capacity.lease import Attempt, Lease, LeaseState
from gpucost.capacity.providers.base import ProviderError
from gpucost.job import JobId
from gpucost.lifecycle.reaping import LOOK_SECONDS, LOOKS, reap
from gpucost.reasons import Reason
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World

OTHER = TASK.model_copy(update={"run_id": "another"})


def buy(world: World, job: JobId = TASK, hours: float = 5.0) -> Lease:
    services = world.services
    world.begin(job)
    services.leases.begin_attempt(Attempt(job=job.key, number=1, started_at=START))
    order = services.buyer.intend(job.key, 1, quote(pool(), "0.30", START), None, "me", START + timedelta(hours=hours))
    return services.buyer.buy(order)


def never(seconds: float) -> None:
    pytest.fail(f"waited {seconds} s for nothing")


def nobody(job: JobId) -> bool:
    return False


def test_an_abandoned_job_s_machine_is_ended_charged_and_its_job_closed(world: World) -> None:
    lease = buy(world)
    world.pass_hours(1.0)
    [finding] = reap(world.services, is_wanted=nobody, sleep=never)
    assert finding.ended is not None
    assert finding.ended.state is LeaseState.TERMINATED
    assert str(world.services.books.job_cost(TASK.key)) == "$0.3000"
    assert world.services.jobs.ended_as(TASK.key) is Reason.CANCELLED
    [attempt] = world.services.leases.attempts(TASK.key)
    assert attempt.reason is Reason.CANCELLED
    assert reap(world.services, is_wanted=nobody, sleep=never) == [], lease.id


def test_only_tasks_of_open_leases_are_asked_about(world: World) -> None:
    buy(world)
    world.begin(OTHER)
    asked: list[JobId] = []
    reap(world.services, is_wanted=lambda job: not asked.append(job), sleep=never)  # type: ignore[func-returns-value]
    assert asked == [TASK]


def test_a_dry_run_changes_nothing(world: World) -> None:
    lease = buy(world)
    [finding] = reap(world.services, is_wanted=nobody, dry_run=True, sleep=never)
    assert (finding.lease_id, finding.ended) == (lease.id, None)
    assert world.services.leases.get(lease.id) == lease
    assert world.services.jobs.ended_as(TASK.key) is None


def test_without_a_word_from_airflow_every_job_counts_as_wanted(world: World) -> None:
    buy(world)
    assert reap(world.services, sleep=never) == []


def test_an_expired_machine_of_a_job_that_goes_on_is_ended_and_the_job_stays_open(world: World) -> None:
    buy(world, hours=1.0)
    world.pass_hours(1.6)
    [finding] = reap(world.services, sleep=never)
    assert finding.why.startswith("it was to end by")
    assert world.provider.alive() == []
    assert world.services.jobs.ended_as(TASK.key) is None


def test_it_looks_again_until_the_cloud_confirms(world: World) -> None:
    buy(world)
    world.provider.end_takes = timedelta(seconds=5)
    [finding] = reap(world.services, is_wanted=nobody, sleep=world.hand.sleep)
    assert finding.ended is not None
    assert finding.ended.state is LeaseState.TERMINATED
    assert world.clock.now() - START == timedelta(seconds=3 * LOOK_SECONDS)


def test_what_the_cloud_does_not_confirm_in_time_is_left_to_the_next_round(world: World) -> None:
    lease = buy(world)
    world.provider.end_takes = None
    [finding] = reap(world.services, is_wanted=nobody, sleep=world.hand.sleep)
    assert finding.ended is not None
    assert finding.ended.state is LeaseState.TERMINATING
    assert world.clock.now() - START == timedelta(seconds=LOOKS * LOOK_SECONDS)
    assert world.services.jobs.ended_as(TASK.key) is None, "its cost is not known yet"
    world.provider.shut_down(str(lease.instance_id))
    reap(world.services, is_wanted=nobody, sleep=never)
    assert world.services.jobs.ended_as(TASK.key) is Reason.CANCELLED


def test_one_machine_that_the_cloud_refuses_to_end_keeps_no_other_alive(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = buy(world), buy(world, OTHER)
    terminate = world.provider.terminate

    def protected(region: str, ids: Any) -> None:
        if stuck.instance_id in ids:
            raise ProviderError(Reason.NOT_AUTHORIZED, "termination protection")
        terminate(region, ids)

    monkeypatch.setattr(world.provider, "terminate", protected)
    with pytest.raises(ProviderError, match="termination protection"):
        reap(world.services, is_wanted=nobody, sleep=world.hand.sleep)
    assert [machine.instance_id for machine in world.provider.alive()] == [stuck.instance_id]
    assert world.services.jobs.ended_as(other.job) is Reason.CANCELLED


def test_a_refusal_that_passes_is_no_failure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    buy(world)
    terminate = world.provider.terminate
    throttled = iter([True])

    def once(region: str, ids: Any) -> None:
        if next(throttled, False):
            raise ProviderError(Reason.THROTTLED, "slow down")
        terminate(region, ids)

    monkeypatch.setattr(world.provider, "terminate", once)
    reap(world.services, is_wanted=nobody, sleep=world.hand.sleep)
    assert world.provider.alive() == []


def test_a_region_that_does_not_answer_keeps_no_known_machine_alive(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buy(world)

    def away(region: str) -> Any:
        raise ProviderError(Reason.CLOUD_ERROR, f"{region} is away")

    monkeypatch.setattr(world.provider, "owned", away)
    with pytest.raises(ProviderError, match="us-east-1 is away"):
        reap(world.services, is_wanted=nobody, sleep=never)
    assert world.provider.alive() == []


def test_a_charge_that_one_round_did_not_come_to_is_written_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buy(world)
    world.pass_hours(1.0)
    with monkeypatch.context() as patch:

        def away(*_: Any) -> Any:
            raise ProviderError(Reason.CLOUD_ERROR, "no price history")

        patch.setattr(world.provider, "price_history", away)
        with pytest.raises(ProviderError, match="no price history"):
            reap(world.services, is_wanted=nobody, sleep=never)
    assert world.provider.alive() == []
    assert world.services.jobs.ended_as(TASK.key) is None, "its cost is not known yet"
    assert reap(world.services, is_wanted=nobody, sleep=never) == []
    assert str(world.services.books.job_cost(TASK.key)) == "$0.3000"
    assert world.services.jobs.ended_as(TASK.key) is Reason.CANCELLED


def test_a_machine_that_is_gone_of_a_job_that_goes_on_is_left_to_its_task(world: World) -> None:
    lease = buy(world)
    world.services.buyer.release(lease, Reason.INTERRUPTED)
    reap(world.services, sleep=never)
    [attempt] = world.services.leases.attempts(TASK.key)
    assert attempt.ended_at is None
