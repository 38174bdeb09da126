"""How does a state get to the store and back without a second copy of it in memory? Part by part.

`torch.save` writes into a `PartWriter`, which puts a part whenever one is full; `torch.load` reads from a `PartReader`,
which gets a part when it is first touched and keeps two. Neither raises while torch is at work, for torch would hide
the error behind one of its own: they keep it, and are asked afterwards.
"""

from __future__ import annotations

import hashlib
import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from gpucost.jobstore import Part
from gpucost.objects import ObjectMissing, Objects
from gpucost.training.checkpoints.agreement import TornCheckpoint

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PART_BYTES = 16 * 1024 * 1024
"""At 1 MB/s a part takes 17 s, which the store's time limit for a request allows."""
KEPT = 2
"""Parts in memory while reading: torch looks at the end, then at the start, then goes through in order."""


class PartWriter:
    """A file to write to, whose bytes become parts in the store.

    Args:
        objects: the store.
        name: the start of the parts' keys; index and digest are appended, so that no part is ever overwritten by
            another content.
        part_bytes: size of all parts but the last.
        rank: whose state it is; None: that of all.
    """

    def __init__(self, objects: Objects, name: str, part_bytes: int, rank: int | None) -> None:
        self._objects = objects
        self._name = name
        self._part_bytes = part_bytes
        self._rank = rank
        self._buffer = bytearray(part_bytes)
        self._filled = 0
        self._parts: list[Part] = []
        self._error: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Take bytes; a part that becomes full is put. After a failure they go nowhere."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left and self._error is None:
            taken = left[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            left = left[len(taken) :]
            if self._filled == len(self._buffer):
                self._put()
        return size

    def flush(self) -> None:
        """Nothing: a part is put when it is full."""

    def close(self) -> tuple[Part, ...]:
        """Put the last part; all parts.

        Raises:
            one of `store_errors()`: a part could not be put.
        """
        if self._error is None and self._filled:
            self._put()
        if self._error is not None:
            raise self._error
        return tuple(self._parts)

    def _put(self) -> None:
        data = memoryview(self._buffer)[: self._filled]
        digest = hashlib.sha256(data).hexdigest()
        key = f"{self._name}{len(self._parts):05d}-{digest[:16]}.part"
        try:
            self._objects.put(key, data)
        except Exception as error:  # noqa: BLE001 - raised by close()
            self._error = error
            return
        self._parts.append(Part(key=key, size=self._filled, sha256=digest, rank=self._rank))
        # A new one: a store may hold on to what it was given.
        self._buffer, self._filled = bytearray(self._part_bytes), 0


class PartReader(io.RawIOBase):
    """A file to read from, made of parts; each is compared with its digest whenever it is read.

    Args:
        objects: the store.
        parts: in their order.
    """

    def __init__(self, objects: Objects, parts: Sequence[Part]) -> None:
        super().__init__()
        self._objects = objects
        self._parts = parts
        self._ends = list(accumulate(part.size for part in parts))
        self._at = 0
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._unread = set(range(len(parts)))
        self._error: Exception | None = None

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        end = self._ends[-1] if self._ends else 0
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: end}[whence] + offset
        return self._at

    def readinto(self, target: WriteableBuffer) -> int:
        """Fill `target`; less only at the end, or after a failure."""
        room = memoryview(target).cast("B")
        done = 0
        while done < len(room) and self._error is None:
            index = bisect_right(self._ends, self._at)
            if index == len(self._ends):
                break
            start = self._at - (self._ends[index] - self._parts[index].size)
            piece = memoryview(self._part(index))[start : start + len(room) - done]
            room[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def check(self) -> None:
        """Raise what went wrong so far, if anything did.

        Raises:
            TornCheckpoint: a part is missing or has another content.
            one of `store_errors()`: the store is away.
        """
        if self._error is not None:
            raise self._error

    def check_rest(self) -> None:
        """Read also the parts that nobody has read; see `check`."""
        for index in sorted(self._unread):
            self.check()
            self._part(index)
        self.check()

    def _part(self, index: int) -> bytes:
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        while len(self._kept) >= KEPT:
            self._kept.popitem(last=False)
        try:
            data = checked(self._objects, self._parts[index])
        except Exception as error:  # noqa: BLE001 - raised by check()
            self._error = error
            return b""
        self._kept[index] = data
        self._unread.discard(index)
        return data


def checked(objects: Objects, part: Part) -> bytes:
    """The part's bytes, which are those that were written.

    Raises:
        TornCheckpoint: they are missing, or others.
        one of `store_errors()`: the store is away.
    """

    def get() -> bytes:
        data = objects.get(part.key)
        if len(data) != part.size:
            raise TornCheckpoint(f"{part.key} has {len(data)} bytes, expected {part.size}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != part.sha256:
            raise TornCheckpoint(f"{part.key} has sha256 {digest[:16]}..., expected {part.sha256[:16]}...")
        return data

    try:
        return looked_at_twice(get)
    except ObjectMissing as missing:
        raise TornCheckpoint(f"{part.key} is missing") from missing


def looked_at_twice(read: Callable[[], bytes]) -> bytes:
    """What `read` gives; asked again when it finds damage, which may have come about on the way."""
    try:
        return read()
    except TornCheckpoint:
        return read()
