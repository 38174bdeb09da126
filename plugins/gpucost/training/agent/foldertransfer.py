"""How do a folder's files get to the store and back? In parts, several at a time, each with its digest.

Each checkpoint has all its parts below its own folder in the store, so that none depends on another. A part that the
checkpoint before has already is copied within the store, and one that an interrupted save has put there is left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from gpucost.jobstore import Manifest, Part
from gpucost.objects import ObjectMissing, Objects
from gpucost.training.agent.download import check_space, in_parallel
from gpucost.training.agent.picture import Index, Look, Seen, check_paths
from gpucost.training.checkpoints.agreement import TornCheckpoint
from gpucost.training.checkpoints.parts import checked
from gpucost.training.outage import patiently

PARALLEL = 4
"""Parts under way at a time; they take 64 MiB of memory, and a copy of each."""

Files = dict[str, tuple[Part, ...]]
"""Path -> the parts of each file, in their order."""


@dataclass(frozen=True)
class Kept:
    """What the newest checkpoint holds.

    Args:
        seen: path -> what was in the folder then.
        files: the parts of its files.
    """

    seen: Mapping[str, Seen]
    files: Files

    def by_digest(self) -> dict[str, Part]:
        """Its parts."""
        return {part.sha256: part for parts in self.files.values() for part in parts}


@dataclass(frozen=True)
class _Chunk:
    path: str
    index: int
    size: int


class Upload:
    """Brings files into one checkpoint's folder in the store.

    Args:
        objects: the store.
        step: the checkpoint's.
        root: its folder in the store.
        folder: where the files lie.
        kept: the checkpoint before.
        part_bytes: size of the parts.
    """

    def __init__(self, objects: Objects, step: int, root: str, folder: Path, kept: Kept, part_bytes: int) -> None:
        self.step = step
        self.root = root
        self._objects = objects
        self._folder = folder
        self._kept = kept
        self._known = kept.by_digest()
        self._part_bytes = part_bytes
        self._done: set[str] = set()

    def files(self, look: Look) -> tuple[Files, list[str]]:
        """Upload what is not there yet; the parts of each file, and those that could not be read to their end.

        Raises:
            one of `store_errors()`: the store is away; call it again later.
        """
        chunks = {path: self._chunks(seen) for path, seen in look.seen.items() if seen.entry.kind == "file"}
        unchanged = {path for path in chunks if self._kept.seen.get(path) == look.seen[path]} & self._kept.files.keys()
        done: dict[_Chunk, Part | None] = {}

        def store(chunk: _Chunk) -> None:
            old = self._kept.files[chunk.path][chunk.index] if chunk.path in unchanged else None
            done[chunk] = (old and self._copied(old, chunk.path)) or self._read(chunk)

        in_parallel(store, (chunk for pieces in chunks.values() for chunk in pieces), PARALLEL)
        files: Files = {}
        for path, pieces in chunks.items():
            parts = tuple(part for chunk in pieces if (part := done[chunk]))
            if len(parts) == len(pieces):
                files[path] = parts
        return files, [path for path in chunks if path not in files]

    def put(self, data: bytes, path: str | None) -> Part:
        """Upload one part, if it is not there yet."""
        digest = hashlib.sha256(data).hexdigest()
        if digest in self._known and (part := self._copied(self._known[digest], path)):
            return part
        part = Part(key=self._key(digest), size=len(data), sha256=digest, path=path)
        if digest not in self._done:
            self._objects.put(part.key, data)
            self._done.add(digest)
        return part

    def _chunks(self, seen: Seen) -> list[_Chunk]:
        starts = range(0, seen.entry.size, self._part_bytes)
        sizes = (min(self._part_bytes, seen.entry.size - start) for start in starts)
        return [_Chunk(seen.entry.path, index, size) for index, size in enumerate(sizes)]

    def _read(self, chunk: _Chunk) -> Part | None:
        try:
            with (self._folder / chunk.path).open("rb") as file:
                file.seek(chunk.index * self._part_bytes)
                data = file.read(chunk.size)
        except OSError:
            return None  # Gone meanwhile, or nobody may read it; who it was is told by what is missing.
        return self.put(data, chunk.path) if len(data) == chunk.size else None

    def _copied(self, old: Part, path: str | None) -> Part | None:
        if old.sha256 not in self._done:
            try:
                self._objects.copy(old.key, self._key(old.sha256))
            except ObjectMissing:
                return None
            self._done.add(old.sha256)
        return old.model_copy(update={"key": self._key(old.sha256), "path": path})

    def _key(self, digest: str) -> str:
        return f"{self.root}/{digest}.part"


class Download:
    """Brings a checkpoint's files back into a folder.

    Args:
        objects: the store.
        warn: takes a line for people.
        patience: real seconds for which each request waits for a store that is away; None: as `outage` says.
    """

    def __init__(self, objects: Objects, warn: Callable[[str], None], patience: float | None) -> None:
        self._objects = objects
        self._warn = warn
        self._patience = patience

    def replace(self, folder: Path, manifest: Manifest) -> Files:
        """Replace `folder` by what the checkpoint holds; it stays as it is until all is there and verified.

        Raises:
            TornCheckpoint: something is missing, not what was written, or leads out of the folder.
            CannotFetch: the disk is too small.
            one of `store_errors()`: the store was away for too long.
        """
        index = self._index(manifest)
        files = _files(index, manifest)
        check_space(sum(entry.size for entry in index.entries), folder.parent, f"folder {folder.name}")
        fresh, old = (folder.with_name(f".{folder.name}.{word}") for word in ("restoring", "before"))
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)
        _make(index, fresh)
        in_parallel(lambda piece: self._fetch(fresh, *piece), _pieces(files), PARALLEL)
        _finish(index, fresh)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        return files

    def _index(self, manifest: Manifest) -> Index:
        try:
            text = b"".join(self._checked(part) for part in manifest.parts if part.path is None)
            index = Index.model_validate_json(text)
            check_paths(index.entries)
        except ValueError as wrong:
            raise TornCheckpoint(f"it is no checkpoint of a folder: {wrong}") from wrong
        return index

    def _checked(self, part: Part) -> bytes:
        return patiently(lambda: checked(self._objects, part), self._warn, patience=self._patience)

    def _fetch(self, fresh: Path, path: str, start: int, part: Part) -> None:
        data = self._checked(part)
        with (fresh / path).open("r+b") as file:
            file.seek(start)
            file.write(data)


def _files(index: Index, manifest: Manifest) -> Files:
    files: dict[str, list[Part]] = {entry.path: [] for entry in index.entries if entry.kind == "file"}
    for part in manifest.parts:
        if part.path is not None:
            if part.path not in files:
                raise TornCheckpoint(f"its index has no file {part.path!r}")
            files[part.path].append(part)
    for entry in index.entries:
        size = sum(part.size for part in files.get(entry.path, ()))
        if entry.kind == "file" and size != entry.size:
            raise TornCheckpoint(f"the parts of {entry.path!r} have {size} bytes, expected {entry.size}")
    return {path: tuple(parts) for path, parts in files.items()}


def _pieces(files: Files) -> Iterator[tuple[str, int, Part]]:
    for path, parts in files.items():
        starts = accumulate((part.size for part in parts[:-1]), initial=0)
        yield from ((path, start, part) for start, part in zip(starts, parts, strict=False))


def _make(index: Index, folder: Path) -> None:
    folder.mkdir(parents=True)
    for entry in index.entries:
        place = folder / entry.path
        if entry.kind == "folder":
            place.mkdir()
        elif entry.kind == "file":
            with place.open("xb") as file:
                file.truncate(entry.size)


def _finish(index: Index, folder: Path) -> None:
    """Links, modes and times; what is in a folder first, which then may be one that cannot be written to."""
    for entry in reversed(index.entries):
        place = folder / entry.path
        if entry.kind == "link":
            place.symlink_to(entry.target)
            continue
        place.chmod(entry.mode)
        if entry.kind == "file":
            os.utime(place, ns=(entry.mtime_ns, entry.mtime_ns))
