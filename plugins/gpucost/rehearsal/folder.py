"""Whose folder is this? The state folder of one rehearsal cloud: one cloud at a time, the same cloud every time."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import IO

IDENTITY = "cloud.json"
ENDPOINT = "endpoint.json"
LOCK = "lock"


class FolderTaken(ValueError):
    """Another rehearsal cloud runs on this folder."""


class StateFolder:
    """A rehearsal's folder, held until `release`.

    Raises:
        FolderTaken: another cloud holds it.
        OSError: it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = self._take()
        self.cloud_id = self._identity()

    def _take(self) -> IO[str]:
        file = (self.path / LOCK).open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise FolderTaken(
                f"state_dir: another rehearsal cloud runs on {self.path}; end it, or use another --state-dir"
            ) from error
        return file

    def _identity(self) -> str:
        path = self.path / IDENTITY
        try:
            return str(json.loads(path.read_bytes())["cloud_id"])
        except FileNotFoundError:
            cloud_id = f"rehearsal-{secrets.token_hex(8)}"
            path.write_text(json.dumps({"cloud_id": cloud_id}) + "\n", encoding="utf-8")
            return cloud_id

    def earlier_port(self) -> int:
        """The port of this folder's last cloud, which its machines still ask for their metadata; 0 for none."""
        try:
            url = str(json.loads((self.path / ENDPOINT).read_bytes())["url"])
            return int(url.rpartition(":")[2])
        except (FileNotFoundError, ValueError, KeyError):
            return 0

    def write_endpoint(self, url: str) -> None:
        """Leave the address in `endpoint.json`, for whoever started us on any free port, and for the next start."""
        part = self.path / f"{ENDPOINT}.part"
        part.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n", encoding="utf-8")
        part.replace(self.path / ENDPOINT)

    def release(self) -> None:
        """Let another cloud have the folder."""
        self._lock.close()
