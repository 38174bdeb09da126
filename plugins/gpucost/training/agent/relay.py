"""What does the node send? Log, metrics and heartbeats, in order, each line once, in bounded pieces.

The program writes files; what has not been sent yet waits there, so that the store may be away for as long
as it likes while memory stays bounded by one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gpucost.clock import Clock
from gpucost.jobstore import Heartbeat, JobStore, Live, MetricPoint, Phase
from gpucost.reasons import Reason
from gpucost.training.agent.identity import Identity
from gpucost.training.agent.say import say
from gpucost.training.workdir import Progress, Result, Workdir

CHUNK_BYTES = 256 * 1024
LOG_LIMIT_BYTES = 16 * 1024 * 1024
LOG_TAIL_BYTES = 64 * 1024

Word = TypeVar("Word", Progress, Result)


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `end` of a file, to be sent as piece `index`."""

    index: int
    start: int
    end: int
    data: bytes


def cut(data: bytes, limit: int, *, final: bool) -> int:
    """How many of `data`'s bytes make the next piece: whole lines, at most `limit` bytes.

    A line longer than `limit` is sent in several pieces, cut between characters. The last, unfinished line
    waits for its end unless `final`.
    """
    head = data[:limit]
    if final and len(data) <= limit:
        return len(data)
    end = head.rfind(b"\n") + 1
    if end or len(data) <= limit:
        return end
    for end in range(limit, max(0, limit - 4), -1):
        if data[end] & 0xC0 != 0x80:  # A byte 10xxxxxx continues a character of UTF-8.
            return end
    return limit  # No UTF-8 at all.


class Tail:
    """Reads a growing file piece by piece; a piece is repeated, unchanged, until it is confirmed.

    Args:
        path: the file, which need not be there yet.
        chunk: bytes of a piece at most.
    """

    def __init__(self, path: Path, chunk: int = CHUNK_BYTES) -> None:
        self.path = path
        self.offset = 0
        self._chunk = chunk
        self._index = 0
        self._pending: Chunk | None = None

    def next(self, *, final: bool = False) -> Chunk | None:
        """The next piece, or None while there is none. With `final`, also a last line without an end."""
        if self._pending is None:
            data = read_range(self.path, self.offset, self._chunk + 1)
            if size := cut(data, self._chunk, final=final):
                self._pending = Chunk(self._index, self.offset, self.offset + size, data[:size])
        return self._pending

    def confirm(self) -> None:
        """The present piece has been sent."""
        if self._pending is not None:
            self.offset = self._pending.end
            self._index += 1
            self._pending = None

    def skip_to(self, offset: int, note: str) -> None:
        """Leave out what lies before `offset`; `note` is sent in its place, as a piece of its own."""
        self._pending = Chunk(self._index, self.offset, offset, note.encode())


class Relay:
    """Sends what one node has to say.

    Args:
        store: the job's documents.
        live: the heartbeats of all jobs.
        workdir: where the program writes.
        identity: this node.
        clock: the job's clock.
        log_limit: bytes of log sent while the program runs; at its end, the last 64 KiB follow.
    """

    def __init__(
        self,
        store: JobStore,
        live: Live,
        workdir: Workdir,
        identity: Identity,
        clock: Clock,
        log_limit: int = LOG_LIMIT_BYTES,
    ) -> None:
        self._store = store
        self._live = live
        self._workdir = workdir
        self._identity = identity
        self._clock = clock
        self._log_limit = log_limit
        self._log = Tail(workdir.log)
        self._log_cut = False
        self._metrics = Tail(workdir.metrics)
        self._sequence = 0
        self._unreadable: set[str] = set()
        self.bad_metrics = 0
        """Lines among the metrics that were none, and were left out."""

    def progress(self) -> Progress | None:
        """How far the program is; None, and said once, when what it wrote cannot be read."""
        return self._read("progress", self._workdir.progress)

    def result(self) -> Result | None:
        """The program's last word; None, and said once, when what it wrote cannot be read."""
        return self._read("result", self._workdir.result)

    def beat(self, exited: Reason | None = None) -> None:
        """Write a heartbeat with the program's progress."""
        progress = self.progress()
        said = progress.model_dump(exclude={"at", "phase"}) if progress else {}
        phase = Phase.ENDED if exited else progress.phase if progress else Phase.STARTING
        self._live.write(
            Heartbeat(
                lease_id=self._identity.lease_id,
                job=self._identity.job,
                attempt=self._identity.attempt,
                sequence=self._sequence,
                at=self._clock.now(),
                phase=phase,
                exited=exited,
                **said,
            )
        )
        self._sequence += 1

    def forward(self, *, final: bool = False) -> None:
        """Send all log and metrics that are there; with `final`, to the last byte."""
        while chunk := self._metrics.next(final=final):
            points, bad = read_metrics(chunk.data)
            self._store.write_metrics(self._identity.attempt, chunk.index, points)
            self._metrics.confirm()
            if bad:
                self.bad_metrics += bad
                say(f"metrics: {bad} lines are no metrics and were left out, {self.bad_metrics} so far")
        while chunk := self._next_log(final):
            self._store.write_log(self._identity.attempt, chunk.index, chunk.data.decode(errors="replace"))
            self._log.confirm()

    def _read(self, name: str, read: Callable[[], Word | None]) -> Word | None:
        try:
            return read()
        except ValidationError as wrong:
            # The program may write what it likes; the node must not fall silent over it.
            if name not in self._unreadable:
                say(f"the program's {name} cannot be read and counts as none: {' '.join(str(wrong).split())}")
            self._unreadable.add(name)
            return None

    def _next_log(self, final: bool) -> Chunk | None:
        if self._log.offset < self._log_limit or self._log_cut:
            return self._log.next(final=final)
        if not final:
            return None
        self._log_cut = True
        end = self._workdir.log.stat().st_size
        resume = max(self._log.offset, end - LOG_TAIL_BYTES)
        if resume > self._log.offset:
            left_out = resume - self._log.offset
            self._log.skip_to(resume, f"\n[gpucost: {left_out} bytes of log left out here; the end follows]\n")
        return self._log.next(final=True)


def read_metrics(data: bytes) -> tuple[list[MetricPoint], int]:
    """The metrics in a piece, and the number of lines that are none."""
    # A program that is killed while writing leaves half a line, as the last one.
    whole = data[: data.rfind(b"\n") + 1]
    points, bad = [], 0
    for line in whole.splitlines():
        try:
            points.append(MetricPoint.model_validate_json(line))
        except ValidationError:
            bad += 1
    return points, bad


def read_range(path: Path, offset: int, size: int) -> bytes:
    """At most `size` bytes of a file from `offset` on; nothing when there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def read_end(path: Path, size: int) -> str:
    """The last `size` bytes of a file as text; nothing when there is no file."""
    try:
        length = path.stat().st_size
    except FileNotFoundError:
        return ""
    return read_range(path, max(0, length - size), size).decode(errors="replace")
