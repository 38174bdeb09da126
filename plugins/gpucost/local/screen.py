"""What does a person see of a run? The program's log as it comes, and one line of how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live as RichLive
from rich.table import Table
from rich.text import Text

from gpucost.jobstore import Heartbeat, Phase
from gpucost.reasons import Reason
from gpucost.training.agent.relay import CHUNK_BYTES, LOG_KEPT_BYTES, LOG_LIMIT_BYTES, Chunk, Tail
from gpucost.training.workdir import Progress

BEHIND_BYTES = 16 * 1024 * 1024
"""A program that writes faster than a terminal takes it: beyond this the middle is left out."""
PIECES_AT_ONCE = 16
"""Of the log, until Ctrl-C and the status have their turn."""
SHOWN_END_BYTES = 64 * 1024
PLAIN_SECONDS = 10.0
"""Between two lines of how far it is, where no terminal can replace the first by the second."""
AGENT = "gpucost agent: "
_NO_NEWS = ("instance metadata: ", *Reason)
"""What the agent says of a machine that has no cloud, and why it ends, which the command tells by itself."""


class Screen:
    """The terminal, or the file that the output goes to.

    Args:
        console: where it goes.
        real: real seconds, monotonic.
    """

    def __init__(self, console: Console, real: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._real = real
        self._live = RichLive(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._status = ""
        self._plain_at = real() + PLAIN_SECONDS

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        """A sentence of the command's own."""
        self._console.print(Text(f"gpucost: {line}", style="bold"), soft_wrap=True)

    def agent(self, text: str) -> None:
        """Lines of the agent's log; those without its name belong to the one before, and stay in the file."""
        for line in text.splitlines():
            said = line.removeprefix(AGENT)
            if said != line and not said.startswith(_NO_NEWS):
                self._console.print(Text(line, style="dim"), soft_wrap=True)

    def program(self, text: str) -> None:
        """Lines of the program's log, as they are."""
        # A progress bar that is drawn over itself: its last state.
        lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.removesuffix("\n").split("\n")]
        if self._console.is_terminal:
            self._console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
        else:
            self._console.file.write("\n".join(lines) + "\n")
            self._console.file.flush()

    def status(self, line: str) -> None:
        """How far it is."""
        if self._live and line != self._status:
            self._status = line
            self._live.update(Text(line, style="cyan", no_wrap=True, overflow="ellipsis"), refresh=True)
        elif not self._live and line != self._status and self._real() >= self._plain_at:
            self._plain_at = self._real() + PLAIN_SECONDS
            self._status = line
            self.say(line)

    def results(self, results: dict[str, float]) -> None:
        """The final metrics."""
        table = Table(box=None, show_header=False)
        for name, value in results.items():
            table.add_row(name, f"{value:.6g}")
        self._console.print(table)


class Follower:
    """A growing file, handed on as it grows; each line once, the end without a newline at last.

    Args:
        path: the file, which need not be there yet.
        show: takes the text.
    """

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self._tail = Tail(path)
        self._show = show

    def follow(self, *, final: bool = False) -> None:
        """Hand on what has come."""
        pieces = 0
        while (final or pieces < PIECES_AT_ONCE) and (chunk := self._next(final)):
            pieces += 1
            self._show(chunk.data.decode(errors="replace"))
            self._tail.confirm()

    def _next(self, final: bool) -> Chunk | None:
        chunk = self._tail.next(final=final)
        path = self._tail.path
        if chunk is None or not path.is_file():
            return chunk
        # Asked after it was read: the agent gives back the disk under a long log, and what it took reads as zeros.
        size = path.stat().st_size
        taken = chunk.end > LOG_LIMIT_BYTES + CHUNK_BYTES and chunk.start < size - LOG_KEPT_BYTES
        if taken or size - chunk.start > BEHIND_BYTES:
            left_out = size - SHOWN_END_BYTES - chunk.start
            note = f"[gpucost: {left_out} bytes left out here; what is kept of them is in {path}]\n"
            self._tail.skip_to(size - SHOWN_END_BYTES, note)
        return self._tail.pending


def status_line(progress: Progress | None, beat: Heartbeat | None, seconds: float) -> str:
    """How far the program is, on one line.

    Args:
        progress: the program's own word; None: it has said nothing yet.
        beat: the agent's newest heartbeat, for what the machine does; None: not known.
        seconds: real seconds since the start.
    """
    parts = [str(timedelta(seconds=int(seconds)))]
    if progress is None:
        parts.append("starting")
    else:
        total = f" of {progress.total_steps}" if progress.total_steps else ""
        parts.append(f"step {progress.step}{total}")
        if progress.phase is not Phase.TRAINING:
            parts.append(str(progress.phase))
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.4g}")
        if progress.steps_per_second is not None:
            parts.append(f"{progress.steps_per_second:.3g} steps/s")
        parts.append("nothing saved yet" if progress.saved_step is None else f"saved at {progress.saved_step}")
    return " · ".join(parts + use(beat))


def use(beat: Heartbeat | None) -> list[str]:
    """What the machine's parts do, as far as the agent says."""
    if beat is None or beat.telemetry is None:
        return []
    telemetry = beat.telemetry
    told = [] if telemetry.cpu_percent is None else [f"CPU {telemetry.cpu_percent:.0f} %"]
    for gpu in telemetry.gpus:
        if gpu.utilization_percent is not None:
            memory = "" if gpu.memory_used is None else f", {gpu.memory_used / 2**30:.1f} GiB"
            told.append(f"GPU {gpu.index} {gpu.utilization_percent:.0f} %{memory}")
    return told
