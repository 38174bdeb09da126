"""Greedy: spot until it is taken, else wait; on demand when waiting any longer would be too long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.placement.policies.greedy import BatchedGreedy, Greedy
from gpucost.placement.policies.protocol import (
    Action,
    ActionKind,
    JobView,
    MarketHistory,
    Mode,
    Observation,
    ObservationBatch,
    PoolView,
)

POOLS = [PoolView(name=zone, region="r", on_demand_price=1.0) for zone in "abc"]
JOB = JobView(work_hours=4, deadline_hours=8, launch_hours=0.5)
TICK = 0.25


def decide(job: JobView = JOB, pools: list[PoolView] = POOLS, **changes: object) -> Action:
    """Idle at the start, three zones at 0.30, 0.35 and 0.40, unless changed."""
    seen: dict[str, object] = {
        "hours": 0.0,
        "tick_hours": TICK,
        "work_left_hours": job.work_hours,
        "mode": Mode.IDLE,
        "pool": None,
        "spot_available": [None] * len(pools),
        "spot_prices": [0.30, 0.35, 0.40][: len(pools)],
        "on_demand_available": [True] * len(pools),
    }
    policy = Greedy()
    policy.start(job, pools, MarketHistory())
    return policy.decide(Observation(**(seen | changes)))  # type: ignore[arg-type]


def test_with_time_it_takes_the_cheapest_spot() -> None:
    action = decide()
    assert (action.kind, action.pool) == (ActionKind.RUN_SPOT, 0)
    assert action.reason == "cheapest of 3 spot pools at $0.3000/h"


def test_a_pool_that_refused_is_left_out() -> None:
    assert decide(spot_available=[False, None, None]).pool == 1
    assert decide(spot_available=[False, True, None]).pool == 1


def test_a_pool_without_a_price_is_not_free() -> None:
    assert decide(spot_prices=[None, 0.35, 0.40]).pool == 1


def test_cheap_is_counted_per_hour_of_work() -> None:
    slow = [PoolView("slow", "r", 1.0, speed=0.5), PoolView("fast", "r", 1.0, speed=1.0)]
    assert decide(pools=slow, spot_available=[None, None], spot_prices=[0.30, 0.35]).pool == 1


def test_without_spot_it_waits_while_there_is_time() -> None:
    action = decide(spot_available=[False] * 3)
    assert (action.kind, action.pool) == (ActionKind.WAIT, None)
    assert "8.00 h left, 5.25 h needed" in action.reason


# 4 h of work, two launches of 0.5 h and one tick of 0.25 h: 5.25 h are needed.
@pytest.mark.parametrize(
    ("hours", "kind"), [(2.74, ActionKind.WAIT), (2.75, ActionKind.WAIT), (2.76, ActionKind.RUN_ON_DEMAND)]
)
def test_the_last_call_is_two_launches_and_a_tick_before_the_end(hours: float, kind: ActionKind) -> None:
    assert decide(hours=hours, spot_available=[False] * 3).kind is kind


def test_at_the_last_call_on_demand_comes_before_spot() -> None:
    action = decide(hours=3.0)
    assert action.kind is ActionKind.RUN_ON_DEMAND
    assert "no time to wait for spot" in action.reason


def test_at_the_last_call_without_on_demand_spot_is_better_than_nothing() -> None:
    assert decide(hours=3.0, on_demand_available=[False] * 3).kind is ActionKind.RUN_SPOT
    nothing = decide(hours=3.0, on_demand_available=[False] * 3, spot_available=[False] * 3)
    assert nothing.kind is ActionKind.WAIT
    assert "neither spot nor on-demand is to be had" in nothing.reason


@pytest.mark.parametrize("mode", [Mode.SPOT, Mode.ON_DEMAND])
@pytest.mark.parametrize("hours", [0.0, 7.9])
def test_what_runs_is_left_alone(mode: Mode, hours: float) -> None:
    assert decide(mode=mode, pool=2, hours=hours) == Action(ActionKind.STAY)


# A cap of 0.25 is below every price. Waiting for a price ends a launch and a tick before waiting for capacity does.
CAPPED = JobView(work_hours=4, deadline_hours=8, launch_hours=0.5, spot_price_cap=0.25)


@pytest.mark.parametrize(
    ("hours", "kind"),
    [
        (0.0, ActionKind.WAIT),
        (2.0, ActionKind.WAIT),
        (2.01, ActionKind.RUN_SPOT),
        (2.75, ActionKind.RUN_SPOT),
        (2.76, ActionKind.RUN_ON_DEMAND),
    ],
)
def test_a_price_cap_waits_then_takes_spot_above_it_before_on_demand(hours: float, kind: ActionKind) -> None:
    assert decide(job=CAPPED, hours=hours).kind is kind


def test_a_price_at_the_cap_is_taken() -> None:
    assert decide(job=CAPPED, spot_prices=[0.30, 0.25, 0.40]).pool == 1


def test_on_demand_is_the_cheapest_that_is_there() -> None:
    pools = [PoolView("a", "r", 1.2), PoolView("b", "r", 1.0), PoolView("c", "r", None)]
    late = {"hours": 3.0, "pools": pools}
    assert decide(**late).pool == 1  # type: ignore[arg-type]
    assert decide(**late, on_demand_available=[True, False, True]).pool == 0  # type: ignore[arg-type]


hours = st.floats(min_value=0, max_value=50)
prices = st.one_of(st.none(), st.floats(min_value=0.01, max_value=10))


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[PoolView], list[JobView], list[Observation]]:
    count = draw(st.integers(min_value=1, max_value=4))
    pools = [
        PoolView(str(index), "r", draw(prices), speed=draw(st.floats(min_value=0.25, max_value=4)))
        for index in range(count)
    ]
    jobs, seen = [], []
    for _ in range(draw(st.integers(min_value=1, max_value=5))):
        jobs.append(
            JobView(
                work_hours=draw(hours),
                deadline_hours=draw(hours),
                launch_hours=draw(st.floats(min_value=0, max_value=2)),
                spot_price_cap=draw(prices),
            )
        )
        mode = draw(st.sampled_from(Mode))
        seen.append(
            Observation(
                hours=draw(hours),
                tick_hours=draw(st.floats(min_value=0.01, max_value=1)),
                work_left_hours=draw(hours),
                mode=mode,
                pool=None if mode is Mode.IDLE else draw(st.integers(min_value=0, max_value=count - 1)),
                spot_available=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
                spot_prices=draw(st.lists(prices, min_size=count, max_size=count)),
                on_demand_available=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
            )
        )
    return pools, jobs, seen


@given(situations())
def test_many_jobs_at_once_are_decided_as_each_alone(
    situation: tuple[list[PoolView], list[JobView], list[Observation]],
) -> None:
    pools, jobs, seen = situation
    batched = BatchedGreedy()
    batched.start(jobs, pools, MarketHistory())
    actions = batched.decide(
        ObservationBatch(
            hours=np.array([o.hours for o in seen]),
            tick_hours=np.array([o.tick_hours for o in seen]),
            work_left_hours=np.array([o.work_left_hours for o in seen]),
            mode=np.array([o.mode for o in seen], dtype=np.int8),
            pool=np.array([-1 if o.pool is None else o.pool for o in seen], dtype=np.int32),
            spot_available=np.array([o.spot_available for o in seen]),
            spot_prices=np.array([[np.inf if p is None else p for p in o.spot_prices] for o in seen]),
            on_demand_available=np.array([o.on_demand_available for o in seen]),
        )
    )
    for index, (job, observation) in enumerate(zip(jobs, seen, strict=True)):
        alone = Greedy()
        alone.start(job, pools, MarketHistory())
        action = alone.decide(observation)
        together = (ActionKind(actions.kind[index]), int(actions.pool[index]))
        assert together == (action.kind, -1 if action.pool is None else action.pool), observation
