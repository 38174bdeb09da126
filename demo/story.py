"""Where the timeline's events come from: gpucost's database and the heartbeats in the object store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from gpucost.capacity.lease import Lease, LeaseState
from gpucost.jobstore import Heartbeat, Phase
from gpucost.lifecycle.services import Services
from gpucost.market.quote import PricePoint
from gpucost.reasons import Reason

from .timeline import AttemptRow, TimelineEvent, progress_line


@dataclass
class Story:
    """Tells one job's events, each once.

    Args:
        services: the rooms.
        job: the job's key.
    """

    services: Services
    job: str
    _told: set[object] = field(default_factory=set)

    def news(self) -> Iterator[TimelineEvent]:
        """What has happened since it was asked last, oldest first."""
        events = [*self._placements(), *self._leases(), *self._beats(), *self._charges()]
        yield from sorted(events, key=lambda event: event.at)

    def status(self) -> str | None:
        """The present state of the training in one line; None before there is any."""
        beat = self._newest_beat()
        if beat is None or not beat.total_steps:
            return None
        rate = beat.steps_per_second
        return progress_line(
            step=beat.step,
            steps=beat.total_steps,
            steps_per_second=rate * self.services.clock.spec.speed if rate else None,
            loss=beat.loss,
            money=self._money(),
        )

    def attempts(self) -> list[AttemptRow]:
        """The result table's rows."""
        report = self.services.books.report(self.job)
        return [
            AttemptRow(
                attempt=line.attempt,
                pool=", ".join(_short(pool) for pool in line.pools),
                start=line.start,
                end=line.end,
                dollars=line.cost.amount,
                steps=(line.last_step or 0) - (line.first_step or 0) - line.lost_steps,
                lost=line.lost_steps,
                resumed_at=line.first_step or None,
                ended_because=line.reason or "",
            )
            for line in report.attempts
            if line.start is not None and line.end is not None
        ]

    def _placements(self) -> Iterator[TimelineEvent]:
        for row in self.services.jobs.placements(self.job):
            if self._first(("placement", row.id)):
                yield TimelineEvent(row.at, "quote", _quotes(row.alternatives))
                where = f" in {_short(row.pool)}" if row.pool else ""
                yield TimelineEvent(row.at, "placement", f"{row.action.replace('_', ' ')}{where}: {row.reason}")

    def _leases(self) -> Iterator[TimelineEvent]:
        for lease in self.services.leases.of_job(self.job):
            for at, event, note in self.services.leases.history(lease.id):
                if self._first((lease.id, event, at)):
                    yield TimelineEvent(at, *_told_of(lease, event, note))

    def _beats(self) -> Iterator[TimelineEvent]:
        for lease in self.services.leases.of_job(self.job):
            beat = self.services.live.read(lease.id)
            if beat is None or beat.phase is Phase.STARTING:
                continue
            if beat.resumed_step and self._first((lease.id, "resumed")):
                yield TimelineEvent(beat.at, "resume", f"goes on from step {beat.resumed_step} of the last checkpoint")
            if beat.saved_step and self._first((lease.id, "saved", beat.saved_step)):
                yield TimelineEvent(beat.at, "checkpoint", f"step {beat.saved_step} is safe")

    def _charges(self) -> Iterator[TimelineEvent]:
        for charge in self.services.books.charges(job=self.job):
            if self._first(("charge", charge.lease_id, charge.amount)):
                yield TimelineEvent(charge.as_of, "charge", f"{charge.amount} for {charge.seconds} s by {charge.rule}")

    def _newest_beat(self) -> Heartbeat | None:
        leases = self.services.leases.of_job(self.job)
        return self.services.live.read(leases[-1].id) if leases else None

    def _money(self) -> Decimal:
        running = [lease for lease in self.services.leases.of_job(self.job) if lease.state.may_cost]
        bought_at: list[PricePoint] = []
        pairs = [(lease, bought_at) for lease in running]
        return self.services.books.cost_so_far(self.job, pairs, self.services.clock.now()).amount

    def _first(self, what: object) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        return True


def _quotes(alternatives: list[dict[str, Any]]) -> str:
    """Every quote of a placement, cheapest first."""
    return ", ".join(f"{_short(one['pool'])} ${Decimal(one['price']):.4f}" for one in alternatives if "price" in one)


def _short(pool: str) -> str:
    """A pool's key without its provider, which is the same for all in the demo."""
    return pool.split("/", 1)[1].replace("/", " ")


def _told_of(lease: Lease, event: str, note: str) -> tuple[str, str]:
    """Kind and sentence of a lease's transition."""
    where = f"{lease.pool.zone} {lease.pool.instance_type} {lease.pool.capacity_type}"
    match event:
        case LeaseState.REQUESTED:
            return "lease", f"asks for {where} at {lease.price}"
        case LeaseState.ACTIVE:
            return "lease", f"got {note}"
        case LeaseState.FAILED:
            return "warning", f"{where} refused: {note}"
        case LeaseState.TERMINATING:
            return "release", f"asks for the end of {lease.instance_id or lease.id} ({note})"
        case LeaseState.TERMINATED if note == Reason.INTERRUPTED:
            return "interruption", f"{lease.instance_id} was taken away"
        case LeaseState.TERMINATED:
            return "release", f"{lease.instance_id} is gone, as the cloud confirms"
        case "adopted":
            # The note names owners, by tokens that say nothing to a person.
            return "lease", f"a new try of the task takes {lease.instance_id or lease.id} over"
    return "lease", f"{event} {note}"
