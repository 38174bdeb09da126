"""What if the rehearsal cloud itself is killed? A small process that outlives it and ends its instances.

The cloud holds the writing end of the guard's standard input. When the cloud ends, however it ends, the kernel
closes that pipe, the guard wakes up and kills everything that carries the cloud's marker. PR_SET_PDEATHSIG would
not do: it fires when the *thread* that forked ends, and reaches neither grandchildren nor new sessions.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from gpucost.rehearsal.machines import processes

CLEAN_LOOKS = 4
"""A process that was just being started shows its marker a moment later: look again before believing."""

PAUSE_REAL_S = 0.25


def kill_all(cloud_id: str, limit_real_s: float = 10.0) -> bool:
    """SIGKILL everything of one cloud until several looks in a row find nothing; False when time ran out."""
    clean = 0
    deadline = time.monotonic() + limit_real_s
    while clean < CLEAN_LOOKS:
        found = processes.Table().of_cloud(cloud_id)
        processes.send(found, signal.SIGKILL)
        clean = 0 if found else clean + 1
        if time.monotonic() > deadline:
            return False
        if clean < CLEAN_LOOKS:
            time.sleep(PAUSE_REAL_S)
    return True


def start(cloud_id: str) -> subprocess.Popen[bytes]:
    """Start the guard of this process, in a session of its own so that Ctrl-C does not reach it."""
    package_root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(
        [sys.executable, "-m", "gpucost.rehearsal.machines.guard", cloud_id],
        cwd=package_root,
        env={"PYTHONPATH": str(package_root), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(cloud_id: str) -> int:
    """Wait for the cloud's end, then end its instances."""
    while sys.stdin.buffer.read(4096):
        pass
    return 0 if kill_all(cloud_id) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main(sys.argv[1]))
