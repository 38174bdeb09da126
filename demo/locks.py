"""One at a time in a home folder: an `up` or `down`, and a demo, which also leaves its name for the others."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import processes
from .settings import StackError


@contextmanager
def alone(path: Path, complaint: str) -> Iterator[None]:
    """Hold the lock file `path`; it is free again when this process ends, however it ends.

    Raises:
        StackError: another process holds it; with `complaint` as its message.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(complaint) from None
        yield


@contextmanager
def alone_by_name(path: Path, complaint: str, table: processes.ProcessTable) -> Iterator[None]:
    """As `alone`, and `holder` tells the others who holds it."""
    with alone(path, complaint):
        me = table.info(os.getpid())
        path.write_text(f"{me.pid} {me.started}" if me else "")
        try:
            yield
        finally:
            path.write_text("")


def holder(path: Path, table: processes.ProcessTable) -> int | None:
    """The pid of the other living process that holds `path` by name; None when there is none, or it is this one."""
    try:
        pid, _, started = path.read_text().partition(" ")
    except OSError:
        return None
    if not (pid.isascii() and pid.isdigit()) or int(pid) == os.getpid():
        return None
    return int(pid) if processes.is_alive(table, int(pid), started) else None
