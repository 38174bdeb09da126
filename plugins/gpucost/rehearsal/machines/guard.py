"""What if the rehearsal cloud itself is killed? A small process that outlives it, and ends its machines if need be.

The cloud holds the writing end of the guard's standard input. When the cloud ends, however it ends, the kernel
closes that pipe and the guard wakes up. (PR_SET_PDEATHSIG would not do: it fires when the *thread* that forked ends,
and reaches neither grandchildren nor new sessions.) It then waits for a successor on the same folder, so that a
supervisor may restart the cloud while its machines go on, and ends the machines when none comes. Who asks the guard
itself to end (SIGTERM) wants no successor: then it ends the machines as soon as its cloud is gone.

Who may end machines or take them up is whoever holds the lock `power.lock`: a cloud for its whole life, the guard
while it ends them. So a successor that comes in that moment waits, and then finds them ended, with the time in
`powered-off.json`; and a guard never ends the machines of a cloud that lives. A guard leaves when a younger one has
written itself into `guard.json`, which a successor's guard does first of all: there is no moment without one.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from gpucost.rehearsal.machines import processes
from gpucost.rehearsal.whole import write_whole

POWER_LOCK = "power.lock"
GUARD = "guard.json"
POWERED_OFF = "powered-off.json"
HEARTBEAT = "heartbeat"
"""Touched every second while a guard lives: when a whole host dies, its machines were last known to live then."""

CLEAN_LOOKS = 4
"""A process that was just being started shows its marker a moment later: look again before believing."""

PAUSE_REAL_S = 0.25
HEARTBEAT_REAL_S = 1.0


def kill_all(cloud_id: str, limit_real_s: float = 10.0) -> bool:
    """SIGKILL everything of one cloud until several looks in a row find nothing; False when time ran out."""
    scanner = processes.Scanner(cloud_id)
    clean = 0
    deadline = time.monotonic() + limit_real_s
    while clean < CLEAN_LOOKS:
        try:
            found = [pid for machine in scanner.look().values() for pid in machine]
        except OSError:
            found, clean = [], -1  # we could not look, and do not know
        processes.send(found, signal.SIGKILL)
        clean = 0 if found else clean + 1
        if time.monotonic() > deadline:
            return False
        if clean < CLEAN_LOOKS:
            time.sleep(0.02 if found else PAUSE_REAL_S)
    return True


def take_power(state_dir: Path, wait_real_s: float) -> IO[str] | None:
    """The lock that says who may end machines or take them up; None when somebody held it for all that time."""
    file = (state_dir / POWER_LOCK).open("a", encoding="utf-8")
    deadline = time.monotonic() + wait_real_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                return None
            time.sleep(0.05)
        else:
            return file


def start(cloud_id: str, state_dir: Path, keep_real_s: float) -> subprocess.Popen[bytes]:
    """Start the guard of this process, in a session of its own so that Ctrl-C does not reach it.

    Args:
        cloud_id: whose machines.
        state_dir: the cloud's folder.
        keep_real_s: how long the machines go on without a cloud, real seconds.
    """
    package_root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(
        [sys.executable, "-m", "gpucost.rehearsal.machines.guard", cloud_id, str(state_dir), str(keep_real_s)],
        cwd=package_root,
        # all that we have: who started us may know its processes by a mark in their environment
        env={**os.environ, "PYTHONPATH": str(package_root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def guards(state_dir: Path) -> set[int]:
    """The pid of the folder's last guard, alive or not; empty when there never was one."""
    try:
        return {int(json.loads((state_dir / GUARD).read_bytes())["pid"])}
    except FileNotFoundError:
        return set()


class Guard:
    """Watches over one cloud's machines.

    Args:
        cloud_id: whose.
        state_dir: the cloud's folder.
        keep_real_s: how long the machines go on without a cloud, real seconds.
    """

    def __init__(self, cloud_id: str, state_dir: Path, keep_real_s: float) -> None:
        self._cloud_id = cloud_id
        self._state_dir = state_dir
        self._keep_real_s = keep_real_s
        self._name = secrets.token_hex(8)
        self._asked_to_end = False
        _write(state_dir / GUARD, {"guard": self._name, "pid": os.getpid()})

    def ask_to_end(self) -> None:
        """End the machines as soon as no cloud lives; may be called from a signal handler."""
        self._asked_to_end = True

    def run(self) -> int:
        """Until the machines are another guard's, or ended; 1 when some could not be ended."""
        self._wait_for_the_end_of_the_cloud()
        scanner = processes.Scanner(self._cloud_id)
        cloud_seen, clean = time.monotonic(), 0
        while not self._superseded() and clean < CLEAN_LOOKS:
            self._beat()
            try:
                clean = 0 if scanner.look() else clean + 1
            except OSError:
                clean = 0  # we could not look, and do not know
            kept = time.monotonic() - cloud_seen
            if kept >= self._keep_real_s or self._asked_to_end or not self._state_dir.is_dir():
                with self._power() as mine:
                    if mine:
                        return self._end_machines()
                cloud_seen = time.monotonic()
            time.sleep(PAUSE_REAL_S)
        return 0

    @contextmanager
    def _power(self) -> Iterator[bool]:
        """Whether no cloud lives, and none begins to live until this is left."""
        if not self._state_dir.is_dir():
            yield True  # somebody removed the folder, and no cloud can live on it any more
            return
        lock = take_power(self._state_dir, 0)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()

    def _wait_for_the_end_of_the_cloud(self) -> None:
        while True:
            self._beat()
            readable, _, _ = select.select([sys.stdin], [], [], HEARTBEAT_REAL_S)
            if readable and not os.read(sys.stdin.fileno(), 4096):
                return

    def _end_machines(self) -> int:
        if self._superseded():
            return 0
        if self._state_dir.is_dir() and processes.Scanner(self._cloud_id).look():
            # before they die: what is billed until then, a process has lived
            _write(self._state_dir / POWERED_OFF, {"at": datetime.now(UTC).isoformat()})
        return 0 if kill_all(self._cloud_id) else 1

    def _superseded(self) -> bool:
        try:
            return bool(json.loads((self._state_dir / GUARD).read_bytes())["guard"] != self._name)
        except FileNotFoundError:
            return False

    def _beat(self) -> None:
        with suppress(FileNotFoundError):
            (self._state_dir / HEARTBEAT).touch()


def _write(path: Path, document: dict[str, object]) -> None:
    write_whole(path, json.dumps(document) + "\n")


def main(arguments: list[str]) -> int:
    """`CLOUD_ID STATE_DIR KEEP_REAL_S`: guard until the end."""
    cloud_id, state_dir, keep_real_s = arguments
    guard = Guard(cloud_id, Path(state_dir), float(keep_real_s))
    # whoever ends a whole group of processes must not end the one that cleans up after them
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, _frame: guard.ask_to_end())
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
