"""The rooms, opened without a network: SQLite in a temporary folder, objects in memory, a clock that stands."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import event

from gpucost.bundle import Agent
from gpucost.clock import ClockSpec, ManualClock, SpecClock
from gpucost.db.engine import Database
from gpucost.job import GpuNeed, JobId, TrainingJob
from gpucost.jobstore import ExitRecord, Heartbeat, Manifest, MetricPoint, Phase
from gpucost.lifecycle.services import Services
from gpucost.money import Money
from gpucost.objects import Objects
from gpucost.reasons import Reason
from tests.fakes.provider import FakeProvider

START = datetime(2026, 11, 30, 12, tzinfo=UTC)
AGENT = Agent("0" * 64, b"the agent's zip")
TASK = JobId(dag_id="spot_training", run_id="manual__2026-11-30", task_id="train")


def standing_clock(start: datetime = START, speed: float = 1.0) -> tuple[SpecClock, ManualClock]:
    """A clock that shows `start`, and the hand that moves real time."""
    hand = ManualClock(start)
    spec = ClockSpec(origin_real=start, origin=start, speed=speed)
    return SpecClock(spec, real_now=hand.now, real_sleep=hand.sleep), hand


def open_database(path: Path) -> Database:
    """An SQLite database that does not wait for the disk."""
    database = Database(f"sqlite:///{path}")

    @event.listens_for(database.engine, "connect")
    def _do_not_wait(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    return database


def wanted(**changes: Any) -> TrainingJob:
    """Two hours of work within eight, for at most 5 dollars."""
    fields: dict[str, Any] = {
        "name": "digits",
        "project": "tests",
        "code": "programs/digits",
        "gpu": GpuNeed(kinds=("T4",)),
        "work_hours": 2.0,
        "launch_hours": 0.1,
        "deadline": START + timedelta(hours=8),
        "budget": Money.usd("5.00"),
    }
    return TrainingJob(**(fields | changes))


class World:
    """Everything that a course needs, and what a node would do.

    Args:
        database: migrated.
        tracker: MLflow, or None.
        speed: of the clock.
    """

    def __init__(self, database: Database, tracker: Any = None, *, speed: float = 1.0) -> None:
        self.clock, self.hand = standing_clock(speed=speed)
        self.provider = FakeProvider(self.clock)
        self.objects = Objects.in_memory()
        self.services = Services(
            clock=self.clock,
            database=database,
            objects=self.objects,
            provider=self.provider,
            agent=AGENT,
            tracker=tracker,
        )

    def begin(self, job_id: JobId = TASK, *, owner: str = "me", **changes: Any) -> str:
        """A try of the job's task writes down what is wanted; returns the job's key."""
        self.services.jobs.begin(job_id, wanted(**changes), owner, 3, self.clock.now())
        return job_id.key

    def pass_hours(self, hours: float) -> None:
        """Let time pass."""
        self.hand.advance(timedelta(hours=hours))

    def beat(self, lease_id: str, *, step: int, total: int = 100, **changes: Any) -> Heartbeat:
        """The node of a lease says how far it is."""
        lease = self.services.leases.get(lease_id)
        before = self.services.live.read(lease_id)
        beat = Heartbeat(
            lease_id=lease_id,
            job=lease.job,
            attempt=lease.attempt,
            sequence=before.sequence + 1 if before else 0,
            at=self.clock.now(),
            phase=Phase.TRAINING,
            step=step,
            total_steps=total,
            **changes,
        )
        self.services.live.write(beat)
        return beat

    def save(self, lease_id: str, *, step: int) -> None:
        """The node of a lease commits a checkpoint."""
        lease = self.services.leases.get(lease_id)
        manifest = Manifest(job=lease.job, attempt=lease.attempt, step=step, created_at=self.clock.now(), parts=())
        self.services.store(lease.job).commit(manifest)

    def upload_metrics(self, lease_id: str, *steps: int) -> None:
        """The node of a lease uploads one chunk of metrics."""
        lease = self.services.leases.get(lease_id)
        points = [MetricPoint(step=step, at=self.clock.now(), values={"loss": 1 / (1 + step)}) for step in steps]
        self.services.store(lease.job).write_metrics(lease.attempt, min(steps), points)

    def exit(self, lease_id: str, reason: Reason, *, step: int = 100, **changes: Any) -> None:
        """The agent of a lease writes why its program ended; its machine goes down when it has."""
        lease = self.services.leases.get(lease_id)
        record = ExitRecord(attempt=lease.attempt, reason=reason, at=self.clock.now(), step=step, **changes)
        self.services.store(lease.job).write_exit(record)
        self.beat(lease_id, step=step, exited=reason, saved_step=changes.get("saved_step"))
