"""The append-only record of everything that happened, one JSON object a line."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any


class FileJournal:
    """Appends events to a file; each line is written whole and flushed, so a killed cloud leaves its history."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")

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


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"journal: cannot write a {type(value).__name__}")
