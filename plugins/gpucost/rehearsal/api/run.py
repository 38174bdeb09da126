"""RunInstances: as many instances of one type as there are, in one zone, or none.

Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html and the pages of its structures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpucost.rehearsal.api import placing, requests, specs
from gpucost.rehearsal.api.context import Context, Reason
from gpucost.rehearsal.api.instances import shown_reservation
from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.api.stock import Stock
from gpucost.rehearsal.book.book import Plan
from gpucost.rehearsal.book.records import Instance, LaunchSpec, Lifecycle, Order
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.protocol import tag_rules
from gpucost.rehearsal.protocol.wire import Ec2Error

DEFAULT_TYPE = "m1.small"

NOT_REHEARSED = {
    "CpuOptions": "Leave it out: the type's own CPUs are used.",
    "DisableApiStop": "Leave it out.",
    "DisableApiTermination": "Leave it out: everything here can be terminated.",
    "HibernationOptions": "Leave it out.",
    "LicenseSpecifications": "Leave it out.",
    "SecondaryInterfaces": "Leave it out.",
}
"""Parameters that would change what is launched, and what to do instead."""


@dataclass(frozen=True)
class Wanted:
    """What one RunInstances asks for; `places` are the zones that will do, `max_price` is per instance-hour."""

    spec: LaunchSpec
    instance_type: str
    places: list[placing.Place]
    lifecycle: Lifecycle
    max_price: Decimal | None
    minimum: int
    maximum: int


def run(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """RunInstances; the same token again is the same reservation."""
    wanted = _wanted(context, request, region)
    tag_rules.tags_for(request.get("TagSpecifications"), "spot-instances-request")
    made = requests.launch_once(context, "reservation", region, request, {}, lambda now: _plan(context, wanted, now))
    launched = [context.book.get(one) for one in made.answer["InstanceIds"]]
    instances = [one for one in launched if one is not None]
    if any(one.state == "terminated" for one in instances):
        # since 2025; before, the old reservation came back: boto/boto3#4406
        raise Ec2Error(
            "IdempotentInstanceTerminated",
            "The client token you have provided is associated with a terminated instance. "
            "Please use a different client token.",
        )
    context.wake()
    return shown_reservation(context, made.id, instances)


def _wanted(context: Context, request: Mapping[str, Any], region: str) -> Wanted:
    moto = context.side(region)
    minimum, maximum = _counts(request)
    for name, instead in NOT_REHEARSED.items():
        if request.get(name):
            raise not_rehearsed(name, instead)
    data, template = specs.merged({}, request), None
    if request.get("LaunchTemplate"):
        of_template, template = moto.launch_template(request["LaunchTemplate"])
        data = specs.merged(of_template, request)
    tags = tag_rules.tags_for(request.get("TagSpecifications"), "instance")
    spec = specs.spec_of(data, template, tags, tag_rules.tags_for(request.get("TagSpecifications"), "volume"))
    specs.check_known(spec, moto)
    instance_type = data.get("InstanceType") or DEFAULT_TYPE
    if not moto.knows_type(instance_type):
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{instance_type}' for InstanceType.")
    lifecycle, max_price = _market(data.get("InstanceMarketOptions") or {})
    placement, interfaces = data.get("Placement") or {}, data.get("NetworkInterfaces") or [{}]
    if placement.get("Tenancy", "default") != "default":
        raise not_rehearsed("Tenancy other than default", "Leave it out.")
    places = placing.places(
        context.market,
        moto,
        zone=placement.get("AvailabilityZone"),
        zone_id=placement.get("AvailabilityZoneId"),
        subnets=request.get("SubnetId") or interfaces[0].get("SubnetId"),
    )
    return Wanted(spec, instance_type, places, lifecycle, max_price, minimum, maximum)


def _counts(request: Mapping[str, Any]) -> tuple[int, int]:
    for name in ("MinCount", "MaxCount"):
        if request.get(name) is None:
            raise Ec2Error("MissingParameter", f"The request must contain the parameter {name}")
    minimum, maximum = request["MinCount"], request["MaxCount"]
    if minimum < 1:
        raise Ec2Error(
            "InvalidParameterValue", f"Value ({minimum}) for parameter minCount is invalid. Expected 1 or more."
        )
    if maximum < minimum:
        raise Ec2Error(
            "InvalidParameterValue", f"Value ({maximum}) for parameter maxCount is invalid. Expected minCount or more."
        )
    return minimum, maximum


def _market(options: Mapping[str, Any]) -> tuple[Lifecycle, Decimal | None]:
    kind = options.get("MarketType") or "on-demand"
    spot = options.get("SpotOptions") or {}
    if kind not in {"spot", "on-demand"}:
        raise not_rehearsed(f"MarketType '{kind}'", "Use spot, or leave InstanceMarketOptions out.")
    if kind == "on-demand":
        if spot:
            raise Ec2Error("InvalidParameterCombination", "SpotOptions can be used with MarketType spot only.")
        return "on-demand", None
    if spot.get("SpotInstanceType", "one-time") != "one-time":
        raise not_rehearsed("A persistent spot request", "Use one-time, and ask again after an interruption.")
    if spot.get("InstanceInterruptionBehavior", "terminate") != "terminate":
        raise not_rehearsed("InstanceInterruptionBehavior stop or hibernate", "Use terminate.")
    if spot.get("BlockDurationMinutes") or spot.get("ValidUntil"):
        raise Ec2Error(
            "InvalidParameterCombination", "BlockDurationMinutes and ValidUntil are not for one-time requests."
        )
    return "spot", requests.price(spot.get("MaxPrice"), "MaxPrice")


def _plan(context: Context, wanted: Wanted, now: datetime) -> Plan:
    """The order for the first zone that can give enough, the fullest stock first; raises Ec2Error when none can."""
    stock = Stock(context, now)
    failure: Reason | None = None
    for place in sorted(wanted.places, key=lambda one: -_most(stock, wanted, one)):
        pool = PoolKey(place.zone, wanted.instance_type)
        count = _most(stock, wanted, place)
        found = stock.unsellable(pool, wanted.lifecycle, wanted.max_price)
        if found is None and count < wanted.minimum:
            found = stock.lack(pool, wanted.lifecycle)
        found = found or stock.refused(pool, wanted.lifecycle)
        if found is None:
            spec = replace(wanted.spec, subnet_id=place.subnet_id, vpc_id=place.vpc_id)
            cap = stock.cap(pool, wanted.max_price)
            order = Order(pool, wanted.lifecycle, count, spec, cap)
            return [order], _answer
        failure = failure or found
    assert failure is not None  # noqa: S101 (there is at least one place, and it did not serve)
    raise Ec2Error(*_worded(failure, wanted))


def _most(stock: Stock, wanted: Wanted, place: placing.Place) -> int:
    pool = PoolKey(place.zone, wanted.instance_type)
    if stock.unsellable(pool, wanted.lifecycle, wanted.max_price) is not None:
        return 0
    return min(wanted.maximum, stock.most(pool, wanted.lifecycle))


def _worded(failure: Reason, wanted: Wanted) -> Reason:
    """Who named no zone is not told of one."""
    code, message = failure
    if code == "InsufficientInstanceCapacity" and wanted.lifecycle == "on-demand" and len(wanted.places) > 1:
        message = (
            f"We currently do not have sufficient capacity in the zones with support for '{wanted.instance_type}' "
            "instance type. Our system will be working on provisioning additional capacity."
        )
    return code, message


def _answer(launched: list[list[Instance]]) -> dict[str, Any]:
    return {"InstanceIds": [one.id for group in launched for one in group]}
