"""Asking the planner on behalf of a job: what it needs to know is gathered here, from books, store and market."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucost.capacity.lease import Lease
from gpucost.job import TrainingJob
from gpucost.lifecycle.progress import read_progress
from gpucost.lifecycle.services import Services
from gpucost.lifecycle.steps import CourseEnded
from gpucost.market.pool import CapacityType, Pool
from gpucost.market.quote import PricePoint, Quote
from gpucost.placement.planner import BudgetTooSmall, DeadlineImpossible, NoPoolFits, Plan, Situation, plan
from gpucost.placement.policies.protocol import Mode
from gpucost.placement.policies.registry import make_policy
from gpucost.reasons import Reason, rule_for

TICK = timedelta(minutes=5)
"""How often a decision is taken anew while waiting or running, on the job's clock."""


@dataclass(frozen=True)
class Refusal:
    """A pool that is not asked for now.

    Args:
        reason: why it was refused.
        note: for people.
    """

    reason: Reason
    note: str


def decide(services: Services, key: str, job: TrainingJob, policy: str, running: Pool | None = None) -> Plan:
    """What the job should do now.

    Args:
        key: the job's key.
        policy: name or dotted path.
        running: the pool it runs in; None: it runs nowhere.

    Raises:
        CourseEnded: nothing can be bought in time, for the money, within the quotas, or at all.
        ProviderError: there are no quotes now.
    """
    now = services.clock.now()
    _, _, started = services.jobs.load(key)
    leases = services.leases.of_job(key)
    quotes = services.provider.quotes(now)
    refused = refusals(services, quotes, now)
    situation = Situation(
        now=now,
        started=started,
        work_left=read_progress(services.store(key), services.live, leases).work_left,
        spent=services.books.cost_so_far(key, _running(leases), now),
        refused={pool: refusal.note for pool, refusal in refused.items()},
        mode=_mode(running),
        pool=running,
        tick=TICK,
    )
    try:
        decision = plan(job, quotes, situation, make_policy(policy), services.jobs.policy_state(key))
    except DeadlineImpossible as late:
        raise CourseEnded(Reason.DEADLINE_IMPOSSIBLE, str(late)) from late
    except BudgetTooSmall as dear:
        raise CourseEnded(Reason.BUDGET_EXHAUSTED, str(dear)) from dear
    except NoPoolFits as misfit:
        raise CourseEnded(Reason.BAD_REQUEST, str(misfit)) from misfit
    if decision.chosen is None and running is None:
        _fail_if_only_quotas_are_in_the_way(decision, refused)
    return decision


def refusals(services: Services, quotes: Sequence[Quote], now: datetime) -> dict[str, Refusal]:
    """Pools that are not asked for now, as the reason table says.

    A quota is counted over a region and a way to buy, not over a pool: all pools of that kind are left out.
    """
    longest = max(rule_for(reason).leave_out_hours for reason in Reason)
    refused: dict[str, Refusal] = {}
    for lease, at in services.leases.refused_between(now - timedelta(hours=longest), now):
        reason = lease.end_reason or Reason.CLOUD_ERROR
        until = at + timedelta(hours=rule_for(reason).leave_out_hours)
        if until <= now:
            continue
        note = f"{reason} at {at:%H:%M}, asked again from {until:%H:%M}"
        keys = [lease.pool.key]
        if reason is Reason.QUOTA:
            note = f"{services.leases.history(lease.id)[-1][2]} ({note})"
            keys = [quote.pool.key for quote in quotes if _one_quota(quote.pool, lease.pool)]
        refused |= {key: Refusal(reason, note) for key in keys}
    return refused


def _fail_if_only_quotas_are_in_the_way(decision: Plan, refused: dict[str, Refusal]) -> None:
    """A quota does not pass by itself: waiting for it would only let the deadline pass."""
    found = [refused.get(alternative.quote.pool.key) for alternative in decision.ranked]
    if found and all(refusal is not None and refusal.reason is Reason.QUOTA for refusal in found):
        raise CourseEnded(Reason.QUOTA, "; ".join(sorted({refusal.note for refusal in found if refusal is not None})))


def _one_quota(one: Pool, other: Pool) -> bool:
    return (one.provider, one.region, one.capacity_type) == (other.provider, other.region, other.capacity_type)


def _running(leases: Sequence[Lease]) -> list[tuple[Lease, list[PricePoint]]]:
    """Leases that still cost; their prices since they were bought are looked up when they are settled."""
    return [(lease, []) for lease in leases if lease.state.may_cost]


def _mode(running: Pool | None) -> Mode:
    if running is None:
        return Mode.IDLE
    return Mode.SPOT if running.capacity_type is CapacityType.SPOT else Mode.ON_DEMAND
