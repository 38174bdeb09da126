"""Prices and types as EC2's API gives them; a zone without a price is unknown, not free."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpucost.market.pool import CapacityType
from gpucost.market.sources.aws import instance_types, spot_history, spot_quotes, zone_ids
from tests.fakes.provider import T4, pool
from tests.fakes.rooms import START


class Ec2Client:
    """Answers in pages, and keeps what it was asked."""

    def __init__(self, **pages: list[dict[str, Any]]) -> None:
        self._pages = pages
        self.asked: dict[str, Any] = {}

    def get_paginator(self, name: str) -> Any:
        client = self

        class Paginator:
            def paginate(self, **asked: Any) -> Iterator[dict[str, Any]]:
                client.asked = asked
                return iter(client._pages[name])

        return Paginator()

    def describe_availability_zones(self) -> dict[str, Any]:
        return self._pages["zones"][0]


def point(zone: str, price: str, minutes_ago: int, instance_type: str = T4.name) -> dict[str, Any]:
    return {
        "AvailabilityZone": f"us-east-1{zone}",
        "InstanceType": instance_type,
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": price,
        "Timestamp": START - timedelta(minutes=minutes_ago),
    }


def test_zones_are_known_by_their_ids() -> None:
    zones = {"AvailabilityZones": [{"ZoneName": "us-east-1a", "ZoneId": "use1-az6"}]}
    assert zone_ids(Ec2Client(zones=[zones])) == {"us-east-1a": "use1-az6"}


def test_the_newest_price_of_each_pool_counts_over_all_pages() -> None:
    client = Ec2Client(
        describe_spot_price_history=[
            {"SpotPriceHistory": [point("a", "0.310000", 90), point("b", "0.350000", 10)]},
            {
                "SpotPriceHistory": [
                    point("a", "0.300000", 30),
                    point("d", "0.1", 5),
                    point("a", "9", 1, "p4d.24xlarge"),
                ]
            },
        ]
    )
    quotes = spot_quotes(client, [pool("a"), pool("b"), pool("c")], {T4.name: T4}, START)
    assert {quote.pool.zone_id: quote.price.amount for quote in quotes} == {
        "use1-az-a": Decimal("0.300000"),
        "use1-az-b": Decimal("0.350000"),
    }, "zone c has no price: it is unknown, not free"
    assert quotes[0].as_of == START - timedelta(minutes=30)
    assert quotes[0].source == "AWS DescribeSpotPriceHistory"
    assert (client.asked["StartTime"], client.asked["ProductDescriptions"]) == (START, ["Linux/UNIX"])


def test_on_demand_pools_get_no_spot_price() -> None:
    client = Ec2Client(describe_spot_price_history=[{"SpotPriceHistory": [point("a", "0.3", 1)]}])
    assert spot_quotes(client, [pool("a", CapacityType.ON_DEMAND)], {T4.name: T4}, START) == []


def test_a_price_history_is_oldest_first() -> None:
    client = Ec2Client(
        describe_spot_price_history=[{"SpotPriceHistory": [point("a", "0.3", 5), point("a", "0.2", 50)]}]
    )
    found = spot_history(client, pool("a"), START - timedelta(hours=1), START)
    assert [str(p.price.amount) for p in found] == ["0.2", "0.3"]
    assert client.asked["AvailabilityZone"] == "us-east-1a"


GPU = {
    "InstanceType": "g4dn.12xlarge",
    "VCpuInfo": {"DefaultVCpus": 48},
    "MemoryInfo": {"SizeInMiB": 196608},
    "GpuInfo": {"Gpus": [{"Name": "T4", "Count": 4, "MemoryInfo": {"SizeInMiB": 16384}}]},
}


def test_what_a_type_has() -> None:
    cpu = {key: value for key, value in GPU.items() if key != "GpuInfo"} | {"InstanceType": "m5.large"}
    client = Ec2Client(describe_instance_types=[{"InstanceTypes": [GPU]}, {"InstanceTypes": [cpu]}])
    found = instance_types(client, ["g4dn.12xlarge", "m5.large"])
    four = found["g4dn.12xlarge"]
    assert (four.gpu_kind, four.gpu_count, four.gpu_memory_gib, four.vcpus, four.memory_gib) == ("T4", 4, 16, 48, 192)
    assert found["m5.large"].gpu_count == 0


def test_a_type_that_ec2_does_not_know_is_named() -> None:
    client = Ec2Client(describe_instance_types=[{"InstanceTypes": [GPU]}])
    with pytest.raises(ValueError, match=r"EC2 does not know g4dn\.huge; mend the site's instance_types"):
        instance_types(client, ["g4dn.12xlarge", "g4dn.huge"])
