"""How are objects of any bucket brought onto this disk? Looked up, compared with the free space, and streamed.

Objects are fetched in pieces of 8 MiB, eight at a time, into temporary names. What lies there whole from an earlier
attempt, told by size and time as rsync does, is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from gpucost.objects import Conflict, ObjectMissing, Objects, Stat
from gpucost.reasons import Reason
from gpucost.training.outage import brief, patiently

PIECE_BYTES = 8 * 1024 * 1024
PARALLEL = 8
"""Pieces under way at a time; with a copy of each, they take 128 MiB of memory."""

Say = Callable[[str], None]
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class CannotFetch(RuntimeError):
    """Something that the job needs cannot be had, and asking again would not help.

    Args:
        reason: for the exit record.
        message: names the field, the URI, and what to do.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Source:
    """Where one name's data come from.

    Args:
        field: of the job, for messages.
        uri: as the job gives it.
        bucket: of `s3://`; None for `file://`.
        path: the key, or the path on this machine.
        sha256: what a single file must have; None: anything.
    """

    field: str
    uri: str
    bucket: str | None
    path: str
    sha256: str | None = None

    @classmethod
    def read(cls, field: str, uri: str) -> Source:
        """Take a URI apart.

        Raises:
            CannotFetch: it is none that can be fetched.
        """
        parts = urlsplit(uri)
        whole, _, fragment = uri.partition("#")
        sha256 = fragment.removeprefix("sha256=").lower() or None
        key = whole.removeprefix(f"s3://{parts.netloc}").lstrip("/")
        if fragment and not re.fullmatch(r"[0-9a-f]{64}", sha256 or ""):
            raise refused(field, uri, "after # expected sha256= and 64 hexadecimal digits")
        if parts.scheme == "s3" and parts.netloc and key:
            if sha256 and key.endswith("/"):
                raise refused(field, uri, "a folder has no digest; name one object, or leave #sha256=... out")
            return cls(field, uri, parts.netloc, key, sha256)
        if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
            return cls(field, uri, None, unquote(parts.path), sha256)
        if parts.scheme in ("http", "https"):
            raise refused(field, uri, "nodes reach nothing but the object store; copy it there and name s3://...")
        raise refused(field, uri, "expected s3://bucket/key, s3://bucket/folder/ or file:///path")

    @property
    def is_folder(self) -> bool:
        """Whether all below it is meant."""
        return self.path.endswith("/") if self.bucket else Path(self.path).is_dir()


@dataclass(frozen=True)
class Wanted:
    """One object, and the file that it becomes."""

    source: Source
    objects: Objects
    stat: Stat
    target: Path

    @property
    def is_there(self) -> bool:
        """Whether an earlier attempt has fetched it already."""
        try:
            there = self.target.lstat()
        except FileNotFoundError:
            return False
        return (there.st_size, there.st_mtime_ns) == (self.stat.size, _nanoseconds(self.stat))


class Fetcher:
    """Fetches objects of any bucket that the machine's credentials reach.

    Args:
        environ: names the store's endpoint and region, which hold for all buckets.
        say: takes a line for people.
        patience: real seconds for which each request waits for a store that is away; None: as `outage` says.
        open_store: opens `s3://bucket`; for tests.
        sleep: waits real seconds.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        say: Say,
        *,
        patience: float | None = None,
        open_store: Callable[[str], Objects] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._environ = environ
        self._say = say
        self._patience = patience
        self._open = open_store or self._default_store
        self._sleep = sleep
        self._stores: dict[str, Objects] = {}
        self._waiting = _Once(say)

    def look(self, source: Source, folder: Path) -> list[Wanted]:
        """The objects of one source, and where each goes below `folder`.

        Raises:
            CannotFetch: there is none, or they may not be read.
            one of `store_errors()`: the store was away for longer than `patience`.
        """
        assert source.bucket is not None  # noqa: S101
        objects = self._ask(source, lambda: self._store(f"s3://{source.bucket}"))
        if not source.is_folder:
            stat = self._ask(source, lambda: objects.stat(source.path))
            return [Wanted(source, objects, stat, folder / Path(source.path).name)]
        prefix = source.path.strip("/")
        stats = _without_markers(self._ask(source, lambda: list(objects.scan(prefix))))
        if not stats:
            raise refused(source.field, source.uri, "there is no object below it; correct the folder, or fill it")
        return [Wanted(source, objects, stat, _below(folder, stat.key, prefix, source)) for stat in stats]

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fetch what is not there yet.

        Raises:
            CannotFetch: the disk is too small, an object changed meanwhile, or has another digest.
            one of `store_errors()`: the store was away for longer than `patience`.
        """
        missing = [one for one in wanted if not one.is_there]
        if missing:
            check_space(sum(one.stat.size for one in missing), missing[0].target.parent, _fields(missing))
        for one in missing:
            _make_room(one)
        pieces = [(one, start) for one in missing for start in range(0, one.stat.size, PIECE_BYTES)]
        in_parallel(lambda piece: self._fetch_piece(*piece), pieces)
        for one in missing:
            os.utime(_temporary(one.target), ns=(_nanoseconds(one.stat),) * 2)
            _temporary(one.target).replace(one.target)
        for one in wanted:
            check_digest(one.source, one.target)

    def _fetch_piece(self, one: Wanted, start: int) -> None:
        end = min(start + PIECE_BYTES, one.stat.size)

        def get() -> bytes:
            data = one.objects.get_range(one.stat.key, start, end, one.stat.etag)
            if len(data) != end - start:
                raise OSError(f"{one.stat.key}: got {len(data)} bytes of {end - start}")
            return data

        data = self._ask(one.source, get)
        with _temporary(one.target).open("r+b") as file:
            file.seek(start)
            file.write(data)

    def _ask(self, source: Source, ask: Callable[[], Answer]) -> Answer:
        def told() -> Answer:
            try:
                return ask()
            except PermissionError as denied:
                why = f"not allowed ({brief(denied)}); let the machine's role or credentials read it"
                raise CannotFetch(Reason.NOT_AUTHORIZED, f"{source.field}: {source.uri}: {why}") from denied
            except ObjectMissing as missing:
                hint = "there is no such object; correct the key, or end it with / if it is a folder"
                raise refused(source.field, source.uri, hint) from missing
            except Conflict as changed:
                raise refused(source.field, source.uri, f"{changed} while it was fetched; start again") from changed

        answer = patiently(told, self._waiting, patience=self._patience, sleep=self._sleep)
        self._waiting.works()
        return answer

    def _store(self, url: str) -> Objects:
        if url not in self._stores:
            self._stores[url] = self._open(url)
        return self._stores[url]

    def _default_store(self, url: str) -> Objects:
        return Objects.open(
            url,
            endpoint=self._environ.get("GPUCOST_STORE_ENDPOINT") or None,
            region=self._environ.get("GPUCOST_STORE_REGION") or None,
        )


def in_parallel(work: Callable[[Item], object], items: Iterable[Item], at_a_time: int = PARALLEL) -> None:
    """Do `work` for all items, in threads; the first error ends it, and is raised.

    Args:
        work: for one item.
        items: read only as fast as they are worked on.
        at_a_time: threads.
    """
    with ThreadPoolExecutor(at_a_time, thread_name_prefix="fetch") as pool:
        running: set[Future[object]] = set()
        for item in items:
            if len(running) >= at_a_time:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
            running.add(pool.submit(work, item))
        for future in running:
            future.result()


def check_space(needed: int, folder: Path, what: str) -> None:
    """Make sure that `needed` bytes fit.

    Args:
        needed: bytes.
        folder: which need not be there yet.
        what: needs them, for the message.

    Raises:
        CannotFetch: naming what is needed and what is free.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CannotFetch(
            Reason.DISK_FULL,
            f"{what}: {size_text(needed)} are needed and {size_text(free)} are free below {there}; give the site a"
            " larger volume (volume_gib), or take less",
        )


def size_text(size: int) -> str:
    """Bytes for people, with the exact number."""
    return f"{size / 2**30:.1f} GiB ({size} bytes)" if size >= 2**20 else f"{size} bytes"


class _Once:
    """Says the first of many equal complaints until something works again; called by many threads."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._said = False

    def __call__(self, line: str) -> None:
        with self._lock:
            if not self._said:
                self._say(line)
            self._said = True

    def works(self) -> None:
        self._said = False


def refused(field: str, uri: str, why: str) -> CannotFetch:
    return CannotFetch(Reason.BAD_REQUEST, f"{field}: {uri}: {why}")


def _nanoseconds(stat: Stat) -> int:
    return int(stat.modified.timestamp()) * 10**9  # Listing and asking for one object tell it to other precisions.


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _fields(wanted: Iterable[Wanted]) -> str:
    return ", ".join(dict.fromkeys(one.source.field for one in wanted))


def _without_markers(stats: list[Stat]) -> list[Stat]:
    """Without the empty objects that some tools make in place of folders."""
    folders = {parent.as_posix() for stat in stats for parent in Path(stat.key).parents}
    return [stat for stat in stats if not (stat.size == 0 and (stat.key in folders or stat.key.endswith("/")))]


def _below(folder: Path, key: str, prefix: str, source: Source) -> Path:
    relative = key.removeprefix(prefix).lstrip("/")
    if not relative or {".", ".."} & set(relative.split("/")):
        raise refused(source.field, source.uri, f"the key {key!r} is no path below the folder; rename it")
    return folder / relative


def _make_room(one: Wanted) -> None:
    one.target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(one.target).open("wb") as file:
        file.truncate(one.stat.size)


def check_digest(source: Source, file: Path) -> None:
    if source.sha256 is None:
        return
    with file.open("rb") as content:
        got = hashlib.file_digest(content, "sha256").hexdigest()
    if got != source.sha256:
        raise refused(source.field, source.uri, f"has sha256 {got}; it is another file than the job means")
