"""The guard: whatever the market and the policy under it do, the job is in time while there is on-demand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucost.placement.policies.greedy import Greedy
from gpucost.placement.policies.guard import Guarded
from gpucost.placement.policies.protocol import (
    Action,
    ActionKind,
    JobView,
    MarketHistory,
    Mode,
    Observation,
    Policy,
    PoolView,
)
from gpucost.placement.policies.registry import make_policy

EPSILON = 1e-6


class Reckless:
    """Waits, or takes and leaves spot, by a script; never thinks of the deadline."""

    name = "reckless"

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self._turn = 0

    def start(self, job: JobView, pools: Sequence[PoolView], history: MarketHistory) -> None:
        self._pools = len(pools)

    def state(self) -> dict[str, Any]:
        return {"turn": self._turn}

    def restore(self, state: dict[str, Any]) -> None:
        self._turn = state["turn"]

    def decide(self, observation: Observation) -> Action:
        choice = self._script[self._turn % len(self._script)]
        self._turn += 1
        if choice == 0:
            return Action(ActionKind.WAIT)
        if choice == 1 and observation.mode is not Mode.IDLE:
            return Action(ActionKind.STAY)
        return Action(ActionKind.RUN_SPOT, choice % self._pools)


@dataclass
class Machine:
    """What runs in the tick simulator: where, and how much of its launch is still to come."""

    mode: Mode
    pool: int
    launch: float


def simulate(
    policy: Policy, job: JobView, pools: Sequence[PoolView], tick: float, spot_up: Callable[[int, int], bool]
) -> float:
    """Hours from the start until the work is done; infinite when it is not done long after the deadline.

    Each launch costs `launch_hours` in which nothing is done; a spot machine dies as soon as its pool is down; what is
    done is saved at once.
    """
    policy.start(job, pools, MarketHistory())
    left, machine = job.work_hours, None
    for turn in range(int(3 * job.deadline_hours / tick) + 3):
        if machine is not None and machine.mode is Mode.SPOT and not spot_up(turn, machine.pool):
            machine = None
        # A process that went on elsewhere remembers only what it wrote down.
        policy.restore(json.loads(json.dumps(policy.state())))
        action = policy.decide(
            Observation(
                hours=turn * tick,
                tick_hours=tick,
                work_left_hours=left,
                mode=machine.mode if machine else Mode.IDLE,
                pool=machine.pool if machine else None,
                spot_available=[spot_up(turn, index) for index in range(len(pools))],
                spot_prices=[0.3] * len(pools),
                on_demand_available=[True] * len(pools),
            )
        )
        machine = carry_out(action, machine, job, lambda pool, turn=turn: spot_up(turn, pool))
        if machine is None:
            continue
        working = max(0.0, tick - machine.launch)
        machine.launch = max(0.0, machine.launch - tick)
        speed = pools[machine.pool].speed
        if working * speed >= left - EPSILON:
            return (turn + 1) * tick - (working - left / speed)
        left -= working * speed
    return float("inf")


def carry_out(action: Action, machine: Machine | None, job: JobView, spot_up: Callable[[int], bool]) -> Machine | None:
    if action.kind is ActionKind.STAY:
        return machine
    if action.kind is ActionKind.WAIT:
        return None
    assert action.pool is not None
    mode = Mode.ON_DEMAND if action.kind is ActionKind.RUN_ON_DEMAND else Mode.SPOT
    if machine is not None and (machine.mode, machine.pool) == (mode, action.pool):
        return machine
    if mode is Mode.SPOT and not spot_up(action.pool):
        return None
    return Machine(mode, action.pool, job.launch_hours)


@st.composite
def markets(draw: st.DrawFn) -> tuple[JobView, list[PoolView], float, list[list[bool]]]:
    tick = draw(st.sampled_from([0.1, 0.25, 0.5]))
    work = draw(st.floats(min_value=0.2, max_value=6))
    launch = draw(st.floats(min_value=0, max_value=1))
    slack = draw(st.floats(min_value=0, max_value=6))
    zones = draw(st.integers(min_value=1, max_value=3))
    up = draw(st.lists(st.lists(st.booleans(), min_size=zones, max_size=zones), min_size=1, max_size=60))
    pools = [PoolView(str(zone), "r", 1.0) for zone in range(zones)]
    return JobView(work, work + launch + slack, launch), pools, tick, up


Market = tuple[JobView, list[PoolView], float, list[list[bool]]]


@settings(max_examples=150)
@given(markets())
def test_greedy_under_the_guard_is_never_late(market: Market) -> None:
    job, pools, tick, up = market
    done = simulate(make_policy("greedy"), job, pools, tick, lambda turn, zone: up[turn % len(up)][zone])
    assert done <= job.deadline_hours + EPSILON


@settings(max_examples=150)
@given(markets(), st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=12))
def test_even_a_reckless_policy_under_the_guard_is_never_late(market: Market, script: list[int]) -> None:
    job, pools, tick, up = market
    done = simulate(Guarded(Reckless(script)), job, pools, tick, lambda turn, zone: up[turn % len(up)][zone])
    assert done <= job.deadline_hours + EPSILON


def test_without_the_guard_the_same_policy_is_late() -> None:
    job, pools = JobView(2, 3, 0.1), [PoolView("a", "r", 1.0)]
    assert simulate(Reckless([0]), job, pools, 0.25, lambda *_: False) > job.deadline_hours


SEEN = Observation(
    hours=0.0,
    tick_hours=0.25,
    work_left_hours=4.0,
    mode=Mode.IDLE,
    pool=None,
    spot_available=[True, True],
    spot_prices=[0.3, 0.3],
    on_demand_available=[True, True],
)


def guarded(action: Action, pools: Sequence[PoolView], job: JobView, observation: Observation = SEEN) -> Action:
    class Says:
        name = "says"

        def start(self, *_: object) -> None: ...

        def state(self) -> dict[str, Any]:
            return {}

        def restore(self, state: dict[str, Any]) -> None: ...

        def decide(self, observation: Observation) -> Action:
            return action

    policy = Guarded(Says())
    policy.start(job, pools, MarketHistory())
    return policy.decide(observation)


EQUAL = [PoolView("a", "r", 1.2), PoolView("b", "r", 1.0)]


def test_with_time_the_policy_decides() -> None:
    wait = Action(ActionKind.WAIT)
    assert guarded(wait, EQUAL, JobView(4, 8, 0.5)) is wait


def test_without_time_it_is_the_cheapest_on_demand_and_says_why() -> None:
    action = guarded(Action(ActionKind.WAIT), EQUAL, JobView(4, 4.6, 0.5))
    assert (action.kind, action.pool) == (ActionKind.RUN_ON_DEMAND, 1)
    assert "4.60 h left for 4.00 h of work and a launch" in action.reason


def test_the_longest_launch_counts_where_it_is_known() -> None:
    wait = Action(ActionKind.WAIT)
    assert guarded(wait, EQUAL, JobView(4, 5, 0.5)) is wait
    assert guarded(wait, EQUAL, JobView(4, 5, 0.5, launch_hours_worst=1.0)).kind is ActionKind.RUN_ON_DEMAND


MIXED = [PoolView("slow and cheap", "r", 1.0, speed=0.5), PoolView("fast and dear", "r", 4.0, speed=1.0)]


def test_on_demand_that_is_too_slow_becomes_on_demand_that_is_in_time() -> None:
    slow = Action(ActionKind.RUN_ON_DEMAND, 0)
    assert guarded(slow, MIXED, JobView(4, 5, 0.5)).pool == 1
    assert guarded(slow, MIXED, JobView(4, 9, 0.5)) is slow


def test_a_fast_machine_that_is_not_there_gives_no_time() -> None:
    only_slow = Observation(**(vars(SEEN) | {"on_demand_available": [True, False]}))
    action = guarded(Action(ActionKind.WAIT), MIXED, JobView(4, 8.6, 0.5), only_slow)
    assert (action.kind, action.pool) == (ActionKind.RUN_ON_DEMAND, 0)


def test_on_demand_is_left_alone_and_without_any_the_policy_decides() -> None:
    stay = Action(ActionKind.STAY)
    late = JobView(4, 1, 0.5)
    running = Observation(**(vars(SEEN) | {"mode": Mode.ON_DEMAND, "pool": 0}))
    assert guarded(stay, EQUAL, late, running) is stay
    nothing = Observation(**(vars(SEEN) | {"on_demand_available": [False, False]}))
    assert guarded(stay, EQUAL, late, nothing) is stay


def test_the_memory_of_the_policy_under_the_guard_goes_through_json() -> None:
    first = Guarded(Reckless([0, 2, 1]))
    first.start(JobView(4, 50, 0.5), EQUAL, MarketHistory())
    first.decide(SEEN)
    second = Guarded(Reckless([0, 2, 1]))
    second.start(JobView(4, 50, 0.5), EQUAL, MarketHistory())
    second.restore(json.loads(json.dumps(first.state())))
    assert second.decide(SEEN) == first.decide(SEEN) == Action(ActionKind.RUN_SPOT, 0)


def test_policies_are_found_by_name_or_path_and_always_guarded() -> None:
    assert (make_policy("greedy").name, type(make_policy("greedy").inner)) == ("greedy", Greedy)
    own = make_policy("gpucost.placement.policies.greedy.Greedy")
    assert isinstance(own, Guarded)
    with pytest.raises(ValueError, match="policy: got 'gredy', expected one of greedy, or a dotted path to a class"):
        make_policy("gredy")
    for missing in ("no.such.Policy", "gpucost.placement.policies.greedy.Gredy"):
        with pytest.raises(ValueError, match=r"policy: nothing at .*check the path and PYTHONPATH"):
            make_policy(missing)
