"""GetSpotPlacementScores: how likely is it to get so much spot capacity, from 1 to 10?

AWS publishes no formula. OURS: with `share` = what is free of all the types now / what is asked for,

    score = 1 + floor(8 * min(share, 1)), and 10 from share = 2 on

so 1 says that there is nothing, 9 that there is just enough, 10 that there is twice as much. With one or two types the
score is 3 at most: EC2's is then "always low".

Source of everything else: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetSpotPlacementScores.html and
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.protocol import filters
from gpucost.rehearsal.protocol.wire import Ec2Error

FEW_TYPES = 2
MOST_WITH_FEW_TYPES = 3
MOST_PLACES = 10
MOST_TYPES = 1000
LARGEST_TARGET = 2_000_000_000

_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")


def score(free: float, target: float, types: int) -> int:
    """The score of one place.

    Args:
        free: units that could be bought now.
        target: units that are asked for.
        types: how many different instance types may be used.
    """
    share = free / target
    found = 10 if share >= 2 else 1 + int(8 * min(share, 1.0))
    return min(found, MOST_WITH_FEW_TYPES) if types <= FEW_TYPES else found


def get(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """GetSpotPlacementScores: the ten best regions, or zones."""
    types = _types(context, request, region)
    target = request.get("TargetCapacity")
    if target is None:
        raise Ec2Error("MissingParameter", "The request must contain the parameter TargetCapacity")
    if not 1 <= target <= LARGEST_TARGET:
        raise Ec2Error("InvalidParameterValue", f"TargetCapacity: got {target}, expected 1 to {LARGEST_TARGET}.")
    wanted = request.get("RegionNames") or context.market.regions
    for name in wanted:
        if not _REGION.fullmatch(name):
            raise Ec2Error("InvalidParameterValue", f"Invalid value '{name}' for RegionNames.")
    free = _free(context, types, request.get("TargetCapacityUnitType") or "units")
    places: list[dict[str, Any]] = []
    for name in dict.fromkeys(wanted):
        of_zones = {zone: free.get(zone, 0) for zone in context.market.zone_ids(name)}
        if request.get("SingleAvailabilityZone"):
            places += [
                {
                    "Region": name,
                    "AvailabilityZoneId": context.market.zone_id(zone),
                    "Score": score(units, target, len(types)),
                }
                for zone, units in of_zones.items()
            ]
        else:
            places.append({"Region": name, "Score": score(sum(of_zones.values()), target, len(types))})
    best = sorted(places, key=lambda place: -place["Score"])[:MOST_PLACES]
    shown, token = filters.page(best, request, sizes=range(10, 1001))
    return {"SpotPlacementScores": shown, "NextToken": token}


def _types(context: Context, request: Mapping[str, Any], region: str) -> list[str]:
    types = list(dict.fromkeys(request.get("InstanceTypes") or []))
    if request.get("InstanceRequirementsWithMetadata"):
        if types:
            raise Ec2Error(
                "InvalidParameterCombination",
                "InstanceTypes and InstanceRequirementsWithMetadata cannot be specified together.",
            )
        raise not_rehearsed("InstanceRequirementsWithMetadata", "Name the InstanceTypes.")
    if not types:
        raise Ec2Error("MissingParameter", "The request must contain the parameter InstanceTypes")
    if len(types) > MOST_TYPES:
        raise Ec2Error("InvalidParameterValue", f"InstanceTypes: got {len(types)}, expected {MOST_TYPES} at most.")
    side = context.side(region)
    for name in types:
        if not side.knows_type(name):
            raise Ec2Error("InvalidParameterValue", f"Invalid value '{name}' for InstanceTypes.")
    return types


def _free(context: Context, types: list[str], unit: str) -> dict[str, int]:
    """Zone -> how many units of the types are free, for spot."""
    of_type = {"units": lambda _name: 1, "vcpu": context.moto.vcpus_of, "memory-mib": context.moto.memory_mib_of}
    if unit not in of_type:
        raise Ec2Error("InvalidParameterValue", f"TargetCapacityUnitType: got {unit!r}, expected {sorted(of_type)}.")
    now = context.book.now()
    found: dict[str, int] = {}
    for pool in context.market.pools:
        if pool.instance_type in types:
            units = context.book.free(pool, "spot", now) * of_type[unit](pool.instance_type)
            found[pool.zone] = found.get(pool.zone, 0) + units
    return found
