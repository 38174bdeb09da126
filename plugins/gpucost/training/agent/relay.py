"""What does the node send? Log, metrics and heartbeats, in order, each line once, in bounded pieces.

The program writes files; what has not been sent yet waits there, so that the store may be away for as long
as it likes while memory stays bounded by one piece.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gpucost.clock import Clock
from gpucost.jobstore import Heartbeat, JobStore, Live, MetricPoint, Phase, Telemetry
from gpucost.reasons import Reason
from gpucost.training.agent.identity import Identity
from gpucost.training.agent.say import say
from gpucost.training.workdir import Failure, Progress, Result, Workdir

CHUNK_BYTES = 256 * 1024
PIECES_AT_ONCE = 16
"""Of the log, and of the metrics, until the next heartbeat has its turn; a slow store takes long for each."""
LOG_LIMIT_BYTES = 16 * 1024 * 1024
LOG_TAIL_BYTES = 64 * 1024
LOG_KEPT_BYTES = 1024 * 1024
"""Of a log beyond its limit, so much of the end stays on the disk; more than is ever sent or shown of it."""
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2

_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""It is not there, or no longer what it was: the work folder is the program's, too."""

Word = TypeVar("Word", Progress, Result, Failure)


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

    @property
    def pending(self) -> Chunk | None:
        """The piece that waits for its confirmation."""
        return self._pending

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
        sample: what the machine does; None: nobody asks.
    """

    def __init__(
        self,
        store: JobStore,
        live: Live,
        workdir: Workdir,
        identity: Identity,
        clock: Clock,
        log_limit: int = LOG_LIMIT_BYTES,
        sample: Callable[[], Telemetry] | None = None,
    ) -> None:
        self._store = store
        self._live = live
        self._workdir = workdir
        self._identity = identity
        self._clock = clock
        self._log_limit = log_limit
        self._sample = sample
        self._sample_failed = False
        self._log = Tail(workdir.log)
        self._metrics_trimmed = 0
        self._log_full = False
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

    def failure(self) -> Failure | None:
        """Of several processes, the failure that the others followed from."""
        return self._read("failure", self._workdir.failure)

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
                telemetry=self._telemetry(),
                **said,
            )
        )
        self._sequence += 1

    def forward(self, *, final: bool = False) -> None:
        """Send log and metrics that are there, `PIECES_AT_ONCE` of each at most; with `final`, to the last byte."""
        for chunk in self._pieces(lambda: self._metrics.next(final=final), final):
            points, bad = read_metrics(chunk.data)
            self._store.write_metrics(self._identity.attempt, chunk.index, points)
            self._metrics.confirm()
            if bad:
                self.bad_metrics += bad
                say(f"metrics: {bad} lines are no metrics and were left out, {self.bad_metrics} so far")
        for chunk in self._pieces(lambda: self._next_log(final), final):
            self._store.write_log(self._identity.attempt, chunk.index, chunk.data.decode(errors="replace"))
            self._log.confirm()

    def _pieces(self, following: Callable[[], Chunk | None], final: bool) -> Iterator[Chunk]:
        sent = 0
        while (final or sent < PIECES_AT_ONCE) and (chunk := following()):
            sent += 1
            yield chunk

    def _read(self, name: str, read: Callable[[], Word | None]) -> Word | None:
        try:
            return read()
        except (ValidationError, OSError) as wrong:
            # The program may write what it likes; the node must not fall silent over it.
            if name not in self._unreadable:
                say(f"the program's {name} cannot be read and counts as none: {' '.join(str(wrong).split())}")
            self._unreadable.add(name)
            return None

    def _telemetry(self) -> Telemetry | None:
        if self._sample is None:
            return None
        try:
            return self._sample()
        except Exception:  # noqa: BLE001
            # A driver may answer with anything; a node that is taken for dead over it would be a poor trade.
            if not self._sample_failed:
                say(f"telemetry is left out where it fails: {traceback.format_exc().strip()}")
            self._sample_failed = True
            return None

    def trim(self) -> None:
        """Give back the disk that a log beyond its limit takes, but for its end, and that of metrics which are sent.

        What is cut away becomes a hole: offsets stay, and whatever the program is writing goes on at the end.

        Raises:
            OSError: the file system has no holes.
        """
        start = self._log_limit + CHUNK_BYTES
        length = _size(self._workdir.log) - LOG_KEPT_BYTES - start
        if length > 0:
            punch_hole(self._workdir.log, start, length)
        if (sent := self._metrics.offset - self._metrics_trimmed) > LOG_KEPT_BYTES:
            punch_hole(self._workdir.metrics, self._metrics_trimmed, sent)
            self._metrics_trimmed += sent

    def _next_log(self, final: bool) -> Chunk | None:
        if self._log.pending or self._log_cut or self._log.offset < self._log_limit:
            return self._log.next(final=final)
        if not self._log_full:
            self._log_full = True
            self._log.skip_to(self._log.offset, "\n[gpucost: the log is long; of what follows, the end is sent]\n")
            return self._log.next()
        if not final:
            return None
        self._log_cut = True
        resume = self._resume()
        if resume > self._log.offset:
            left_out = resume - self._log.offset
            self._log.skip_to(resume, f"\n[gpucost: {left_out} bytes of log left out here; the end follows]\n")
        return self._log.next(final=True)

    def _resume(self) -> int:
        # At the beginning of a line.
        start = max(self._log.offset, _size(self._workdir.log) - LOG_TAIL_BYTES)
        if start == self._log.offset:
            return start
        tail = read_range(self._workdir.log, start, LOG_TAIL_BYTES)
        return start + tail.find(b"\n") + 1


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
    """At most `size` bytes of a file from `offset` on; nothing when there is no file that may be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except _NO_FILE:
        return b""


def read_end(path: Path, size: int) -> str:
    """The last `size` bytes of a file as text; nothing when there is no file."""
    return read_range(path, max(0, _size(path) - size), size).decode(errors="replace")


def punch_hole(path: Path, start: int, length: int) -> None:
    """Give back the disk under bytes `start` to `start + length` of a file; they read as zeros. See fallocate(2).

    Raises:
        OSError: the file system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    with path.open("rb+") as file:
        if libc.fallocate(file.fileno(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, length) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except _NO_FILE:
        return 0
