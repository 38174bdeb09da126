"""Nothing that a program puts on its machine's disk stops the cloud."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpucost.rehearsal.guests import SMALL, read_small, remove


def make(kind: str, path: Path) -> Path:
    """One of the things that programs leave."""
    if kind == "folder":
        (path / "full").mkdir(parents=True)
        (path / "full/file").write_text("x")
        (path / "full").chmod(0o500)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "file":
        path.write_text("x")
    return path


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "nothing"])
def test_only_files_are_read_and_nobody_waits(tmp_path: Path, kind: str) -> None:
    assert read_small(make(kind, tmp_path / "there")) is None


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (SMALL + 1))
    assert read_small(path) == b"x" * SMALL


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "file", "nothing"])
def test_whatever_is_there_can_be_removed(tmp_path: Path, kind: str) -> None:
    path = make(kind, tmp_path / "there")
    remove(path)
    assert not os.path.lexists(path)
