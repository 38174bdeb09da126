"""What does the agent tell people? Lines in its own log, the machine's console."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """A line for people, in the agent's own log."""
    print(f"gpucost agent: {line}", file=sys.stderr, flush=True)  # noqa: T201
