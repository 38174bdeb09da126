"""Prices, types, zones and placement scores of the rehearsal cloud, by boto3."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

from tests.system.rehearsal import SLEEPER, TYPE, ZONES, Cloud, expect_error

G5 = "g5.xlarge"
P3 = "p3.2xlarge"


def test_price_history_reaches_back_and_is_the_same_over_pages(cloud: Cloud) -> None:
    now = cloud.now()
    question = {
        "InstanceTypes": [TYPE],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": now - timedelta(hours=24),
        "EndTime": now,
    }
    whole = cloud.ec2.describe_spot_price_history(**question)["SpotPriceHistory"]
    paginator = cloud.ec2.get_paginator("describe_spot_price_history")
    pages = list(paginator.paginate(**question, PaginationConfig={"PageSize": 5}))
    assert len(pages) > 2
    assert [row for page in pages for row in page["SpotPriceHistory"]] == whole
    assert {row["AvailabilityZone"] for row in whole} == set(ZONES)
    times = [row["Timestamp"] for row in whole]
    assert times == sorted(times, reverse=True)
    assert len({row["SpotPrice"] for row in whole}) > 5, "prices move"
    assert all(Decimal("0.05") < Decimal(row["SpotPrice"]) <= Decimal("0.526") for row in whole)


def test_start_time_now_gives_the_price_in_force_of_each_zone(cloud: Cloud) -> None:
    now = cloud.now()
    rows = cloud.ec2.describe_spot_price_history(
        InstanceTypes=[TYPE, "g5.xlarge"], ProductDescriptions=["Linux/UNIX"], StartTime=now, EndTime=now
    )["SpotPriceHistory"]
    assert {(row["InstanceType"], row["AvailabilityZone"]) for row in rows} == {
        (kind, zone) for kind in (TYPE, "g5.xlarge") for zone in ZONES
    }
    assert all(row["Timestamp"] <= now for row in rows)
    one = cloud.ec2.describe_spot_price_history(InstanceTypes=[TYPE], AvailabilityZone=ZONES[0], StartTime=now)
    assert {row["AvailabilityZone"] for row in one["SpotPriceHistory"]} == {ZONES[0]}
    windows = cloud.ec2.describe_spot_price_history(InstanceTypes=[TYPE], ProductDescriptions=["Windows"])
    assert windows["SpotPriceHistory"] == []


def test_types_zones_and_other_services_are_there(cloud: Cloud) -> None:
    types = cloud.ec2.describe_instance_types(InstanceTypes=[TYPE, "g5.xlarge", "p3.2xlarge"])["InstanceTypes"]
    gpus = {one["InstanceType"]: one["GpuInfo"]["Gpus"][0]["Name"] for one in types}
    assert gpus == {TYPE: "T4", "g5.xlarge": "A10G", "p3.2xlarge": "V100"}
    assert all(one["VCpuInfo"]["DefaultVCpus"] >= 4 and one["MemoryInfo"]["SizeInMiB"] >= 16384 for one in types)
    zones = cloud.ec2.describe_availability_zones()["AvailabilityZones"]
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in zones}
    assert {name: ids[name] for name in ZONES} == dict(zip(ZONES, ["use1-az6", "use1-az1", "use1-az2"], strict=True))
    assert cloud.client("sts").get_caller_identity()["Account"] == "123456789012"


def test_price_filters_choose_zones_and_changes(cloud: Cloud) -> None:
    now = cloud.now()

    def rows(*filters: tuple[str, str], **more: Any) -> list[Any]:
        wanted = [{"Name": name, "Values": [value]} for name, value in filters]
        answer = cloud.ec2.describe_spot_price_history(
            Filters=wanted, StartTime=now - timedelta(hours=24), EndTime=now, **more
        )
        return list(answer["SpotPriceHistory"])

    every = rows(("instance-type", TYPE))
    assert {row["AvailabilityZone"] for row in rows(("availability-zone-id", "use1-az1"))} == {ZONES[1]}
    assert rows(("product-description", "Windows")) == []
    price = every[0]["SpotPrice"]
    assert rows(("instance-type", TYPE), ("spot-price", price)) == [row for row in every if row["SpotPrice"] == price]
    hour = f"{every[0]['Timestamp']:%Y-%m-%dT%H:}*"
    expected = [row for row in every if f"{row['Timestamp']:%Y-%m-%dT%H}" == hour[:13]]
    assert rows(("instance-type", TYPE), ("timestamp", hour)) == expected
    expect_error("InvalidParameterValue", lambda: rows(("no-such-filter", "x")))
    expect_error("InvalidParameterCombination", lambda: rows(AvailabilityZone=ZONES[0], AvailabilityZoneId="use1-az1"))
    expect_error("InvalidParameterValue", lambda: rows(MaxResults=1001))


def scores(cloud: Cloud, types: list[str], target: int, **more: Any) -> dict[str, int]:
    answer = cloud.ec2.get_spot_placement_scores(InstanceTypes=types, TargetCapacity=target, **more)
    return {one.get("AvailabilityZoneId", one["Region"]): one["Score"] for one in answer["SpotPlacementScores"]}


def test_placement_scores_follow_what_is_free(cloud: Cloud, no_leftovers: None) -> None:
    types = [TYPE, G5, P3]
    # nine machines are free in each of three zones
    assert scores(cloud, types, 1, RegionNames=["us-east-1"]) == {"us-east-1": 10}
    assert scores(cloud, types, 27, RegionNames=["us-east-1"]) == {"us-east-1": 9}
    assert scores(cloud, types, 270, RegionNames=["us-east-1"]) == {"us-east-1": 1}
    assert scores(cloud, types, 9, RegionNames=["us-east-1"], SingleAvailabilityZone=True) == {
        "use1-az6": 9, "use1-az1": 9, "use1-az2": 9
    }  # fmt: skip
    cloud.buy(cloud.template(SLEEPER), zones=ZONES[:1], count=4)
    after = scores(cloud, types, 9, RegionNames=["us-east-1"], SingleAvailabilityZone=True)
    assert after["use1-az6"] < after["use1-az1"] == 9
    assert scores(cloud, types, 1, RegionNames=["ap-south-2"]) == {"ap-south-2": 1}, "nothing is sold there"


def test_one_or_two_types_never_score_high(cloud: Cloud) -> None:
    assert set(scores(cloud, [TYPE], 1).values()) == {3}
    assert set(scores(cloud, [TYPE, G5], 1).values()) == {3}


def test_placement_scores_count_in_other_units_and_refuse_nonsense(cloud: Cloud) -> None:
    types = [TYPE, G5, P3]
    # 12 * 4 + 9 * 4 + 6 * 8 vCPUs
    assert scores(cloud, types, 132, TargetCapacityUnitType="vcpu", RegionNames=["us-east-1"]) == {"us-east-1": 9}
    assert scores(cloud, types, 133, TargetCapacityUnitType="vcpu", RegionNames=["us-east-1"]) == {"us-east-1": 8}
    expect_error("InvalidParameterValue", lambda: scores(cloud, ["zz.nonexist"], 1))
    expect_error("InvalidParameterValue", lambda: scores(cloud, types, 1, RegionNames=["nowhere"]))
    expect_error("MissingParameter", lambda: cloud.ec2.get_spot_placement_scores(TargetCapacity=1))
