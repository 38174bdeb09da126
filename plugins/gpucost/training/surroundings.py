"""Where does a program run: on a node of gpucost, or on somebody's own machine?

On a node the agent has set `GPUCOST_WORKDIR` and the rest; elsewhere `checkpointed` works the same on a
local folder, so that one program serves both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpucost.clock import SpecClock
from gpucost.fitness import refusal, remarks
from gpucost.gpus import kind_of
from gpucost.job import CheckpointPlan
from gpucost.jobstore import JobSpec, JobStore
from gpucost.objects import Objects
from gpucost.recipe import Options
from gpucost.training.checkpoints.agreement import by_first
from gpucost.training.ranks import Ranks
from gpucost.training.workdir import Workdir


@dataclass(frozen=True)
class Surroundings:
    """What a program needs to know about where it runs.

    Args:
        workdir: shared with the agent; None outside gpucost.
        environ: the environment variables.
    """

    workdir: Workdir | None
    environ: Mapping[str, str]

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None) -> Surroundings:
        """Read them from the environment (`os.environ` when left out)."""
        environ = os.environ if environ is None else environ
        # A work folder alone does not make a node: only the agent's job.json does.
        path = environ.get("GPUCOST_WORKDIR")
        inside = path is not None and "GPUCOST_ATTEMPT" in environ and "GPUCOST_JOB" in environ
        return cls(Workdir(Path(path)) if path and inside else None, environ)

    @cached_property
    def spec(self) -> JobSpec | None:
        """The job's specification; None outside gpucost."""
        return self.workdir.job() if self.workdir else None

    @property
    def seed(self) -> int:
        """The job's seed; 0 outside gpucost."""
        return self.spec.seed if self.spec else 0

    @cached_property
    def options(self) -> Options:
        """The job's recipe, for the GPU of this process.

        Raises:
            ValueError: this GPU cannot do what it asks for.
        """
        if self.spec is None:
            return Options()
        kind, memory_gib, capability = _gpu()
        options = self.spec.recipe.for_gpu(kind, memory_gib)
        if why := refusal(options, kind, capability):
            raise ValueError(f"recipe: {why}")
        return options

    @property
    def remarks(self) -> list[str]:
        """What of the recipe is allowed here and does not do what one may hope for."""
        return remarks(self.options, _gpu()[0], self.spec.world_size) if self.spec else []

    @property
    def clock(self) -> SpecClock:
        """The job's clock; the system's outside gpucost."""
        return SpecClock(self.spec.clock if self.spec else None)

    @property
    def plan(self) -> CheckpointPlan:
        """How often to save."""
        return self.spec.checkpoint if self.spec else CheckpointPlan()

    def open_store(self, folder: Path | None, ranks: Ranks) -> tuple[JobStore, int] | None:
        """The place for checkpoints and this run's fencing number.

        Args:
            folder: where checkpoints go outside gpucost; None: nowhere.
            ranks: the processes of this training; outside gpucost, rank 0 claims the folder for all.
        """
        if self.workdir:
            store = JobStore(open_objects(self.environ), self.environ["GPUCOST_JOB"])
            return store, int(self.environ["GPUCOST_ATTEMPT"])
        if folder is None:
            return None
        store = JobStore(Objects.open(folder.absolute().as_uri()), "local")
        return store, by_first(ranks, lambda: _claimed(store))


def _claimed(store: JobStore) -> int:
    attempt = store.head().fence + 1
    store.claim(attempt)
    return attempt


def _gpu() -> tuple[str | None, float | None, tuple[int, int] | None]:
    """Kind, memory in GiB and compute capability of this process's GPU; None: there is none."""
    import torch

    if not torch.cuda.is_available():
        return None, None, None
    name = torch.cuda.get_device_name()
    memory: int = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return kind_of(name) or name, memory / 2**30, torch.cuda.get_device_capability()


def open_objects(environ: Mapping[str, str]) -> Objects:
    """Open the store that `GPUCOST_STORE_URL`, `_ENDPOINT` and `_REGION` name.

    Raises:
        ValueError: the address is missing or of an unknown kind.
    """
    url = environ.get("GPUCOST_STORE_URL", "")
    if not url:
        raise ValueError("GPUCOST_STORE_URL is not set, expected s3://bucket/prefix or file:///folder")
    return Objects.open(
        url,
        endpoint=environ.get("GPUCOST_STORE_ENDPOINT") or None,
        region=environ.get("GPUCOST_STORE_REGION") or None,
    )
