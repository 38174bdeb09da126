"""Processes of a stack: which are ours, are they alive, and how do they end.

A process is known by its pid *and* the moment it started (in the kernel's clock ticks since this boot): a pid that the
system has given to somebody else meanwhile is never signalled. What a service started in turn is found three ways,
because each alone has a hole: as a descendant (lost when the parent dies first), by session (lost when a child makes
its own), and by a random mark in the environment, which every process of this stack inherits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

MARK = "GPUCOST_STACK"
"""Environment variable with the stack's random id."""


@dataclass(frozen=True)
class ProcessInfo:
    """What the process table says about one living process."""

    pid: int
    parent: int
    session: int
    started: str
    """Boot id and start time in ticks: differs for two processes that had the same pid."""


class ProcessTable(Protocol):
    """The system's processes; a fake one in tests."""

    def info(self, pid: int) -> ProcessInfo | None:
        """A living process, or None when it is away or only waits to be reaped."""
        ...

    def all(self) -> list[ProcessInfo]:
        """Every living process."""
        ...

    def mark(self, pid: int) -> str | None:
        """The stack id in the environment of a process, where we may read it."""
        ...

    def signal(self, pid: int, number: int) -> None:
        """Send a signal; a process that is gone already is fine."""
        ...


class LinuxProcesses:
    """The process table of /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._boot = (proc / "sys/kernel/random/boot_id").read_text().strip()

    def info(self, pid: int) -> ProcessInfo | None:
        try:
            stat = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The name in brackets may hold spaces and brackets; the fields after it do not.
        fields = stat.rpartition(")")[2].split()
        if fields[0] in ("Z", "X"):
            return None
        return ProcessInfo(pid, int(fields[1]), int(fields[3]), f"{self._boot}:{fields[19]}")

    def all(self) -> list[ProcessInfo]:
        found = (self.info(int(entry.name)) for entry in self._proc.iterdir() if entry.name.isdigit())
        return [info for info in found if info is not None]

    def mark(self, pid: int) -> str | None:
        try:
            environ = (self._proc / str(pid) / "environ").read_bytes()
        except OSError:
            return None
        prefix = f"{MARK}=".encode()
        for item in environ.split(b"\0"):
            if item.startswith(prefix):
                return item[len(prefix) :].decode(errors="replace")
        return None

    def signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def is_alive(table: ProcessTable, pid: int, started: str) -> bool:
    """Is this very process still there (not another one with its old pid)?"""
    info = table.info(pid)
    return info is not None and info.started == started


def same_boot(one: str, other: str) -> bool:
    """Were both processes started since the same start of the machine?"""
    return one.partition(":")[0] == other.partition(":")[0]


def family(table: ProcessTable, roots: Iterable[tuple[int, str]], mark: str | None = None) -> list[ProcessInfo]:
    """Every living process that belongs to the recorded ones, parents before children.

    Args:
        table: the process table.
        roots: recorded (pid, started) pairs; each was started as the leader of its own session.
        mark: the stack's id: processes that carry it belong too, whoever their parent is now.
    """
    everything = table.all()
    recorded = dict(roots)
    ours = {info.pid for info in everything if recorded.get(info.pid) == info.started}
    # The kernel gives no new process a pid that still is some session's id: where the leader is dead, what is left in
    # its session is ours. A session whose leader lives and is not the recorded one belongs to somebody else.
    dead = {pid for pid, started in recorded.items() if pid not in ours and table.info(pid) is None}
    ours |= {
        info.pid
        for info in everything
        if info.session in ours or (info.session in dead and same_boot(info.started, recorded[info.session]))
    }
    if mark is not None:
        ours |= {info.pid for info in everything if table.mark(info.pid) == mark}
    ours = _with_children(everything, ours - {os.getpid()})
    return [info for info in everything if info.pid in ours]


def descendants(table: ProcessTable, pid: int) -> set[int]:
    """The pids of a process and of everything below it."""
    return _with_children(table.all(), {pid})


def _with_children(everything: Iterable[ProcessInfo], pids: set[int]) -> set[int]:
    while more := {info.pid for info in everything if info.parent in pids and info.pid not in pids}:
        pids = pids | more
    return pids


def end(
    table: ProcessTable,
    find: Callable[[], Collection[ProcessInfo]],
    grace: float,
    *,
    asking: Mapping[int, int] = MappingProxyType({}),
    reap: Callable[[], object] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """Ask to end, wait, SIGKILL what is left, until nothing is left.

    Args:
        table: the process table.
        find: lists what is to end; asked again and again, since a process may start another while it ends.
        grace: seconds between asking and SIGKILL.
        asking: pid -> the signal that it is asked by; SIGTERM for all others.
        reap: collects exit statuses of those that are our own children.
        sleep: waits.
        monotonic: a clock for the grace.

    Returns:
        How many processes were killed because they did not leave by themselves.
    """
    asked: set[tuple[int, str]] = set()
    killed: set[tuple[int, str]] = set()
    deadline = monotonic() + grace
    while True:
        reap()
        left = find()
        if not left:
            return len(killed)
        late = monotonic() >= deadline
        for info in left:
            key = (info.pid, info.started)
            done = killed if late else asked
            if key not in done:
                table.signal(info.pid, signal.SIGKILL if late else asking.get(info.pid, signal.SIGTERM))
                done.add(key)
        sleep(0.05)
