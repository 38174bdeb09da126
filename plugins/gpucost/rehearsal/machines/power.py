"""The power switch of each machine, and what can be seen of machines from outside: local processes and their files.

The hypervisor decides by the book what should run; what it needs to do so is `Power`. Here is the real one;
tests have one without processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.guests import read_small, remove
from gpucost.rehearsal.machines import disk, guard, processes
from gpucost.rehearsal.machines.processes import Process

log = logging.getLogger(__name__)

REQUESTS = "requests"
"""Folder of the files by which machines ask to be powered off, one named for each: one look sees all."""

STARTED = "started"
"""Folder of the pids of inits, one file for each machine that is on."""

WAIT_FOR_POWER_REAL_S = 20.0
"""A guard that ends the machines of an earlier cloud needs no more than 10 s."""


@dataclass(frozen=True)
class Sight:
    """One machine's living processes at one look; `init` is None when the machine is not on."""

    processes: Mapping[int, Process]
    init: int | None


class Power(Protocol):
    """What a hypervisor does to machines; all are known by their instance ids."""

    def open(self) -> None:
        """All machines of an earlier cloud are taken up: from now on somebody ends them if we cannot."""
        ...

    def check(self) -> None:
        """Each tick: is that somebody still there?"""
        ...

    def close(self, *, machines_go_on: bool) -> bool:
        """End: with every process of every machine, or leaving them to a successor. False: some are still there."""
        ...

    def lost_at(self) -> datetime | None:
        """When the machines of an earlier cloud that are not on any more went off, rehearsal time; None: unknown."""
        ...

    def was_on(self, instance_id: str) -> bool:
        """Whether this life of the instance was ever powered on, also by an earlier cloud."""
        ...

    def switch_on(self, instance: Instance) -> None:
        """Start its init; OSError when that fails."""
        ...

    def boot(self, instance_id: str) -> None:
        """Let init run the user data; one that has booted does nothing."""
        ...

    def look(self) -> Mapping[str, Sight]:
        """Every machine with a living process."""
        ...

    def send(self, pids: Iterable[int], what: signal.Signals) -> None:
        """Signal these processes; one that is gone needs nothing."""
        ...

    def shutdown_requests(self) -> Mapping[str, str]:
        """Who asks to be powered off: `now` or `+MINUTES`."""
        ...

    def console(self, instance_id: str, line: str) -> None:
        """A line of the kernel on the machine's console."""
        ...

    def program(self, instance_id: str) -> int | None:
        """The pid of the user data, alive or not; None when it was not started yet."""
        ...

    def exit_status(self, instance_id: str) -> int | None:
        """How the user data ended; None when it has not."""
        ...

    def switch_off(self, instance_id: str) -> None:
        """Its last process is gone: clear up."""
        ...

    def pid(self, instance_id: str) -> int | None:
        """The pid that people should see: of the user data, else of init."""
        ...


class LocalPower:
    """Machines as processes of this host.

    Args:
        state_dir: the cloud's folder; machines' disks are in `instances/` below it.
        cloud_id: marks every process of this cloud.
        image_path: folders that the machine image puts on PATH.
        imds_base: the metadata address of an instance id.
        keep_real_s: how long machines go on without a cloud, real seconds.
        at: rehearsal time at a real time.

    Raises:
        OSError: a guard is still ending the machines of the folder's earlier cloud.
    """

    def __init__(
        self,
        state_dir: Path,
        cloud_id: str,
        *,
        image_path: Iterable[Path] = (),
        imds_base: Callable[[str], str],
        keep_real_s: float,
        at: Callable[[datetime], datetime],
    ) -> None:
        self._state_dir = state_dir
        self._cloud_id = cloud_id
        self._image_path = tuple(image_path)
        self._imds_base = imds_base
        self._keep_real_s = keep_real_s
        for name in (REQUESTS, STARTED):
            (state_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = guard.take_power(state_dir, WAIT_FOR_POWER_REAL_S)
        if lock is None:
            raise OSError(f"state_dir: the guard of an earlier cloud still ends machines of {state_dir}; start later")
        self._lock = lock
        went_off = self._last_sign_of_life()
        self._lost_at = None if went_off is None else at(went_off)
        self._scanner = processes.Scanner(cloud_id)
        self._inits: dict[str, int] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    def _last_sign_of_life(self) -> datetime | None:
        """What the guard says; when the whole host went down, its last heartbeat."""
        with contextlib.suppress(FileNotFoundError):
            return datetime.fromisoformat(json.loads((self._state_dir / guard.POWERED_OFF).read_bytes())["at"])
        with contextlib.suppress(FileNotFoundError):
            return datetime.fromtimestamp((self._state_dir / guard.HEARTBEAT).stat().st_mtime, UTC)
        return None

    def folder(self, instance_id: str) -> Path:
        """The instance's disk."""
        return disk.folder_of(self._state_dir, instance_id)

    def open(self) -> None:
        """Start the guard; the one of an earlier cloud leaves then. What that one wrote is settled."""
        self._guard = guard.start(self._cloud_id, self._state_dir, self._keep_real_s)
        (self._state_dir / guard.POWERED_OFF).unlink(missing_ok=True)

    def check(self) -> None:
        """Start another guard when it is gone."""
        if self._guard is not None and self._guard.poll() is not None:
            log.warning("the guard process ended with %s, starting another", self._guard.returncode)
            self._guard = guard.start(self._cloud_id, self._state_dir, self._keep_real_s)

    def close(self, *, machines_go_on: bool) -> bool:
        """Leave machines to the guard and to a successor, or end all, and the guard when that is done."""
        done = machines_go_on or guard.kill_all(self._cloud_id)
        if not done:
            log.error("processes of instances are still there after 10 s of SIGKILL; the guard goes on")
        elif not machines_go_on:
            self._end_guard()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
        for child in self._children.values():
            child.poll()
        self._lock.close()
        return done

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()

    def lost_at(self) -> datetime | None:
        """When machines that are not on any more went off, rehearsal time."""
        return self._lost_at

    def was_on(self, instance_id: str) -> bool:
        """Whether its init was ever started; `switch_off` ends that.

        We write it down outside the machine's disk, whose programs may remove what they like; init's own note is for
        a cloud that was killed between the start and our note.
        """
        return self._started(instance_id).exists() or (self.folder(instance_id) / disk.INIT_PID).exists()

    def _started(self, instance_id: str) -> Path:
        return self._state_dir / STARTED / instance_id

    def switch_on(self, instance: Instance) -> None:
        """Make its disk and start its init, in a session of its own, its output in console.log."""
        folder = self.folder(instance.id)
        fault = disk.prepare(folder, instance.spec.user_data, self._request(instance.id))
        marker = processes.marker_value(self._cloud_id, instance.id)
        with (folder / disk.CONSOLE).open("ab") as console:
            child = subprocess.Popen(
                ["/bin/sh", disk.INIT, fault],
                cwd=folder,
                env=disk.environment(folder, self._image_path, self._imds_base(instance.id), marker),
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started(instance.id).write_text(str(child.pid), encoding="utf-8")
        self._children[instance.id] = child
        self._inits[instance.id] = child.pid
        if fault:
            log.warning("%s user data cannot be run: %s", instance.id, fault)

    def boot(self, instance_id: str) -> None:
        """Close its standard input; that of a machine from before our time was closed by our predecessor's end."""
        child = self._children.get(instance_id)
        if child is not None and child.stdin is not None:
            child.stdin.close()

    def look(self) -> Mapping[str, Sight]:
        """Look at /proc once for all machines.

        A look can miss a process that is being born or changes its program just then. For inits that are our
        children the kernel tells the truth: one that has not ended is seen here, whatever the look saw.
        """
        looks = self._scanner.look()
        for instance_id, child in self._children.items():
            if child.poll() is None and child.pid not in looks.get(instance_id, {}):
                missed = Process(child.pid, os.getpid(), child.pid, started=0, rss=0, name="init")
                looks.setdefault(instance_id, {})[child.pid] = missed
        return {instance_id: Sight(found, self._init_among(instance_id, found)) for instance_id, found in looks.items()}

    def _init_among(self, instance_id: str, found: Mapping[int, Process]) -> int | None:
        pid = self._inits.get(instance_id)
        if pid is None:
            pid = disk.number_in(self._started(instance_id))
            if pid is None:
                pid = disk.number_in(self.folder(instance_id) / disk.INIT_PID)
            # a pid alone proves nothing: it must be this machine's, and lead a session as init does
            if pid is None or pid not in found or found[pid].session != pid:
                return None
            self._inits[instance_id] = pid
        return pid if pid in found else None

    def send(self, pids: Iterable[int], what: signal.Signals) -> None:
        """Send it."""
        processes.send(pids, what)

    def shutdown_requests(self) -> Mapping[str, str]:
        """One look at the folder of requests; programs may put anything there, and it counts when it is a file."""
        requests = {}
        try:
            paths = list((self._state_dir / REQUESTS).iterdir())
        except FileNotFoundError:
            # a program of a machine has removed it; others must still be able to end
            (self._state_dir / REQUESTS).mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = []
        for path in paths:
            content = read_small(path) if path.suffix != ".part" else None
            if content is not None:
                requests[path.name] = content.decode(errors="replace").strip()
        return requests

    def _request(self, instance_id: str) -> Path:
        return self._state_dir / REQUESTS / instance_id

    def console(self, instance_id: str, line: str) -> None:
        """Append it to console.log."""
        # without waiting: a program may have made a pipe of it, which nobody reads
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self.folder(instance_id) / disk.CONSOLE, flags, 0o600)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)

    def pid(self, instance_id: str) -> int | None:
        """That of the user data once it was started, of init before; None for a machine that is not on."""
        init = self._inits.get(instance_id)
        return None if init is None else self.program(instance_id) or init

    def program(self, instance_id: str) -> int | None:
        """The pid that init wrote."""
        return disk.number_in(self.folder(instance_id) / disk.PROGRAM_PID)

    def exit_status(self, instance_id: str) -> int | None:
        """The exit status that init wrote; 128 and more for a signal."""
        return disk.number_in(self.folder(instance_id) / disk.EXIT_STATUS)

    def switch_off(self, instance_id: str) -> None:
        """Collect its init, empty its temporary folder, forget its request."""
        child = self._children.get(instance_id)
        if child is not None:
            if child.stdin is not None:
                child.stdin.close()
            # it was seen to have ended; should it not have, say so rather than wait for ever
            child.wait(timeout=1)
        self._children.pop(instance_id, None)
        self._inits.pop(instance_id, None)
        folder = self.folder(instance_id)
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        remove(self._request(instance_id))
        remove(folder / disk.INIT_PID)
        remove(self._started(instance_id))
