"""What does chance hold for an instance? Whether it is warned, how early a rebalance comes, and which alarms are false.

Everything is a function of a seed and of the instance's number: the same rehearsal gives the same fates. AWS
publishes no rates for any of this; the figures below are ours, and can be set.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from gpucost.rehearsal.wording import read_model


class Habits(BaseModel):
    """How a cloud that takes machines back behaves: shares of 1, rehearsal time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    silent_share: float = Field(default=0.1, ge=0, le=1, description="Interruptions of which nobody is told before.")
    rebalance_share: float = Field(default=0.5, ge=0, le=1, description="Interruptions that a rebalance precedes.")
    rebalance_lead_minutes: float = Field(default=30, gt=0, description="How early a rebalance comes: the median.")
    false_rebalances_per_day: float = Field(default=0.2, ge=0, description="Of one instance; they come to nothing.")
    false_notices_per_day: float = Field(default=0.0, ge=0, description="Of one instance; nothing follows.")


def load_habits(path: Path) -> Habits:
    """Read a habits file.

    Raises:
        ValueError: it cannot be read or is wrong; the message names the file and the fields.
    """
    return read_model(path, Habits, "habits")


@dataclass(frozen=True)
class Fate:
    """What chance holds for one instance.

    Args:
        rank: in [0, 1); when a pool shrinks, the highest go first.
        silent: an interruption comes without a notice.
        rebalance_lead: how long before an interruption a rebalance is recommended; None for not at all.
        false_rebalance: how long after the launch one is recommended for nothing; None for never.
        false_notice: how long after the launch a notice comes to nothing; None for never.
    """

    rank: float
    silent: bool
    rebalance_lead: timedelta | None
    false_rebalance: timedelta | None
    false_notice: timedelta | None


def draw(habits: Habits, seed: int, number: int) -> Fate:
    """The fate of instance `number`.

    The lead of a rebalance is lognormal around its median: minutes for most, hours for some.
    """
    chance = random.Random(f"{seed}/{number}")  # noqa: S311 (fates, not secrets)
    rank, silent, foretold = chance.random(), chance.random(), chance.random()
    lead_s = habits.rebalance_lead_minutes * 60 * math.exp(chance.gauss(0.0, 1.0))
    return Fate(
        rank=rank,
        silent=silent < habits.silent_share,
        rebalance_lead=timedelta(seconds=lead_s) if foretold < habits.rebalance_share else None,
        false_rebalance=_first(chance, habits.false_rebalances_per_day),
        false_notice=_first(chance, habits.false_notices_per_day),
    )


def _first(chance: random.Random, per_day: float) -> timedelta | None:
    """When the first of independent events comes; drawn also when none does, so that rates change nothing else."""
    days = chance.expovariate(1.0)
    return timedelta(days=min(days / per_day, 3650)) if per_day else None
