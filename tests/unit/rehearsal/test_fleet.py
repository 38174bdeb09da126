"""Which pools serve a fleet: strategies, weights, caps, quotas, refusals; with a market that a test makes."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any, cast

import pytest

from gpucost.clock import ManualClock
from gpucost.rehearsal.api import fleet_request
from gpucost.rehearsal.api.context import Context, Reason, Refusal
from gpucost.rehearsal.api.fleet import Planner
from gpucost.rehearsal.api.fleet_request import Candidate, Target, targets
from gpucost.rehearsal.api.quotas import family
from gpucost.rehearsal.api.visibility import Visibility
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import LaunchSpec
from gpucost.rehearsal.market.file import DiskPrice, Quota, SourcedPrice, TypeOffer, Zone
from gpucost.rehearsal.market.market import Market, PoolMarket
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.market.series import PricePoint, Steady
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.moto_side import MotoSide
from tests.fakes.rehearsal import ORIGIN, SOURCE, MemoryJournal, ToldPrices, at

G4, P3 = "g4dn.xlarge", "p3.2xlarge"
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
SPOT = {
    (ZONES[0], G4): ("0.20", 2),
    (ZONES[1], G4): ("0.25", 5),
    (ZONES[2], G4): ("0.30", 9),
    (ZONES[0], P3): ("0.60", 2),
}
LISTED = {G4: Decimal("0.526"), P3: Decimal("3.06")}


class Vcpus:
    """Moto's side, as far as quotas ask it."""

    def vcpus_of(self, instance_type: str) -> int:
        return {G4: 4, P3: 8}[instance_type]


def no_refusal(_pool: PoolKey, _lifecycle: str) -> Reason | None:
    return None


def context(refusal: Refusal = no_refusal, quotas: tuple[Quota, ...] = ()) -> Context:
    """A market of four pools: two, five and nine of a small machine, each zone dearer, and two of a large one."""
    pools = {
        PoolKey(*key): PoolMarket(
            PoolKey(*key),
            LISTED[key[1]],
            ToldPrices([PricePoint(at(days=-1), Decimal(price))]),
            Steady(count),
            Steady(1),
        )
        for key, (price, count) in SPOT.items()
    }
    offers = [
        TypeOffer(name=name, gpu="one", on_demand={"us-east-1": SourcedPrice(usd_per_hour=price, **SOURCE)})
        for name, price in LISTED.items()
    ]
    zones = [Zone(name=name, zone_id=f"use1-az{n}") for n, name in enumerate(ZONES)]
    disk = DiskPrice(usd_per_gib_month=Decimal("0.08"), **SOURCE)
    sold = Market(label="made up", zones=zones, types=offers, pools=pools, disk=disk, quotas=quotas)
    book = Book(sold, ManualClock(ORIGIN), MemoryJournal())
    return Context(sold, book, cast(MotoSide, Vcpus()), lambda: None, Visibility(), refusal)


def candidate(zone: str, instance_type: str = G4, **more: Any) -> Candidate:
    given: dict[str, Any] = {"max_price": None, "priority": float("inf"), "weight": 1.0, **more}
    override = {"InstanceType": instance_type, "AvailabilityZone": zone, "WeightedCapacity": given["weight"]}
    return Candidate(PoolKey(zone, instance_type), LaunchSpec(), {}, override, **given)


EVERY = [candidate(zone) for zone in ZONES]


def launch(shop: Context, wanted: list[Target], pools: list[Candidate]) -> tuple[dict[tuple[str, str], int], list[str]]:
    """(zone, lifecycle) -> how many were launched, and the codes of the errors."""
    planner = Planner(shop, wanted, pools)
    answer = shop.book.launch_once("fleet", "us-east-1", "", "digest", {}, {}, planner.plan).answer
    bought: Counter[tuple[str, str]] = Counter()
    for group in answer["Instances"]:
        bought[group["AvailabilityZone"], group["Lifecycle"]] += len(group["InstanceIds"])
    return bought, [error["ErrorCode"] for error in answer["Errors"]]


@pytest.mark.parametrize(
    ("strategy", "bought"),
    [
        ("lowest-price", {ZONES[0]: 2, ZONES[1]: 2}),
        ("capacity-optimized", {ZONES[2]: 4}),
        # the cheapest of those with room for all four
        ("price-capacity-optimized", {ZONES[1]: 4}),
        ("diversified", {ZONES[0]: 2, ZONES[1]: 1, ZONES[2]: 1}),
    ],
)
def test_a_strategy_chooses_the_pools_that_it_promises(strategy: str, bought: dict[str, int]) -> None:
    got, _ = launch(context(), [Target("spot", 4, strategy)], EVERY)
    assert got == {(zone, "spot"): count for zone, count in bought.items()}


def test_priorities_hold_where_capacity_allows() -> None:
    pools = [candidate(zone, priority=float(n)) for n, zone in enumerate(ZONES)]
    got, _ = launch(context(), [Target("spot", 4, "capacity-optimized-prioritized")], pools)
    assert got == {(ZONES[1], "spot"): 4}, "zone a comes first, but has not enough"
    got, _ = launch(context(), [Target("on-demand", 2, "prioritized")], list(reversed(pools)))
    assert got == {(ZONES[0], "on-demand"): 1, (ZONES[1], "on-demand"): 1}


def test_a_fleet_takes_what_there_is_and_says_what_there_was_not() -> None:
    shop = context()
    got, codes = launch(shop, [Target("spot", 4, "lowest-price")], EVERY[:1])
    assert (got, codes) == ({(ZONES[0], "spot"): 2}, ["InsufficientInstanceCapacity"])
    got, codes = launch(shop, [Target("spot", 1, "lowest-price")], EVERY[:1])
    assert (got, codes) == ({}, ["InsufficientInstanceCapacity"])


def test_both_lifecycles_are_bought_from_one_pool_and_counted_apart() -> None:
    wanted = [Target("on-demand", 1, "lowest-price"), Target("spot", 2, "lowest-price")]
    got, codes = launch(context(), wanted, EVERY[:1])
    assert (got, codes) == ({(ZONES[0], "on-demand"): 1, (ZONES[0], "spot"): 2}, [])


def test_the_price_of_a_unit_decides_and_instances_are_rounded_up() -> None:
    pools = [candidate(ZONES[0]), candidate(ZONES[0], P3, weight=4.0)]
    shop = context()
    launch(shop, [Target("spot", 6, "lowest-price")], pools)
    bought = [one.pool.instance_type for one in shop.book.every()]
    assert bought == [P3, P3], "0.15 for a unit is less than 0.20, and six units are two of four"


def test_a_cap_below_the_price_is_told_before_anything_else_and_the_default_cap_is_on_demand() -> None:
    pools = [candidate(ZONES[0], max_price=Decimal("0.19")), candidate(ZONES[1], max_price=Decimal("0.25"))]
    shop = context()
    got, codes = launch(shop, [Target("spot", 1, "lowest-price")], pools)
    assert (got, codes) == ({(ZONES[1], "spot"): 1}, ["SpotMaxPriceTooLow"])
    launch(shop, [Target("spot", 1, "lowest-price")], EVERY[2:])
    assert [one.max_price for one in shop.book.every()] == [Decimal("0.25"), Decimal("0.526")]


def test_the_total_price_bounds_the_number() -> None:
    wanted = [Target("spot", 4, "lowest-price", max_total=Decimal("0.70"))]
    got, codes = launch(context(), wanted, EVERY)
    assert got == {(ZONES[0], "spot"): 2, (ZONES[1], "spot"): 1}, "0.20 + 0.20 + 0.25, and no other for 0.05"
    assert codes == ["InsufficientInstanceCapacity", "UnfulfillableCapacity", "UnfulfillableCapacity"]


def test_one_zone_for_all_is_the_first_that_suffices_or_the_fullest() -> None:
    got, _ = launch(context(), [Target("spot", 4, "lowest-price", single_zone=True)], EVERY)
    assert got == {(ZONES[1], "spot"): 4}
    got, _ = launch(context(), [Target("spot", 20, "lowest-price", single_zone=True)], EVERY)
    assert got == {(ZONES[2], "spot"): 9}
    mixed = [*EVERY, candidate(ZONES[0], P3)]
    got, _ = launch(context(), [Target("spot", 16, "lowest-price", single_type=True)], mixed)
    assert sum(got.values()) == 16


def test_too_few_of_one_lifecycle_launch_nothing_at_all() -> None:
    shop = context()
    wanted = [Target("on-demand", 1, "lowest-price"), Target("spot", 9, "lowest-price", minimum=6, single_zone=True)]
    got, codes = launch(shop, wanted, EVERY[:2])
    assert (got, codes) == ({}, ["InsufficientInstanceCapacity"])
    assert shop.book.every() == []


def test_quotas_count_what_runs_and_what_is_bought_now() -> None:
    quotas = (Quota(region="us-east-1", lifecycle="spot", family="g", vcpus=13),)
    shop = context(quotas=quotas)
    got, codes = launch(shop, [Target("spot", 9, "lowest-price")], [*EVERY, candidate(ZONES[0], P3)])
    assert got == {(ZONES[0], "spot"): 2 + 2, (ZONES[1], "spot"): 1}
    assert codes.count("MaxSpotInstanceCountExceeded") == 2
    assert {one.pool.instance_type for one in shop.book.every()} == {G4, P3}, "P has a quota of its own, here none"
    got, codes = launch(shop, [Target("spot", 1, "lowest-price")], EVERY[2:])
    assert (got, codes) == ({}, ["MaxSpotInstanceCountExceeded"])
    got, _ = launch(shop, [Target("on-demand", 1, "lowest-price")], EVERY)
    assert sum(got.values()) == 1, "on-demand is counted apart"


@pytest.mark.parametrize(
    ("instance_type", "of"),
    [
        ("g4dn.xlarge", "g"), ("gr6.4xlarge", "g"), ("vt1.3xlarge", "g"), ("p3.2xlarge", "p"), ("p4d.24xlarge", "p"),
        ("m5.large", "standard"), ("t3.micro", "standard"), ("im4gn.large", "standard"), ("inf2.xlarge", None),
        ("trn1.2xlarge", None), ("x1e.xlarge", None), ("dl1.24xlarge", None), ("hpc6a.48xlarge", None),
    ],
)  # fmt: skip
def test_families_of_quotas(instance_type: str, of: str | None) -> None:
    assert family(instance_type) == of


def test_faults_are_asked_only_for_pools_that_would_be_bought_from() -> None:
    asked: list[tuple[str, str]] = []

    def refuse_a(pool: PoolKey, lifecycle: str) -> Reason | None:
        asked.append((pool.zone, lifecycle))
        return ("UnfulfillableCapacity", "a fault") if pool.zone == ZONES[0] else None

    got, codes = launch(context(refuse_a), [Target("spot", 1, "lowest-price")], EVERY)
    assert (got, codes) == ({(ZONES[1], "spot"): 1}, ["UnfulfillableCapacity"])
    assert asked == [(ZONES[0], "spot"), (ZONES[1], "spot")]


def test_what_is_not_sold_is_an_error_of_its_pool() -> None:
    got, codes = launch(context(), [Target("spot", 1, "lowest-price")], [candidate("us-east-1d"), EVERY[2]])
    assert (got, codes) == ({(ZONES[2], "spot"): 1}, ["InvalidFleetConfiguration"])


def wanted(total: int, **more: Any) -> dict[str, Any]:
    specification = {"TotalTargetCapacity": total, "DefaultTargetCapacityType": "spot", **more.pop("of", {})}
    return {"Type": "instant", "TargetCapacitySpecification": specification, **more}


def test_the_rest_of_a_total_is_of_the_default_lifecycle() -> None:
    (on_demand, spot) = targets(wanted(5, of={"OnDemandTargetCapacity": 2}))
    assert [(one.lifecycle, one.units) for one in (on_demand, spot)] == [("on-demand", 2), ("spot", 3)]
    (only,) = targets(wanted(5, of={"DefaultTargetCapacityType": "on-demand"}))
    assert (only.lifecycle, only.units) == ("on-demand", 5)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({**wanted(1), "Type": "maintain"}, "UnsupportedOperation"),
        (wanted(0), "InvalidTargetCapacitySpecification"),
        (wanted(1, of={"SpotTargetCapacity": 2}), "InvalidTargetCapacitySpecification"),
        (wanted(1, of={"DefaultTargetCapacityType": "capacity-block"}), "UnsupportedOperation"),
        (wanted(1, of={"TargetCapacityUnitType": "vcpu"}), "InvalidParameterCombination"),
        (wanted(1, SpotOptions={"AllocationStrategy": "prioritized"}), "InvalidParameterValue"),
        (wanted(1, SpotOptions={"InstanceInterruptionBehavior": "hibernate"}), "UnsupportedOperation"),
        (wanted(1, SpotOptions={"InstancePoolsToUseCount": 2}), "UnsupportedOperation"),
        (wanted(1, SpotOptions={"MinTargetCapacity": 1}), "InvalidParameterCombination"),
        (wanted(1, SpotOptions={"MinTargetCapacity": 2, "SingleInstanceType": True}), "InvalidParameterValue"),
        (wanted(1, SpotOptions={"MaxTotalPrice": "cheap"}), "InvalidParameterValue"),
    ],
)
def test_requests_that_are_wrong_or_not_rehearsed(request_: dict[str, Any], code: str) -> None:
    with pytest.raises(Ec2Error) as caught:
        targets(request_)
    assert caught.value.code == code


@pytest.mark.parametrize("strategy", sorted(fleet_request.SPOT_STRATEGIES))
def test_every_strategy_gives_all_that_is_asked_or_all_that_there_is(strategy: str) -> None:
    for units in (1, 2, 5, 9, 16, 17, 40):
        got, _ = launch(context(), [Target("spot", units, strategy)], EVERY)
        assert sum(got.values()) == min(units, 16)
        assert all(got.get((zone, "spot"), 0) <= SPOT[zone, G4][1] for zone in ZONES)
