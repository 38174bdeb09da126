"""Who is this node? Its job, lease and attempt, from the environment or from the instance's tags."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpucost.training.agent.imds import Metadata

TRIES = 5
"""Tags show in instance metadata some seconds after the launch; a node that just booted asks again."""
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
    environ: Mapping[str, str], metadata: Metadata, sleep: Callable[[float], None] = time.sleep
) -> Identity:
    """Read `GPUCOST_JOB`, `GPUCOST_LEASE`, `GPUCOST_ATTEMPT`, or the tags `gpucost:job`, `:lease`, `:attempt`.

    Raises:
        Unidentified: naming what is missing or wrong.
    """
    names = ("job", "lease", "attempt")
    found = {name: environ.get(f"GPUCOST_{name.upper()}", "") for name in names}
    trouble = ""
    for attempt in range(TRIES):
        if all(found.values()):
            break
        if attempt:
            sleep(PAUSE_SECONDS)
        try:
            found = {name: value or metadata.tag(f"gpucost:{name}") or "" for name, value in found.items()}
        except OSError as error:
            trouble = f"; {error}"
    missing = [name for name, value in found.items() if not value]
    if missing:
        wanted = ", ".join(f"GPUCOST_{name.upper()} or the tag gpucost:{name}" for name in missing)
        raise Unidentified(f"this node does not know whom it works for: expected {wanted}{trouble}")
    number = found["attempt"]
    if not number.isdecimal() or int(number) < 1:
        raise Unidentified(f"attempt: got {number!r}, expected a whole number from 1")
    return Identity(found["job"], found["lease"], int(number))
