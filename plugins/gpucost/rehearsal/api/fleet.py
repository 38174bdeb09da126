"""Which pools serve a fleet? CreateFleet of type `instant`: strategies, weights, caps, what is refused.

Planning happens inside the book's lock, on what is free and in force at that second, so that capacity is never
sold twice. What a pool cannot give becomes an entry of Errors in the answer, as EC2 does it; only requests that
are wrong in themselves raise.

Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-fleet-allocation-strategy.html and
ec2-fleet-instance-weighting.html. Where EC2 promises only a preference, ours is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpucost.rehearsal.api.context import Context, Reason
from gpucost.rehearsal.api.fleet_request import Candidate, Target
from gpucost.rehearsal.api.stock import Stock
from gpucost.rehearsal.book.book import Plan
from gpucost.rehearsal.book.records import Instance, Lifecycle, Order

TOO_DEAR: Reason = (
    "UnfulfillableCapacity",
    "Unable to fulfill capacity due to your request configuration. Please adjust your request and try again.",
)
"""For what MaxTotalPrice keeps a fleet from launching; the reference names no code for it."""


@dataclass
class _Bought:
    """What a plan takes, and what it could not."""

    taken: dict[int, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)


class Planner:
    """Decides what one request launches.

    Args:
        context: prices, capacities, what is free, faults.
        wanted: what to launch.
        pools: where it may be launched.
    """

    def __init__(self, context: Context, wanted: list[Target], pools: list[Candidate]) -> None:
        self._context = context
        self._wanted = wanted
        self._pools = pools

    def plan(self, now: datetime) -> Plan:
        """Orders and the answer; called inside the book's lock."""
        stock = Stock(self._context, now)
        orders: list[Order] = []
        sources: list[Candidate] = []
        errors: list[dict[str, Any]] = []
        for target in self._wanted:
            bought = self._fill(target, stock)
            errors += bought.errors
            units = sum(count * self._pools[index].weight for index, count in bought.taken.items())
            if units < target.minimum:
                orders, sources = [], []  # too few of one lifecycle: the fleet launches nothing at all
                break
            for index, count in bought.taken.items():
                candidate = self._pools[index]
                cap = stock.cap(candidate.pool, candidate.max_price)
                orders.append(Order(candidate.pool, target.lifecycle, count, candidate.spec, cap))
                sources.append(candidate)
        return orders, _answer(orders, sources, errors)

    def _fill(self, target: Target, stock: Stock) -> _Bought:
        bought = _Bought()
        sellable = []
        for index, candidate in enumerate(self._pools):
            failure = candidate.flaw or stock.unsellable(candidate.pool, target.lifecycle, candidate.max_price)
            if failure is None:
                sellable.append(index)
            else:
                bought.errors.append(_error(candidate, target.lifecycle, failure))
        order = _order(target, stock)
        ordered = self._one_group(target, stock, sorted(sellable, key=lambda index: order(self._pools[index])))
        if target.strategy == "diversified":
            self._spread(target, stock, ordered, bought)
        else:
            self._one_after_another(target, stock, ordered, bought)
        return bought

    def _one_group(self, target: Target, stock: Stock, ordered: list[int]) -> list[int]:
        """With one type or one zone for all: the first of them that can give everything, or else the most."""
        if not (target.single_type or target.single_zone):
            return ordered
        groups: dict[tuple[str, str], list[int]] = {}
        for index in ordered:
            pool = self._pools[index].pool
            key = (pool.instance_type if target.single_type else "", pool.zone if target.single_zone else "")
            groups.setdefault(key, []).append(index)
        best: list[int] = []
        most = -1.0
        for group in groups.values():
            pools = {self._pools[index].pool: self._pools[index].weight for index in group}
            units = min(
                sum(stock.most(pool, target.lifecycle) * weight for pool, weight in pools.items()), target.units
            )
            if units > most:
                best, most = group, units
        return best

    def _one_after_another(self, target: Target, stock: Stock, ordered: list[int], bought: _Bought) -> None:
        missing, budget = float(target.units), target.max_total
        for index in ordered:
            if missing <= 0:
                return
            candidate = self._pools[index]
            wanted = math.ceil(missing / candidate.weight)
            count, failure = _available(candidate, target.lifecycle, stock, wanted, budget)
            refused = stock.refused(candidate.pool, target.lifecycle) if count else None
            if refused is not None:
                count, failure = 0, refused
            if failure is not None:
                bought.errors.append(_error(candidate, target.lifecycle, failure))
            if count:
                budget = _spent(budget, stock.price(candidate.pool, target.lifecycle) * count)
                stock.take(candidate.pool, target.lifecycle, count)
                bought.taken[index] = count
                missing -= count * candidate.weight

    def _spread(self, target: Target, stock: Stock, ordered: list[int], bought: _Bought) -> None:
        """Strategy diversified: one of each pool in turn."""
        missing, budget = float(target.units), target.max_total
        active = []
        for index in ordered:
            pool = self._pools[index].pool
            # a pool that has nothing is not bought from: in the first turn it says so itself
            failure = stock.refused(pool, target.lifecycle) if stock.most(pool, target.lifecycle) else None
            if failure is None:
                active.append(index)
            else:
                bought.errors.append(_error(self._pools[index], target.lifecycle, failure))
        while missing > 0 and active:
            for index in list(active):
                if missing <= 0:
                    return
                candidate = self._pools[index]
                count, failure = _available(candidate, target.lifecycle, stock, 1, budget)
                if failure is not None:
                    bought.errors.append(_error(candidate, target.lifecycle, failure))
                    active.remove(index)
                    continue
                budget = _spent(budget, stock.price(candidate.pool, target.lifecycle))
                stock.take(candidate.pool, target.lifecycle, count)
                bought.taken[index] = bought.taken.get(index, 0) + count
                missing -= candidate.weight


def _available(
    candidate: Candidate, lifecycle: Lifecycle, stock: Stock, wanted: int, budget: Decimal | None
) -> tuple[int, Reason | None]:
    """How many of `wanted` instances the pool can give, and why not all."""
    most = stock.most(candidate.pool, lifecycle)
    if budget is not None:
        affordable = int(budget / stock.price(candidate.pool, lifecycle))
        if affordable < min(wanted, most):
            return affordable, TOO_DEAR
    if most < wanted:
        return most, stock.lack(candidate.pool, lifecycle)
    return wanted, None


def _spent(budget: Decimal | None, amount: Decimal) -> Decimal | None:
    return None if budget is None else budget - amount


def _order(target: Target, stock: Stock) -> Callable[[Candidate], tuple[float, ...]]:
    """What EC2 promises of each strategy, made deterministic; equal ones stay in the request's order."""

    def price(one: Candidate) -> float:
        return float(stock.price(one.pool, target.lifecycle)) / one.weight

    def free(one: Candidate) -> int:
        return stock.free(one.pool, target.lifecycle)

    def scarce(one: Candidate) -> bool:
        return free(one) * one.weight < target.units

    keys: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
        "lowest-price": lambda one: (price(one),),
        "diversified": lambda one: (price(one),),
        "prioritized": lambda one: (one.priority,),
        "capacity-optimized": lambda one: (-free(one),),
        "capacity-optimized-prioritized": lambda one: (scarce(one), one.priority, -free(one)),
        "price-capacity-optimized": lambda one: (scarce(one), price(one)),
    }
    return keys[target.strategy]


def _shown(candidate: Candidate) -> dict[str, Any]:
    return {"LaunchTemplateSpecification": candidate.template, "Overrides": candidate.override}


def _error(candidate: Candidate, lifecycle: Lifecycle, failure: Reason) -> dict[str, Any]:
    code, message = failure
    return {
        "LaunchTemplateAndOverrides": _shown(candidate),
        "Lifecycle": lifecycle,
        # a fleet says it in its own words: hashicorp/packer#9946
        "ErrorCode": "InvalidFleetConfiguration" if code == "Unsupported" else code,
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
