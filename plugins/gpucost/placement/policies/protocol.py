"""The contract between a policy and whoever drives it: the operator, with real observations, or a simulator.

A policy is pure: no I/O, no clock, no randomness but a seed it was given. It thinks in plain floats (hours,
USD per instance-hour); exact money stays with the caller. Its whole memory serializes to JSON, so that a
decision can be taken in another process after a crash. A rule that must decide millions of times has a
batched form behind the same interface; a test holds both forms equal, decision by decision.

Somebody else's simulator drives a policy like this:

    policy.start(job, pools, history)
    while not finished:
        action = policy.decide(observation)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Mode(IntEnum):
    """How the job runs now."""

    IDLE = 0
    SPOT = 1
    ON_DEMAND = 2


class ActionKind(IntEnum):
    """What to do until the next decision."""

    WAIT = 0
    """Buy nothing."""
    STAY = 1
    """Go on as now."""
    RUN_SPOT = 2
    """Launch on spot in a pool (from idle, or instead of what runs now)."""
    RUN_ON_DEMAND = 3
    """Launch on demand in a pool."""
    MOVE = 4
    """Save, leave, and launch on spot in another pool."""


@dataclass(frozen=True)
class JobView:
    """The job as a policy sees it.

    Args:
        work_hours: hours of training on a pool of speed 1.
        deadline_hours: hours from the start to the deadline.
        launch_hours: paid hours of each launch in which no work is done.
        launch_hours_worst: the longest that a launch may take, hours.
        checkpoint_gib: size of a checkpoint, GiB.
        checkpoint_interval_hours: hours between two checkpoints.
        save_hours: hours that a save takes.
        budget_usd: most that the job may cost; None: no limit.
        spot_price_cap: wait rather than pay more for spot, USD per instance-hour; None: no cap.
    """

    work_hours: float
    deadline_hours: float
    launch_hours: float
    launch_hours_worst: float | None = None
    checkpoint_gib: float = 0.0
    checkpoint_interval_hours: float = 0.0
    save_hours: float = 0.0
    budget_usd: float | None = None
    spot_price_cap: float | None = None


@dataclass(frozen=True)
class PoolView:
    """A pool as a policy sees it: one instance type in one zone, to be had on spot or on demand.

    Args:
        name: for the reason that people read.
        region: pools of one region exchange checkpoints without egress.
        on_demand_price: USD per instance-hour; None: not to be had on demand.
        speed: work hours done per hour.
        egress_price: USD per GiB to move a checkpoint here from another region.
    """

    name: str
    region: str
    on_demand_price: float | None
    speed: float = 1.0
    egress_price: float = 0.0


@dataclass(frozen=True)
class MarketHistory:
    """What was seen of the pools before the start, at even ticks, oldest first.

    Args:
        tick_hours: hours between two ticks.
        available: [ticks, pools], whether spot was to be had.
        prices: [ticks, pools], USD per instance-hour.
    """

    tick_hours: float = 0.0
    available: Sequence[Sequence[bool]] = ()
    prices: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Observation:
    """What is known when a decision is due.

    Args:
        hours: since the start.
        tick_hours: until the next decision is due.
        work_left_hours: at speed 1, as far as saved.
        mode: how the job runs now.
        pool: index of the pool it runs in; None when idle.
        spot_available: [pools]; None: not known.
        spot_prices: [pools], USD per instance-hour; None: no price.
        on_demand_available: [pools].
        spent_usd: so far.
    """

    hours: float
    tick_hours: float
    work_left_hours: float
    mode: Mode
    pool: int | None
    spot_available: Sequence[bool | None]
    spot_prices: Sequence[float | None]
    on_demand_available: Sequence[bool]
    spent_usd: float = 0.0


@dataclass(frozen=True)
class Action:
    """What to do, where, and why.

    Args:
        kind: what.
        pool: index of the pool; None for WAIT and STAY.
        reason: a sentence for people.
    """

    kind: ActionKind
    pool: int | None = None
    reason: str = field(default="", compare=False)


class Policy(Protocol):
    """Decides what to run next."""

    name: str

    def start(self, job: JobView, pools: Sequence[PoolView], history: MarketHistory) -> None:
        """Begin with a job; forgets whatever was before."""
        ...

    def decide(self, observation: Observation) -> Action:
        """What to do now; the same answer for the same past."""
        ...

    def state(self) -> dict[str, Any]:
        """The whole memory, as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, after `start` with the same job and pools."""
        ...


@dataclass(frozen=True)
class ObservationBatch:
    """Observations of `n` jobs with the same pools, as arrays; see `Observation` for the units.

    Args:
        hours, tick_hours, work_left_hours: [n].
        mode: [n], values of `Mode`.
        pool: [n], -1 when idle.
        spot_available: [n, pools].
        spot_prices: [n, pools], inf where there is none.
        on_demand_available: [n, pools].
    """

    hours: NDArray[np.float64]
    tick_hours: NDArray[np.float64]
    work_left_hours: NDArray[np.float64]
    mode: NDArray[np.int8]
    pool: NDArray[np.int32]
    spot_available: NDArray[np.bool_]
    spot_prices: NDArray[np.float64]
    on_demand_available: NDArray[np.bool_]


@dataclass(frozen=True)
class ActionBatch:
    """Actions of `n` jobs.

    Args:
        kind: [n], values of `ActionKind`.
        pool: [n], -1 for WAIT and STAY.
    """

    kind: NDArray[np.int8]
    pool: NDArray[np.int32]


class BatchedPolicy(Protocol):
    """The same rule for many jobs at once."""

    name: str

    def start(self, jobs: Sequence[JobView], pools: Sequence[PoolView], history: MarketHistory) -> None:
        """Begin with `n` jobs over the same pools."""
        ...

    def decide(self, observations: ObservationBatch) -> ActionBatch:
        """What each job does now."""
        ...
