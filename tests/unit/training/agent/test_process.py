"""What the program started is ended with it, in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from gpucost.training.agent import process


class Machine:
    """Processes that end when they are killed, unless they are stuck in the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stuck: set[int]) -> None:
        self.now = 100.0
        self.stuck = stuck
        self.alive = {11, 12, 13}
        monkeypatch.setattr(process, "_descendants", lambda root, spare: set(self.alive))
        monkeypatch.setattr(process, "_reap", lambda: None)
        monkeypatch.setattr(os, "kill", self.kill)

    def kill(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.alive &= self.stuck | (self.alive - {pid})

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def end(self, within: float) -> tuple[int, int]:
        return process.end_descendants(1, within=within, sleep=self.sleep, real=lambda: self.now)


def test_all_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, stuck=set())
    assert machine.end(within=10) == (3, 0)
    assert machine.now < 101


def test_one_that_cannot_be_ended_is_told_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, stuck={12})
    assert machine.end(within=10) == (2, 1)
    assert machine.now == pytest.approx(110, abs=0.1)


def test_without_time_they_are_killed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, stuck=set())
    machine.end(within=0)
    assert machine.alive == set()
    assert machine.now == 100


def test_a_spared_process_and_what_it_started_live_on() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo started; wait"], stdout=subprocess.PIPE, process_group=0)
    try:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"started\n"
        everything = process._descendants(os.getpid(), frozenset())
        spared = process._descendants(os.getpid(), frozenset({shell.pid}))
        sleeping = process._descendants(shell.pid, frozenset())
        assert len(sleeping) == 1
        assert everything - spared == {shell.pid} | sleeping
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
