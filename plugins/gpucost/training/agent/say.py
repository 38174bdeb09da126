"""What does the agent tell people? Lines in its own log, the machine's console."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """A line for people, in the agent's own log."""
    # A full disk under the log, or a reader that is gone, must not cost the training; there is nowhere to tell it.
    with contextlib.suppress(OSError):
        print(f"gpucost agent: {line}", file=sys.stderr, flush=True)  # noqa: T201
