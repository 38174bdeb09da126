"""Prices and instance types from EC2's own API.

DescribeSpotPriceHistory with StartTime = now answers the price in force; zone names differ per account, so
that pools carry zone ids; a zone without a price is unknown, not free.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpucost.market.pool import CapacityType, InstanceType, Pool
from gpucost.market.quote import PricePoint, Quote
from gpucost.money import InstanceHourPrice

PRODUCT = "Linux/UNIX"
SOURCE = "AWS DescribeSpotPriceHistory"


def zone_ids(client: Any) -> dict[str, str]:
    """Zone name in this account -> zone id, of the client's region."""
    answer = client.describe_availability_zones()
    return {zone["ZoneName"]: zone["ZoneId"] for zone in answer["AvailabilityZones"]}


def instance_types(client: Any, names: Sequence[str]) -> dict[str, InstanceType]:
    """What machines of these types have.

    Raises:
        ValueError: EC2 does not know one of them.
    """
    found: dict[str, InstanceType] = {}
    for page in client.get_paginator("describe_instance_types").paginate(InstanceTypes=list(names)):
        for item in page["InstanceTypes"]:
            gpus = item.get("GpuInfo", {}).get("Gpus", [])
            found[item["InstanceType"]] = InstanceType(
                name=item["InstanceType"],
                gpu_kind=gpus[0]["Name"] if gpus else "",
                gpu_count=sum(gpu["Count"] for gpu in gpus),
                gpu_memory_gib=gpus[0]["MemoryInfo"]["SizeInMiB"] / 1024 if gpus else 0,
                vcpus=item["VCpuInfo"]["DefaultVCpus"],
                memory_gib=item["MemoryInfo"]["SizeInMiB"] / 1024,
            )
    missing = sorted(set(names) - set(found))
    if missing:
        raise ValueError(f"instance_types: EC2 does not know {', '.join(missing)}; mend the site's instance_types")
    return found


def spot_quotes(client: Any, pools: Sequence[Pool], types: dict[str, InstanceType], at: datetime) -> list[Quote]:
    """The spot price in force at `at` of each pool that has one."""
    wanted = {(pool.zone, pool.instance_type): pool for pool in pools if pool.capacity_type is CapacityType.SPOT}
    newest: dict[tuple[str, str], PricePoint] = {}
    pages = client.get_paginator("describe_spot_price_history").paginate(
        StartTime=at,
        EndTime=at,
        InstanceTypes=sorted({pool.instance_type for pool in pools}),
        ProductDescriptions=[PRODUCT],
    )
    for page in pages:
        for item in page["SpotPriceHistory"]:
            place = (item["AvailabilityZone"], str(item["InstanceType"]))
            point = PricePoint(since=item["Timestamp"], price=InstanceHourPrice(amount=Decimal(item["SpotPrice"])))
            if place in wanted and (place not in newest or point.since > newest[place].since):
                newest[place] = point
    return [
        Quote(
            pool=wanted[place],
            instance=types[wanted[place].instance_type],
            price=point.price,
            as_of=point.since,
            source=SOURCE,
        )
        for place, point in newest.items()
    ]


def spot_history(client: Any, pool: Pool, start: datetime, end: datetime) -> list[PricePoint]:
    """The pool's spot prices from the one in force at `start` until `end`, oldest first."""
    pages = client.get_paginator("describe_spot_price_history").paginate(
        StartTime=start,
        EndTime=end,
        InstanceTypes=[pool.instance_type],
        ProductDescriptions=[PRODUCT],
        AvailabilityZone=pool.zone,
    )
    points = [
        PricePoint(since=item["Timestamp"], price=InstanceHourPrice(amount=Decimal(item["SpotPrice"])))
        for page in pages
        for item in page["SpotPriceHistory"]
    ]
    return sorted(points, key=lambda point: point.since)
