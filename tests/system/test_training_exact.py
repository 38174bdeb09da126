"""The agent and real programs on a folder as the store: real processes, real signals, equal weights."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpucost.bundle import pack_agent, pack_code
from gpucost.clock import ClockSpec
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import AttemptRecord, Command, Control, ExitRecord, JobSpec, JobStore, Live, Member, Phase
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.training.workdir import Progress, Workdir

DIGITS = Path(__file__).parents[2] / "include" / "programs" / "digits"

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

    def __init__(self, tmp_path: Path, name: str, code: Path, *arguments: str, every_steps: int = 10_000) -> None:
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
            )
        )
        self.agent = self.folder / "agent.zip"
        self.agent.write_bytes(pack_agent().data)

    def start(self, lives: timedelta = timedelta(hours=1)) -> Node:
        self.attempts += 1
        now = datetime.now(UTC)
        lease = f"lease-{self.attempts}"
        self.store.write_attempt(
            AttemptRecord(
                number=self.attempts, members=(Member(lease_id=lease),), created_at=now, expires_at=now + lives
            )
        )
        self.store.claim(self.attempts)
        return Node(self, self.attempts, lease)

    def whole_log(self, attempt: int) -> str:
        return "".join(text for _, text in self.store.log(attempt))


class Node:
    """A rehearsed machine: the agent in a process group of its own."""

    def __init__(self, job: Job, number: int, lease: str) -> None:
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
                [sys.executable, str(job.agent)], env=environ, stdout=log, stderr=log, process_group=0
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
    def make(*arguments: str, source: str = SMALL_PROGRAM, every_steps: int = 10_000, name: str = "small") -> Job:
        code = tmp_path / "code"
        code.mkdir(exist_ok=True)
        (code / "train.py").write_text(source)
        return Job(tmp_path, name, code, *arguments, every_steps=every_steps)

    return make


def test_killed_at_random_moments_the_weights_end_bit_for_bit_the_same(tmp_path: Path, nodes: list[Node]) -> None:
    arguments = ("--epochs", "9", "--step-delay-ms", "10")
    whole = Job(tmp_path, "whole", DIGITS, *arguments, every_steps=20)
    killed = Job(tmp_path, "killed", DIGITS, *arguments, every_steps=20)
    chance = random.Random(20261130)
    nodes.append(reference := whole.start())

    for moment in ("training", "any", "training", "training", "any", "training"):
        nodes.append(node := killed.start())
        if moment == "training":  # Somewhere in a step or a save, at least one save further than the attempt before.
            assert node.wait_for(steps_since_resumed(chance.randint(21, 45)))
            time.sleep(chance.uniform(0.0, 0.1))
        else:  # Anywhere from the agent's start on: fetching, importing, restoring, first steps.
            time.sleep(chance.uniform(0.0, 4.0))
        node.power_off()
        _gone(node)

    nodes.append(node := killed.start())
    expected, got = reference.end(), node.end()
    resumed = [progress.resumed_step for node in nodes[2:] if (progress := node.workdir.progress())]
    assert len([step for step in resumed if step]) >= 4
    assert (expected.reason, got.reason) == (Reason.COMPLETED, Reason.COMPLETED)
    assert got.step == expected.step == 9 * 23
    assert got.weights_digest == expected.weights_digest
    assert got.results == expected.results
    assert got.results["accuracy"] > 0.9
    assert _losses(whole, range(1, 2)) == _losses(killed, range(1, killed.attempts + 1))


def _gone(node: Node) -> None:
    until = time.monotonic() + 5
    while (left := node.processes()) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []


def _losses(job: Job, attempts: range) -> dict[int, float]:
    """Step -> loss, the newest attempt's word for each step. Killed attempts may not have sent their last lines."""
    return {
        point.step: point.values["loss"]
        for number in attempts
        for _, points in job.store.metrics(number)
        for point in points
        if "loss" in point.values and point.step % 50 == 0 and point.step > 150
    }


def test_sigterm_loses_no_step_and_the_next_attempt_goes_on_there(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("30")
    nodes.append(first := job.start())
    first.wait_for(lambda progress: progress.step >= 30)
    began = time.monotonic()
    first.process.send_signal(signal.SIGTERM)
    record = first.end()
    assert time.monotonic() - began < 15
    assert record.reason is Reason.INTERRUPTED
    assert record.step >= 30
    assert record.saved_step == record.step
    assert first.process.returncode == 75

    nodes.append(second := job.start())
    finished = second.end()
    assert finished.reason is Reason.COMPLETED
    assert finished.step == 300
    beat = Live(job.objects).read(second.lease)
    assert beat is not None
    assert (beat.resumed_step, beat.step, beat.exited) == (record.step, 300, Reason.COMPLETED)

    nodes.append(undisturbed := small("30", name="undisturbed").start())
    assert undisturbed.end().weights_digest == finished.weights_digest


def test_a_program_that_raises_is_told_with_the_end_of_its_log(small: Callable[..., Job], nodes: list[Node]) -> None:
    source = "print('reading data')\nraise RuntimeError('column 7 is not a number')\n"
    job = small(source=source)
    nodes.append(node := job.start())
    record = node.end()
    assert (record.reason, record.exit_code) == (Reason.BAD_PROGRAM, 1)
    assert "RuntimeError: column 7 is not a number" in record.message
    assert job.whole_log(1) == node.workdir.log.read_text()
    assert job.whole_log(1).count("reading data") == 1


def test_a_program_that_ends_too_soon_is_no_success(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("5", source=SMALL_PROGRAM.replace("run.finish", "print"))
    nodes.append(node := job.start())
    record = node.end()
    assert record.reason is Reason.BAD_PROGRAM
    assert "exit code 0 at step 50 of 50 without calling run.finish" in record.message


def test_a_zombie_commits_nothing_and_ends(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("10000", every_steps=20)
    nodes.append(zombie := job.start())
    zombie.wait_for(lambda progress: (progress.saved_step or 0) >= 20)
    job.store.claim(2)
    before = job.store.head().checkpoints
    record = zombie.end(seconds=30)
    assert record.reason is Reason.FENCED
    assert zombie.process.returncode == 76
    assert job.store.head().checkpoints == before
    assert job.store.head().fence == 2


def test_control_object_saves_then_stops(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("10000")
    nodes.append(node := job.start())
    node.wait_for(training)
    job.store.ask(1, Control(sequence=1, command=Command.SAVE, why="a look"))
    node.wait_for(lambda progress: progress.saved_step is not None)
    saved = node.workdir.progress()
    node.wait_for(lambda progress: progress.step > (saved.step if saved else 0) + 20)
    job.store.ask(1, Control(sequence=2, command=Command.SAVE_AND_STOP, why="budget"))
    record = node.end()
    assert record.reason is Reason.STOPPED
    assert "budget" in record.message
    assert record.saved_step == record.step > (saved.step if saved else 0)
    assert len(job.store.head().checkpoints) == 2


def test_an_expired_node_saves_and_ends_itself(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("10000")
    nodes.append(node := job.start(lives=timedelta(seconds=12)))
    record = node.end()
    assert record.reason is Reason.EXPIRED
    assert (record.saved_step or 0) == record.step


def test_what_outlives_the_program_is_ended(small: Callable[..., Job], nodes: list[Node]) -> None:
    source = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
    )
    job = small(source=source)
    nodes.append(node := job.start())
    node.end()
    assert node.processes() == []


def test_a_store_that_is_away_is_told_by_exit_code_and_message(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("1")
    (job.folder / "file").write_text("where a folder should be")
    job.url = (job.folder / "file").as_uri()
    nodes.append(node := job.start())
    assert node.process.wait(30) == 74
    assert "store_unreachable" in (job.folder / "agent-1.log").read_text()


def test_the_program_survives_a_signal_to_every_process(small: Callable[..., Job], nodes: list[Node]) -> None:
    """A machine that shuts down sends SIGTERM to agent and program alike."""
    job = small("10000")
    nodes.append(node := job.start())
    node.wait_for(training)
    for pid in node.processes():
        os.kill(pid, signal.SIGTERM)
    record = node.end()
    assert record.reason is Reason.INTERRUPTED
    assert record.saved_step == record.step > 0
