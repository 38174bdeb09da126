"""What may reach a running attempt from outside? Orders, from whoever sees the reason for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from gpucost.reasons import Reason


@dataclass(frozen=True)
class Save:
    """Save at the next step boundary and go on."""

    why: str


@dataclass(frozen=True)
class Stop:
    """Save at the next step boundary and end.

    Args:
        reason: what the exit record will say.
        why: for a person.
        within: real seconds from now until the node must be gone; None: as long as it takes.
    """

    reason: Reason
    why: str
    within: float | None = None


@dataclass(frozen=True)
class Kill:
    """End at once, without saving: another attempt owns the job."""

    reason: Reason
    why: str


@dataclass(frozen=True)
class Extend:
    """The node may live until `expires_at`, on the job's clock."""

    expires_at: datetime


@dataclass(frozen=True)
class Reconfigure:
    """Save, end, and start the program again here with another recipe.

    Args:
        options: of the recipe, that replace the job's.
        why: for a person.
    """

    options: Mapping[str, object]
    why: str


Order = Save | Stop | Kill | Extend | Reconfigure
