"""The guard under every policy: no action after which on-demand could not finish in time.

With R hours left, an action is allowed if R - tick >= C_after + d should the spot machine die at the next
tick: C_after is the work then left, which is all that is left now, because nothing is counted as done before
it is saved; d is the longest that a launch may take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class Guarded:
    """Wraps a policy: what would risk the deadline becomes on-demand, with the reason.

    Args:
        inner: the policy that decides while there is time.
    """

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.name = inner.name

    def start(self, job: JobView, pools: Sequence[PoolView], history: MarketHistory) -> None:
        """Begin with a job."""
        self._job = job
        self._pools = tuple(pools)
        self.inner.start(job, pools, history)

    def state(self) -> dict[str, Any]:
        """The inner policy's memory; the guard has none."""
        return self.inner.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.inner.restore(state)

    def decide(self, observation: Observation) -> Action:
        """The inner policy's action, unless it could make the job late."""
        action = self.inner.decide(observation)
        if self._safe(action, observation):
            return action
        place = self._on_demand_pool(observation)
        if place is None or (action.kind is ActionKind.RUN_ON_DEMAND and action.pool == place):
            return action
        left = self._job.deadline_hours - observation.hours
        reason = (
            f"{left:.2f} h left for {observation.work_left_hours:.2f} h of work and a launch: "
            "after one more tick on spot, on-demand could no longer finish in time"
        )
        return Action(ActionKind.RUN_ON_DEMAND, place, reason)

    def _safe(self, action: Action, observation: Observation) -> bool:
        if action.kind is ActionKind.STAY and observation.mode is Mode.ON_DEMAND:
            return True
        left = self._job.deadline_hours - observation.hours - self._launch
        if action.kind is ActionKind.RUN_ON_DEMAND and action.pool is not None:
            return left >= observation.work_left_hours / self._pools[action.pool].speed
        fastest = max((self._pools[index].speed for index in self._on_demand(observation)), default=1.0)
        return left - observation.tick_hours >= observation.work_left_hours / fastest

    def _on_demand_pool(self, observation: Observation) -> int | None:
        left = self._job.deadline_hours - observation.hours - self._launch
        costs: list[tuple[float, float, int]] = []
        for index in self._on_demand(observation):
            pool = self._pools[index]
            late = max(0.0, observation.work_left_hours / pool.speed - left)
            costs.append((late, (pool.on_demand_price or 0.0) / pool.speed, index))
        return min(costs)[2] if costs else None

    def _on_demand(self, observation: Observation) -> list[int]:
        """The pools that are to be had on demand now."""
        return [
            index
            for index, (pool, up) in enumerate(zip(self._pools, observation.on_demand_available, strict=True))
            if pool.on_demand_price is not None and up
        ]

    @property
    def _launch(self) -> float:
        """The longest that a launch may take, hours."""
        return self._job.launch_hours_worst or self._job.launch_hours
