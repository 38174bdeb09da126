"""Which pools serve a fleet? CreateFleet of type `instant`: overrides, strategies, price caps, what is refused.

Planning happens inside the book's lock, on what is free and in force at that second, so that capacity is never
sold twice. What a pool cannot give becomes an entry of Errors in the answer, as EC2 does it; only requests that
are wrong in themselves raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from gpucost.rehearsal.api.moto_side import MotoSide, tags_for
from gpucost.rehearsal.api.wire import Ec2Error
from gpucost.rehearsal.book.book import Book, Plan
from gpucost.rehearsal.book.records import Instance, LaunchSpec, Lifecycle, Order
from gpucost.rehearsal.market.market import Market, PoolKey

SPOT_STRATEGIES = frozenset(
    {"lowest-price", "capacity-optimized", "capacity-optimized-prioritized", "price-capacity-optimized"}
)
ON_DEMAND_STRATEGIES = frozenset({"lowest-price", "prioritized"})


@dataclass(frozen=True)
class Candidate:
    """One pool that one override allows."""

    pool: PoolKey
    spec: LaunchSpec
    template: Mapping[str, Any]
    override: Mapping[str, Any]
    max_price: Decimal | None
    priority: float


@dataclass(frozen=True)
class Target:
    """How many to launch of one lifecycle, in which order of pools, and how few are not worth it."""

    lifecycle: Lifecycle
    count: int
    strategy: str
    minimum: int


def targets(request: Mapping[str, Any]) -> list[Target]:
    """What the request wants of each lifecycle; raises Ec2Error for what the API or this rehearsal refuses."""
    if request.get("Type", "maintain") != "instant":
        raise Ec2Error(
            "UnsupportedOperation",
            f"Type: got {request.get('Type', 'maintain')!r}; this rehearsal cloud makes fleets of type 'instant'.",
        )
    wanted = request.get("TargetCapacitySpecification") or {}
    total = wanted.get("TotalTargetCapacity")
    if total is None or total < 1:
        raise Ec2Error("InvalidTargetCapacitySpecification", f"TotalTargetCapacity: got {total}, expected 1 or more.")
    spot, on_demand = wanted.get("SpotTargetCapacity", 0), wanted.get("OnDemandTargetCapacity", 0)
    rest = total - spot - on_demand
    if rest < 0:
        raise Ec2Error("InvalidTargetCapacitySpecification", "Spot and on-demand capacity exceed the total.")
    if wanted.get("DefaultTargetCapacityType", "on-demand") == "spot":
        spot += rest
    else:
        on_demand += rest
    made = []
    for lifecycle, count, options, known in (
        ("spot", spot, request.get("SpotOptions") or {}, SPOT_STRATEGIES),
        ("on-demand", on_demand, request.get("OnDemandOptions") or {}, ON_DEMAND_STRATEGIES),
    ):
        if count:
            made.append(_target(lifecycle, count, options, known))
    return made


def _target(lifecycle: str, count: int, options: Mapping[str, Any], known: frozenset[str]) -> Target:
    strategy = options.get("AllocationStrategy", "lowest-price")
    if strategy not in known:
        raise Ec2Error("InvalidParameterValue", f"AllocationStrategy: got {strategy!r}, expected {sorted(known)}.")
    if options.get("MaxTotalPrice"):
        raise Ec2Error("UnsupportedOperation", "MaxTotalPrice is not rehearsed; use MaxPrice of the overrides.")
    life: Lifecycle = "spot" if lifecycle == "spot" else "on-demand"
    return Target(life, count, strategy, options.get("MinTargetCapacity", 0))


def candidates(request: Mapping[str, Any], market: Market, moto: MotoSide) -> list[Candidate]:
    """Every pool that the overrides allow, in the request's order.

    Raises:
        Ec2Error, moto's ServiceException: in EC2's words, when the request itself is wrong.
    """
    configs = request.get("LaunchTemplateConfigs")
    if not configs:
        raise Ec2Error("MissingParameter", "The request must contain the parameter LaunchTemplateConfigs")
    instance_tags = tags_for(request.get("TagSpecifications"), "instance")
    found = []
    for config in configs:
        data, spec = moto.launch_template(config.get("LaunchTemplateSpecification") or {})
        launched_from = {
            "aws:ec2launchtemplate:id": spec.template_id,
            "aws:ec2launchtemplate:version": spec.template_version,
        }
        system_tags = {key: value for key, value in launched_from.items() if value}
        spec = replace(spec, tags={**spec.tags, **instance_tags, **system_tags})
        template = {"LaunchTemplateId": spec.template_id, "Version": spec.template_version}
        for override in config.get("Overrides") or [{}]:
            found += _of_override(override, data, spec, template, market, moto)
    return found


def _of_override(
    override: Mapping[str, Any],
    data: Mapping[str, Any],
    spec: LaunchSpec,
    template: Mapping[str, Any],
    market: Market,
    moto: MotoSide,
) -> list[Candidate]:
    for name in ("InstanceRequirements", "WeightedCapacity"):
        if override.get(name):
            raise Ec2Error("UnsupportedOperation", f"{name} is not rehearsed; name one InstanceType for each override.")
    instance_type = override.get("InstanceType") or data.get("InstanceType")
    if not instance_type:
        raise Ec2Error("MissingParameter", "The override and its launch template name no InstanceType.")
    if not moto.knows_type(instance_type):
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{instance_type}' for InstanceType.")
    market_options = (data.get("InstanceMarketOptions") or {}).get("SpotOptions") or {}
    max_price = _price(override.get("MaxPrice") or market_options.get("MaxPrice"))
    made = []
    for zone, subnet_id in _places(override, market, moto):
        subnet, vpc = moto.subnet_of(subnet_id, zone)
        placed = replace(spec, subnet_id=subnet, vpc_id=vpc, image_id=override.get("ImageId") or spec.image_id)
        shown = {**override, "InstanceType": instance_type, "AvailabilityZone": zone}
        priority = float(override.get("Priority", float("inf")))
        made.append(Candidate(PoolKey(zone, instance_type), placed, template, shown, max_price, priority))
    return made


def _places(override: Mapping[str, Any], market: Market, moto: MotoSide) -> list[tuple[str, str | None]]:
    zone = override.get("AvailabilityZone")
    if override.get("AvailabilityZoneId"):
        by_id = {zone_id: name for name, zone_id in market.zones.items()}
        zone = by_id.get(override["AvailabilityZoneId"], override["AvailabilityZoneId"])
    if zone is not None and zone not in moto.zone_names():
        raise Ec2Error("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
    subnets = [part.strip() for part in (override.get("SubnetId") or "").split(",") if part.strip()]
    places: list[tuple[str, str | None]] = [(moto.zone_of_subnet(subnet), subnet) for subnet in subnets]
    for other, subnet_id in places:
        if zone is not None and other != zone:
            raise Ec2Error("InvalidParameterValue", f"The subnet {subnet_id} lies in {other}, not in {zone}.")
    if places:
        return places
    return [(name, None) for name in ([zone] if zone else market.zones)]


def _price(text: Any) -> Decimal | None:
    if text in (None, ""):
        return None
    try:
        price = Decimal(str(text))
    except InvalidOperation as error:
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{text}' for MaxPrice.") from error
    if not price.is_finite() or price <= 0:
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{text}' for MaxPrice.")
    return price


class Planner:
    """Decides what one request launches.

    Args:
        wanted: what to launch.
        pools: where it may be launched.
        market: prices and capacities.
        book: what is free.
    """

    def __init__(self, wanted: list[Target], pools: list[Candidate], market: Market, book: Book) -> None:
        self._wanted = wanted
        self._pools = pools
        self._market = market
        self._book = book

    def plan(self, now: datetime) -> Plan:
        """Orders and the answer; called inside the book's lock."""
        orders: list[Order] = []
        sources: list[Candidate] = []
        errors: list[dict[str, Any]] = []
        for target in self._wanted:
            chosen = self._fill(target, now, errors)
            if sum(order.count for order, _ in chosen) < target.minimum:
                chosen = []
            orders += [order for order, _ in chosen]
            sources += [candidate for _, candidate in chosen]
        return orders, _answer(orders, sources, errors)

    def _fill(self, target: Target, now: datetime, errors: list[dict[str, Any]]) -> list[tuple[Order, Candidate]]:
        chosen: list[tuple[Order, Candidate]] = []
        taken: dict[PoolKey, int] = {}
        missing = target.count
        sellable = []
        for candidate in self._pools:
            refusal = self._refusal(candidate, target.lifecycle, now)
            if refusal is None:
                sellable.append(candidate)
            else:
                errors.append(_error(candidate, target.lifecycle, *refusal))
        for candidate in sorted(sellable, key=self._order(target, now)):
            if not missing:
                break
            free = self._book.free(candidate.pool, target.lifecycle) - taken.get(candidate.pool, 0)
            count = min(missing, free)
            if count < missing:
                errors.append(_error(candidate, target.lifecycle, *_no_capacity(candidate.pool, target.lifecycle)))
            if count:
                cap = candidate.max_price or self._market.on_demand(candidate.pool.instance_type)
                price = f"{cap:.6f}" if target.lifecycle == "spot" else None
                chosen.append((Order(candidate.pool, target.lifecycle, count, candidate.spec, price), candidate))
                taken[candidate.pool] = taken.get(candidate.pool, 0) + count
                missing -= count
        return chosen

    def _refusal(self, candidate: Candidate, lifecycle: Lifecycle, now: datetime) -> tuple[str, str] | None:
        pool = candidate.pool
        if not self._market.sells(pool):
            message = f"Your requested instance type ({pool.instance_type}) is not supported in {pool.zone}."
            return "InvalidFleetConfiguration", message
        if lifecycle == "spot" and candidate.max_price is not None:
            price = self._market.prices(pool).at(now)
            if candidate.max_price < price:
                message = (
                    f"Your Spot request price of {candidate.max_price} is lower than the minimum required Spot "
                    f"request fulfillment price of {price}."
                )
                return "SpotMaxPriceTooLow", message
        return None

    def _order(self, target: Target, now: datetime) -> Callable[[Candidate], tuple[float, ...]]:
        """What EC2 promises of each strategy, made deterministic; equal ones stay in the request's order."""

        def price(one: Candidate) -> float:
            if target.lifecycle == "spot":
                return float(self._market.prices(one.pool).at(now))
            return float(self._market.on_demand(one.pool.instance_type))

        def free(one: Candidate) -> int:
            return self._book.free(one.pool, target.lifecycle)

        keys: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
            "lowest-price": lambda one: (price(one),),
            "prioritized": lambda one: (one.priority,),
            "capacity-optimized": lambda one: (-free(one),),
            "capacity-optimized-prioritized": lambda one: (free(one) < target.count, one.priority, -free(one)),
            "price-capacity-optimized": lambda one: (free(one) < target.count, price(one)),
        }
        return keys[target.strategy]


def _no_capacity(pool: PoolKey, lifecycle: Lifecycle) -> tuple[str, str]:
    if lifecycle == "spot":
        return "InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request."
    message = (
        f"We currently do not have sufficient {pool.instance_type} capacity in the Availability Zone you requested "
        f"({pool.zone}). Our system will be working on provisioning additional capacity."
    )
    return "InsufficientInstanceCapacity", message


def _shown(candidate: Candidate) -> dict[str, Any]:
    return {"LaunchTemplateSpecification": candidate.template, "Overrides": candidate.override}


def _error(candidate: Candidate, lifecycle: Lifecycle, code: str, message: str) -> dict[str, Any]:
    return {
        "LaunchTemplateAndOverrides": _shown(candidate),
        "Lifecycle": lifecycle,
        "ErrorCode": code,
        "ErrorMessage": message,
    }


def _answer(
    orders: list[Order], sources: list[Candidate], errors: list[dict[str, Any]]
) -> Callable[[list[list[Instance]]], dict[str, Any]]:
    def make(launched: list[list[Instance]]) -> dict[str, Any]:
        groups = [
            {
                "LaunchTemplateAndOverrides": _shown(source),
                "Lifecycle": order.lifecycle,
                "InstanceIds": [one.id for one in instances],
                "InstanceType": order.pool.instance_type,
                "AvailabilityZone": order.pool.zone,
            }
            for order, source, instances in zip(orders, sources, launched, strict=True)
        ]
        return {"Errors": errors, "Instances": groups}

    return make
