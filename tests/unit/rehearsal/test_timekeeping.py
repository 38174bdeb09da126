"""One clock for a state folder, however often the cloud is started on it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpucost.rehearsal.timekeeping import take_up

REAL = datetime(2026, 11, 30, 16, 0, 0, 250_000, tzinfo=UTC)
LATER = REAL + timedelta(hours=1)


def test_the_first_start_shows_the_present_second_or_what_it_is_told(tmp_path: Path) -> None:
    for name in ("plain", "told"):
        (tmp_path / name).mkdir()
    plain = take_up(tmp_path / "plain", 120, None, REAL)
    assert (plain.clock.origin_real, plain.clock.speed) == (REAL, 120)
    assert plain.clock.origin == plain.first_origin == REAL.replace(microsecond=0)
    told = take_up(tmp_path / "told", 120, REAL - timedelta(days=9), REAL)
    assert told.clock.at(REAL) == REAL - timedelta(days=9)


@pytest.mark.parametrize("origin", [None, datetime(2027, 3, 1, 12, 0, 0, 123_456, tzinfo=UTC)])
def test_the_same_start_again_continues_the_very_same_clock(tmp_path: Path, origin: datetime | None) -> None:
    first = take_up(tmp_path, 119.7, origin, REAL)
    written = (tmp_path / "clock.json").read_bytes()
    assert take_up(tmp_path, 119.7, origin, LATER) == first
    assert take_up(tmp_path, 119.7, None, LATER + timedelta(days=7)) == first
    assert (tmp_path / "clock.json").read_bytes() == written


@pytest.mark.parametrize("speed", [1.0, 7.3, 2000.0])
def test_another_speed_goes_on_from_the_time_shown_and_keeps_the_prices(tmp_path: Path, speed: float) -> None:
    old = take_up(tmp_path, 120, None, REAL)
    new = take_up(tmp_path, speed, None, LATER)
    assert new.clock.speed == speed
    assert new.clock.at(LATER) == old.clock.at(LATER)
    assert new.first_origin == old.first_origin
    assert take_up(tmp_path, speed, None, LATER + timedelta(hours=5)) == new


def test_a_later_origin_is_a_new_clock(tmp_path: Path) -> None:
    old = take_up(tmp_path, 120, None, REAL)
    ahead = old.clock.at(LATER) + timedelta(days=2)
    new = take_up(tmp_path, 120, ahead, LATER)
    assert (new.clock.at(LATER), new.first_origin) == (ahead, old.first_origin)


@pytest.mark.parametrize("speed", [120.0, 60.0])
def test_an_earlier_origin_is_refused_and_changes_nothing(tmp_path: Path, speed: float) -> None:
    old = take_up(tmp_path, 120, None, REAL)
    with pytest.raises(ValueError, match=r"origin: got 2026-11-30T18.*2026-12-05T16.*use another --state-dir"):
        take_up(tmp_path, speed, REAL + timedelta(hours=2), LATER)
    assert take_up(tmp_path, 120, None, LATER) == old


def test_a_broken_file_is_not_taken_for_a_first_start(tmp_path: Path) -> None:
    (tmp_path / "clock.json").write_text('{"clock": ')
    with pytest.raises(ValueError, match=r"clock\.json is not a rehearsal's clock.*use another --state-dir"):
        take_up(tmp_path, 120, None, REAL)


def test_a_clock_that_is_gone_is_not_made_anew_for_those_who_live_by_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"clock\.json is missing"):
        take_up(tmp_path, 60, None, datetime.now(UTC), lived=True)
    assert not (tmp_path / "clock.json").exists()


def test_a_start_without_a_speed_goes_on_at_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert take_up(tmp_path / "new", None, None, REAL).clock.speed == 1
    first = take_up(tmp_path, 60, None, REAL)
    assert take_up(tmp_path, None, None, LATER) == first
