"""Capacities that come and go: by chance, but the same for everybody."""

from __future__ import annotations

import itertools
import statistics
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucost.rehearsal.market.availability import (
    MIN_SPELL_S,
    SEASON_S,
    Fading,
    GeneratedCapacity,
    Process,
    Span,
    common,
)
from gpucost.rehearsal.market.file import Durations, OnOff, load_market
from gpucost.rehearsal.market.market import Market, from_file
from gpucost.rehearsal.market.places import PoolKey

ROOT = Path(__file__).resolve().parents[3]
SMALL = ROOT / "include/market/small.json"
THREE = ROOT / "include/market/three_zones.json"
ORIGIN = datetime(2026, 11, 30, 16, 0, 0, tzinfo=UTC)
POOL = PoolKey("us-east-1a", "p3.2xlarge")
LAW = OnOff(
    lifetimes=Durations(short_hours=0.5, long_hours=10, short_share=0.6),
    outages=Durations(short_hours=0.5, long_hours=4, short_share=0.7),
)

durations = st.builds(
    Durations, short_hours=st.floats(0.05, 5), long_hours=st.floats(1, 500), short_share=st.floats(0, 1)
)


def small() -> Market:
    return from_file(load_market(SMALL), ORIGIN)


def test_the_small_market_sells_in_two_regions_with_a_source_for_every_price() -> None:
    file = load_market(SMALL)
    market = from_file(file, ORIGIN)
    assert market.regions == ["us-east-1", "us-west-2"]
    assert len(market.keys()) == 18
    assert len(market.keys("us-west-2")) == 9
    prices = [price for offer in file.instance_types for price in offer.on_demand.values()]
    prices += [pool.spot for pool in file.pools]
    assert all("catalog" in price.source and price.as_of for price in prices)
    assert {(quota.region, quota.lifecycle, quota.family) for quota in file.quotas} == set(
        itertools.product(("us-east-1", "us-west-2"), ("spot", "on-demand"), ("g", "p"))
    )


def test_the_market_of_the_demo_stays_calm() -> None:
    file = load_market(THREE)
    market = from_file(file, ORIGIN)
    for pool in file.pools:
        for lifecycle, count in (("spot", pool.capacity.spot), ("on-demand", pool.capacity.on_demand)):
            points = market.capacities(pool.key, lifecycle, ORIGIN, ORIGIN + timedelta(days=90))
            assert [point.count for point in points] == [count]


def test_capacity_runs_out_in_part_and_in_whole_and_comes_back() -> None:
    counts = [point.count for point in small().capacities(POOL, "spot", ORIGIN, ORIGIN + timedelta(days=30))]
    assert set(counts) == {0, 1, 2, 3}
    falls = [(before, after) for before, after in itertools.pairwise(counts) if after < before]
    assert (3, 2) in falls
    assert (2, 1) in falls
    assert (1, 0) in falls
    assert counts.count(0) > 10


def test_on_demand_is_refused_for_a_while_where_the_file_says_so() -> None:
    market = small()
    month = (ORIGIN, ORIGIN + timedelta(days=30))
    counts = [point.count for point in market.capacities(POOL, "on-demand", *month)]
    assert set(counts) == {0, 1}
    calm = market.capacities(PoolKey("us-west-2a", "g4dn.xlarge"), "on-demand", *month)
    assert [point.count for point in calm] == [3]


def test_a_shortage_takes_every_zone_of_its_region_and_no_other_region() -> None:
    market = small()
    hours = [ORIGIN + timedelta(hours=hour) for hour in range(24 * 60)]
    there = {
        key: [float(market.capacity(key, "spot", hour) > 0) for hour in hours]
        for key in market.pools
        if key.instance_type == "p3.2xlarge"
    }

    def alike(one: str, other: str) -> float:
        return statistics.correlation(there[PoolKey(one, "p3.2xlarge")], there[PoolKey(other, "p3.2xlarge")])

    assert alike("us-east-1a", "us-east-1c") > 0.2
    assert alike("us-west-2a", "us-west-2b") > 0.2
    assert abs(alike("us-east-1a", "us-west-2b")) < 0.15


def test_it_is_the_same_for_everybody_whatever_was_asked_before() -> None:
    early, late = small(), small()
    whole = early.capacities(POOL, "spot", ORIGIN, ORIGIN + timedelta(days=400))
    for days in (399.5, 0.3, 45.01, 16, 300):
        moment = ORIGIN + timedelta(days=days)
        expected = [point for point in whole if point.at <= moment][-1]
        assert late.capacity(POOL, "spot", moment) == expected.count
        tail = [point for point in whole if point.at > moment]
        assert late.capacities(POOL, "spot", moment, whole[-1].at)[1:] == tail


def test_another_seed_is_another_history() -> None:
    file = load_market(SMALL)
    other = from_file(file.model_copy(update={"seed": file.seed + 1}), ORIGIN)
    month = (ORIGIN, ORIGIN + timedelta(days=30))
    assert other.capacities(POOL, "spot", *month) != small().capacities(POOL, "spot", *month)


def test_a_look_far_ahead_draws_nothing_of_the_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original = Process._drawn

    def counted(self: Process, index: int) -> object:
        drawn.append(index)
        return original(self, index)

    monkeypatch.setattr(Process, "_drawn", counted)
    small().capacity(POOL, "spot", ORIGIN + timedelta(days=3650))
    assert len(drawn) == 2
    assert set(drawn) == {122}


def test_before_its_beginning_a_pool_holds_what_it_begins_with() -> None:
    capacity = GeneratedCapacity(Fading(3, 0.25), [Process(LAW, "seed")], ORIGIN)
    long_ago = ORIGIN - timedelta(days=100)
    assert capacity.at(long_ago) == capacity.at(ORIGIN)
    assert capacity.between(long_ago, ORIGIN)[0].count == capacity.at(ORIGIN)


@settings(max_examples=40, deadline=None)
@given(lifetimes=durations, outages=durations, full=st.integers(0, 50), fading=st.floats(0, 1), seed=st.text())
def test_capacity_lies_within_its_bounds_and_moves_at_every_point(
    lifetimes: Durations, outages: Durations, full: int, fading: float, seed: str
) -> None:
    law = OnOff(lifetimes=lifetimes, outages=outages)
    capacity = GeneratedCapacity(Fading(full, fading), [Process(law, seed), Process(law, seed + "2")], ORIGIN)
    points = capacity.between(ORIGIN, ORIGIN + timedelta(days=65))
    assert all(before.at < after.at for before, after in itertools.pairwise(points))
    assert all(0 <= point.count <= full and point.at.microsecond == 0 for point in points)
    if full:
        assert all(before.count != after.count for before, after in itertools.pairwise(points))


@settings(max_examples=40, deadline=None)
@given(lifetimes=durations, outages=durations, seed=st.text(), index=st.integers(0, 1000))
def test_spells_are_apart_within_their_season_and_none_is_very_short(
    lifetimes: Durations, outages: Durations, seed: str, index: int
) -> None:
    spans = Process(OnOff(lifetimes=lifetimes, outages=outages), seed).lifetimes(index)
    assert all(0 <= span.begin < span.end <= SEASON_S for span in spans)
    assert all(after.begin - before.end >= MIN_SPELL_S for before, after in itertools.pairwise(spans))
    assert all(span.end - span.begin >= MIN_SPELL_S for span in spans if span.end < SEASON_S)


def test_the_time_on_is_the_share_that_its_durations_give() -> None:
    process = Process(LAW, "share")
    on = sum(span.end - span.begin for index in range(60) for span in process.lifetimes(index))
    assert on / (60 * SEASON_S) == pytest.approx(LAW.available_share, abs=0.03)


def test_common_is_when_both_are_on() -> None:
    one = [Span(0, 10), Span(20, 30), Span(40, 50)]
    other = [Span(5, 25), Span(29, 41), Span(60, 70)]
    assert common(one, other) == [(5, 10), (20, 25), (29, 30), (40, 41)]
    assert common(one, []) == []
