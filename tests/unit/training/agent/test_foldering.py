"""The folder of a program that saves by itself is kept on orders, in time, and at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucost.jobstore import Command
from gpucost.training.agent.foldering import LEAST_RESERVE_SECONDS, FolderKeeper


class Sync:
    """Keeps nothing, and tells what it was asked."""

    def __init__(self) -> None:
        self.saves: list[bool] = []
        self.error: Exception | None = None
        self.hangs: threading.Event | None = None
        self.takes = 0.0
        self.now = 0.0

    def restore(self) -> bool:
        return False

    def save(self, final: bool = False) -> bool:
        if self.hangs:
            self.hangs.wait(30)
        self.saves.append(final)
        self.now += self.takes
        if self.error:
            raise self.error
        return True


class Program:
    """Counts the signals that it gets."""

    signals = 0

    def ask_to_end(self) -> None:
        self.signals += 1


@pytest.fixture
def sync() -> Iterator[Sync]:
    sync = Sync()
    yield sync
    if sync.hangs:
        sync.hangs.set()


def test_a_wish_to_save_keeps_the_folder_now(sync: Sync, tmp_path: Path) -> None:
    keeper = FolderKeeper(sync, tmp_path, every_seconds=3600)
    keeper.thread.start()
    program = Program()
    for wanted in range(2, 4):
        until = time.monotonic() + 10
        while len(sync.saves) < wanted and time.monotonic() < until:
            keeper.ask(program, Command.SAVE, "rebalance", None)
            time.sleep(0.01)
        assert len(sync.saves) >= wanted
    assert keeper.thread.end(10)
    assert program.signals == 0


def test_a_wish_to_stop_is_one_signal(sync: Sync, tmp_path: Path) -> None:
    keeper, program = FolderKeeper(sync, tmp_path, every_seconds=3600), Program()
    keeper.ask(program, Command.SAVE_AND_STOP, "budget", None)
    keeper.ask(program, Command.SAVE_AND_STOP, "notice", None)
    assert program.signals == 1
    assert sync.saves == []


def test_the_last_save_is_given_what_the_longest_took_and_a_half(sync: Sync, tmp_path: Path) -> None:
    keeper = FolderKeeper(sync, tmp_path, every_seconds=3600, real=lambda: sync.now)
    assert keeper.reserve() == LEAST_RESERVE_SECONDS
    for sync.takes in (20, 2):
        keeper.thread.once()
    assert keeper.reserve() == 30


def test_the_end_is_kept(sync: Sync, tmp_path: Path) -> None:
    last = FolderKeeper(sync, tmp_path, every_seconds=3600).last_save(patience=0)
    last.join(10)
    assert last.done
    assert last.exit_code() == 0
    assert sync.saves == [True]


def test_an_end_that_is_not_kept_is_told(sync: Sync, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sync.error = ConnectionError("refused")
    last = FolderKeeper(sync, tmp_path, every_seconds=3600).last_save(patience=0)
    last.join(10)
    assert not last.done
    assert "what was saved last is not kept: refused" in capsys.readouterr().err


def test_the_last_save_goes_on_when_asked_to_end_and_is_left_alone_when_there_is_no_time(
    sync: Sync, tmp_path: Path
) -> None:
    sync.hangs = threading.Event()
    last = FolderKeeper(sync, tmp_path, every_seconds=3600).last_save(patience=0)
    last.ask_to_end()
    assert last.exit_code() is None
    last.kill()
    assert last.exit_code() == 0
    assert not last.done


@pytest.mark.parametrize(
    ("text", "results"),
    [
        (None, {}),
        ('{"accuracy": 0.9, "steps": 40, "name": "x", "good": true, "list": [1]}', {"accuracy": 0.9, "steps": 40}),
        ("[1, 2]", {}),
        ("{", {}),
        ('{"loss": NaN}', {}),
    ],
)
def test_numbers_in_its_results_are_taken(
    sync: Sync, tmp_path: Path, text: str | None, results: dict[str, float]
) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    assert FolderKeeper(sync, tmp_path, every_seconds=3600).results() == results
