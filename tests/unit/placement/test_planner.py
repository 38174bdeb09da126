"""The planner: what to buy now, at what cost, and for every other pool why not."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.market.pool import CapacityType, InstanceType, Pool
from gpucost.market.quote import Quote
from gpucost.money import Money
from gpucost.placement.planner import (
    BudgetTooSmall,
    DeadlineImpossible,
    NoPoolFits,
    Plan,
    Situation,
    plan,
)
from gpucost.placement.policies.protocol import ActionKind, Mode
from gpucost.placement.policies.registry import make_policy
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, wanted

A100 = InstanceType(name="p4d.24xlarge", gpu_kind="A100", gpu_count=8, gpu_memory_gib=40, vcpus=96, memory_gib=1152)


def market(**spot: str) -> list[Quote]:
    """Spot in zones a, b, c at 0.30, 0.35, 0.40, on demand at 1.00 everywhere, unless changed."""
    prices = {"a": "0.30", "b": "0.35", "c": "0.40"} | spot
    on_demand = [quote(pool(zone, CapacityType.ON_DEMAND), "1.00", START) for zone in "abc"]
    return [quote(pool(zone), price, START) for zone, price in prices.items()] + on_demand


def decide(quotes: list[Quote] | None = None, job: dict[str, Any] | None = None, **changes: Any) -> Plan:
    facts: dict[str, Any] = {
        "now": START,
        "started": START,
        "work_left": 1.0,
        "spent": Money.zero(),
        "refused": {},
    }
    situation = Situation(**(facts | changes))
    return plan(wanted(**(job or {})), market() if quotes is None else quotes, situation, make_policy("greedy"))


def test_the_cheapest_spot_is_taken_at_its_cost_to_finish() -> None:
    found = decide()
    assert found.chosen is not None
    assert found.chosen.quote.pool == pool("a")
    assert found.chosen.expected_cost == Money.usd("0.63")  # (2 h of work + 0.1 h of launch) at 0.30
    assert found.chosen.finish == START + timedelta(hours=2.1)
    assert found.chosen.verdict.startswith("taken: cheapest of 3 spot pools")


def test_every_pool_is_ranked_and_every_loser_says_why() -> None:
    found = decide(refused={pool("b").key: "no_capacity at 12:00, asked again from 12:15"})
    costs = [alternative.expected_cost.amount for alternative in found.ranked]
    assert costs == sorted(costs)
    assert len(found.ranked) == 6
    verdicts = {alternative.quote.pool.key: alternative.verdict for alternative in found.ranked}
    assert verdicts[pool("c").key] == "not taken: $0.2100 dearer"
    assert verdicts[pool("b").key] == "left out: no_capacity at 12:00, asked again from 12:15"
    assert (pool("b").key, "no_capacity at 12:00, asked again from 12:15") in found.left_out


def test_the_yardstick_for_savings_is_the_same_machine_on_demand() -> None:
    same = quote(pool("a", CapacityType.ON_DEMAND), "1.50", START)
    cheaper_elsewhere = quote(pool("b", CapacityType.ON_DEMAND), "1.20", START)
    found = decide([quote(pool("a"), "0.3", START), same, cheaper_elsewhere])
    assert found.on_demand_price(pool("a")) == same.price
    assert decide([quote(pool("a"), "0.3", START)]).on_demand_price(pool("a")) is None


def test_a_purchase_that_would_break_the_budget_is_not_made_however_cheap_the_refused_ones_were() -> None:
    refused = {pool(zone).key: "no_capacity" for zone in "abc"}
    with pytest.raises(BudgetTooSmall, match=r"budget: got \$2.00.*on-demand.*expected to cost"):
        decide(
            [quote(pool("a"), "0.3", START), quote(pool("a", CapacityType.ON_DEMAND), "10", START)],
            job={"budget": Money.usd("2.00")},
            refused=refused,
            now=START + timedelta(hours=5.8),
        )


def test_a_running_job_that_has_used_up_its_budget_is_told_so() -> None:
    with pytest.raises(BudgetTooSmall, match="all of"):
        decide(job={"budget": Money.usd("2.00")}, spent=Money.usd("2.01"), mode=Mode.SPOT, pool=pool("a"))


def test_what_is_left_is_what_is_planned() -> None:
    found = decide(work_left=0.25, now=START + timedelta(hours=3))
    assert found.chosen is not None
    assert found.chosen.expected_cost == Money.usd("0.18")  # (0.5 h + 0.1 h) at 0.30
    assert found.chosen.finish == START + timedelta(hours=3.6)


def test_spot_nowhere_means_wait_and_later_on_demand() -> None:
    refused = {pool(zone).key: "no_capacity" for zone in "abc"}
    waiting = decide(refused=refused)
    assert (waiting.action.kind, waiting.chosen) == (ActionKind.WAIT, None)
    late = decide(refused=refused, now=START + timedelta(hours=5.8))
    assert late.chosen is not None
    assert late.chosen.quote.pool == pool("a", CapacityType.ON_DEMAND)


def test_refused_on_demand_is_left_out_too() -> None:
    refused = {pool("a", CapacityType.ON_DEMAND).key: "no_capacity"} | {pool(z).key: "no_capacity" for z in "abc"}
    late = decide(refused=refused, now=START + timedelta(hours=5.8))
    assert late.chosen is not None
    assert late.chosen.quote.pool == pool("b", CapacityType.ON_DEMAND)


def test_a_deadline_that_not_even_on_demand_meets_names_the_earliest_finish() -> None:
    with pytest.raises(DeadlineImpossible, match=r"deadline: got 2026-11-30 14:00 UTC.* at 2026-11-30 14:06 UTC"):
        decide(job={"deadline": START + timedelta(hours=2)})
    assert decide(job={"deadline": START + timedelta(hours=2.1)}).chosen is not None


def test_a_running_job_is_not_refused() -> None:
    late = {"now": START + timedelta(hours=7), "mode": Mode.ON_DEMAND, "pool": pool("a", CapacityType.ON_DEMAND)}
    assert decide(**late).action.kind is ActionKind.STAY


def test_a_budget_below_the_cheapest_plan_names_the_amounts_and_what_would_do() -> None:
    message = r"budget: got \$1\.0000, .* costs \$0\.6300 after \$0\.5000 already spent; raise the budget to \$1\.1300"
    with pytest.raises(BudgetTooSmall, match=message):
        decide(job={"budget": "1.00 USD"}, spent=Money.usd("0.50"))
    assert decide(job={"budget": "1.13 USD"}, spent=Money.usd("0.50")).chosen is not None


def test_when_no_pool_fits_the_nearest_misses_are_named() -> None:
    with pytest.raises(NoPoolFits, match=r"gpu: no pool fits the job \(g4dn.xlarge has T4, the job accepts H100"):
        decide(job={"gpu": {"kinds": ("H100",)}})
    with pytest.raises(NoPoolFits, match="there are no quotes at all"):
        decide([])


def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    big = quote(pool("a", instance_type=A100.name), "0.01", START, instance=A100)
    found = decide([*market(), big])
    assert (big.pool.key, "p4d.24xlarge has A100, the job accepts T4") in found.left_out
    assert big.pool.key not in {alternative.quote.pool.key for alternative in found.ranked}


def test_prices_of_two_currencies_are_refused() -> None:
    with pytest.raises(ValueError, match="quotes: got prices in CNY, USD, expected one currency; convert them first"):
        decide([*market(), quote(pool("d"), "2.00", START, currency="CNY")])


def test_moving_from_dying_time_on_spot_to_on_demand_is_the_guard_s_word() -> None:
    found = decide(now=START + timedelta(hours=5.9), mode=Mode.SPOT, pool=pool("a"))
    assert found.action.kind is ActionKind.RUN_ON_DEMAND
    assert "on-demand could no longer finish in time" in found.action.reason


def test_a_plan_is_json_for_the_placement_table() -> None:
    rows = [alternative.as_row() for alternative in decide().ranked]
    assert json.loads(json.dumps(rows)) == rows
    assert rows[0]["expected_cost"] == "0.630000"
    assert (rows[0]["price"], rows[0]["source"], rows[0]["as_of"]) == ("0.30", "a test", START.isoformat())


spot_prices = st.decimals(min_value=Decimal("0.01"), max_value=Decimal("3"), places=4)


@given(st.tuples(spot_prices, spot_prices, spot_prices), st.sampled_from("abc"), spot_prices)
def test_a_lower_price_never_ranks_worse_nor_costs_more(
    prices: tuple[Decimal, Decimal, Decimal], zone: str, lower: Decimal
) -> None:
    before = dict(zip("abc", map(str, prices), strict=True))
    after = before | {zone: str(min(lower, Decimal(before[zone])))}

    def place(found: Plan, of: Pool) -> int:
        return [alternative.quote.pool for alternative in found.ranked].index(of)

    one, two = (decide(market(**spot), job={"budget": None}) for spot in (before, after))
    assert place(two, pool(zone)) <= place(one, pool(zone))
    assert one.chosen is not None
    assert two.chosen is not None
    assert two.chosen.expected_cost <= one.chosen.expected_cost
    cheapest = min(Decimal(price) for price in after.values())
    assert two.chosen.quote.price.amount == cheapest
