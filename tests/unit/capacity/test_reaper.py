"""The reaper's judgement: what it may end, over any mix of leases, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from gpucost.capacity.lease import Lease, LeaseState
from gpucost.capacity.reaper import Finding, Reaper
from gpucost.db.engine import Database
from gpucost.lifecycle.reaping import reap
from gpucost.reasons import Reason
from tests.fakes.provider import REGION, pool, quote
from tests.fakes.rooms import START, TASK, World

EXPIRES = START + timedelta(hours=2)


def buy(world: World, job: str, expires: Any = EXPIRES) -> Lease:
    buyer = world.services.buyer
    return buyer.buy(buyer.intend(job, 1, quote(pool(), "0.30", START), None, "me", expires))


def reaper(world: World) -> Reaper:
    services = world.services
    return Reaper(world.provider, services.leases, world.clock, world.provider.regions(), services.buyer)


def ended(world: World, finding: Finding) -> Lease:
    lease = reaper(world).end(finding).ended
    assert lease is not None
    return lease


def test_a_machine_of_a_job_that_goes_on_is_left_alone(world: World) -> None:
    buy(world, world.begin())
    world.pass_hours(2.0)  # its last moment
    assert reaper(world).overdue([]) == []
    assert reaper(world).strays(REGION) == []


def test_it_says_what_is_wrong_and_what_it_costs(world: World) -> None:
    lease = buy(world, world.begin())
    [over] = reaper(world).overdue([lease.job])
    assert over.owner == "me"
    assert (over.lease_id, over.instance_id, over.region) == (lease.id, lease.instance_id, REGION)
    assert (over.why, str(over.at_stake)) == ("its job is over", "$0.3000/h")
    world.pass_hours(2.51)
    [expired] = reaper(world).overdue([])
    assert expired.why == "it was to end by 2026-11-30 14:00 UTC"
    world.services.leases.terminating(lease, Reason.CANCELLED, START)
    [asked] = reaper(world).overdue([])
    assert asked.why == "it was to end by 2026-11-30 14:00 UTC"
    assert world.provider.named("terminate") == [], "looking changes nothing"


def test_after_it_took_a_lease_over_its_former_owner_is_refused(world: World) -> None:
    lease = buy(world, world.begin())
    world.provider.end_takes = timedelta(hours=1)
    [finding] = reaper(world).overdue([lease.job])
    taken = ended(world, finding)
    assert taken.state is LeaseState.TERMINATING
    assert taken.owner != "me"


def test_who_is_taken_over_at_the_same_moment_is_left_to_the_faster_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = buy(world, world.begin())
    one = reaper(world)
    [finding] = one.overdue([lease.job])
    store = world.services.leases
    looked = one._store.get

    def overtaken(lease_id: str) -> Lease:
        seen = looked(lease_id)
        if seen.owner == "me":
            store.adopt(seen, "next try", START)
        return seen

    monkeypatch.setattr(one._store, "get", overtaken)
    assert one.end(finding).ended is None
    held = store.get(lease.id)
    assert (held.owner, held.state) == ("next try", LeaseState.ACTIVE)
    assert len(world.provider.alive()) == 1


def test_who_took_a_lease_over_since_it_was_found_keeps_it(world: World) -> None:
    lease = buy(world, world.begin())
    one = reaper(world)
    [finding] = one.overdue([lease.job])
    world.services.leases.adopt(lease, "next try", START)
    assert one.end(finding).ended is None
    assert len(world.provider.alive()) == 1


def test_an_end_that_the_cloud_never_confirms_is_asked_for_again_after_the_grace(world: World) -> None:
    lease = buy(world, world.begin(), START + timedelta(hours=9))
    world.services.leases.terminating(lease, Reason.STOPPED, START)
    world.pass_hours(0.4)
    assert reaper(world).overdue([]) == [], "its own task is still asking"
    world.pass_hours(0.2)
    [finding] = reaper(world).overdue([])
    assert finding.why == "its end was asked for at 2026-11-30 12:00 UTC and is not confirmed"


def test_a_machine_that_no_lease_knows_is_a_stray(world: World) -> None:
    lease = buy(world, world.begin())
    world.services.leases.terminated(lease, str(lease.instance_id), START, Reason.CANCELLED, START)
    [stray] = reaper(world).strays(REGION)
    assert (stray.lease_id, stray.instance_id, stray.at_stake) == (None, lease.instance_id, None)
    assert repr(lease.id) in stray.why
    reaper(world).end(stray)
    assert world.provider.alive() == []


def test_a_machine_bought_while_it_looks_is_no_stray(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.begin()
    owned = world.provider.owned

    def and_somebody_buys(region: str) -> Any:
        buy(world, job)
        return owned(region)

    monkeypatch.setattr(world.provider, "owned", and_somebody_buys)
    assert reaper(world).strays(REGION) == []


def test_a_machine_without_our_tag_s_value_is_told_not_stumbled_over(world: World) -> None:
    lease = buy(world, world.begin())
    machine = world.provider.machines[str(lease.instance_id)]
    world.provider.machines[machine.instance_id] = machine.model_copy(update={"tags": {}})
    assert "None" in reaper(world).strays(REGION)[0].why


# Any mix of leases.


class Case(BaseModel):
    """One job and its lease: how far the purchase got, and what has become of its purpose."""

    model_config = ConfigDict(frozen=True)

    state: LeaseState
    wanted: bool
    over: bool
    expired: bool
    answer_lost: bool = False
    seen_gone: bool = False

    @property
    def has_a_purpose(self) -> bool:
        return self.wanted and not self.over and not self.expired


def make(world: World, number: int, case: Case) -> Lease:
    job = world.begin(TASK.model_copy(update={"map_index": number}))
    services = world.services
    expires = START + timedelta(hours=0.5 if case.expired else 5)
    lease = services.buyer.intend(job, 1, quote(pool(), "0.30", START), None, "me", expires)
    if case.state is LeaseState.FAILED:
        lease = services.leases.fail(lease, Reason.NO_CAPACITY, "none", START)
    elif case.state is LeaseState.REQUESTED:
        if case.answer_lost:
            world.provider.launch(services.buyer._request(lease))
    else:
        lease = services.buyer.buy(lease)
    if case.state is LeaseState.TERMINATING:
        lease = services.leases.terminating(lease, Reason.CANCELLED, START)
    if case.state is LeaseState.TERMINATED:
        if case.seen_gone:
            lease = services.buyer.release(lease, Reason.CANCELLED)
        else:
            # The books say so and the machine is there all the same: a stray.
            lease = services.leases.terminated(lease, str(lease.instance_id), START, Reason.CANCELLED, START)
    if case.over:
        services.jobs.end(job, "me", Reason.CANCELLED, START)
    return lease


CASES = st.builds(
    Case,
    state=st.sampled_from(LeaseState),
    wanted=st.booleans(),
    over=st.booleans(),
    expired=st.booleans(),
    answer_lost=st.booleans(),
    seen_gone=st.booleans(),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=st.lists(CASES, max_size=4), seconds=st.sampled_from([0.0, 1.0, 30.0]))
def test_over_any_mix_it_ends_what_has_no_purpose_and_nothing_else(
    emptied: Callable[[], Database], cases: list[Case], seconds: float
) -> None:
    world = World(emptied())
    made = [(case, make(world, number, case)) for number, case in enumerate(cases)]
    world.pass_hours(1.2)
    world.provider.end_takes = timedelta(seconds=seconds)
    unwanted = {lease.job for case, lease in made if not case.wanted}
    for_good = {
        lease.client_token
        for case, lease in made
        if case.has_a_purpose and case.state in (LeaseState.REQUESTED, LeaseState.ACTIVE)
    }
    before = {machine.client_token for machine in world.provider.alive()}
    reap(world.services, is_wanted=lambda job: job.key not in unwanted, sleep=world.hand.sleep)
    world.pass_hours(0.01)  # nobody waits for strays: asked once, the cloud ends them in its own time
    assert {machine.client_token for machine in world.provider.owned(REGION)} == before & for_good
    for case, lease in made:
        now = world.services.leases.get(lease.id)
        if lease.client_token in for_good:
            assert now == lease, f"{case}: touched"
        else:
            assert not now.state.may_cost, f"{case}: still {now.state}"
