"""How far is the job? Read from what its nodes wrote: the newest checkpoint and the newest heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from gpucost.capacity.lease import Lease
from gpucost.jobstore import JobStore, Live
from gpucost.objects import ObjectMissing


@dataclass(frozen=True)
class Progress:
    """How far a job is.

    Args:
        saved_step: steps in the newest whole checkpoint.
        total_steps: steps in all; None until a node has said so.
    """

    saved_step: int
    total_steps: int | None

    @property
    def work_left(self) -> float:
        """The share of the work that is not saved, 0 to 1."""
        if not self.total_steps:
            return 1.0
        return max(0.0, 1.0 - self.saved_step / self.total_steps)


def read_progress(store: JobStore, live: Live, leases: list[Lease]) -> Progress:
    """A job's progress.

    Args:
        store: the job's documents.
        live: all heartbeats.
        leases: the job's leases, oldest first.
    """
    head = store.head()
    saved = 0
    for key in head.checkpoints:
        try:
            saved = store.manifest(key).step
            break
        except ObjectMissing:
            continue
    beats = (live.read(lease.id) for lease in reversed(leases) if lease.launched_at)
    total = next((beat.total_steps for beat in beats if beat and beat.total_steps), None)
    return Progress(saved, total)
