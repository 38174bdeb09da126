"""Which processes belong to which instance? One look at /proc for all instances of a cloud.

Everything that an instance starts inherits one environment variable, `MARKER`, and belongs to it by that, also
when it made a session of its own. What cleared its environment is still found by its session or its ancestors.
Only a process that did all three (cleared environment, own session, orphaned) escapes; a container or a cgroup
would hold even that, but needs rights that a newcomer's machine does not give.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

MARKER = "GPUCOST_REHEARSAL_INSTANCE"
"""Environment variable `<cloud id>/<instance id>` of everything that an instance runs."""

SETTLES_REAL_S = 2.0
"""A process shows its marker when its program has started, a moment after its birth: younger ones are read again."""

BLIND = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that are about us or the host, not about the file."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """A living process; `started` in the kernel's ticks since its boot tells two of the same pid apart."""

    pid: int
    parent: int
    session: int
    started: int
    rss: int
    """Bytes in memory, what it shares with others included."""
    name: str


def marker_value(cloud_id: str, instance_id: str) -> str:
    """What MARKER holds for an instance."""
    return f"{cloud_id}/{instance_id}"


class Scanner:
    """Looks at /proc again and again, and reads of a process that it knows only what changes.

    Args:
        cloud_id: whose instances; processes of other clouds are strangers.
        proc: the process table's folder.
        monotonic: real seconds.
    """

    def __init__(
        self, cloud_id: str, proc: Path = Path("/proc"), monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix = f"{MARKER}={cloud_id}/".encode()
        self._proc = str(proc)
        self._monotonic = monotonic
        self._known: dict[tuple[int, int], tuple[str | None, float]] = {}

    def look(self) -> dict[str, dict[int, Process]]:
        """Every living process of the cloud's instances: instance id -> pid -> process.

        Processes that end while we look are left out; zombies are too: they only wait to be collected.

        Raises:
            OSError: the table could not be looked at, for want of file descriptors; that says nothing of who lives.
        """
        now, known, seen = self._monotonic(), self._known, dict[tuple[int, int], tuple[str | None, float]]()
        everything: dict[int, Process] = {}
        owners: dict[int, str] = {}
        for name in os.listdir(self._proc):  # noqa: PTH208 (a Path for each process makes this half as fast)
            if not name.isdigit():
                continue
            process = self._read(name)
            if process is None:
                continue
            key = (process.pid, process.started)
            owner, since = known.get(key) or (None, now)
            if owner is None and now - since <= SETTLES_REAL_S:
                owner = self._owner(name)
            seen[key] = (owner, since)
            everything[process.pid] = process
            if owner is not None:
                owners[process.pid] = owner
        self._known = seen
        return _by_owner(everything, owners)

    def _read(self, pid: str) -> Process | None:
        """/proc/PID/stat: pid (name) state ppid pgrp session ...; the name may hold spaces and brackets."""
        data = _content(f"{self._proc}/{pid}/stat")
        if data is None:
            return None
        head, _, tail = data.rpartition(b")")
        fields = tail.split()
        if not fields or fields[0] in {b"Z", b"X"}:
            return None
        name = head.partition(b"(")[2].decode("utf-8", errors="replace")
        return Process(int(pid), int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]) * _PAGE, name)

    def _owner(self, pid: str) -> str | None:
        # another user's processes are not readable, and none of ours
        for item in (_content(f"{self._proc}/{pid}/environ") or b"").split(b"\0"):
            if item.startswith(self._prefix):
                return item[len(self._prefix) :].decode("utf-8", errors="replace")
        return None


def _content(path: str) -> bytes | None:
    """A file of /proc; None when the process is gone, or is not ours to read.

    Raises:
        OSError: we could not look, which is not to be taken for that.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in BLIND:
            raise
        return None
    try:
        parts = []
        while part := os.read(file, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError as error:
        if error.errno in BLIND:
            raise
        return None
    finally:
        os.close(file)


def _by_owner(everything: Mapping[int, Process], marked: Mapping[int, str]) -> dict[str, dict[int, Process]]:
    """Add to the marked processes those of their sessions, and everything that descends from them."""
    owners = dict(marked)
    sessions = {everything[pid].session: owner for pid, owner in marked.items()}
    children: dict[int, list[int]] = {}
    for process in everything.values():
        children.setdefault(process.parent, []).append(process.pid)
        if process.pid not in owners and process.session in sessions:
            owners[process.pid] = sessions[process.session]
    waiting = list(owners)
    while waiting:
        parent = waiting.pop()
        for child in children.get(parent, ()):
            if child not in owners:
                owners[child] = owners[parent]
                waiting.append(child)
    owners.pop(os.getpid(), None)
    found: dict[str, dict[int, Process]] = {}
    for pid, owner in owners.items():
        found.setdefault(owner, {})[pid] = everything[pid]
    return found


def pss(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Bytes in memory, with what is shared split evenly between those who share it; None when it is gone."""
    for line in (_content(f"{proc}/{pid}/smaps_rollup") or b"").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def send(pids: Iterable[int], what: signal.Signals) -> None:
    """Signal each of them; one that is gone already needs nothing."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)
