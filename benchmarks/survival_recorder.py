"""What was a program doing when it was killed? It says so itself, line by line, into a named pipe.

The program is not changed: from outside, a few public methods are wrapped in its process. What it wrote into the pipe
before SIGKILL is there afterwards, to the last line. One line:

    <seconds, monotonic> <rank> phase <phase> <step> <resumed step, or ->      before it writes its progress
    <seconds, monotonic> <rank> loss <steps done before> <loss, hexadecimal>   a step (or micro-step) is computed
    <seconds, monotonic> <rank> step <steps done>                              run.step has returned
    <seconds, monotonic> <rank> store <call> <key>                             a call to the object store begins
    <seconds, monotonic> <rank> stored                                         it has answered
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

PIPE = "SURVIVAL_PIPE"
SLOW = "SURVIVAL_SLOW_MS"
"""Milliseconds that each write to the store takes longer: half before the bytes go, half before the answer comes."""
PART_BYTES = "SURVIVAL_PART_BYTES"
"""The size of a checkpoint's parts, so that a small model has several of them."""


class Recorder:
    """Wraps what a program calls, in its own process.

    Args:
        pipe: a named pipe that somebody reads.
        rank: of this process.
        slow: seconds that each write to the store takes longer.
    """

    def __init__(self, pipe: str, rank: int, slow: float) -> None:
        self._pipe = os.open(pipe, os.O_WRONLY)
        self._rank = rank
        self._slow = slow
        self._inside = threading.local()

    def say(self, *words: object) -> None:
        """One line; as short as this, it is written as a whole or not at all."""
        line = " ".join(map(str, (f"{time.monotonic():.6f}", self._rank, *words)))
        os.write(self._pipe, f"{line}\n".encode())

    def install(self) -> None:
        """Wrap the methods."""
        from gpucost.objects import Objects
        from gpucost.training import Run
        from gpucost.training.workdir import Workdir

        setattr(Workdir, "write_progress", self._progress(Workdir.write_progress))  # noqa: B010
        setattr(Run, "step", self._step(Run.step))  # noqa: B010
        for name, method in list(vars(Objects).items()):
            if not name.startswith("_") and callable(method):
                setattr(Objects, name, self._store(name, method))

    def _progress(self, write: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(write)
        def wrapped(workdir: Any, progress: Any) -> None:
            resumed = "-" if progress.resumed_step is None else progress.resumed_step
            self.say("phase", progress.phase, progress.step, resumed)
            write(workdir, progress)

        return wrapped

    def _step(self, step: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(step)
        def wrapped(run: Any, **metrics: Any) -> None:
            if "loss" in metrics:
                self.say("loss", run.steps, float(metrics["loss"]).hex())
            try:
                step(run, **metrics)
            finally:
                self.say("step", run.steps)

        return wrapped

    def _store(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(objects: Any, *args: Any, **named: Any) -> Any:
            if getattr(self._inside, "call", None):  # One call of Objects uses another.
                return call(objects, *args, **named)
            self._inside.call = name
            slow = self._slow / 2 if name.startswith("put") else 0.0
            self.say("store", name, args[0] if args and isinstance(args[0], str) else "-")
            try:
                time.sleep(slow)
                answer = call(objects, *args, **named)
                time.sleep(slow)
                return answer
            finally:
                self._inside.call = None
                self.say("stored")

        return wrapped


def record() -> None:
    """Begin to record, as the environment says; without `SURVIVAL_PIPE` nothing is done."""
    environ = os.environ
    if PIPE not in environ:
        return
    if size := environ.get(PART_BYTES):
        cut_into_parts(int(size))
    # Read once: a process that the program starts later is no rank of it.
    recorder = Recorder(environ[PIPE], int(environ.get("RANK") or 0), float(environ.get(SLOW) or 0) / 1000)
    recorder.install()


def cut_into_parts(size: int) -> None:
    """Let checkpoints have parts of `size` bytes.

    Raises:
        LookupError: Checkpoints has no such argument any more.
    """
    from gpucost.training.checkpoints.engine import Checkpoints

    defaults = Checkpoints.__init__.__kwdefaults__ or {}
    if "part_bytes" not in defaults:
        raise LookupError(f"Checkpoints: got the arguments {sorted(defaults)}, expected part_bytes among them")
    defaults["part_bytes"] = size
