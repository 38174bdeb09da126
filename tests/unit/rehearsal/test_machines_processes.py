"""Which process belongs to which machine, read from a process table made of files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from gpucost.rehearsal.machines.processes import MARKER, Scanner, pss

PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcFolder:
    """A /proc that a test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.scanner = Scanner("cloud", path, lambda: self.now)

    def add(
        self,
        pid: int,
        machine: str = "",
        *,
        parent: int = 1,
        session: int | None = None,
        state: str = "S",
        name: str = "sh",
        started: int = 5,
        pages: int = 0,
    ) -> None:
        folder = self.path / str(pid)
        folder.mkdir(exist_ok=True)
        middle = " ".join(["0"] * 15)
        stat = f"{pid} ({name}) {state} {parent} {pid} {session or pid} {middle} {started} 0 {pages} 0 0\n"
        (folder / "stat").write_text(stat)
        (folder / "environ").write_bytes(f"PATH=/bin\0{MARKER}={machine}\0A=b\0".encode() if machine else b"PATH=/\0")

    def pids(self) -> dict[str, set[int]]:
        return {machine: set(found) for machine, found in self.scanner.look().items()}


def test_every_process_with_the_marker_is_its_machines(tmp_path: Path) -> None:
    proc = ProcFolder(tmp_path)
    proc.add(10, "cloud/i-1")
    proc.add(11, "cloud/i-1", parent=10)
    proc.add(20, "cloud/i-2", name="odd) name (", pages=7)
    proc.add(30, "other/i-1")
    proc.add(40, "clouds/i-1")
    proc.add(50)
    (tmp_path / "version").write_text("no process")
    found = proc.scanner.look()
    assert {machine: set(processes) for machine, processes in found.items()} == {"i-1": {10, 11}, "i-2": {20}}
    assert (found["i-2"][20].name, found["i-2"][20].rss) == ("odd) name (", 7 * PAGE)


def test_without_the_marker_a_session_or_an_ancestor_tells(tmp_path: Path) -> None:
    proc = ProcFolder(tmp_path)
    proc.add(10, "cloud/i-1")
    proc.add(11, parent=1, session=10)
    proc.add(12, parent=11, session=12)
    proc.add(13, parent=12, session=13)
    proc.add(14, parent=1, session=14)
    assert proc.pids() == {"i-1": {10, 11, 12, 13}}


def test_who_has_ended_is_not_there(tmp_path: Path) -> None:
    proc = ProcFolder(tmp_path)
    proc.add(10, "cloud/i-1", state="Z")
    proc.add(11, "cloud/i-1")
    (tmp_path / "12").mkdir()
    assert proc.pids() == {"i-1": {11}}


def test_a_process_that_has_just_been_born_may_show_its_marker_later(tmp_path: Path) -> None:
    proc = ProcFolder(tmp_path)
    proc.add(10)
    assert proc.pids() == {}
    proc.now = 0.5
    proc.add(10, "cloud/i-1")
    assert proc.pids() == {"i-1": {10}}


def test_another_process_with_a_known_pid_is_another_process(tmp_path: Path) -> None:
    proc = ProcFolder(tmp_path)
    proc.add(10, "cloud/i-1", started=5)
    proc.add(20, started=5)
    assert proc.pids() == {"i-1": {10}}
    proc.now = 60
    proc.add(10, started=99)
    proc.add(20, "cloud/i-2", started=99)
    assert proc.pids() == {"i-2": {20}}


def test_we_are_never_among_them(tmp_path: Path) -> None:
    proc = ProcFolder(tmp_path)
    proc.add(os.getpid(), "cloud/i-1")
    assert proc.pids() == {}


def test_the_real_table_says_how_much_memory_we_use() -> None:
    found = pss(os.getpid())
    assert found is not None
    assert found > 2**20
    assert pss(2**22 + 1) is None


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
def test_who_could_not_look_does_not_say_that_nobody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    proc = ProcFolder(tmp_path)
    proc.add(10, "cloud/i-1")
    assert proc.pids() == {"i-1": {10}}

    def refuse(*_: Any) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as poor:
        poor.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="open files"):
            proc.pids()
    proc.now = 60
    assert proc.pids() == {"i-1": {10}}
