"""How is the user's program run? As a child in its own process group, ended with all that it started.

Linux only, as the nodes are: a program dies with its agent (PR_SET_PDEATHSIG), and what outlives the program
is handed to the agent (PR_SET_CHILD_SUBREAPER), which ends it; see prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpucost.jobstore import JobSpec
from gpucost.training.workdir import Workdir

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0

# Runs between fork and the program: die with the agent, and do not start when it is dead already. Not a
# preexec_fn, which is unsafe in a process with threads.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def command(spec: JobSpec, python: str = sys.executable) -> list[str]:
    """What starts the program on this node: one process, without torchrun."""
    return [python, spec.program, *spec.arguments]


def environment(spec: JobSpec, base: Mapping[str, str], workdir: Workdir, package_root: Path) -> dict[str, str]:
    """The program's environment.

    Args:
        spec: threads and seed come from the job, so that a resumed run computes as the first one did.
        base: the agent's environment.
        workdir: shared with the program.
        package_root: a folder or zip from which `import gpucost` works.
    """
    path = os.pathsep.join(filter(None, [str(package_root), base.get("PYTHONPATH", "")]))
    threads = str(spec.threads)
    return {
        **base,
        "PYTHONPATH": path,
        "PYTHONHASHSEED": str(spec.seed),
        "PYTHONUNBUFFERED": "1",
        "GPUCOST_WORKDIR": str(workdir.path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Without it cuBLAS has no deterministic algorithm; see torch.use_deterministic_algorithms.
        "CUBLAS_WORKSPACE_CONFIG": base.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }


class Program:
    """The running program.

    Args:
        arguments: command line, absolute interpreter first.
        folder: where it runs.
        env: its environment, whole.
        log: the file that stdout and stderr go to.
    """

    def __init__(self, arguments: list[str], folder: Path, env: Mapping[str, str], log: Path) -> None:
        become_subreaper()
        tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *arguments]
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                tied,
                cwd=folder,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        if self._child.returncode is None:
            if os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            # Before its number is given back, so that the group cannot be somebody else's.
            _kill_group(self._child.pid)
            self._child.wait()
        return self._child.returncode

    def kill(self) -> None:
        """End it and everything in its process group, at once."""
        if self._child.returncode is None:
            _kill_group(self._child.pid)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(
    root: int,
    *,
    spare: frozenset[int] = frozenset(),
    within: float = KILL_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    real: Callable[[], float] = time.monotonic,
) -> tuple[int, int]:
    """Kill every process below `root` and wait until they are gone.

    Args:
        root: lives on.
        spare: live on, with all below them.
        within: real seconds to wait at most.

    Returns:
        How many have ended, and how many are killed and still there.
    """
    killed: set[int] = set()
    until = real() + within
    while alive := _descendants(root, spare):
        for pid in alive:
            killed.add(pid)
            _quietly(os.kill, pid, signal.SIGKILL)
        _reap()
        if real() >= until:
            break
        sleep(0.02)
    return len(killed - alive), len(alive)


def _descendants(root: int, spare: frozenset[int]) -> set[int]:
    parents = dict(filter(None, map(_parent, Path("/proc").glob("[0-9]*"))))
    found: set[int] = set()
    layer = {root}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer} - found - spare
        found |= layer
    return found


def _parent(process: Path) -> tuple[int, int] | None:
    try:
        # "pid (name) state ppid ...": the name may hold spaces and parentheses, so count from its end.
        fields = (process / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(process.name), int(fields[1])


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _kill_group(group: int) -> None:
    _quietly(os.killpg, group, signal.SIGKILL)


def _quietly(kill: Callable[[int, int], None], target: int, number: int) -> None:
    try:
        kill(target, number)
    except ProcessLookupError:
        return  # It has ended by itself meanwhile.


def oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory on this machine so far."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
