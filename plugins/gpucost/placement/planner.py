"""The planner: from a job and today's quotes to what to buy, with the ranked alternatives and the reason.

It translates between the exact world (quotes, money, UTC) and a policy's plain numbers, asks the policy, and
keeps what a person wants to see later: every pool that was considered, what it was expected to cost, and why
it was not taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpucost.job import TrainingJob
from gpucost.market.pool import CapacityType, Pool
from gpucost.market.quote import Quote
from gpucost.money import InstanceHourPrice, Money
from gpucost.placement.policies.protocol import (
    Action,
    ActionKind,
    JobView,
    MarketHistory,
    Mode,
    Observation,
    Policy,
    PoolView,
)


class DeadlineImpossible(ValueError):
    """Not even on-demand, started now, would finish in time."""


class BudgetTooSmall(ValueError):
    """Not even the cheapest plan is within what is left of the budget."""


class NoPoolFits(ValueError):
    """No quoted pool can run the job."""


@dataclass(frozen=True)
class Alternative:
    """One pool that was considered.

    Args:
        quote: pool and price.
        expected_cost: of finishing there without an interruption: (work left + launch) x price.
        finish: when it would be done without an interruption.
        verdict: why it was or was not taken.
    """

    quote: Quote
    expected_cost: Money
    finish: datetime
    verdict: str

    def as_row(self) -> dict[str, Any]:
        """As JSON values, for the placement table."""
        return {
            "pool": self.quote.pool.key,
            "price": str(self.quote.price.amount),
            "currency": self.quote.price.currency,
            "as_of": self.quote.as_of.isoformat(),
            "source": self.quote.source,
            "expected_cost": str(self.expected_cost.amount),
            "finish": self.finish.isoformat(),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Plan:
    """What to do now.

    Args:
        action: the policy's answer.
        chosen: what to buy; None when nothing is to be bought.
        ranked: every pool that fits, cheapest expected cost first.
        left_out: pools that do not fit or were refused lately, with the reason.
        policy: name of the policy that decided.
        policy_state: its memory, to be given to the next `plan`.
    """

    action: Action
    chosen: Alternative | None
    ranked: tuple[Alternative, ...]
    left_out: tuple[tuple[str, str], ...]
    policy: str
    policy_state: dict[str, Any]

    def on_demand_price(self, pool: Pool) -> InstanceHourPrice | None:
        """What `pool`'s machine costs on demand in the same zone: the yardstick for savings, and EC2's own cap."""
        same = pool.on_demand()
        return next((a.quote.price for a in self.ranked if a.quote.pool == same), None)


@dataclass(frozen=True)
class Situation:
    """Where the job stands.

    Args:
        now: the present moment.
        started: when the deadline began to count.
        work_left: share of the work that is not saved yet, 0 to 1.
        spent: charged and running so far.
        refused: pool key -> why it is left out for now.
        mode, pool: how and where it runs now.
        tick: time until the next decision.
    """

    now: datetime
    started: datetime
    work_left: float
    spent: Money
    refused: dict[str, str]
    mode: Mode = Mode.IDLE
    pool: Pool | None = None
    tick: timedelta = timedelta(minutes=5)


@dataclass(frozen=True)
class _Place:
    """One machine in one zone, both ways to buy it."""

    spot: Quote | None
    on_demand: Quote | None

    @property
    def any(self) -> Quote:
        quote = self.spot or self.on_demand
        assert quote is not None  # noqa: S101 - places are made from quotes
        return quote


def plan(
    job: TrainingJob,
    quotes: Iterable[Quote],
    situation: Situation,
    policy: Policy,
    policy_state: dict[str, Any] | None = None,
) -> Plan:
    """Decide what the job does now.

    Args:
        job: what is wanted.
        quotes: prices in force, spot and on-demand, of one currency.
        situation: where the job stands.
        policy: who decides.
        policy_state: its memory from the plan before; None at the first.

    Raises:
        NoPoolFits: no pool can run the job; the message names the nearest misses.
        DeadlineImpossible: the earliest finish is after the deadline; the message names it.
        BudgetTooSmall: the cheapest plan costs more than is left; the message names both.
    """
    fitting, left_out = _fitting(job, quotes)
    ranked = _rank(job, fitting, situation)
    if situation.mode is Mode.IDLE:
        _refuse_the_impossible(job, ranked, situation)
    elif job.budget is not None and situation.spent >= job.budget:
        raise BudgetTooSmall(f"budget: {situation.spent} is spent, all of {job.budget}; raise it to let the job go on")
    places = _places(fitting)
    policy.start(_job_view(job, situation), [_pool_view(place) for place in places], MarketHistory())
    if policy_state:
        policy.restore(policy_state)
    action = policy.decide(_observe(job, places, situation))
    chosen = _chosen(action, places, ranked)
    if chosen is not None:
        _refuse_beyond_budget(job, chosen, action, situation)
    refused = tuple((key, why) for key, why in situation.refused.items())
    verdicts = _with_verdicts(ranked, chosen, action, situation)
    taken = next((one for one in verdicts if chosen is not None and one.quote is chosen.quote), None)
    return Plan(action, taken, verdicts, (*left_out, *refused), policy.name, policy.state())


def _fitting(job: TrainingJob, quotes: Iterable[Quote]) -> tuple[list[Quote], list[tuple[str, str]]]:
    fitting: list[Quote] = []
    left_out: list[tuple[str, str]] = []
    for quote in quotes:
        misfit = quote.instance.misfit(job.gpu)
        if misfit:
            left_out.append((quote.pool.key, misfit))
        else:
            fitting.append(quote)
    if not fitting:
        nearest = "; ".join(why for _, why in left_out[:3]) or "there are no quotes at all"
        raise NoPoolFits(
            f"gpu: no pool fits the job ({nearest}); widen gpu.kinds, or add sites that have such machines"
        )
    currencies = {quote.price.currency for quote in fitting}
    if len(currencies) > 1:
        raise ValueError(
            f"quotes: got prices in {', '.join(sorted(currencies))}, expected one currency; convert them first"
        )
    return fitting, left_out


def _rank(job: TrainingJob, quotes: Sequence[Quote], situation: Situation) -> list[Alternative]:
    hours = job.work_hours * situation.work_left + job.launch_hours
    finish = situation.now + timedelta(hours=hours)
    alternatives = [
        Alternative(quote, quote.price.for_hours(Decimal(str(round(hours, 6)))).rounded(), finish, "")
        for quote in quotes
    ]
    return sorted(alternatives, key=lambda a: (a.expected_cost.amount, a.quote.pool.key))


def _refuse_the_impossible(job: TrainingJob, ranked: Sequence[Alternative], situation: Situation) -> None:
    earliest = min(alternative.finish for alternative in ranked)
    if earliest > job.deadline:
        raise DeadlineImpossible(
            f"deadline: got {job.deadline:%Y-%m-%d %H:%M} UTC, but even a machine bought now would finish at "
            f"{earliest:%Y-%m-%d %H:%M} UTC; move the deadline there or later, or reduce work_hours"
        )
    if job.budget is not None:
        cheapest = situation.spent + ranked[0].expected_cost
        if cheapest > job.budget:
            raise BudgetTooSmall(
                f"budget: got {job.budget}, but the cheapest plan costs {ranked[0].expected_cost} after "
                f"{situation.spent} already spent; raise the budget to {cheapest} or more"
            )


def _refuse_beyond_budget(job: TrainingJob, chosen: Alternative, action: Action, situation: Situation) -> None:
    """The budget is hard: a purchase that would break it is not made, also where the deadline then cannot be met."""
    if job.budget is None:
        return
    needed = situation.spent + chosen.expected_cost
    if needed > job.budget:
        raise BudgetTooSmall(
            f"budget: got {job.budget}, of which {situation.spent} is spent; {chosen.quote.pool.key}, which the "
            f"deadline now needs ({action.reason}), is expected to cost {chosen.expected_cost}; raise the budget to "
            f"{needed} or more, or move the deadline"
        )


def _places(quotes: Sequence[Quote]) -> list[_Place]:
    found: dict[tuple[str, str, str], dict[CapacityType, Quote]] = {}
    for quote in quotes:
        pool = quote.pool
        found.setdefault((pool.provider, pool.zone_id, pool.instance_type), {})[pool.capacity_type] = quote
    return [_Place(both.get(CapacityType.SPOT), both.get(CapacityType.ON_DEMAND)) for _, both in sorted(found.items())]


def _job_view(job: TrainingJob, situation: Situation) -> JobView:
    return JobView(
        work_hours=job.work_hours,
        deadline_hours=(job.deadline - situation.started) / timedelta(hours=1),
        launch_hours=job.launch_hours,
        budget_usd=float(job.budget.amount) if job.budget else None,
        spot_price_cap=float(job.price_cap.amount) if job.price_cap else None,
    )


def _pool_view(place: _Place) -> PoolView:
    pool = place.any.pool
    price = float(place.on_demand.price.amount) if place.on_demand else None
    return PoolView(name=f"{pool.zone_id} {pool.instance_type}", region=pool.region, on_demand_price=price)


def _observe(job: TrainingJob, places: Sequence[_Place], situation: Situation) -> Observation:
    def free(quote: Quote | None) -> bool:
        return quote is not None and quote.pool.key not in situation.refused

    here = next(
        (
            index
            for index, place in enumerate(places)
            if situation.pool is not None
            and (place.any.pool.zone_id, place.any.pool.instance_type)
            == (situation.pool.zone_id, situation.pool.instance_type)
        ),
        None,
    )
    return Observation(
        hours=(situation.now - situation.started) / timedelta(hours=1),
        tick_hours=situation.tick / timedelta(hours=1),
        work_left_hours=job.work_hours * situation.work_left,
        mode=situation.mode,
        pool=here,
        # Whether a pool has capacity is only known by asking it; a pool that refused lately is not asked.
        spot_available=[None if free(place.spot) else False for place in places],
        spot_prices=[float(place.spot.price.amount) if place.spot else None for place in places],
        on_demand_available=[free(place.on_demand) for place in places],
        spent_usd=float(situation.spent.amount),
    )


def _chosen(action: Action, places: Sequence[_Place], ranked: Sequence[Alternative]) -> Alternative | None:
    if action.pool is None:
        return None
    place = places[action.pool]
    quote = place.on_demand if action.kind is ActionKind.RUN_ON_DEMAND else place.spot
    return next((alternative for alternative in ranked if alternative.quote is quote), None)


def _with_verdicts(
    ranked: Sequence[Alternative], chosen: Alternative | None, action: Action, situation: Situation
) -> tuple[Alternative, ...]:
    def verdict(alternative: Alternative) -> str:
        if alternative is chosen:
            return f"taken: {action.reason}"
        refused = situation.refused.get(alternative.quote.pool.key)
        if refused:
            return f"left out: {refused}"
        if chosen is None:
            return f"not taken: {action.reason}"
        difference = alternative.expected_cost - chosen.expected_cost
        return f"not taken: {difference} dearer" if difference.amount > 0 else "not taken"

    return tuple(Alternative(a.quote, a.expected_cost, a.finish, verdict(a)) for a in ranked)
