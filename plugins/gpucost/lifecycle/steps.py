"""What a course can ask of whoever drives it: watch a lease, wait, or finish."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpucost.reasons import Reason, rule_for


class _Step(BaseModel):
    model_config = ConfigDict(frozen=True)


class Watch(_Step):
    """Watch a lease until something happens that needs a decision."""

    lease_id: str
    owner: str


class Pause(_Step):
    """Nothing to watch; decide again at `until`."""

    until: AwareDatetime
    why: str


class Finished(_Step):
    """The job is done; `summary` is what Airflow keeps and people read."""

    summary: dict[str, Any]


Step = Watch | Pause | Finished


class EventKind(StrEnum):
    """What happened to a watched lease."""

    OVER = "over"
    """The cloud confirms that the machine is gone."""
    EXITED = "exited"
    """The agent wrote why the program ended."""
    SILENT = "silent"
    """The machine runs, but its heartbeats have stopped, or never came."""
    EXPIRED = "expired"
    """The lease's expiry has passed and the machine is still there."""
    REPLAN = "replan"
    """The policy would no longer stay."""
    TIME = "time"
    """A pause is over."""


class Event(_Step):
    """What a watcher saw; travels through Airflow as JSON."""

    kind: EventKind
    lease_id: str | None = None
    at: AwareDatetime
    note: str = Field(default="", description="A sentence for people.")


class CourseEnded(RuntimeError):
    """The job, or this attempt, failed for a reason of the table.

    Args:
        reason: its row says whether Airflow's retries may help.
        message: what happened; what to do is added from the table.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        advice = rule_for(reason).advice
        super().__init__(f"{reason}: {message}" + (f" What to do: {advice}." if advice else ""))
        self.reason = reason
