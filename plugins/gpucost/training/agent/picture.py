"""What is in a folder that a program saves into, and is it a picture of one moment?

Programs write while we look. A picture is consistent when nothing of it changed while it was uploaded, and no process
has a changed file open for writing. Left out are names that say half written:

    model.pt.tmp, model.pt.tmp.17, model.pt.tmp-a1, model.partial, model.incomplete     written, then renamed
    .tmpAb12Cd, tmpab12cd_x, tmp-checkpoint-500/                                         made by tempfile and the like

A file that is appended to (a log, lines of JSON or CSV, TensorBoard's events) is right at any length.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PROC = Path("/proc")

_TEMPORARY = re.compile(r"\.tmp$|\.tmp[.\-_]|\.tmp\d+$|^\.tmp|^tmp-|^tmp[a-z0-9_]{8}$|\.partial$|\.incomplete$")
_APPENDED = re.compile(r"\.(log|jsonl|csv|tsv)$|\.tfevents\.")


class Entry(BaseModel):
    """One thing in the folder. Times in nanoseconds since 1970."""

    model_config = ConfigDict(frozen=True)

    path: str = Field(description="Relative, with / between its parts.")
    kind: Literal["file", "folder", "link"] = "file"
    size: int = Field(default=0, ge=0)
    mode: int = Field(default=0o644, ge=0, le=0o777)
    mtime_ns: int = 0
    target: str = Field(default="", description="Of a link: relative to where it lies.")


class Index(BaseModel):
    """All that is in the folder; the first part of a checkpoint."""

    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Seen:
    """An entry, and what tells whether it is still the same file with the same content: inode and time of change."""

    entry: Entry
    inode: int = 0
    changed_ns: int = 0


@dataclass
class Look:
    """What one look at the folder saw.

    Attributes:
        there: whether there is a folder.
        seen: path -> what is there.
        temporary: names that say half written, and what was seen of them.
        left_out: path -> why it cannot be kept.
    """

    there: bool = True
    seen: dict[str, Seen] = field(default_factory=dict)
    temporary: dict[str, Seen] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def changed_since(self, known: Mapping[str, Seen]) -> list[str]:
        """Files that are new, or other than known."""
        return [path for path, seen in self.seen.items() if seen.entry.kind == "file" and known.get(path) != seen]


def look_at(folder: Path) -> Look:
    """Look at the folder and all below it; links are not followed."""
    if not folder.is_dir():
        return Look(there=False)
    look = Look()
    _look_below(folder, "", False, look)
    return look


def _look_below(folder: Path, above: str, temporary: bool, look: Look) -> None:
    for item in sorted(_items(folder), key=lambda item: item.name):
        path = f"{above}{item.name}"
        half = temporary or bool(_TEMPORARY.search(item.name))
        try:
            seen = _see(item, path)
        except FileNotFoundError:
            continue  # Gone since the folder was listed.
        except ValueError as wrong:
            look.left_out[path.encode(errors="backslashreplace").decode()] = str(wrong)
            continue
        (look.temporary if half else look.seen)[path] = seen
        if seen.entry.kind == "folder":
            _look_below(folder / item.name, f"{path}/", half, look)


def _items(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _see(item: os.DirEntry[str], path: str) -> Seen:
    if not _is_utf8(path):
        raise ValueError("its name is no UTF-8")
    status = item.stat(follow_symlinks=False)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISLNK(status.st_mode):
        target = _inside(item.path, path)
        return Seen(Entry(path=path, kind="link", target=target), status.st_ino, status.st_ctime_ns)
    if stat.S_ISDIR(status.st_mode):
        return Seen(Entry(path=path, kind="folder", mode=mode))
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is neither file, folder nor link")
    entry = Entry(path=path, size=status.st_size, mode=mode, mtime_ns=status.st_mtime_ns)
    return Seen(entry, status.st_ino, status.st_ctime_ns)


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _inside(place: str, path: str) -> str:
    """Where a link leads, relative to where it lies."""
    target = os.readlink(place)  # noqa: PTH115
    here = place.removesuffix(path)
    if target.startswith(here):  # Its own folder by its full name, which another node may not have.
        target = os.path.relpath(target, os.path.dirname(place))  # noqa: PTH120
    if leads_out(path, target):
        raise ValueError(f"it is a link out of the folder, to {target}")
    return target


def leads_out(path: str, target: str) -> bool:
    """Whether a link at `path` would lead out of the folder."""
    if target.startswith("/"):
        return True
    depth = len(PurePosixPath(path).parts) - 1
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def check_paths(entries: Sequence[Entry]) -> None:
    """Make sure that an index, which may have been tampered with, stays within the folder.

    Raises:
        ValueError: naming the path that does not.
    """
    kinds = {entry.path: entry.kind for entry in entries}
    if len(kinds) != len(entries):
        raise ValueError("a path stands in its index twice")
    for entry in entries:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in entry.path:
            raise ValueError(f"its path {entry.path!r} leads out of the folder")
        if entry.path != path.as_posix() or any(kinds.get(up.as_posix()) != "folder" for up in path.parents[:-1]):
            raise ValueError(f"its path {entry.path!r} is not below folders of its own")
        if entry.kind == "link" and leads_out(entry.path, entry.target):
            raise ValueError(f"its link {entry.path!r} leads out of the folder, to {entry.target!r}")


def is_appended(path: str) -> bool:
    """Whether a file of that name is right at any length."""
    return bool(_APPENDED.search(path.rsplit("/", 1)[-1]))


def moved(before: Look, after: Look) -> list[str]:
    """Paths that are not what they were; appended files may have become longer."""
    paths = before.seen.keys() | after.seen.keys()
    return sorted(path for path in paths if not _same(before.seen.get(path), after.seen.get(path)))


def _same(before: Seen | None, after: Seen | None) -> bool:
    if before == after:
        return True
    if before is None or after is None or not is_appended(before.entry.path):
        return False
    return before.inode == after.inode and before.entry.size <= after.entry.size


def open_for_writing(folder: Path, paths: Iterable[str], proc: Path = PROC) -> list[str]:
    """Those of the files that some process has open for writing, as far as this user may see; see proc_pid_fd(5)."""
    root = folder.resolve()
    wanted = {str(root / path): path for path in paths if not is_appended(path)}
    found = set()
    for descriptor in _descriptors(proc) if wanted else ():
        try:
            path = wanted.get(os.readlink(descriptor))  # noqa: PTH115
            if path and _writes(descriptor.parent.parent / "fdinfo" / descriptor.name):
                found.add(path)
        except OSError:
            continue  # Closed meanwhile.
    return sorted(found)


def _descriptors(proc: Path) -> Iterator[Path]:
    for process in proc.glob("[0-9]*"):
        try:
            yield from (process / "fd").iterdir()
        except OSError:
            continue  # Ended meanwhile, or somebody else's.


def _writes(info: Path) -> bool:
    flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
