"""The course of one job: plan, buy, watch, settle, and again, until it is done.

Airflow's operator, the terminal and the tests drive it the same way: `begin`, then `pursue`, then `handle` for
each event that a watcher reports, until a `Finished` comes back. Every method can be called again after a crash:
what was bought is adopted, what was asked is asked under the same token, what was settled is not settled twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from gpucost.bundle import pack_code
from gpucost.capacity.buyer import may_ask_elsewhere
from gpucost.capacity.lease import Attempt, Lease, LeaseState
from gpucost.capacity.providers.base import ProviderError
from gpucost.capacity.store import NotOwner
from gpucost.job import JobId, TrainingJob
from gpucost.jobstore import AttemptRecord, Command, JobSpec, Member
from gpucost.lifecycle import settlement, tracking
from gpucost.lifecycle.planning import TICK, decide
from gpucost.lifecycle.services import Services
from gpucost.lifecycle.steps import CourseEnded, Event, EventKind, Finished, Pause, Step, Watch
from gpucost.placement.planner import Alternative, Plan
from gpucost.placement.policies.protocol import ActionKind
from gpucost.reasons import Reason, Then, rule_for

log = logging.getLogger(__name__)

EXPIRY_FACTOR = 1.5
EXPIRY_MARGIN = timedelta(hours=1)
"""A node ends itself this much after its planned finish: half as long again, and an hour for launch and upload."""

FRUITLESS_ATTEMPTS = 3
"""Attempts without a new checkpoint, one after another, until the job fails instead of buying again."""

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

    def begin(self, code_folder: Path, tries_allowed: int = 0) -> None:
        """Take the job over, write down what is wanted, and put the code where nodes find it.

        Again after a crash or a clear; from here on whatever an earlier try still attempts is refused.

        Args:
            code_folder: the program's folder.
            tries_allowed: Airflow's `max_tries`.

        Raises:
            ValueError: the code or a field is wrong; nothing was bought for this try.
        """
        digest, data = pack_code(code_folder)
        if not (code_folder / self.job.program).is_file():
            raise ValueError(f"program: {self.job.program!r} is not in {str(code_folder)!r}, expected a file there")
        _refuse_what_is_not_there_yet(self.job)
        self.services.jobs.begin(self.job_id, self.job, self.owner, tries_allowed, self.services.clock.now())
        self._store.write_code(digest, data)
        self._store.write_spec(self._spec(digest))
        tracking.job_began(self.services, self.job_id, self.job)

    def pursue(self) -> Step:
        """Take the next step from wherever the job stands: adopt what is there, or plan and buy.

        Raises:
            CourseEnded: nothing can be bought in time, for the money, or at all.
            NotOwner: another try works on the job now; leave it alone.
        """
        self._make_sure_it_is_ours()
        return self._ending_well(self._pursue)

    def handle(self, event: Event) -> Step:
        """Act on what a watcher saw.

        Raises:
            CourseEnded: the attempt or the job failed.
            NotOwner: another try works on the job now; leave it alone.
        """
        log.info("Event: %s %s", event.kind, event.note)
        self._make_sure_it_is_ours()
        if event.kind is EventKind.TIME or event.lease_id is None:
            return self._ending_well(self._pursue)
        lease = self.services.leases.get(event.lease_id)
        if lease.owner != self.owner:
            raise NotOwner(f"lease {lease.id}: held by another try, not by {self.owner}")
        if event.kind is EventKind.REPLAN:
            self.ask(lease, Command.SAVE_AND_STOP, event.note)
            return Watch(lease_id=lease.id, owner=self.owner)
        return self._ending_well(lambda: self._settle(lease, event))

    def _ending_well(self, step: Callable[[], Step]) -> Step:
        """Take a step; pause while the cloud is away, and close the books of a job that fails."""
        try:
            return step()
        except ProviderError as error:
            if may_ask_elsewhere(error):
                return self._ask_later(error)
            ended = CourseEnded(error.reason, str(error))
        except CourseEnded as failed:
            ended = failed
        if not self.services.leases.open(self.key):
            settlement.finish(self.services, self.key, self.owner, ended.reason)
        raise ended

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

    def _make_sure_it_is_ours(self) -> None:
        if self.services.jobs.owner(self.key) != self.owner:
            raise NotOwner(f"job {self.key}: another try works on it now, not {self.owner}")

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
            settlement.finish(self.services, self.key, self.owner, reason)
        return True

    def reason_to_leave(self, lease: Lease) -> str | None:
        """Why the job should save and leave the machine that it runs on; None: it stays.

        Raises:
            CourseEnded: it cannot be told now.
            ProviderError: likewise.
        """
        try:
            decision = decide(self.services, self.key, self.job, self._policy, running=lease.pool)
        except CourseEnded as ended:
            if ended.reason is not Reason.BUDGET_EXHAUSTED:
                raise
            return str(ended)
        if decision.action.kind in (ActionKind.STAY, ActionKind.WAIT):
            self.services.jobs.remember(self.key, decision.policy_state)
            return None
        self.services.jobs.place(self.key, decision, self.services.clock.now())
        return decision.action.reason

    # Planning and buying.

    def _plan_and_buy(self) -> Step:
        for _ in range(MAX_TRIES_AT_ONCE):
            decision = decide(self.services, self.key, self.job, self._policy)
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
                    raise
                continue
            log.info("Bought %s as %s", lease.pool.key, lease.instance_id)
            return Watch(lease_id=lease.id, owner=self.owner)
        return Pause(until=self.services.clock.now() + TICK, why=f"{MAX_TRIES_AT_ONCE} pools refused in a row")

    def _ask_later(self, error: ProviderError) -> Pause:
        log.warning("The cloud is asked again in %s: %s", TICK, error)
        return Pause(until=self.services.clock.now() + TICK, why=str(error))

    def _intend(self, chosen: Alternative, decision: Plan) -> Lease:
        """Announce the attempt and write the intent, in the order that leaves no machine without a row."""
        # Again for each machine: between two of them gpucost may have been upgraded, and the agent with it.
        self.services.agent.publish(self.services.objects)
        now = self.services.clock.now()
        number = self._next_attempt()
        expires = now + (chosen.finish - now) * EXPIRY_FACTOR + EXPIRY_MARGIN
        on_demand = decision.on_demand_price(chosen.quote.pool)
        self.services.leases.begin_attempt(Attempt(job=self.key, number=number, started_at=now))
        lease = self.services.buyer.intend(self.key, number, chosen.quote, on_demand, self.owner, expires)
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
            return Finished(summary=settlement.finish(self.services, self.key, self.owner, reason))
        # A cancelled attempt is an earlier try's: this one was started to go on with the job.
        if reason is Reason.CANCELLED or (then is Then.BUY_AGAIN and not self._going_nowhere()):
            return self._pursue()
        raise CourseEnded(reason, attempt.message or "the machine ended without a word")

    def _going_nowhere(self) -> bool:
        """Whether the last attempts all ended without a new checkpoint: buying again would only burn money.

        An interruption does not count, however early it comes, nor does our own stop: neither is the job's fault.
        """
        last = self.services.leases.attempts(self.key)[-FRUITLESS_ATTEMPTS:]
        blameless = (Reason.INTERRUPTED, Reason.STOPPED, Reason.CANCELLED, None)
        fruitless = [
            one for one in last if one.reason not in blameless and (one.saved_step or 0) <= (one.first_step or 0)
        ]
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
            folder_sync=job.folder_sync,
            hang=job.hang,
            clock=self.services.clock.spec,
        )


def _refuse_what_is_not_there_yet(job: TrainingJob) -> None:
    """What a node would refuse is refused before a machine is bought for it."""
    wanted = {
        "world_size": job.world_size > max(1, job.gpu.count)
        and f"{job.world_size} processes, expected at most one per GPU of one machine (gpu.count: {job.gpu.count})",
        "environment.image": job.environment.image and "an image, expected none; set the site's image",
        "sensitivity": job.sensitivity == "confidential" and "'confidential', expected 'public' or 'internal'",
    }
    refused = [f"{field}: got {why}" for field, why in wanted.items() if why]
    if refused:
        raise ValueError(f"not there yet: {'; '.join(refused)}; nothing was bought")
