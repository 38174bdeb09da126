"""services.json: what runs, so that a later `up` or `down` knows it, whatever happened to the one that started it."""

from __future__ import annotations

import json
import os
import secrets
import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .settings import StackError


class ServiceRecord(BaseModel):
    """One started service."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: str = Field(description="Tells this process from a later one with the same pid; see `processes`.")
    started_at: float = Field(description="Seconds since the epoch.")
    fingerprint: str = Field(description="Digest of command, environment and code: equal means no restart is needed.")
    stop_grace: float = Field(description="Seconds between being asked to end and SIGKILL.")
    stop_signal: int = Field(default=signal.SIGTERM, description="The signal that its leading process is asked by.")
    stop_wave: int = Field(default=0, description="Services of a higher wave end later: those that others write to.")
    leftovers: tuple[str, ...] = Field(default=(), description="Files to remove after its end.")


class StackRecord(BaseModel):
    """Everything that is remembered about a stack between two commands."""

    model_config = ConfigDict(validate_assignment=True)

    stack_id: str = Field(default_factory=lambda: secrets.token_hex(8))
    ports: dict[str, int] = {}
    chosen: tuple[str, ...] = Field(default=(), description="The services that were asked for.")
    services: dict[str, ServiceRecord] = {}


class RecordFile:
    """Reads and writes services.json; a write replaces the file as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> StackRecord:
        """The record; a fresh one when there is none.

        Raises:
            StackError: the file is there and is not ours to understand. (Guessing would leave processes behind.)
        """
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return StackRecord()
        except UnicodeDecodeError as error:
            raise StackError(f"{self.path} cannot be read ({error}): end what runs, remove the file") from error
        try:
            return StackRecord.model_validate_json(text)
        except ValidationError as error:
            raise StackError(
                f"{self.path} cannot be read ({error.errors()[0]['msg']}): end what runs, remove the file"
            ) from error

    def write(self, record: StackRecord) -> None:
        """Keep the record."""
        write_private(self.path, json.dumps(record.model_dump(), indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # there only where the disk is full
