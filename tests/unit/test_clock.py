"""One clock for everybody: rehearsed time, told the same in every process."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpucost.clock import ClockSpec, ManualClock, SpecClock, floor_second, require_utc

REAL = datetime(2026, 11, 30, 12, tzinfo=UTC)
SHOWN = datetime(2030, 1, 1, tzinfo=UTC)


def test_sixty_times_as_fast_an_hour_lasts_a_minute() -> None:
    spec = ClockSpec(origin_real=REAL, origin=SHOWN, speed=60)
    assert spec.at(REAL) == SHOWN
    assert spec.at(REAL + timedelta(minutes=1)) == SHOWN + timedelta(hours=1)
    assert spec.real_at(SHOWN + timedelta(hours=1)) == REAL + timedelta(minutes=1)


def test_sleeping_waits_real_seconds_over_speed() -> None:
    slept: list[float] = []
    clock = SpecClock(ClockSpec(origin_real=REAL, origin=SHOWN, speed=60), real_sleep=slept.append)
    clock.sleep(120)
    clock.sleep(-5)
    assert slept == [2.0, 0.0]


def test_without_a_spec_it_is_the_system_clock() -> None:
    before = datetime.now(UTC)
    shown = SpecClock().now()
    assert before - timedelta(seconds=1) <= shown <= datetime.now(UTC) + timedelta(seconds=1)
    assert shown.utcoffset() == timedelta(0)


@given(st.floats(min_value=-1e5, max_value=1e5), st.floats(min_value=0.01, max_value=100_000))
def test_a_spec_that_travelled_as_json_tells_the_same_time(real: float, speed: float) -> None:
    spec = ClockSpec(origin_real=REAL, origin=SHOWN, speed=speed)
    arrived = ClockSpec.model_validate_json(spec.model_dump_json())
    assert arrived == spec
    moment = REAL + timedelta(seconds=real)
    assert arrived.at(moment) == spec.at(moment)
    assert abs(spec.real_at(spec.at(moment)) - moment) <= timedelta(milliseconds=1)


def test_what_it_shows_is_utc_whatever_zone_the_origin_is_in() -> None:
    spec = ClockSpec(origin_real=REAL, origin=SHOWN.astimezone(timezone(timedelta(hours=8))))
    assert spec.at(REAL).utcoffset() == timedelta(0)
    assert spec.at(REAL) == SHOWN


@pytest.mark.parametrize("speed", [0, -1, float("nan"), 1e6])
def test_an_impossible_speed_is_refused_by_name(speed: float) -> None:
    with pytest.raises(ValidationError, match="speed"):
        ClockSpec(origin_real=REAL, origin=SHOWN, speed=speed)


def test_a_naive_origin_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="origin"):
        ClockSpec(origin_real=REAL, origin=SHOWN.replace(tzinfo=None))


def test_a_naive_time_is_refused_with_the_field_and_an_example() -> None:
    with pytest.raises(ValueError, match=r"deadline: got 2026-11-30T12:00:00 without a time zone.*\+00:00"):
        require_utc(REAL.replace(tzinfo=None), "deadline")
    with pytest.raises(ValueError, match="start"):
        ManualClock(REAL.replace(tzinfo=None))


def test_any_zone_becomes_utc() -> None:
    found = require_utc(REAL.astimezone(timezone(timedelta(hours=-5))), "deadline")
    assert (found, found.tzinfo) == (REAL, UTC)


def test_a_manual_clock_moves_when_told_and_never_back() -> None:
    clock = ManualClock(REAL)
    clock.sleep(90)
    clock.advance(timedelta(hours=1))
    assert clock.now() == REAL + timedelta(hours=1, seconds=90)
    with pytest.raises(ValueError, match="by: got -1 day"):
        clock.advance(timedelta(seconds=-1))


def test_cloud_times_have_whole_seconds() -> None:
    assert floor_second(REAL.replace(microsecond=999_999)) == REAL
