"""Where is everything written down? One JSON object a line, appended before the change is told to anybody."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class JournalError(ValueError):
    """A journal that cannot be read; the message names the file and the line."""


class FileJournal:
    """Appends events to a file, and reads those of earlier lives.

    Each line is written whole and flushed, so that a killed cloud leaves its history; of a machine that loses power
    the last lines may be missing. A last line that was cut is no event: it was told to nobody.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._earlier = _whole_lines(path)
        self._file = path.open("a", encoding="utf-8")

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event of earlier lives, in order.

        Raises:
            JournalError: a line in the middle is no event.
        """
        for number, line in enumerate(self._earlier, start=1):
            try:
                event = json.loads(line)
            except ValueError as error:
                raise JournalError(
                    f"journal: {self._path} line {number} is not JSON: {error}; use another --state-dir"
                ) from error
            yield event

    def write(self, event: str, **facts: Any) -> None:
        """Append one event; times become ISO 8601."""
        line = json.dumps({"event": event, **facts}, default=_plain)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        with self._lock:
            self._file.close()


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of the file that are complete; what follows the last of them is cut off the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = content.rpartition(b"\n")[0]
    kept = len(whole) + 1 if whole else 0
    if kept < len(content):
        log.warning(
            "journal: %s ends in half a line, as of a killed cloud: %d bytes are cut", path, len(content) - kept
        )
        with path.open("r+b") as file:
            file.truncate(kept)
    return whole.splitlines()


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"journal: cannot write a {type(value).__name__}")
