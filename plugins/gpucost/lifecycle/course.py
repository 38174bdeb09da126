"""The course of one job: plan, buy, watch, settle, and again, until it is done.

Airflow's operator, the terminal and the tests drive it the same way: `begin`, then `pursue`, then `handle` for
each event that a watcher reports, until a `Finished` comes back. Every method can be called again after a crash:
what was bought is adopted, what was asked is asked under the same token, what was settled is not settled twice.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from pathlib import Path

from gpucost.bundle import pack_code
from gpucost.capacity.buyer import may_ask_elsewhere
from gpucost.capacity.lease import Attempt, Lease, LeaseState
from gpucost.capacity.providers.base import ProviderError
from gpucost.job import JobId, TrainingJob
from gpucost.jobstore import AttemptRecord, Command, JobSpec, Member
from gpucost.ledger.books import Books
from gpucost.lifecycle import settlement, tracking
from gpucost.lifecycle.progress import read_progress
from gpucost.lifecycle.services import Services
from gpucost.lifecycle.steps import CourseEnded, Event, EventKind, Finished, Pause, Step, Watch
from gpucost.market.pool import CapacityType, Pool
from gpucost.market.quote import PricePoint
from gpucost.money import Money
from gpucost.placement.planner import (
    Alternative,
    BudgetTooSmall,
    DeadlineImpossible,
    NoPoolFits,
    Plan,
    Situation,
    plan,
)
from gpucost.placement.policies.protocol import ActionKind, Mode
from gpucost.placement.policies.registry import make_policy
from gpucost.reasons import Reason, Then, rule_for

log = logging.getLogger(__name__)

TICK = timedelta(minutes=5)
"""How often a decision is taken anew while waiting or running, on the job's clock."""

EXPIRY_FACTOR = 1.5
EXPIRY_MARGIN = timedelta(hours=1)
"""A node ends itself this much after its planned finish: half as long again, and an hour for launch and upload."""

FRUITLESS_ATTEMPTS = 3
"""Attempts lost before their first step, one after another, until the job fails instead of buying again."""

MAX_TRIES_AT_ONCE = 20
"""Pools asked one after another within one step, before it pauses."""


class Course:
    """One job on its way.

    Args:
        services: the rooms.
        job_id: which job.
        job: what is wanted.
        owner: this try's owner token.
        policy: name or dotted path of the policy that decides.
    """

    def __init__(self, services: Services, job_id: JobId, job: TrainingJob, owner: str, policy: str = "greedy") -> None:
        self.services = services
        self.job_id = job_id
        self.job = job
        self.owner = owner
        self.key = job_id.key
        self._policy = policy
        self._store = services.store(self.key)

    def begin(self, code_folder: Path) -> None:
        """Write down what is wanted and put the code where nodes find it; again after a crash or a clear."""
        now = self.services.clock.now()
        digest, data = pack_code(code_folder)
        if not (code_folder / self.job.program).is_file():
            raise CourseEnded(
                Reason.BAD_PROGRAM, f"program: {self.job.program!r} is not in {str(code_folder)!r}; nothing was bought"
            )
        self.services.jobs.begin(self.job_id, self.job, now)
        self._store.write_code(digest, data)
        self._store.write_spec(self._spec(digest))
        tracking.job_began(self.services, self.job_id, self.job)

    def pursue(self) -> Step:
        """Take the next step from wherever the job stands: adopt what is there, or plan and buy.

        Raises:
            CourseEnded: nothing can be bought in time, for the money, or at all.
        """
        try:
            return self._pursue()
        except ProviderError as error:
            return self._ask_later(error)

    def _pursue(self) -> Step:
        for lease in self.services.leases.open(self.key):
            mine = lease if lease.owner == self.owner else self._adopt(lease)
            if mine.state is LeaseState.REQUESTED:
                mine = self._ask_again(mine)
            if mine.state in (LeaseState.ACTIVE, LeaseState.TERMINATING):
                return Watch(lease_id=mine.id, owner=self.owner)
        unsettled = self._unfinished_attempt()
        if unsettled is not None:
            return self._settle(unsettled, None)
        return self._plan_and_buy()

    def handle(self, event: Event) -> Step:
        """Act on what a watcher saw.

        Raises:
            CourseEnded: the attempt or the job failed.
            NotOwner: another try holds the job now; leave it alone.
        """
        log.info("Event: %s %s", event.kind, event.note)
        if event.kind is EventKind.TIME or event.lease_id is None:
            return self.pursue()
        lease = self.services.leases.get(event.lease_id)
        if event.kind is EventKind.REPLAN:
            self.ask(lease, Command.SAVE_AND_STOP, event.note)
            return Watch(lease_id=lease.id, owner=self.owner)
        try:
            return self._settle(lease, event)
        except ProviderError as error:
            return self._ask_later(error)

    def ask(self, lease: Lease, command: Command, why: str) -> None:
        """Ask something of the running attempt through its control object."""
        control = self._store.control(lease.attempt)
        if control.command is not command:
            changed = control.model_copy(update={"sequence": control.sequence + 1, "command": command, "why": why})
            self._store.ask(lease.attempt, changed)

    def stop(self, reason: Reason) -> bool:
        """End every machine of the job that this try owns; for cancelling.

        A job that another try goes on with, or that has ended, is left as it is.

        Returns:
            Whether the cloud has confirmed the end of all of them.
        """
        leases = self.services.leases.open(self.key)
        mine = [lease for lease in leases if lease.owner == self.owner]
        ended = [self.services.buyer.release(lease, reason) for lease in mine]
        if any(lease.state.may_cost for lease in ended):
            return False
        unsettled = self._unfinished_attempt()
        if unsettled is not None:
            settlement.settle_attempt(self.services, self.key, unsettled)
        if len(mine) == len(leases) and self.services.jobs.ended_as(self.key) is None:
            settlement.finish(self.services, self.key, reason)
        return True

    def assess(self, lease: Lease) -> Plan:
        """What the policy would do now, with the job running on `lease`."""
        mode = Mode.SPOT if lease.pool.capacity_type is CapacityType.SPOT else Mode.ON_DEMAND
        return self._plan(mode, lease.pool)

    # Planning and buying.

    def _plan_and_buy(self) -> Step:
        for _ in range(MAX_TRIES_AT_ONCE):
            decision = self._plan(Mode.IDLE, None)
            now = self.services.clock.now()
            self.services.jobs.place(self.key, decision, now)
            log.info("Placement by %s: %s (%s)", decision.policy, decision.action.kind.name, decision.action.reason)
            if decision.chosen is None:
                return Pause(until=now + TICK, why=decision.action.reason)
            settlement.note_compromise(self.services, self.key, decision, now)
            lease = self._intend(decision.chosen, decision)
            try:
                lease = self.services.buyer.buy(lease)
            except ProviderError as error:
                log.warning("%s refused: %s", lease.pool.key, error)
                if not may_ask_elsewhere(error) or error.reason in (Reason.CLOUD_ERROR, Reason.THROTTLED):
                    return self._ask_later(error)
                continue
            log.info("Bought %s as %s", lease.pool.key, lease.instance_id)
            return Watch(lease_id=lease.id, owner=self.owner)
        return Pause(until=self.services.clock.now() + TICK, why=f"{MAX_TRIES_AT_ONCE} pools refused in a row")

    def _ask_later(self, error: ProviderError) -> Pause:
        """The cloud did not do what was asked: pause, or end where asking again cannot help."""
        if not may_ask_elsewhere(error):
            raise CourseEnded(error.reason, str(error)) from error
        log.warning("The cloud is asked again in %s: %s", TICK, error)
        return Pause(until=self.services.clock.now() + TICK, why=str(error))

    def _plan(self, mode: Mode, pool: Pool | None) -> Plan:
        now = self.services.clock.now()
        _, _, started = self.services.jobs.load(self.key)
        leases = self.services.leases.of_job(self.key)
        situation = Situation(
            now=now,
            started=started,
            work_left=read_progress(self._store, self.services.live, leases).work_left,
            spent=self._spent(now, leases),
            refused=self._refused(now),
            mode=mode,
            pool=pool,
            tick=TICK,
        )
        quotes = self.services.provider.quotes(now)
        try:
            return plan(
                self.job, quotes, situation, make_policy(self._policy), self.services.jobs.policy_state(self.key)
            )
        except DeadlineImpossible as late:
            raise CourseEnded(Reason.DEADLINE_IMPOSSIBLE, str(late)) from late
        except BudgetTooSmall as dear:
            raise CourseEnded(Reason.BUDGET_EXHAUSTED, str(dear)) from dear
        except NoPoolFits as misfit:
            raise CourseEnded(Reason.BAD_REQUEST, str(misfit)) from misfit

    def _spent(self, now: datetime, leases: list[Lease]) -> Money:
        books: Books = self.services.books
        bought_at: list[PricePoint] = []
        return books.cost_so_far(self.key, [(lease, bought_at) for lease in leases if lease.state.may_cost], now)

    def _refused(self, now: datetime) -> dict[str, str]:
        """Pools that are not asked for now, as the reason table says, with why."""
        longest = max(rule_for(reason).leave_out_hours for reason in Reason)
        refused: dict[str, str] = {}
        for lease, at in self.services.leases.refused_since(now - timedelta(hours=longest)):
            reason = lease.end_reason or Reason.CLOUD_ERROR
            until = at + timedelta(hours=rule_for(reason).leave_out_hours)
            if until > now:
                refused[lease.pool.key] = f"{reason} at {at:%H:%M}, asked again from {until:%H:%M}"
        return refused

    def _intend(self, chosen: Alternative, decision: Plan) -> Lease:
        """Announce the attempt and write the intent, in the order that leaves no machine without a row."""
        # Again for each machine: between two of them gpucost may have been upgraded, and the agent with it.
        self.services.agent.publish(self.services.objects)
        now = self.services.clock.now()
        number = self._next_attempt()
        expires = now + (chosen.finish - now) * EXPIRY_FACTOR + EXPIRY_MARGIN
        yardstick = decision.on_demand
        self.services.leases.begin_attempt(Attempt(job=self.key, number=number, started_at=now))
        lease = self.services.buyer.intend(
            self.key, number, chosen.quote, yardstick.quote.price if yardstick else None, self.owner, expires
        )
        self._announce(lease)
        return lease

    def _announce(self, lease: Lease) -> None:
        """Make the lease's attempt the one that may write; its node reads this first."""
        self._store.claim(lease.attempt)
        self._store.write_attempt(
            AttemptRecord(
                number=lease.attempt,
                members=(Member(lease_id=lease.id),),
                created_at=lease.requested_at,
                expires_at=lease.expires_at,
            )
        )

    def _next_attempt(self) -> int:
        """The number after the last attempt that ran; one whose purchase was refused keeps its number."""
        attempts = self.services.leases.attempts(self.key)
        if not attempts:
            return 1
        last = attempts[-1]
        return last.number if last.ended_at is None else last.number + 1

    def _adopt(self, lease: Lease) -> Lease:
        log.info("Adopting lease %s from an earlier try", lease.id)
        return self.services.leases.adopt(lease, self.owner, self.services.clock.now())

    def _ask_again(self, lease: Lease) -> Lease:
        """An intent whose answer was lost, or that was not carried out: under the same token, asking again buys once.

        Raises:
            ProviderError: nobody answered again; buying elsewhere now could buy twice.
        """
        found = self.services.buyer.look_up(lease)
        if found.state is not LeaseState.REQUESTED:
            return found
        self._announce(found)
        try:
            return self.services.buyer.buy(found)
        except ProviderError as error:
            log.warning("%s refused: %s", found.pool.key, error)
            refused = self.services.leases.get(found.id)
            if refused.state is LeaseState.REQUESTED:
                raise
            return refused

    # Settling.

    def _unfinished_attempt(self) -> Lease | None:
        """The last lease of an attempt that ended without anybody writing it down."""
        open_numbers = {a.number for a in self.services.leases.attempts(self.key) if a.ended_at is None}
        over = [
            lease
            for lease in self.services.leases.of_job(self.key)
            if lease.attempt in open_numbers and lease.state is LeaseState.TERMINATED
        ]
        return over[-1] if over else None

    def _settle(self, lease: Lease, event: Event | None) -> Step:
        """End the machine, settle the attempt, and go on as the reason table says."""
        wanted = settlement.reason_of(self._store, lease, event)
        lease = self.services.buyer.release(lease, wanted)
        if lease.state.may_cost:
            return Watch(lease_id=lease.id, owner=self.owner)
        attempt = settlement.settle_attempt(self.services, self.key, lease, event)
        reason = attempt.reason or wanted
        then = rule_for(reason).then
        if then is Then.DONE:
            return Finished(summary=settlement.finish(self.services, self.key, reason))
        # A cancelled attempt is an earlier try's: this one was started to go on with the job.
        if reason is Reason.CANCELLED or (then is Then.BUY_AGAIN and not self._going_nowhere()):
            return self.pursue()
        settlement.finish(self.services, self.key, reason)
        raise CourseEnded(reason, attempt.message or "the machine ended without a word")

    def _going_nowhere(self) -> bool:
        """Whether the last attempts were all lost before their first step: buying again would only burn money."""
        last = self.services.leases.attempts(self.key)[-FRUITLESS_ATTEMPTS:]
        fruitless = [one for one in last if one.reason is Reason.NODE_LOST and not one.last_step]
        return len(fruitless) == FRUITLESS_ATTEMPTS

    def _spec(self, code_digest: str) -> JobSpec:
        job = self.job
        return JobSpec(
            job_id=self.job_id,
            name=job.name,
            code_digest=code_digest,
            program=job.program,
            arguments=job.arguments,
            environment=job.environment,
            data=job.data,
            recipe=job.recipe,
            seed=job.seed,
            world_size=job.world_size,
            threads=job.threads,
            gpu_count=job.gpu.count,
            checkpoint=job.checkpoint,
            clock=self.services.clock.spec,
        )


def wants_to_leave(decision: Plan) -> bool:
    """Whether a plan made for a running job says anything but to go on."""
    return decision.action.kind not in (ActionKind.STAY, ActionKind.WAIT)
