"""How are the user's processes started, asked for their stacks, and ended with all that they started?

Linux only, as the nodes are: a program dies with its agent (PR_SET_PDEATHSIG), and what outlives the program
is handed to the agent (PR_SET_CHILD_SUBREAPER), which ends it; see prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpucost.training.agent.say import say

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0
STACK_SECONDS = 2.0
"""Real seconds in which one process writes its stacks."""
STACKS_SECONDS = 15.0
"""Real seconds in which all processes of a program write theirs."""

# Runs between fork and the program: die with the agent, and do not start when it is dead already; leave no core file
# of gigabytes. Not a preexec_fn, which is unsafe in a process with threads.
_TIED = (
    "import ctypes, os, resource, sys; ctypes.CDLL(None).prctl(1, 9); "
    "resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class Program:
    """The running program.

    Args:
        arguments: command line, absolute interpreter first.
        folder: where it runs.
        env: its environment, whole.
        log: the file that stdout and stderr go to.
        launched: whether it is a launcher whose children are the training's processes.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, arguments: list[str], folder: Path, env: Mapping[str, str], log: Path, *, launched: bool = False
    ) -> None:
        become_subreaper()
        self._log = log
        self._launched = launched
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
        """End it and everything in its process group, at once; a launcher's processes die with it."""
        if self._child.returncode is None:
            _kill_group(self._child.pid)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the training's processes, and to nothing that they started."""
        if self._child.returncode is None:
            for pid in _children({self._child.pid}, frozenset()) if self._launched else {self._child.pid}:
                _quietly(os.kill, pid, signal.SIGTERM)

    def dump_stacks(self) -> int:
        """Let all its python processes write the stacks of their threads to the log, one after the other, and end.

        They do so on SIGABRT (PYTHONFAULTHANDLER). All are halted first, so that none fails over another's end.

        Returns:
            The log's size before, bytes.
        """
        size = self._log.stat().st_size if self._log.is_file() else 0
        launcher = {self._child.pid} if self._launched else set()
        pids = sorted({self._child.pid} | _descendants(self._child.pid, frozenset()))
        for pid in pids:
            _quietly(os.kill, pid, signal.SIGSTOP)
        until = time.monotonic() + STACKS_SECONDS
        for pid in pids:
            if pid not in launcher and time.monotonic() < until:
                self._note(f"stacks of process {pid}, {_what(pid)}")
                _quietly(os.kill, pid, signal.SIGABRT)
                _quietly(os.kill, pid, signal.SIGCONT)
                _wait_for_end(pid, STACK_SECONDS)
        return size

    def _note(self, text: str) -> None:
        try:
            with self._log.open("ab") as log:
                log.write(f"\n[gpucost: {text}]\n".encode())
        except OSError as error:  # A full disk must not keep a program that hangs alive.
            say(f"{text}: {error}")


def free_port() -> int:
    """A TCP port of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    found: set[int] = set()
    layer = {root}
    while layer:
        layer = _children(layer, spare) - found
        found |= layer
    return found


def _children(of: set[int], spare: frozenset[int]) -> set[int]:
    parents = dict(filter(None, map(_parent, Path("/proc").glob("[0-9]*"))))
    return {pid for pid, parent in parents.items() if parent in of} - spare


def _parent(process: Path) -> tuple[int, int] | None:
    fields = _stat(process)
    return None if fields is None else (int(process.name), int(fields[1]))


def _stat(process: Path) -> list[str] | None:
    try:
        # "pid (name) state ppid ...": the name may hold spaces and parentheses, so count from its end.
        return (process / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _wait_for_end(pid: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (fields := _stat(Path(f"/proc/{pid}"))) and fields[0] != "Z" and time.monotonic() < until:
        time.sleep(0.02)


def _what(pid: int) -> str:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        return "which has ended"
    rank = next((variable[5:] for variable in environ if variable.startswith(b"RANK=")), b"?")
    return f"rank {rank.decode(errors='replace')}: {command[-200:].decode(errors='replace')}"


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
