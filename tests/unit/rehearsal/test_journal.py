"""The journal on disk: whole lines, or nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucost.rehearsal.book.journal import FileJournal, JournalError

Write = Callable[[int, bytes], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def journal(path: Path) -> Iterator[FileJournal]:
    made = FileJournal(path)
    yield made
    made.close()


def names(path: Path) -> list[str]:
    """What a later life would read."""
    later = FileJournal(path)
    found = [event["name"] for event in later.events()]
    later.close()
    return found


def full_after(count: int, real: Write = os.write) -> Write:
    """A disk that takes so many bytes of each line, and then no more."""

    def write(file: int, data: bytes) -> int:
        if count:
            return real(file, data[:count])
        raise OSError(errno.ENOSPC, "No space left on device")

    return write


@pytest.mark.parametrize("count", [0, 7])
def test_a_line_for_which_there_is_no_room_never_turns_up_again(
    journal: FileJournal, path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    journal.write("x", name="first")
    with monkeypatch.context() as full:
        full.setattr(os, "write", full_after(count))
        with pytest.raises(OSError, match=r"No space left|only 7 of") as refused:
            journal.write("x", name="phantom")
    assert refused.value.errno == errno.ENOSPC
    journal.write("x", name="second")
    assert names(path) == ["first", "second"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_what_can_neither_be_written_nor_cut_ends_all_writing(
    journal: FileJournal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal.write("x", name="first")
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full_after(7))
        broken.setattr(os, "ftruncate", fails)
        with pytest.raises(OSError, match="only 7 of"):
            journal.write("x", name="phantom")
    with pytest.raises(OSError, match="ends in half a line; start the rehearsal again"):
        journal.write("x", name="second")
    assert names(path) == ["first"], "a later life cuts the half line, and goes on"


def test_a_line_is_in_the_file_when_it_is_written(journal: FileJournal, path: Path) -> None:
    journal.write("x", name="first")
    assert json.loads(path.read_text()) == {"event": "x", "name": "first"}


def test_a_line_that_is_no_event_is_named(path: Path) -> None:
    path.write_text('{"event": "x", "name": "a"}\nnonsense\n')
    with pytest.raises(JournalError, match="line 2 is not JSON"):
        names(path)
