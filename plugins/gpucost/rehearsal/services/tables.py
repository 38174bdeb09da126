"""Which regions, zones and instance types does the API show? Moto's own tables, with what the market adds to them.

Moto knows AWS's regions, their zones with ids, and about 1,400 types. A market may name more: zones and types of
another cloud (traces of GCP), or types that AWS has retired. What moto knows must not be contradicted. The tables
belong to the process, as everything of moto does.
"""

from __future__ import annotations

import os
from typing import Any

from moto.ec2.models.availability_zones_and_regions import Region, RegionsAndZonesBackend
from moto.ec2.models.availability_zones_and_regions import Zone as MotoZone
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES, InstanceType, InstanceTypeBackend

from gpucost.rehearsal.market.file import MarketError
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.places import region_of

NEEDED = (("VCpuInfo", "DefaultVCpus"), ("MemoryInfo", "SizeInMiB"))
"""What quotas and memory limits are made from."""

_ADDED: set[str] = set()
"""Types that are not moto's: there are such only where they are sold."""


def add_market(market: Market) -> None:
    """Let moto's tables show the market's regions, zones, types, and what is offered where.

    Raises:
        MarketError: the market contradicts what moto knows, or does not describe a type that moto does not know.
    """
    for region in market.regions:
        _add_region(region)
    for index, zone in enumerate(market.zones):
        _add_zone(index, zone.name, zone.zone_id)
    for index, offer in enumerate(market.types):
        if offer.name not in INSTANCE_TYPES:
            _add_type(index, offer.name, offer.describe)
    for region in market.regions:
        _offer(market, region)


def _add_region(name: str) -> None:
    if any(region.name == name for region in RegionsAndZonesBackend.regions):
        return
    RegionsAndZonesBackend.regions.append(Region(name, f"ec2.{name}.amazonaws.com", "opt-in-not-required"))
    RegionsAndZonesBackend.zones[name] = []
    # moto asks this at every first use of a region; without it, only AWS's regions have backends
    os.environ["MOTO_ALLOW_NONEXISTENT_REGION"] = "true"


def _add_zone(index: int, name: str, zone_id: str) -> None:
    region = region_of(name)
    known = {zone.name: zone.zone_id for zone in RegionsAndZonesBackend.zones[region]}
    if known.get(name) == zone_id:
        return
    if name in known or zone_id in known.values():
        raise MarketError(
            f"zones.{index}: got {name} = {zone_id}, expected a name and an id that do not contradict {known}"
        )
    RegionsAndZonesBackend.zones[region].append(MotoZone(region_name=region, name=name, zone_id=zone_id))


def _add_type(index: int, name: str, describe: dict[str, Any] | None) -> None:
    if describe is None:
        raise MarketError(
            f"instance_types.{index}.describe: {name} is not among moto's types, expected "
            "DescribeInstanceTypes' answer for it"
        )
    for outer, inner in NEEDED:
        if not isinstance((describe.get(outer) or {}).get(inner), int):
            raise MarketError(f"instance_types.{index}.describe.{outer}.{inner}: not there, expected a whole number")
    _ADDED.add(name)
    INSTANCE_TYPES[name] = {**describe, "InstanceType": name}
    InstanceTypeBackend.instance_types.append(InstanceType(name))


def _offer(market: Market, region: str) -> None:
    """What the market sells is offered exactly where it is sold; nothing else can be bought here."""
    keys = market.keys(region)
    zones = {key.zone: market.zone_id(key.zone) for key in keys}
    places = {
        "region": [(region, kind) for kind in dict.fromkeys(key.instance_type for key in keys)],
        "availability-zone": [(key.zone, key.instance_type) for key in keys],
        "availability-zone-id": [(zones[key.zone], key.instance_type) for key in keys],
    }
    for kind, rows in places.items():
        INSTANCE_TYPE_OFFERINGS[kind][region] = [
            {"InstanceType": instance_type, "LocationType": kind, "Location": location}
            for location, instance_type in rows
        ]


def types_of(region: str) -> list[str]:
    """The names of the types that exist in a region: all of AWS's, and what the market adds there."""
    return [name for name in INSTANCE_TYPES if knows_type(region, name)]


def knows_type(region: str, instance_type: str) -> bool:
    """Whether the instance type exists in a region at all; whether it is sold there is another question."""
    if instance_type in _ADDED:
        sold = INSTANCE_TYPE_OFFERINGS["region"].get(region, [])
        return any(one["InstanceType"] == instance_type for one in sold)
    return instance_type in INSTANCE_TYPES


def vcpus_of(instance_type: str) -> int:
    """How many vCPUs the type has.

    Raises:
        KeyError: no such type.
    """
    return int(INSTANCE_TYPES[instance_type]["VCpuInfo"]["DefaultVCpus"])


def memory_mib_of(instance_type: str) -> int:
    """How much memory the type has, MiB.

    Raises:
        KeyError: no such type.
    """
    return int(INSTANCE_TYPES[instance_type]["MemoryInfo"]["SizeInMiB"])
