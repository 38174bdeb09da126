"""Everything that a job's course needs, in one place, so that it can be handed around and replaced in tests."""

from __future__ import annotations

from dataclasses import dataclass

from gpucost.bundle import Agent
from gpucost.capacity.buyer import Buyer, unseen_grace
from gpucost.capacity.providers.base import Provider
from gpucost.capacity.store import LeaseStore
from gpucost.clock import SpecClock
from gpucost.db.engine import Database
from gpucost.decisions.log import DecisionLog
from gpucost.jobstore import JobStore, Live
from gpucost.ledger.books import Books
from gpucost.lifecycle.jobs import Jobs
from gpucost.objects import Objects
from gpucost.tracking.mlflow_tracker import Tracker


@dataclass(frozen=True)
class Services:
    """The rooms, opened with one team's connections.

    Args:
        agent: what nodes run first; `provider` starts its machines with it.
        tracker: None when no MLflow is configured; then nothing is tracked.
    """

    clock: SpecClock
    database: Database
    objects: Objects
    provider: Provider
    agent: Agent
    tracker: Tracker | None

    @property
    def leases(self) -> LeaseStore:
        """The leases' book."""
        return LeaseStore(self.database)

    @property
    def buyer(self) -> Buyer:
        """Buys and gives back."""
        return Buyer(self.provider, self.leases, self.clock, unseen_grace(self.clock.spec.speed))

    @property
    def jobs(self) -> Jobs:
        """The jobs' book."""
        return Jobs(self.database)

    @property
    def books(self) -> Books:
        """The ledger."""
        return Books(self.database)

    @property
    def decisions(self) -> DecisionLog:
        """The decision log."""
        return DecisionLog(self.database)

    @property
    def live(self) -> Live:
        """The heartbeats of all jobs."""
        return Live(self.objects)

    def store(self, job: str) -> JobStore:
        """One job's documents."""
        return JobStore(self.objects, job)
