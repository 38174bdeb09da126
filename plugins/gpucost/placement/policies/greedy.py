"""Greedy: spot until it is taken, else wait; on demand when waiting any longer would be too long.

The rule as published (see docs/reference/policies.md): idle with time left R < C + 2d, C the work left and d the
launch overhead: on demand to the end. Spot is taken in the cheapest pool that has it, counted per hour of
work. A price cap governs the waiting only, and waiting for a price ends one launch and one tick before
waiting for capacity does: then spot above the cap is taken, since on-demand would be dearer still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucost.placement.policies.protocol import (
    Action,
    ActionBatch,
    ActionKind,
    JobView,
    MarketHistory,
    Mode,
    Observation,
    ObservationBatch,
    PoolView,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Greedy:
    """The scalar form; it needs no memory beyond what `start` was given."""

    name = "greedy"

    def start(self, job: JobView, pools: Sequence[PoolView], history: MarketHistory) -> None:  # noqa: ARG002
        """Begin with a job."""
        self._job = job
        self._pools = tuple(pools)

    def state(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to go on from."""

    def decide(self, observation: Observation) -> Action:
        """Stay while running; idle, take spot, wait for it, or go on demand in time."""
        if observation.mode is not Mode.IDLE:
            return Action(ActionKind.STAY, reason="it runs; greedy leaves it alone")
        left = self._job.deadline_hours - observation.hours
        needed = observation.work_left_hours + 2 * self._job.launch_hours + observation.tick_hours
        last_call = left < needed
        price_may_fall = left >= needed + self._job.launch_hours + observation.tick_hours
        spot = self._cheapest_spot(observation, capped=price_may_fall)
        if not last_call:
            if spot is not None:
                return Action(ActionKind.RUN_SPOT, spot, self._spot_reason(observation, spot))
            return Action(
                ActionKind.WAIT, reason=f"no spot to be had; {left:.2f} h left, {needed:.2f} h needed: time to wait"
            )
        why = f"{left:.2f} h left, {needed:.2f} h needed: no time to wait for spot"
        on_demand = self._cheapest_on_demand(observation)
        if on_demand is None:
            if spot is None:
                return Action(ActionKind.WAIT, reason=f"{why}, but neither spot nor on-demand is to be had")
            return Action(ActionKind.RUN_SPOT, spot, f"{why}, but on-demand is not to be had")
        return Action(ActionKind.RUN_ON_DEMAND, on_demand, why)

    def _spot_reason(self, observation: Observation, index: int) -> str:
        price = observation.spot_prices[index]
        have = sum(1 for up in observation.spot_available if up is not False)
        return f"cheapest of {have} spot pools at ${price:.4f}/h"

    def _cheapest_spot(self, observation: Observation, *, capped: bool) -> int | None:
        cap = self._job.spot_price_cap if capped else None
        costs = [
            (price / pool.speed, index)
            for index, (pool, price, up) in enumerate(
                zip(self._pools, observation.spot_prices, observation.spot_available, strict=True)
            )
            if price is not None and up is not False and (cap is None or price <= cap)
        ]
        return min(costs)[1] if costs else None

    def _cheapest_on_demand(self, observation: Observation) -> int | None:
        costs = [
            (pool.on_demand_price / pool.speed, index)
            for index, (pool, up) in enumerate(zip(self._pools, observation.on_demand_available, strict=True))
            if pool.on_demand_price is not None and up
        ]
        return min(costs)[1] if costs else None


class BatchedGreedy:
    """The same rule for many jobs at once."""

    name = "greedy"

    def start(self, jobs: Sequence[JobView], pools: Sequence[PoolView], history: MarketHistory) -> None:  # noqa: ARG002
        """Begin with `n` jobs over the same pools."""
        import numpy as np

        self._deadline = np.array([job.deadline_hours for job in jobs])
        self._launch = np.array([job.launch_hours for job in jobs])
        self._cap = np.array([np.inf if job.spot_price_cap is None else job.spot_price_cap for job in jobs])
        self._speed = np.array([pool.speed for pool in pools])
        self._on_demand = np.array([np.inf if p.on_demand_price is None else p.on_demand_price for p in pools])

    def decide(self, observations: ObservationBatch) -> ActionBatch:
        """What each job does now."""
        import numpy as np

        o = observations
        left = self._deadline - o.hours
        needed = o.work_left_hours + 2 * self._launch + o.tick_hours
        last_call = left < needed
        price_may_fall = left >= needed + self._launch + o.tick_hours
        cap = np.where(price_may_fall, self._cap, np.inf)[:, None]
        spot_cost = np.where(o.spot_available & (o.spot_prices <= cap), o.spot_prices / self._speed, np.inf)
        on_demand_cost = np.where(o.on_demand_available, self._on_demand / self._speed, np.inf)
        spot, has_spot = _least(spot_cost)
        on_demand, has_on_demand = _least(on_demand_cost)

        kind = np.where(has_spot, ActionKind.RUN_SPOT, ActionKind.WAIT)
        kind = np.where(last_call & has_on_demand, ActionKind.RUN_ON_DEMAND, kind)
        kind = np.where(o.mode != Mode.IDLE, ActionKind.STAY, kind)
        pool = np.where(kind == ActionKind.RUN_SPOT, spot, np.where(kind == ActionKind.RUN_ON_DEMAND, on_demand, -1))
        return ActionBatch(kind.astype(np.int8), pool.astype(np.int32))


def _least(cost: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Per row: the index of the least cost, and whether it is finite; cost is [n, pools]."""
    import numpy as np

    index = cost.argmin(axis=1)
    least: NDArray[np.float64] = cost[np.arange(len(cost)), index]
    return index, np.isfinite(least)
