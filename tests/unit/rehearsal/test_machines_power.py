"""What a cloud reads from its folder about machines that it did not start itself; starts no process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpucost.rehearsal.machines import disk, guard, power
from gpucost.rehearsal.machines.power import LocalPower

OFF = datetime(2026, 11, 30, 16, 0, tzinfo=UTC)
BEAT = datetime(2026, 11, 30, 16, 5, tzinfo=UTC)
AHEAD = timedelta(days=100)


def local(folder: Path) -> LocalPower:
    """A rehearsal whose clock is a hundred days ahead of real time."""
    return LocalPower(folder, "cloud", imds_base=lambda _id: "", keep_real_s=30, at=lambda real: real + AHEAD)


@pytest.fixture
def found(tmp_path: Path) -> Iterator[LocalPower]:
    made = local(tmp_path)
    yield made
    made.close(machines_go_on=True)


def write_off(folder: Path) -> None:
    (folder / guard.POWERED_OFF).write_text(json.dumps({"at": OFF.isoformat()}))


def write_beat(folder: Path) -> None:
    (folder / guard.HEARTBEAT).touch()
    os.utime(folder / guard.HEARTBEAT, (BEAT.timestamp(), BEAT.timestamp()))


def lost_at(folder: Path) -> datetime | None:
    made = local(folder)
    made.close(machines_go_on=True)
    return made.lost_at()


def test_when_lost_machines_went_off(tmp_path: Path) -> None:
    assert lost_at(tmp_path) is None
    write_beat(tmp_path)
    assert lost_at(tmp_path) == BEAT + AHEAD, "the host went down with the guard: its last sign of life counts"
    write_off(tmp_path)
    assert lost_at(tmp_path) == OFF + AHEAD, "the guard wrote when it ended them"


def test_a_cloud_does_not_start_while_a_guard_ends_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "WAIT_FOR_POWER_REAL_S", 0.0)
    held = guard.take_power(tmp_path, 0)
    assert held is not None
    with pytest.raises(OSError, match="state_dir: the guard of an earlier cloud still ends machines"):
        local(tmp_path)
    held.close()
    local(tmp_path).close(machines_go_on=True)


def test_requests_are_read_whole_and_by_machine(found: LocalPower, tmp_path: Path) -> None:
    assert found.shutdown_requests() == {}
    requests = tmp_path / power.REQUESTS
    (requests / "i-1").write_text("now")
    (requests / "i-2").write_text("+3\n")
    (requests / "i-3.part").write_text("no")
    assert found.shutdown_requests() == {"i-1": "now", "i-2": "+3"}


def test_one_machine_cannot_keep_the_requests_of_others_from_being_heard(found: LocalPower, tmp_path: Path) -> None:
    requests = tmp_path / power.REQUESTS
    (requests / "i-1").mkdir()
    (requests / "i-2").write_text("now")
    (requests / "i-3").symlink_to("i-3")
    os.mkfifo(requests / "i-4")
    assert found.shutdown_requests() == {"i-2": "now"}
    shutil.rmtree(requests)
    assert found.shutdown_requests() == {}
    (requests / "i-2").write_text("now")
    assert found.shutdown_requests() == {"i-2": "now"}, "the folder is there again"


def test_a_machine_is_switched_off_whatever_it_made_of_its_files(found: LocalPower, tmp_path: Path) -> None:
    folder = found.folder("i-1")
    disk.prepare(folder, None, folder / "request")
    (tmp_path / power.REQUESTS / "i-1").mkdir()
    (folder / disk.INIT_PID).mkdir()
    os.mkfifo(folder / disk.CONSOLE)
    with pytest.raises(OSError, match="console"):
        found.console("i-1", "nobody reads this")
    found.switch_off("i-1")
    assert not found.was_on("i-1")
    assert found.shutdown_requests() == {}


def test_a_machine_was_on_from_its_first_process_until_it_is_switched_off(found: LocalPower) -> None:
    folder = found.folder("i-1")
    disk.prepare(folder, None, folder / "request")
    assert not found.was_on("i-1")
    (folder / disk.INIT_PID).write_text("123\n")
    assert found.was_on("i-1")
    found.switch_off("i-1")
    assert not found.was_on("i-1")
    assert not (folder / "tmp").exists()


def test_a_pid_alone_proves_nothing(found: LocalPower) -> None:
    folder = found.folder("i-1")
    disk.prepare(folder, None, folder / "request")
    (folder / disk.INIT_PID).write_text(f"{os.getpid()}\n")
    assert found.look() == {}
    assert found.pid("i-1") is None


def test_the_kernels_lines_are_on_the_console(found: LocalPower) -> None:
    folder = found.folder("i-1")
    disk.prepare(folder, None, folder / "request")
    found.console("i-1", "Out of memory")
    found.console("i-1", "again")
    assert (folder / disk.CONSOLE).read_text() == "Out of memory\nagain\n"


class Child:
    """What an init looks like to its parent."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status


def test_an_init_that_a_look_misses_is_still_seen_while_it_lives(
    found: LocalPower, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(123)
    monkeypatch.setattr(found, "_children", {"i-1": child})
    monkeypatch.setattr(found, "_inits", {"i-1": 123})
    monkeypatch.setattr(found, "_scanner", type("Blind", (), {"look": lambda _self: {}})())
    assert found.look()["i-1"].init == 123, "in the middle of an exec it has no environment, and lives"
    child.status = 0
    assert found.look() == {}
