"""Recorded histories, replayed: what is seen equals the files."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.rehearsal.market.catalogue import known
from gpucost.rehearsal.market.file import MarketError
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.opening import open_market
from gpucost.rehearsal.market.places import PoolKey

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared/traces"
ORIGIN = datetime(2026, 11, 30, 16, 0, 0, tzinfo=UTC)
GAP = 200
V100 = PoolKey("us-west-2a", "p3.2xlarge")
H100 = PoolKey("us-central1-a", "a3-highgpu-8g")
G2 = PoolKey("us-east-1a", "g2.2xlarge")

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="recorded histories are not part of the project: no ../shared/traces beside it"
)


def write_ticks(folder: Path, key: PoolKey, data: list[int], prices: list[Any], **metadata: Any) -> Path:
    """A trace file as others write it: prices are JSON numbers; `metadata` replaces, None leaves out."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"gap_seconds": GAP, "zone": key.zone, "gpu": "V100", "count": 1, "instance_type": key.instance_type}
    meta |= {"on_demand_usd_per_hour": 3.06} | metadata
    path = folder / f"{key.zone}_{key.instance_type}.json"
    document = {"metadata": {k: v for k, v in meta.items() if v is not None}, "data": data, "prices": prices}
    path.write_text(json.dumps(document))
    return path


def write_history(folder: Path, name: str, rows: list[tuple[str, str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("timestamp,spot_usd_per_hour\n" + "".join(f"{at},{price}\n" for at, price in rows))
    return path


def opened(folder: Path, offset_s: int = 0, **capacities: int) -> Market:
    return open_market(folder, ORIGIN, offset=timedelta(seconds=offset_s), **capacities)


def after(seconds: float) -> datetime:
    return ORIGIN + timedelta(seconds=seconds)


def test_each_tick_holds_until_the_next(tmp_path: Path) -> None:
    write_ticks(tmp_path, V100, [1, 0, 1], [0.918, 0.91805, 0.92])
    market = opened(tmp_path, spot_capacity=7, on_demand_capacity=5)
    for second, count, price in [
        (0, 7, "0.918"), (199, 7, "0.918"), (200, 0, "0.91805"), (399, 0, "0.91805"), (400, 7, "0.92"), (599, 7, "0.92")
    ]:  # fmt: skip
        assert market.capacity(V100, "spot", after(second)) == count
        assert market.prices(V100).at(after(second)) == Decimal(price)
        assert market.capacity(V100, "on-demand", after(second)) == 5
    assert market.on_demand(V100) == Decimal("3.06")


def test_only_changes_are_told(tmp_path: Path) -> None:
    write_ticks(tmp_path, V100, [1, 1, 0, 0], [0.918, 0.918, 0.918, 0.92])
    market = opened(tmp_path, spot_capacity=1)
    points = market.prices(V100).between(after(10), after(700))
    assert [(point.at, point.price) for point in points] == [
        (after(0), Decimal("0.918")),
        (after(600), Decimal("0.92")),
    ]
    capacities = market.capacities(V100, "spot", after(10), after(700))
    assert [(point.at, point.count) for point in capacities] == [(after(10), 1), (after(400), 0)]


def test_the_part_before_the_offset_is_the_history(tmp_path: Path) -> None:
    write_ticks(tmp_path, V100, [0, 1, 1, 0], [0.1, 0.2, 0.3, 0.4])
    market = opened(tmp_path, offset_s=2 * GAP, spot_capacity=1)
    prices = market.prices(V100)
    assert prices.start == after(-2 * GAP)
    assert [point.price for point in prices.between(after(-86400), after(0))] == [Decimal(f"0.{n}") for n in (1, 2, 3)]
    with pytest.raises(ValueError, match="moment"):
        prices.at(after(-2 * GAP - 1))
    assert market.capacity(V100, "spot", after(-2 * GAP - 1)) == 0
    assert market.capacity(V100, "spot", after(GAP)) == 0


def test_after_its_end_a_trace_begins_again(tmp_path: Path) -> None:
    write_ticks(tmp_path, V100, [1, 0, 0], [0.1, 0.2, 0.1])
    market = opened(tmp_path, offset_s=GAP, spot_capacity=1)
    points = market.prices(V100).between(after(0), after(6 * GAP))
    assert [((point.at - ORIGIN).total_seconds() / GAP, str(point.price)) for point in points] == [
        (0, "0.2"),
        (1, "0.1"),
        (3, "0.2"),
        (4, "0.1"),
        (6, "0.2"),
    ]
    far = after(GAP * (3 * 1_000_000 + 2))
    assert market.capacity(V100, "spot", far) == 1
    assert market.capacity(V100, "spot", far + timedelta(seconds=GAP)) == 0


@given(
    offset=st.integers(0, 5000),
    moment=st.integers(0, 10**9),
    data=st.lists(st.integers(0, 1), min_size=1, max_size=9),
)
def test_any_moment_shows_the_tick_that_it_falls_on(
    tmp_path_factory: pytest.TempPathFactory, offset: int, moment: int, data: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("traces")
    prices = [round(0.5 + index / 10, 1) for index in range(len(data))]
    write_ticks(folder, V100, data, prices)
    market = opened(folder, offset_s=offset, spot_capacity=3)
    tick = (offset + moment) // GAP % len(data)
    assert market.capacity(V100, "spot", after(moment)) == 3 * data[tick]
    assert market.prices(V100).at(after(moment)) == Decimal(str(prices[tick]))


def test_an_unknown_price_is_the_last_known_one(tmp_path: Path) -> None:
    write_ticks(tmp_path, V100, [1] * 4, [None, 0.5, float("nan"), 0.6])
    prices = opened(tmp_path).prices(V100)
    assert [str(prices.at(after(tick * GAP))) for tick in range(4)] == ["0.5", "0.5", "0.5", "0.6"]


def test_price_histories_of_one_folder_begin_together_and_are_always_available(tmp_path: Path) -> None:
    write_history(
        tmp_path,
        "g2.2xlarge_us-east-1a.csv",
        [("2015-03-11 16:00:00+00:00", "0.0652"), ("2015-03-11 17:30:00Z", "6.0")],
    )
    write_history(
        tmp_path,
        "g2.2xlarge_us-east-1b.csv",
        [
            ("2015-03-11T16:10:00+00:00", "0.07"),
            ("2015-03-11T16:20:00+00:00", ""),
            ("2015-03-11T16:30:00+00:00", "0.07"),
        ],
    )
    market = opened(tmp_path, spot_capacity=2)
    a, b = market.prices(G2), market.prices(PoolKey("us-east-1b", "g2.2xlarge"))
    seen = [((point.at - ORIGIN).total_seconds() / 60, str(point.price)) for point in a.between(ORIGIN, after(9000))]
    assert seen == [(0, "0.0652"), (90, "6.0"), (120, "0.0652")]
    seen = [((point.at - ORIGIN).total_seconds() / 60, str(point.price)) for point in b.between(ORIGIN, after(7000))]
    assert seen == [(0, "0.07"), (10, "0.07"), (30, "0.07")], "rows of the file, also those that change nothing"
    assert {point.count for point in market.capacities(G2, "spot", ORIGIN, after(10**7))} == {2}
    assert market.on_demand(G2) == Decimal("0.65")


def test_folders_in_a_folder_are_replayed_together(tmp_path: Path) -> None:
    write_ticks(tmp_path / "aws", V100, [1], [0.918])
    write_ticks(tmp_path / "gcp", H100, [1], [18.979], gpu="H100", count=8, on_demand_usd_per_hour=82.5254)
    write_history(tmp_path / "old", "g2.2xlarge_us-east-1a.csv", [("2015-03-11 16:00:00+00:00", "0.0652")])
    market = opened(tmp_path)
    assert market.keys() == [V100, H100, G2]
    assert market.zone_ids("us-west-2") == {"us-west-2a": "usw2-az2"}
    assert market.zone_id("us-central1-a") == "us-central1-a"
    described = {offer.name: offer.describe for offer in market.types}
    assert described["a3-highgpu-8g"] is not None
    assert described["a3-highgpu-8g"]["GpuInfo"]["Gpus"][0]["Count"] == 8
    assert "metadata" in market.types[0].on_demand["us-west-2"].source


def test_a_folder_can_bring_its_own_list(tmp_path: Path) -> None:
    other = PoolKey("eu-north-9a", "z9.huge")
    write_ticks(tmp_path, other, [1], [1.5], on_demand_usd_per_hour=None, gpu="B900", count=4)
    price = {"usd_per_hour": "9.5", "source": "their page", "as_of": "2026"}
    listed = {"name": "z9.huge", "gpu": "4x B900", "on_demand": {"eu-north-9": price}, "describe": {"VCpuInfo": {}}}
    path = tmp_path / "list_prices.json"
    path.write_text(json.dumps({"zones": {"eu-north-9a": "eun9-az3"}, "instance_types": [listed]}))
    market = opened(tmp_path)
    assert market.on_demand(other) == Decimal("9.5")
    assert market.zone_id("eu-north-9a") == "eun9-az3"
    assert market.types[0].describe == {"VCpuInfo": {}}
    path.write_text(json.dumps({"instance_types": [listed | {"on_demand": {"eu-north-9": {"usd_per_hour": "-1"}}}]}))
    with pytest.raises(MarketError, match=r"list_prices.json.*on_demand.eu-north-9.usd_per_hour"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("data", "prices", "metadata", "told"),
    [
        ([1, 2], [0.5, 0.5], {}, r"data\.1"),
        ([1, 1], [0.5, 0], {}, r"prices\.1.*greater than 0"),
        ([1, 1], [0.5, "dear"], {}, r"prices\.1"),
        ([1, 1], [0.5], {}, r"prices: got 1 of them, expected 2"),
        ([1], [None], {}, "only nulls"),
        ([], [], {}, "data"),
        ([1], [0.5], {"gap_seconds": 0}, r"metadata\.gap_seconds"),
        ([1], [0.5], {"zone": "mars"}, r"metadata\.zone.*mars"),
        ([1], [0.5], {"instance_type": None}, r"metadata\.instance_type"),
        ([1], [0.5], {"on_demand_usd_per_hour": None}, r"list_prices\.json"),
        ([2] * 1000, [0.5] * 1000, {}, "and 992 more"),
    ],
)
def test_a_wrong_trace_is_refused_by_its_path_and_field(
    tmp_path: Path, data: list[int], prices: list[Any], metadata: dict[str, Any], told: str
) -> None:
    path = write_ticks(tmp_path, V100, data, prices, **metadata)
    with pytest.raises(MarketError, match=told) as caught:
        opened(tmp_path)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "rows", "told"),
    [
        ("g2.2xlarge.csv", [("2015-03-11 16:00:00+00:00", "1")], "TYPE_ZONE.csv"),
        ("_us-east-1a.csv", [("2015-03-11 16:00:00+00:00", "1")], "no type"),
        ("g2.2xlarge_us-east-1a.csv", [("2015-03-11 16:00:00", "1")], "line 2.*timestamp"),
        ("g2.2xlarge_us-east-1a.csv", [("2015-03-11 16:00:00Z", "free")], "line 2.*spot_usd_per_hour"),
        ("g2.2xlarge_us-east-1a.csv", [("2015-03-11 16:00:00Z", "1"), ("2015-03-11 15:00:00Z", "1")], "line 3.*later"),
        ("g2.2xlarge_us-east-1a.csv", [], "no price"),
    ],
)
def test_a_wrong_history_is_refused_by_its_path_and_line(
    tmp_path: Path, name: str, rows: list[tuple[str, str]], told: str
) -> None:
    write_history(tmp_path, name, rows)
    with pytest.raises(MarketError, match=told) as caught:
        opened(tmp_path)
    assert name in str(caught.value)


def test_a_folder_that_cannot_be_a_market_says_why(tmp_path: Path) -> None:
    with pytest.raises(MarketError, match="holds no trace"):
        opened(tmp_path)
    with pytest.raises(MarketError, match=r"not a trace.*by its own path"):
        opened(ROOT / "include/market")
    write_ticks(tmp_path / "a", V100, [1], [1.0])
    with pytest.raises(MarketError, match="offset: got -1 day"):
        opened(tmp_path, offset_s=-86400)
    with pytest.raises(MarketError, match=r"spot_capacity.*got 0"):
        opened(tmp_path, spot_capacity=0)
    write_ticks(tmp_path / "b", V100, [1], [1.0])
    with pytest.raises(MarketError, match=r"both tell of p3.2xlarge in us-west-2a"):
        opened(tmp_path)
    write_ticks(tmp_path / "b", PoolKey("us-west-2b", "p3.2xlarge"), [1], [1.0], on_demand_usd_per_hour=4)
    (tmp_path / "b/us-west-2a_p3.2xlarge.json").unlink()
    with pytest.raises(MarketError, match="expected one list price in us-west-2"):
        opened(tmp_path)


def test_a_market_file_takes_none_of_what_only_traces_need() -> None:
    path = ROOT / "include/market/three_zones.json"
    assert open_market(path, ORIGIN).regions == ["us-east-1"]
    with pytest.raises(MarketError, match="offset: got"):
        open_market(path, ORIGIN, offset=timedelta(hours=1))
    with pytest.raises(MarketError, match="spot_capacity: got 3"):
        open_market(path, ORIGIN, spot_capacity=3)
    with pytest.raises(MarketError, match="--market"):
        open_market(path.with_name("none.json"), ORIGIN)


def test_our_zone_ids_are_those_that_the_api_shows() -> None:
    zones = pytest.importorskip("moto.ec2.models.availability_zones_and_regions").RegionsAndZonesBackend.zones
    shown = {zone.name: zone.zone_id for region in zones.values() for zone in region}
    assert known().zones["us-east-1a"] == "use1-az6"
    assert {name: shown.get(name) for name in known().zones} == known().zones


@needs_shared
def test_every_tick_of_the_recorded_histories_is_seen_as_it_is_in_the_files() -> None:
    offset = timedelta(days=2, seconds=77)
    market = open_market(SHARED, ORIGIN, offset=offset, spot_capacity=4)
    files = sorted(SHARED.rglob("*.json"))
    assert files
    for path in files:
        document = json.loads(path.read_text(), parse_float=str)
        meta = document["metadata"]
        key, gap = PoolKey(meta["zone"], meta["instance_type"]), timedelta(seconds=meta["gap_seconds"])
        assert str(market.on_demand(key)) == meta["on_demand_usd_per_hour"]
        ticks = len(document["data"])
        for tick in (*range(0, ticks, 97), ticks - 1):
            for moment in (ORIGIN - offset + tick * gap, ORIGIN - offset + (tick + 1) * gap - timedelta(seconds=1)):
                assert market.capacity(key, "spot", moment) == 4 * document["data"][tick]
                assert str(market.prices(key).at(moment)) == document["prices"][tick]


@needs_shared
def test_every_row_of_the_recorded_price_histories_is_seen_at_its_time() -> None:
    market = open_market(SHARED, ORIGIN)
    paths = sorted(SHARED.rglob("*.csv"))
    assert paths
    tables = {path: list(csv.DictReader(path.read_text().splitlines())) for path in paths}
    begin = min(datetime.fromisoformat(rows[0]["timestamp"]) for rows in tables.values())
    for path, rows in tables.items():
        instance_type, _, zone = path.stem.partition("_")
        expected = [(datetime.fromisoformat(row["timestamp"]) - begin, row["spot_usd_per_hour"]) for row in rows]
        points = market.prices(PoolKey(zone, instance_type)).between(ORIGIN, ORIGIN + expected[-1][0])
        seen = [(point.at - ORIGIN, str(point.price)) for point in points]
        assert seen[-len(expected) :] == expected
        assert len(seen) - len(expected) in {0, 1}, "at most the price before the first row is added"


def test_a_folder_that_is_away_is_said_to_be_away_whatever_else_is_given(tmp_path: Path) -> None:
    with pytest.raises(MarketError, match="cannot read"):
        open_market(tmp_path / "none", ORIGIN, offset=timedelta(hours=48), spot_capacity=3)
