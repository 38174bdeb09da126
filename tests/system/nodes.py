"""What the tests of training share: jobs in a folder store, and nodes that run their attempts as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpucost.bundle import pack_agent, pack_code
from gpucost.clock import ClockSpec
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import AttemptRecord, ExitRecord, JobSpec, JobStore, Member, Phase
from gpucost.objects import Objects
from gpucost.training.workdir import Progress, Workdir

SMALL_PROGRAM = textwrap.dedent(
    """
    import sys, time
    import torch
    from gpucost.training import checkpointed, prepare

    prepare()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with checkpointed(model, optimizer, epochs=int(sys.argv[1])) as run:
        for epoch in run.epochs():
            for batch in run.batches(100, 10):
                loss = model(torch.rand(10, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.01)
                run.step(loss=loss)
        run.finish({"loss": loss.item()})
    """
)


class Job:
    """One job in a folder store, and the nodes that run its attempts."""

    def __init__(
        self, tmp_path: Path, name: str, code: Path, *arguments: str, every_steps: int = 10_000, **spec: Any
    ) -> None:
        self.folder = tmp_path / name
        self.url = (self.folder / "store").as_uri()
        self.objects = Objects.open(self.url)
        self.store = JobStore(self.objects, JobId(dag_id="test", run_id="r", task_id=name).key)
        self.attempts = 0
        digest, data = pack_code(code)
        self.store.write_code(digest, data)
        self.store.write_spec(
            JobSpec(
                job_id=JobId(dag_id="test", run_id="r", task_id=name),
                name=name,
                code_digest=digest,
                program="train.py",
                arguments=arguments,
                seed=7,
                checkpoint=CheckpointPlan(every_steps=every_steps),
                clock=ClockSpec.real(),
                **spec,
            )
        )
        self.agent = self.folder / "agent.zip"
        self.agent.write_bytes(pack_agent().data)

    def start(self, lives: timedelta = timedelta(hours=1), *, around: tuple[str, ...] = ()) -> Node:
        """Start the next attempt; `around`: what the agent's command line is put behind."""
        self.attempts += 1
        now = datetime.now(UTC)
        lease = f"lease-{self.attempts}"
        self.store.write_attempt(
            AttemptRecord(
                number=self.attempts, members=(Member(lease_id=lease),), created_at=now, expires_at=now + lives
            )
        )
        self.store.claim(self.attempts)
        return Node(self, self.attempts, lease, around)

    def whole_log(self, attempt: int) -> str:
        return "".join(text for _, text in self.store.log(attempt))


class Node:
    """A rehearsed machine: the agent in a process group of its own."""

    def __init__(self, job: Job, number: int, lease: str, around: tuple[str, ...] = ()) -> None:
        self.job = job
        self.number = number
        self.lease = lease
        self.workdir = Workdir(job.folder / f"node-{number}")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPUCOST", "PYTHON"))}
        environ |= {
            "GPUCOST_STORE_URL": job.url,
            "GPUCOST_STORE_ENDPOINT": "",
            "GPUCOST_JOB": job.store.key,
            "GPUCOST_LEASE": lease,
            "GPUCOST_ATTEMPT": str(number),
            "GPUCOST_WORKDIR": str(self.workdir.path),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9/imds/i-1/",
        }
        with (job.folder / f"agent-{number}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*around, sys.executable, str(job.agent)], env=environ, stdout=log, stderr=log, process_group=0
            )

    def power_off(self) -> None:
        """As a cloud does without notice: everything on the machine is gone at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_for(self, what: Callable[[Progress], bool], seconds: float = 60) -> bool:
        """Until the program's progress is as wished; False when the node ended before."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if (progress := self.workdir.progress()) and what(progress):
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        pytest.fail(f"attempt {self.number}: waited {seconds} s; progress: {self.workdir.progress()}\n{self.log()}")

    def end(self, seconds: float = 60) -> ExitRecord:
        """Wait for the node's end; what it left as its exit record."""
        self.process.wait(seconds)
        record = self.job.store.exit_record(self.number)
        assert record is not None, self.log()
        return record

    def log(self) -> str:
        return (self.job.folder / f"agent-{self.number}.log").read_text() + "\n" + self.workdir.log.read_text()

    def processes(self) -> list[int]:
        """Everything that still runs on this node."""
        mark = f"GPUCOST_WORKDIR={self.workdir.path}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def training(progress: Progress) -> bool:
    return progress.phase is Phase.TRAINING and progress.step > (progress.resumed_step or 0)


def steps_since_resumed(number: int) -> Callable[[Progress], bool]:
    return lambda progress: progress.step >= (progress.resumed_step or 0) + number


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        node.power_off()


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Job]:
    def make(
        *arguments: str, source: str = SMALL_PROGRAM, every_steps: int = 10_000, name: str = "small", **spec: Any
    ) -> Job:
        code = tmp_path / "code"
        code.mkdir(exist_ok=True)
        (code / "train.py").write_text(source)
        return Job(tmp_path, name, code, *arguments, every_steps=every_steps, **spec)

    return make
