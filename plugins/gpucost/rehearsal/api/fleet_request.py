"""What does a CreateFleet request want? Targets, and the pools that its overrides allow.

Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateFleet.html and the pages of its structures:
SpotOptionsRequest, OnDemandOptionsRequest, FleetLaunchTemplateOverridesRequest, TargetCapacitySpecificationRequest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from gpucost.rehearsal.api import placing, requests, specs, views
from gpucost.rehearsal.api.context import Reason
from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.book.records import LaunchSpec, Lifecycle
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.protocol import tag_rules
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.moto_side import RegionSide

SPOT_STRATEGIES = frozenset(
    {
        "lowest-price",
        "diversified",
        "capacity-optimized",
        "capacity-optimized-prioritized",
        "price-capacity-optimized",
    }
)
ON_DEMAND_STRATEGIES = frozenset({"lowest-price", "prioritized"})
LOWEST_PRIORITY = float("inf")


@dataclass(frozen=True)
class Candidate:
    """One pool that one override allows.

    `weight` is how many units one instance counts for, `max_price` US dollars per instance-hour. `flaw` is what is
    wrong with what would be launched, when EC2 tells it only with the launch.
    """

    pool: PoolKey
    spec: LaunchSpec
    template: Mapping[str, Any]
    override: Mapping[str, Any]
    max_price: Decimal | None
    priority: float
    weight: float
    flaw: Reason | None = None


@dataclass(frozen=True)
class Target:
    """How many units to launch of one lifecycle, in which order of pools, and how few are not worth it.

    `max_total` is the most that all of them may cost, US dollars per hour.
    """

    lifecycle: Lifecycle
    units: int
    strategy: str
    minimum: int = 0
    single_type: bool = False
    single_zone: bool = False
    max_total: Decimal | None = None


def targets(request: Mapping[str, Any]) -> list[Target]:
    """What the request wants of each lifecycle; raises Ec2Error for what the API or this rehearsal refuses."""
    if request.get("Type", "maintain") != "instant":
        raise not_rehearsed(
            f"A fleet of type '{request.get('Type', 'maintain')}'",
            "Use Type=instant and ask again for what is missing.",
        )
    wanted = request.get("TargetCapacitySpecification") or {}
    total = wanted.get("TotalTargetCapacity")
    if total is None or total < 1:
        raise Ec2Error("InvalidTargetCapacitySpecification", f"TotalTargetCapacity: got {total}, expected 1 or more.")
    if wanted.get("TargetCapacityUnitType", "units") != "units":
        raise Ec2Error(
            "InvalidParameterCombination", "TargetCapacityUnitType can be used with InstanceRequirements only."
        )
    default = wanted.get("DefaultTargetCapacityType", "on-demand")
    if default not in {"spot", "on-demand"}:
        raise not_rehearsed(f"DefaultTargetCapacityType '{default}'", "Use spot or on-demand.")
    spot, on_demand = wanted.get("SpotTargetCapacity", 0), wanted.get("OnDemandTargetCapacity", 0)
    rest = total - spot - on_demand
    if rest < 0 or min(spot, on_demand) < 0:
        raise Ec2Error("InvalidTargetCapacitySpecification", "Spot and on-demand capacity exceed the total.")
    spot, on_demand = (spot + rest, on_demand) if default == "spot" else (spot, on_demand + rest)
    made = []
    if on_demand:
        made.append(_target("on-demand", on_demand, request.get("OnDemandOptions") or {}, ON_DEMAND_STRATEGIES))
    if spot:
        made.append(_target("spot", spot, request.get("SpotOptions") or {}, SPOT_STRATEGIES))
    return made


def _target(lifecycle: Lifecycle, units: int, options: Mapping[str, Any], known: frozenset[str]) -> Target:
    strategy = options.get("AllocationStrategy", "lowest-price")
    if strategy not in known:
        raise Ec2Error("InvalidParameterValue", f"AllocationStrategy: got {strategy!r}, expected {sorted(known)}.")
    _refuse_options(options)
    minimum = options.get("MinTargetCapacity") or 0
    single_type, single_zone = bool(options.get("SingleInstanceType")), bool(options.get("SingleAvailabilityZone"))
    if minimum and not (single_type or single_zone):
        raise Ec2Error(
            "InvalidParameterCombination",
            "MinTargetCapacity: at least one of SingleAvailabilityZone and SingleInstanceType must be specified.",
        )
    if not 0 <= minimum <= min(units, 1000):
        raise Ec2Error(
            "InvalidParameterValue",
            f"MinTargetCapacity: got {minimum}, expected 0 to the target capacity {units}, and 1000 at most.",
        )
    max_total = requests.price(options.get("MaxTotalPrice"), "MaxTotalPrice")
    return Target(lifecycle, units, strategy, minimum, single_type, single_zone, max_total)


def _refuse_options(options: Mapping[str, Any]) -> None:
    if options.get("InstanceInterruptionBehavior", "terminate") != "terminate":
        raise not_rehearsed("InstanceInterruptionBehavior other than terminate", "Leave it out.")
    if options.get("InstancePoolsToUseCount", 1) != 1:
        raise not_rehearsed("InstancePoolsToUseCount", "Use the allocation strategy diversified.")
    if options.get("CapacityReservationOptions"):
        raise not_rehearsed("CapacityReservationOptions", "Leave them out.")
    if options.get("MaintenanceStrategies"):
        raise Ec2Error("InvalidParameterCombination", "MaintenanceStrategies: for fleets of type maintain only.")


def candidates(request: Mapping[str, Any], market: Market, moto: RegionSide) -> list[Candidate]:
    """Every pool that the overrides allow, in the request's order.

    Raises:
        Ec2Error, moto's ServiceException: in EC2's words, when the request itself is wrong.
    """
    configs = request.get("LaunchTemplateConfigs")
    if not configs:
        raise Ec2Error("MissingParameter", "The request must contain the parameter LaunchTemplateConfigs")
    if request.get("ReservedCapacityOptions"):
        raise not_rehearsed("ReservedCapacityOptions", "Leave them out.")
    tags = {kind: tag_rules.tags_for(request.get("TagSpecifications"), kind) for kind in ("instance", "volume")}
    _refuse_duplicates(configs)
    return [one for config in configs for one in _of_config(config, tags, market, moto)]


def _refuse_duplicates(configs: list[Mapping[str, Any]]) -> None:
    """EC2 takes every pool once; its words: github-aws-runners/terraform-aws-github-runner#2904."""
    seen = set()
    for override in (one for config in configs for one in config.get("Overrides") or []):
        place = tuple(override.get(name) for name in ("SubnetId", "AvailabilityZone", "AvailabilityZoneId"))
        if override.get("InstanceType") and (override["InstanceType"], place) in seen:
            raise Ec2Error("InvalidFleetConfig", "The fleet configuration contains duplicate instance pools.")
        seen.add((override.get("InstanceType"), place))


def _of_config(
    config: Mapping[str, Any], tags: Mapping[str, Mapping[str, str]], market: Market, moto: RegionSide
) -> Iterator[Candidate]:
    wanted = config.get("LaunchTemplateSpecification") or {}
    data, of_template = moto.launch_template(wanted)
    if wanted.get("LaunchTemplateSpecificationUserData"):
        data = {**data, "UserData": wanted["LaunchTemplateSpecificationUserData"]}
    shown = {"LaunchTemplateId": of_template.template_id, "Version": of_template.template_version}
    for override in config.get("Overrides") or [{}]:
        if override.get("InstanceRequirements"):
            raise not_rehearsed("InstanceRequirements", "Name one InstanceType for each override.")
        mine = specs.merged(data, override)
        spec = specs.spec_of(mine, of_template, tags["instance"], tags["volume"])
        for candidate in _of_override(override, mine, spec, market, moto):
            yield replace(candidate, template=shown)


def _of_override(
    override: Mapping[str, Any], data: Mapping[str, Any], spec: LaunchSpec, market: Market, moto: RegionSide
) -> Iterator[Candidate]:
    instance_type = data.get("InstanceType")
    if not instance_type:
        raise Ec2Error("MissingParameter", "The override and its launch template name no InstanceType.")
    if not moto.knows_type(instance_type):
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{instance_type}' for InstanceType.")
    weight = _number(override, "WeightedCapacity", 1.0, least=1.0, most=999.0)
    of_unit = requests.price(override.get("MaxPrice") or _template_price(data), "MaxPrice")
    for place in _places(override, data, market, moto):
        yield Candidate(
            pool=PoolKey(place.zone, instance_type),
            spec=replace(spec, subnet_id=place.subnet_id, vpc_id=place.vpc_id),
            template={},
            override=views.override(override) | {"InstanceType": instance_type, "AvailabilityZone": place.zone},
            # the cap of an override is the price of one unit
            max_price=None if of_unit is None else of_unit * Decimal(str(weight)),
            priority=_number(override, "Priority", LOWEST_PRIORITY, least=0.0, most=sys.float_info.max),
            weight=weight,
            flaw=_flaw(spec, moto),
        )


def _number(override: Mapping[str, Any], name: str, default: float, *, least: float, most: float) -> float:
    given = override.get(name)
    if given is None:
        return default
    if not least <= float(given) <= most:
        raise Ec2Error("InvalidParameterValue", f"{name}: got {given}, expected {least:g} to {most:g}.")
    return float(given)


def _template_price(data: Mapping[str, Any]) -> Any:
    return ((data.get("InstanceMarketOptions") or {}).get("SpotOptions") or {}).get("MaxPrice")


def _places(
    override: Mapping[str, Any], data: Mapping[str, Any], market: Market, moto: RegionSide
) -> list[placing.Place]:
    named = [override.get(name) for name in ("AvailabilityZone", "AvailabilityZoneId", "SubnetId")]
    if not any(named):
        placement, interfaces = data.get("Placement") or {}, data.get("NetworkInterfaces") or [{}]
        named = [placement.get("AvailabilityZone"), None, interfaces[0].get("SubnetId")]
    return placing.places(market, moto, zone=named[0], zone_id=named[1], subnets=named[2])


def _flaw(spec: LaunchSpec, moto: RegionSide) -> Reason | None:
    try:
        specs.check_known(spec, moto)
    except Ec2Error as error:
        return error.code, error.message
    return None
