"""The market file and the prices that move."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpucost.rehearsal.market.file import MarketError, load_market
from gpucost.rehearsal.market.market import from_file
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.market.prices import GeneratedPrices
from gpucost.rehearsal.market.series import PricePoint

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "include/market/three_zones.json"
ORIGIN = datetime(2026, 11, 30, 16, 0, 0, tzinfo=UTC)
POOL = PoolKey("us-east-1a", "g4dn.xlarge")
LONG = {"short_hours": 1, "long_hours": 10, "short_share": 0.5}
SHORTAGE = {"region": "us-east-1", "instance_type": "g4dn.xlarge", "lifetimes": LONG, "outages": LONG}
QUOTA = {"region": "us-east-1", "lifecycle": "spot", "family": "g", "vcpus": 8}


def broken(tmp_path: Path, change: Any) -> Path:
    document = json.loads(FILE.read_text())
    change(document)
    path = tmp_path / "market.json"
    path.write_text(json.dumps(document))
    return path


def test_the_shipped_market_names_a_source_for_every_price() -> None:
    market = load_market(FILE)
    assert {zone.name: zone.zone_id for zone in market.zones} == {
        "us-east-1a": "use1-az6",
        "us-east-1b": "use1-az1",
        "us-east-1c": "use1-az2",
    }
    assert len(market.pools) == 9
    prices = [price for offer in market.instance_types for price in offer.on_demand.values()]
    prices += [pool.spot for pool in market.pools]
    assert all("catalog" in price.source and price.as_of for price in prices)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d["pools"][0]["spot"].update(usd_per_hour="-1"), "pools.0.spot.usd_per_hour"),
        (lambda d: d["pools"][0]["spot"].update(usd_per_hour=0.2), "pools.0.spot.usd_per_hour"),
        (lambda d: d["pools"][0].update(zone="us-east-1z"), "pools.0.zone"),
        (lambda d: d["pools"][1].update(instance_type="x9.huge"), "pools.1.instance_type"),
        (lambda d: d["pools"][0]["spot"].update(usd_per_hour="9.99"), "at most the on-demand price"),
        (lambda d: d["pools"].append(d["pools"][0]), "listed twice"),
        (lambda d: d["pools"][0]["capacity"].update(spot=-1), "pools.0.capacity.spot"),
        (lambda d: d["instance_types"][0].update(on_demand={}), "no on_demand price in us-east-1"),
        (lambda d: d["zones"][0].update(name="mars"), "zones.0.name"),
        (lambda d: d.update(shortages=[SHORTAGE | {"region": "eu-west-9"}]), "shortages.0.region"),
        (lambda d: d.update(shortages=[SHORTAGE | {"instance_type": "x9.huge"}]), "shortages.0.instance_type"),
        (lambda d: d.update(shortages=[SHORTAGE, SHORTAGE]), "shortages.1: .* listed twice"),
        (lambda d: d["pools"][0].update(availability={"lifetimes": LONG}), "pools.0.availability.outages"),
        (lambda d: d.update(quotas=[QUOTA | {"region": "eu-west-9"}]), "quotas.0.region"),
        (lambda d: d.update(currency="EUR"), "currency"),
        (lambda d: d.pop("seed"), "seed"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_field(tmp_path: Path, change: Any, field: str) -> None:
    with pytest.raises(MarketError, match=field):
        load_market(broken(tmp_path, change))


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MarketError, match="--market"):
        load_market(tmp_path / "none.json")


def test_prices_are_the_same_for_everybody_whatever_was_asked_before() -> None:
    one, other = from_file(load_market(FILE), ORIGIN), from_file(load_market(FILE), ORIGIN)
    moments = [ORIGIN + timedelta(hours=h) for h in (-40, -3, 0, 7, 100)]
    forwards = [one.prices(POOL).at(moment) for moment in moments]
    backwards = [other.prices(POOL).at(moment) for moment in reversed(moments)]
    assert forwards == backwards[::-1]


def test_each_pool_moves_on_its_own_within_its_bounds_in_steps_of_a_hundredth_cent() -> None:
    market = from_file(load_market(FILE), ORIGIN)
    seen = {}
    for pool in market.pools:
        points = market.prices(pool).between(ORIGIN - timedelta(hours=48), ORIGIN + timedelta(hours=200))
        assert len(points) > 20
        assert all(b.at - a.at >= timedelta(seconds=300) for a, b in itertools.pairwise(points))
        assert all(a.price != b.price for a, b in itertools.pairwise(points))
        for point in points:
            assert point.at.microsecond == 0
            assert point.price == point.price.quantize(Decimal("0.0001"))
            assert 0 < point.price <= market.on_demand(pool)
        seen[pool] = [(point.at, point.price) for point in points]
    assert len({tuple(series) for series in seen.values()}) == len(seen)


def test_history_reaches_back_a_day_at_least_and_not_further_than_it_says() -> None:
    series = from_file(load_market(FILE), ORIGIN).prices(POOL)
    assert series.start <= ORIGIN - timedelta(hours=24)
    with pytest.raises(ValueError, match="moment"):
        series.at(series.start - timedelta(seconds=1))


def test_between_begins_with_the_price_in_force() -> None:
    series = from_file(load_market(FILE), ORIGIN).prices(POOL)
    second = series.between(series.start, ORIGIN)[1]
    just_before = second.at - timedelta(seconds=1)
    assert series.at(just_before) != series.at(second.at)
    points = series.between(just_before, second.at)
    assert [point.price for point in points] == [series.at(just_before), second.price]
    assert series.between(second.at, second.at) == [second]
    assert series.between(ORIGIN, ORIGIN - timedelta(hours=1)) == []


def test_prices_go_on_from_season_to_season_and_are_the_same_for_who_comes_late() -> None:
    early, late = from_file(load_market(FILE), ORIGIN), from_file(load_market(FILE), ORIGIN)
    whole = early.prices(POOL).between(ORIGIN, ORIGIN + timedelta(days=840))
    assert all(b.at - a.at >= timedelta(seconds=300) for a, b in itertools.pairwise(whole))
    assert all(a.price != b.price for a, b in itertools.pairwise(whole))
    assert len({point.price for point in whole[-360:]}) > 50, "prices still move in the last month"
    steps = [float(abs(b.price / a.price - 1)) for a, b in itertools.pairwise(whole)]
    assert max(steps) < 0.35, "no price jumps by a third"
    for days in (839.5, 30, 29.9, 28, 500):
        moment = ORIGIN + timedelta(days=days)
        expected = [point for point in whole if point.at <= moment][-1]
        assert late.prices(POOL).at(moment) == expected.price
        tail = [point for point in whole if moment < point.at]
        assert late.prices(POOL).between(moment, whole[-1].at)[1:] == tail


def test_a_look_far_ahead_makes_no_prices_of_the_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    series = from_file(load_market(FILE), ORIGIN).prices(POOL)
    made: list[int] = []
    original = GeneratedPrices._made

    def counted(self: GeneratedPrices, index: int) -> list[PricePoint]:
        made.append(index)
        return original(self, index)

    monkeypatch.setattr(GeneratedPrices, "_made", counted)
    now = ORIGIN + timedelta(days=840)
    series.at(now)
    series.between(now - timedelta(days=90), now)
    assert len(made) <= 4
