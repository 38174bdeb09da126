"""The machine is switched off some time after the expiry, whatever became of the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpucost.clock import ClockSpec, SpecClock
from gpucost.training.agent.attempt import package_root
from gpucost.training.agent.watchdog import MARGIN, STARTING, Watchdog

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


class Switch:
    """A power switch that only notes that it was used."""

    def __init__(self, tmp_path: Path) -> None:
        self.used = tmp_path / "used"
        script = tmp_path / "switch"
        script.write_text(f'#!/bin/sh\necho "$*" > {self.used}.part && mv {self.used}.part {self.used}\n')
        script.chmod(0o755)
        self.command = f"'{script}' -h now"

    def wait(self, seconds: float = 20) -> str:
        until = time.monotonic() + seconds
        while not self.used.exists():
            assert time.monotonic() < until, "the machine was not switched off"
            time.sleep(0.02)
        return self.used.read_text().strip()


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path)


class Waiting:
    """A process that was to be started, and what it waits for."""

    started: list[Waiting]

    def __init__(self, arguments: list[str], **options: object) -> None:
        self.pid = 1000 + len(self.started)
        self.at = datetime.fromtimestamp(float(arguments[5]), UTC)
        self.command = arguments[6:]
        self.options = options
        self.killed_beside: int | None = None
        self.started.append(self)

    def kill(self) -> None:
        self.killed_beside = len(self.started) - 1

    def wait(self) -> None:
        """It has ended."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Waiting]:
    Waiting.started = []
    monkeypatch.setattr(subprocess, "Popen", Waiting)
    return Waiting.started


def test_it_waits_in_real_time_for_an_expiry_on_the_jobs_clock(started: list[Waiting]) -> None:
    hour_a_minute = SpecClock(ClockSpec(origin_real=NOW, origin=NOW + timedelta(days=900), speed=60))
    dog = Watchdog("shutdown -h now", real_now=lambda: NOW)
    dog.arm_for_start()
    dog.arm(hour_a_minute, NOW + timedelta(days=900, hours=2))
    assert [one.at for one in started] == [NOW + STARTING, NOW + timedelta(minutes=2) + MARGIN]
    assert started[1].command == ["shutdown", "-h", "now"]
    assert dog.pids == {started[1].pid}


def test_an_expiry_that_has_passed_leaves_time_for_an_orderly_end(started: list[Waiting]) -> None:
    Watchdog("shutdown -h now", real_now=lambda: NOW).arm(SpecClock(), NOW - timedelta(hours=1))
    assert started[0].at == NOW + MARGIN


def test_an_expiry_beyond_all_calendars_is_never(started: list[Waiting]) -> None:
    Watchdog("shutdown -h now", real_now=lambda: NOW).arm(SpecClock(), datetime.max.replace(tzinfo=UTC))
    assert started[0].at.year == 9999


def test_armed_anew_the_old_one_ends_after_the_new_one_has_begun(started: list[Waiting]) -> None:
    dog = Watchdog("shutdown -h now", real_now=lambda: NOW)
    dog.arm(SpecClock(), NOW + timedelta(hours=1))
    dog.arm(SpecClock(), NOW + timedelta(hours=2))
    assert [one.killed_beside for one in started] == [1, None]


def test_when_it_cannot_be_armed_anew_the_old_one_stands(
    started: list[Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = Watchdog("shutdown -h now", real_now=lambda: NOW)
    dog.arm(SpecClock(), NOW + timedelta(hours=1))

    def full(*arguments: object, **options: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(OSError, match="no more processes"):
        dog.arm(SpecClock(), NOW + timedelta(hours=2))
    assert started[0].killed_beside is None
    assert dog.pids == {started[0].pid}


def test_without_a_command_nothing_is_switched_off(started: list[Waiting]) -> None:
    dog = Watchdog("")
    dog.arm_for_start()
    dog.arm(SpecClock(), NOW)
    assert started == []
    assert dog.pids == frozenset()


ARM = """
import os, signal, sys
from datetime import UTC, datetime, timedelta
from gpucost.training.agent import process, watchdog
dog = watchdog.Watchdog(sys.argv[1])
watchdog.STARTING = timedelta(seconds=float(sys.argv[2]))
dog.arm_for_start()
process.become_subreaper()
print(*dog.pids, process.end_descendants(os.getpid(), spare=dog.pids)[0], flush=True)
os.killpg(0, signal.SIGKILL)
"""


@pytest.fixture
def killed_agent(switch: Switch) -> Iterator[Callable[[float], int]]:
    """Starts an agent that arms its watchdog, ends all else, and is killed with its group; gives the watchdog's pid."""
    pids: list[int] = []

    def start(seconds: float) -> int:
        agent = subprocess.run(
            [sys.executable, "-c", ARM, switch.command, str(seconds)],
            env={"PYTHONPATH": str(package_root()), "PATH": os.environ["PATH"], "MARK": "inherited"},
            stdout=subprocess.PIPE,
            process_group=0,
            text=True,
            check=False,
        )
        assert agent.returncode == -signal.SIGKILL
        pid, ended = map(int, agent.stdout.split())
        pids.append(pid)
        assert ended == 0
        return pid

    yield start
    for pid in pids:
        if Path(f"/proc/{pid}/stat").exists():
            os.kill(pid, signal.SIGKILL)


def test_it_outlives_the_agent_and_switches_the_machine_off(
    switch: Switch, killed_agent: Callable[[float], int]
) -> None:
    killed_agent(0.5)
    assert switch.wait() == "-h now"


def test_it_carries_the_machines_mark_and_ends_with_the_machine(
    switch: Switch, killed_agent: Callable[[float], int]
) -> None:
    pid = killed_agent(600)
    assert b"MARK=inherited" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 10
    while (stat := Path(f"/proc/{pid}/stat")).exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert not switch.used.exists()
