"""Which lines of a failed service's log does a person need?"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

TAIL_BYTES = 256 * 1024
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ALARM = re.compile(
    r"\b(ERROR|CRITICAL|FATAL|error|critical|fatal|panic)\b[\]:\s]|^F\d{4} |^E\d{4} |Address already in use"
)
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Failure|Timeout)\b")
_TRACEBACK = "Traceback (most recent call last)"


def excerpt(log: Path, lines: int = 15, secrets: Iterable[str] = ()) -> list[str]:
    """At most `lines` lines of a log, those that say what went wrong first; secrets are blotted out."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"(no log: {error})"]
    for secret in secrets:
        text = text.replace(secret, "***")
    return choose([_COLOUR.sub("", line).rstrip() for line in text.splitlines()], lines)


def choose(log: list[str], lines: int = 15) -> list[str]:
    """The lines that matter, in their order.

    The end of the last traceback (its last frame and what was raised) and the latest lines of alarm come first; the
    last lines of the log fill the rest.
    """
    log = [line for line in log if line.strip()]
    if len(log) <= lines:
        return log
    wanted: list[int] = []
    for index in _traceback_end(log):
        wanted.append(index)
    alarms = [index for index, line in enumerate(log) if _ALARM.search(line) or _RAISED.match(line)]
    wanted += [index for index in reversed(alarms) if index not in wanted]
    # A third is kept for the very end: it tells what the service did last.
    wanted = wanted[: lines - lines // 3]
    for index in range(len(log) - 1, -1, -1):
        if len(wanted) >= lines:
            break
        if index not in wanted:
            wanted.append(index)
    return [log[index] for index in sorted(wanted)]


def _traceback_end(log: list[str]) -> list[int]:
    """Indices of the last traceback's raised line and of its last frame (two lines)."""
    starts = [index for index, line in enumerate(log) if _TRACEBACK in line]
    if not starts:
        return []
    start = starts[-1]
    raised = next((i for i in range(start + 1, len(log)) if not log[i].startswith((" ", "\t", "|", "+"))), None)
    if raised is None:
        return []
    return [raised, *range(raised - 1, max(start, raised - 3), -1)]
