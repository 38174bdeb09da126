"""Whose folder is this? The state folder of one rehearsal cloud: one cloud at a time, the same cloud every time."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel, Field

from gpucost.rehearsal.whole import write_whole
from gpucost.rehearsal.wording import read_model

IDENTITY = "cloud.json"
ENDPOINT = "endpoint.json"
MARKET = "market.json"
LOCK = "lock"


Model = TypeVar("Model", bound=BaseModel)


class _Identity(BaseModel):
    cloud_id: str


class _Market(BaseModel):
    fingerprint: str
    label: str


class Endpoint(BaseModel):
    """Where the folder's cloud answers, or answered."""

    url: str = Field(pattern=r"^http://127\.0\.0\.1:\d+$")
    pid: int


class FolderTaken(ValueError):
    """Another rehearsal cloud runs on this folder."""


class StateFolder:
    """A rehearsal's folder, held until `release`.

    Raises:
        FolderTaken: another cloud holds it.
        ValueError: a file in it is not what this wrote; the message names it.
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
        kept = self._read(IDENTITY, _Identity)
        if kept is None:
            kept = _Identity(cloud_id=f"rehearsal-{secrets.token_hex(8)}")
            self._write(IDENTITY, kept)
        return kept.cloud_id

    def _read(self, name: str, model: type[Model]) -> Model | None:
        path = self.path / name
        if not path.exists():
            return None
        try:
            return read_model(path, model, "state_dir")
        except ValueError as error:
            raise ValueError(f"{error}; put the file right, or use another --state-dir") from error

    def _write(self, name: str, kept: BaseModel) -> None:
        write_whole(self.path / name, kept.model_dump_json() + "\n")

    def settle_market(self, fingerprint: str, label: str, *, used: bool) -> None:
        """Hold the folder to the market that its instances were bought in: its invoice and history tell those prices.

        Args:
            fingerprint, label: of the market of this start.
            used: whether anything was launched here before.

        Raises:
            ValueError: it began with another market.
        """
        kept = self._read(MARKET, _Market)
        if used and kept is not None and kept.fingerprint != fingerprint:
            raise ValueError(
                f"market: got another one ({label}), expected that of the instances in {self.path} "
                f"({kept.label}): their invoice tells its prices; use another --state-dir, or with make another "
                "HOME_FOLDER"
            )
        self._write(MARKET, _Market(fingerprint=fingerprint, label=label))

    def earlier_port(self) -> int:
        """The port of this folder's last cloud, which its machines still ask for their metadata; 0 for none."""
        kept = self._read(ENDPOINT, Endpoint)
        return int(kept.url.rpartition(":")[2]) if kept else 0

    def write_endpoint(self, url: str) -> None:
        """Leave the address in `endpoint.json`, for whoever started us on any free port, and for the next start."""
        self._write(ENDPOINT, Endpoint(url=url, pid=os.getpid()))

    def release(self) -> None:
        """Let another cloud have the folder."""
        self._lock.close()
