"""Who is this node? Its job, lease and attempt, from the environment or from the instance's tags."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpucost.training.agent.imds import Metadata
from gpucost.training.agent.say import say

MISSING_SECONDS = 60.0
"""Tags show in instance metadata some seconds after the launch; a node that just booted asks again."""
AWAY_SECONDS = 600.0
"""So long for a metadata service that does not answer: less than until the watchdog ends a node that starts."""
PAUSE_SECONDS = 2.0


class Unidentified(RuntimeError):
    """Neither the environment nor the tags say which attempt this node belongs to."""


@dataclass(frozen=True)
class Identity:
    """Args: job: the job's key. lease_id: this node's lease. attempt: the fencing number, from 1."""

    job: str
    lease_id: str
    attempt: int


def find_identity(
    environ: Mapping[str, str],
    metadata: Metadata,
    sleep: Callable[[float], None] = time.sleep,
    real: Callable[[], float] = time.monotonic,
) -> Identity:
    """Read `GPUCOST_JOB`, `GPUCOST_LEASE`, `GPUCOST_ATTEMPT`, or the tags `gpucost:job`, `:lease`, `:attempt`.

    Tags that are missing are asked for again for a minute, a service that does not answer for ten.

    Raises:
        Unidentified: naming what is missing or wrong.
    """
    found = {name: environ.get(f"GPUCOST_{name.upper()}", "") for name in ("job", "lease", "attempt")}
    began, trouble = real(), ""
    answered: float | None = None
    while not all(found.values()):
        try:
            found = {name: value or metadata.tag(f"gpucost:{name}") or "" for name, value in found.items()}
        except OSError as error:
            if not trouble:
                say(f"{error}; asking again for up to {AWAY_SECONDS:g} s")
            trouble, until = f"; {error}", began + AWAY_SECONDS
        else:
            answered = real() if answered is None else answered
            trouble, until = "", answered + MISSING_SECONDS
        if all(found.values()) or real() + PAUSE_SECONDS > until:
            break
        sleep(PAUSE_SECONDS)
    if missing := [name for name, value in found.items() if not value]:
        wanted = ", ".join(f"GPUCOST_{name.upper()} or the tag gpucost:{name}" for name in missing)
        raise Unidentified(f"this node does not know whom it works for: expected {wanted}{trouble}")
    number = found["attempt"]
    if not number.isdecimal() or int(number) < 1:
        raise Unidentified(f"attempt: got {number!r}, expected a whole number from 1")
    return Identity(found["job"], found["lease"], int(number))
