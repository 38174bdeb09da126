"""What does a machine look like to the benchmark? Processes that can be watched, warned, and switched off at once.

Two kinds: `Forked`, ranks of a zygote, which start in a fraction of a second; and `Booted`, the real agent's zip with
torchrun under it, as on a rented machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Seen:
    """What one rank was doing, by its last line."""

    phase: str = "starting"
    step: int = 0
    resumed: int | None = None
    call: str = ""
    """The call to the store that is under way, with its key; empty: none."""
    calls: int = 0
    """Writes to the store in the present save."""
    began: float = 0.0
    """When the phase began, the call, the step."""
    called: float = 0.0
    stepped: float = 0.0


@dataclass
class Pipe:
    """Reads what the ranks of one attempt say.

    Args:
        path: the named pipe; made here.
        ranks: how many speak into it.
    """

    path: Path
    ranks: int
    seen: list[Seen] = field(default_factory=list)
    losses: list[tuple[int, int, str]] = field(default_factory=list)
    """(rank, steps done before, loss in hexadecimal), every one that was computed."""
    lasted: list[tuple[str, float]] = field(default_factory=list)
    """(what, seconds) of rank 0: a phase, a step, a write, or the gathering of a save until its first write."""

    def __post_init__(self) -> None:
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        # Somebody writes for as long as we read, so that it never shows its end.
        self._keep = os.open(self.path, os.O_WRONLY)
        self._rest = b""
        self.seen = [Seen() for _ in range(self.ranks)]

    def read(self, seconds: float) -> bool:
        """Take in what is said within `seconds`, the first words at once; whether there was anything."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        *lines, self._rest = (self._rest + os.read(self._fd, 1 << 16)).split(b"\n")
        for line in lines:
            self._take(line.decode().split())
        return True

    def close(self) -> None:
        """Take in the last words."""
        while self.read(0):
            pass
        os.close(self._fd)
        os.close(self._keep)
        self.path.unlink()

    def _take(self, words: list[str]) -> None:
        at, rank, what = float(words[0]), int(words[1]), words[2]
        seen, lasted = self.seen[rank], self.lasted if rank == 0 else []
        if what == "phase":
            self._phase(seen, lasted, at, words)
        elif what == "loss":
            self.losses.append((rank, int(words[3]), words[4]))
        elif what == "step":
            if seen.stepped:
                lasted.append(("step", at - seen.stepped))
            seen.stepped, seen.step = at, max(seen.step, int(words[3]))
        elif what == "store":
            seen.call, seen.called = " ".join(words[3:]), at
            if words[3].startswith("put"):
                seen.calls += 1
                if seen.phase == "saving" and seen.calls == 1:
                    lasted.append(("gather", at - seen.began))
        elif what == "stored":
            if seen.call.startswith("put"):
                lasted.append(("write", at - seen.called))
            seen.call = ""

    def _phase(self, seen: Seen, lasted: list[tuple[str, float]], at: float, words: list[str]) -> None:
        phase, step, resumed = words[3], int(words[4]), words[5]
        if phase != seen.phase:
            if seen.began:
                lasted.append((seen.phase, at - seen.began))
            seen.phase, seen.began, seen.calls, seen.stepped = phase, at, 0, 0.0
        if phase != "restoring":  # Until it is through, the step and what it resumed from are not known.
            seen.step = max(seen.step, step)
            seen.resumed = None if resumed == "-" else int(resumed)


class Node(Protocol):
    """One machine with one attempt on it."""

    def poll(self) -> list[int] | None:
        """The exit codes when everything has ended, else None."""
        ...

    def warn(self, way: str, chance: float) -> None:
        """SIGTERM, to `all` its processes, its `ranks` (or agent), or `one` of the ranks."""
        ...

    def lose_rank(self, chance: float) -> None:
        """SIGKILL to one of its ranks."""
        ...

    def power_off(self) -> None:
        """SIGKILL to everything on it, and wait until nothing is left."""
        ...


class Zygote:
    """The process that forks programs.

    Args:
        environ: what all of them get.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.survival_zygote"],
            cwd=ROOT,
            env={**environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.ended: dict[int, int] = {}
        self._rest = b""
        self._started: list[list[int]] = []
        self._next({"ready"})

    def start(self, request: Mapping[str, Any]) -> list[int]:
        """Fork one process per rank; their pids."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        said: list[int] = self._next({"started"})["started"]
        return said

    def listen(self, seconds: float) -> None:
        """Take in who has ended, waiting up to `seconds` for the first."""
        assert self._process.stdout is not None  # noqa: S101
        with contextlib.suppress(TimeoutError):
            self._next(set(), seconds)

    def close(self) -> None:
        """End it, and with it whatever it has forked."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        self._process.wait(10)

    def _next(self, wanted: set[str], seconds: float = 120.0) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while True:
            *lines, self._rest = self._more(until).split(b"\n")
            for number, line in enumerate(lines):
                said = json.loads(line)
                if "ended" in said:
                    self.ended[said["ended"]] = said["code"]
                if wanted & said.keys():
                    # What was said after it is for the next who asks.
                    self._rest = b"\n".join([*lines[number + 1 :], self._rest])
                    return said  # type: ignore[no-any-return]
            if not wanted:
                return {}

    def _more(self, until: float) -> bytes:
        assert self._process.stdout is not None  # noqa: S101
        if b"\n" in self._rest:
            return self._rest
        if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError("the zygote says nothing")
        if not (data := os.read(self._process.stdout.fileno(), 1 << 16)):
            raise RuntimeError(f"the zygote ended with exit code {self._process.wait()}")
        return self._rest + data


class Forked:
    """Ranks that a zygote has forked, without agent and torchrun: their place is taken by the benchmark.

    Args:
        zygote: forks them.
        workdir: the machine's folder; the program runs in it.
        program: path of the program's file.
        arguments: for the program.
        world_size: ranks.
        environ: on top of the zygote's.
    """

    def __init__(
        self,
        zygote: Zygote,
        workdir: Path,
        program: Path,
        arguments: tuple[str, ...],
        world_size: int,
        environ: Mapping[str, str],
    ) -> None:
        self._zygote = zygote
        self._pids = zygote.start(
            {
                "environ": {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
                "world_size": world_size,
                "program": str(program),
                "folder": str(workdir),
                "arguments": arguments,
                "log": str(workdir / "program.log"),
            }
        )
        self._lost_at: float | None = None

    def poll(self) -> list[int] | None:
        """The ranks' exit codes when all have ended. As torchrun does, it ends the others when one has failed."""
        self._zygote.listen(0)
        codes = [self._zygote.ended.get(pid) for pid in self._pids]
        if None not in codes:
            return [code for code in codes if code is not None]
        if any(codes):
            self._lost_at = self._lost_at or time.monotonic()
            if time.monotonic() > self._lost_at + 5:
                self._signal_group(signal.SIGKILL)
        return None

    def warn(self, way: str, chance: float) -> None:
        """SIGTERM to the group, to all ranks, or to one of them."""
        if way == "all":
            self._signal_group(signal.SIGTERM)
            return
        for pid in self._pids if way == "ranks" else [self._pids[int(chance * len(self._pids))]]:
            self._signal(pid, signal.SIGTERM)

    def lose_rank(self, chance: float) -> None:
        """SIGKILL to one rank."""
        self._signal(self._pids[int(chance * len(self._pids))], signal.SIGKILL)

    def power_off(self) -> None:
        """SIGKILL to the group, and wait until the zygote has buried everybody."""
        until = time.monotonic() + 30
        while self._signal_group(signal.SIGKILL):
            self._zygote.listen(0.01)
            if time.monotonic() > until:
                raise TimeoutError(f"process group {self._pids[0]} is not gone 30 s after SIGKILL")
        self._zygote.listen(0)

    def _signal_group(self, number: signal.Signals) -> bool:
        try:
            os.killpg(self._pids[0], number)
        except ProcessLookupError:
            return False
        return True

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if pid not in self._zygote.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Booted:
    """A machine that the real agent runs on: its zip, torchrun, the program.

    Args:
        agent: the zip.
        workdir: the machine's folder.
        environ: the machine's whole environment.
    """

    def __init__(self, agent: Path, workdir: Path, environ: Mapping[str, str]) -> None:
        self._mark = f"GPUCOST_WORKDIR={workdir}\0".encode()
        with (workdir / "agent.log").open("wb") as log:
            self._agent = subprocess.Popen(
                [sys.executable, str(agent)], env=dict(environ), stdout=log, stderr=log, process_group=0
            )

    def poll(self) -> list[int] | None:
        """The agent's exit code when it has ended."""
        code = self._agent.poll()
        return None if code is None else [code]

    def warn(self, way: str, chance: float) -> None:  # noqa: ARG002
        """SIGTERM to every process (`all`), as a machine does that shuts down; else to the agent."""
        for pid in self._processes() if way == "all" else [self._agent.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def lose_rank(self, chance: float) -> None:
        """SIGKILL to one of the ranks."""
        ranks = [pid for pid in self._processes() if pipe_is_open(pid)]
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[int(chance * len(ranks))], signal.SIGKILL)

    def power_off(self) -> None:
        """SIGKILL to every process that carries this machine's mark, until there is none."""
        until = time.monotonic() + 30
        while left := self._processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._agent.poll()
            if time.monotonic() > until:
                raise TimeoutError(f"processes {left} are not gone 30 s after SIGKILL")
        self._agent.wait()

    def _processes(self) -> list[int]:
        return [pid for pid, environ in _environments() if self._mark in environ]


def pipe_is_open(pid: int) -> bool:
    """Whether this process speaks into a pipe of ours: a rank, or a worker of one."""
    with contextlib.suppress(OSError):
        return any(fd.readlink().name == "pipe" for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _environments() -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_bytes()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def watched(folder: Path, program: str, into: Path) -> None:
    """Copy a program's folder so that its program says what it does: for `Booted` machines.

    Args:
        folder: of the program.
        program: the file in it.
        into: the new folder; run `watched.py` in it.
    """
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).with_name("survival_recorder.py"), into)
    (into / "watched.py").write_text(
        "import runpy\nimport survival_recorder\n\nsurvival_recorder.record()\n"
        f"runpy.run_path({program!r}, run_name='__main__')\n"
    )
