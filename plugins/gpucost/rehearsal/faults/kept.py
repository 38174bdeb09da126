"""What must be remembered of faults when the cloud starts again? A small private file for each who remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpucost.rehearsal.whole import write_whole


class KeptFile:
    """A JSON document in a file that only this user can read.

    Args:
        path: the file; None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        """What was written last; nothing at the first start.

        Raises:
            ValueError: it cannot be read; the message says what to do.
        """
        if self._path is None:
            return {}
        try:
            document: dict[str, Any] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise self.damaged(error) from error
        return document

    def damaged(self, error: ValueError) -> ValueError:
        """The error to raise when what was read makes no sense."""
        return ValueError(f"state_dir: {self._path} cannot be read: {error}; remove it to begin without")

    def write(self, document: dict[str, Any]) -> None:
        """Keep a document, whole or not at all."""
        if self._path is None:
            return
        write_whole(self._path, json.dumps(document))
