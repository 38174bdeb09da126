"""Who may end machines or take them up: one at a time."""

from __future__ import annotations

from pathlib import Path

from gpucost.rehearsal.machines import guard


def test_the_power_is_one_holders_at_a_time(tmp_path: Path) -> None:
    first = guard.take_power(tmp_path, 0)
    assert first is not None
    assert guard.take_power(tmp_path, 0) is None
    first.close()
    second = guard.take_power(tmp_path, 0)
    assert second is not None
    second.close()


def test_a_younger_guard_relieves_the_older(tmp_path: Path) -> None:
    older = guard.Guard("cloud", tmp_path, 5.0)
    assert not older._superseded()
    younger = guard.Guard("cloud", tmp_path, 5.0)
    assert older._superseded()
    assert not younger._superseded()


def test_a_guard_that_is_relieved_in_the_last_moment_ends_nothing(tmp_path: Path) -> None:
    older = guard.Guard("cloud", tmp_path, 0.0)
    guard.Guard("cloud", tmp_path, 0.0)
    assert older._end_machines() == 0
    assert not (tmp_path / guard.POWERED_OFF).exists()
