"""A node, as the training program sees it: environment, work folder, and a store on this disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucost.clock import ClockSpec
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import JobSpec, JobStore
from gpucost.objects import Objects
from gpucost.recipe import Recipe
from gpucost.training.workdir import Workdir


class Node:
    """A program's surroundings as the agent makes them.

    Args:
        tmp_path: for the store and the work folders.
        monkeypatch: sets the environment.
        every_steps: optimizer steps between two checkpoints.

    Attributes:
        recipe: of the next attempt.
        store: the job's.
        workdir: of the present attempt.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_steps: int = 5) -> None:
        self._monkeypatch = monkeypatch
        self._tmp_path = tmp_path
        self.every_steps = every_steps
        self.recipe = Recipe()
        url = (tmp_path / "store").as_uri()
        self.store = JobStore(Objects.open(url), "job")
        monkeypatch.setenv("GPUCOST_STORE_URL", url)
        monkeypatch.setenv("GPUCOST_JOB", "job")
        self.attempt(1)

    def attempt(self, number: int) -> Workdir:
        """Begin an attempt."""
        self.store.claim(number)
        workdir = Workdir(self._tmp_path / f"node-{number}")
        workdir.write_job(
            JobSpec(
                job_id=JobId(dag_id="d", run_id="r", task_id="t"),
                name="t",
                code_digest="0",
                program="train.py",
                seed=11,
                recipe=self.recipe,
                checkpoint=CheckpointPlan(every_steps=self.every_steps),
                clock=ClockSpec.real(),
            )
        )
        self._monkeypatch.setenv("GPUCOST_WORKDIR", str(workdir.path))
        self._monkeypatch.setenv("GPUCOST_ATTEMPT", str(number))
        self.workdir = workdir
        return workdir
