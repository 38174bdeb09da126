"""What a machine finds on its disk, and which user data it could not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucost.rehearsal.machines import disk


@pytest.mark.parametrize(
    ("user_data", "why"),
    [
        (None, ""),
        (b"#!/bin/sh\necho hello\n", ""),
        (b"#! /bin/sh -e\n", ""),
        (b"#!/bin/sh\0\n", ""),
        (b"#!/no/such\0\n", "/no/such is not a program on this machine"),
        (b"\x7fELF\x02", ""),
        (b"echo hello\n", "expected #! and an interpreter"),
        (b"#cloud-config\n", "expected #! and an interpreter"),
        (b"#!\n", "expected #! and an interpreter"),
        (b"#!/no/such/python\n", "/no/such/python is not a program on this machine"),
        (b"\xff\xfe", "expected #! and an interpreter"),
    ],
)
def test_user_data_that_the_kernel_would_not_run_is_known_beforehand(
    tmp_path: Path, user_data: bytes | None, why: str
) -> None:
    said = disk.prepare(tmp_path / "i-1", user_data, tmp_path / "request")
    assert said.endswith(why)
    assert bool(said) == bool(why)


def test_what_an_earlier_life_left_does_not_reach_the_next(tmp_path: Path) -> None:
    folder, request = tmp_path / "i-1", tmp_path / "request"
    disk.prepare(folder, None, request)
    for name in (disk.INIT_PID, disk.PROGRAM_PID, disk.EXIT_STATUS):
        (folder / name).write_text("1")
    (folder / "results").write_text("kept: a stopped machine keeps its disk")
    request.write_text("now")
    disk.prepare(folder, None, request)
    assert not request.exists()
    assert disk.number_in(folder / disk.PROGRAM_PID) is None
    assert (folder / "results").exists()


def test_only_its_owner_sees_a_disk(tmp_path: Path) -> None:
    disk.prepare(tmp_path / "i-1", b"#!/bin/sh\n", tmp_path / "request")
    for path in (tmp_path / "i-1", *(tmp_path / "i-1").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_environment_is_made_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "must not leak")
    found = disk.environment(tmp_path, [Path("/image/bin")], "http://127.0.0.1:1/imds/i-1/", "cloud/i-1")
    assert "AWS_SECRET_ACCESS_KEY" not in found
    assert found["PATH"].split(":")[:2] == [str(tmp_path / "bin"), "/image/bin"]
    assert found["HOME"] == str(tmp_path)


def test_a_number_that_is_not_written_to_its_end_is_none(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    assert disk.number_in(path) is None
    path.write_text("")
    assert disk.number_in(path) is None
    path.write_text("17\n")
    assert disk.number_in(path) == 17
