"""Where is everything written down? One JSON object a line, appended before the change is told to anybody."""

from __future__ import annotations

import errno
import json
import logging
import os
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

    Each line is written at once and whole, so that a killed cloud leaves its history; of a machine that loses power
    the last lines may be missing. A last line that was cut is no event: it was told to nobody. What could not be
    written whole, on a full disk, is cut off again: it must not turn up in a later life.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._earlier = _whole_lines(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._length = os.fstat(self._file).st_size
        self._torn = False

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
        """Append one event; times become ISO 8601.

        Raises:
            OSError: it could not be written, and is not in the file; or an earlier line could neither be written nor
                be cut off, after which nothing is written any more.
        """
        line = (json.dumps({"event": event, **facts}, default=_plain) + "\n").encode()
        with self._lock:
            if self._torn:
                raise OSError(errno.EIO, f"journal: {self._path} ends in half a line; start the rehearsal again")
            try:
                written = os.write(self._file, line)
            except OSError:
                self._cut()
                raise
            if written < len(line):
                self._cut()
                raise OSError(errno.ENOSPC, f"journal: only {written} of {len(line)} bytes went into {self._path}")
            self._length += len(line)

    def _cut(self) -> None:
        """Back to the last whole line."""
        try:
            os.ftruncate(self._file, self._length)
        except OSError:
            self._torn = True
            log.exception("journal: %s ends in half a line and cannot be cut: nothing more is written", self._path)

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        with self._lock:
            os.close(self._file)


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
