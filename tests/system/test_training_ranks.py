"""Two processes train one model: they agree on every save and stop, and go on bit for bit. Real processes, gloo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucost.clock import ClockSpec
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import Command, JobSpec, JobStore
from gpucost.objects import Objects
from gpucost.recipe import Recipe
from gpucost.training.workdir import EXIT_STOPPED, Progress, Request, Result, Workdir

PROGRAM = textwrap.dedent(
    """
    import time
    import torch
    from gpucost.training import checkpointed, prepare, replicated

    prepare()
    # Buffers that follow the data, and random numbers: both differ between the processes.
    model = replicated(torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    ))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.linspace(-1, 1, 4 * 203).reshape(203, 4)
    with checkpointed(model, optimizer, epochs=6, log_every=1) as run:
        for epoch in run.epochs():
            for batch in run.batches(len(data), 24):
                loss = (model(data[batch]) - data[batch].sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                run.backward(loss)
                optimizer.step()
                time.sleep(0.02)
                run.step(loss=loss)
        run.finish({"loss": loss.item()})
    """
)
MICROS = 3
STEPS = 6 * 9


class Training:
    """A job of two processes, and what the agent would do for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.program = folder / "train.py"
        self.program.write_text(PROGRAM)
        self.url = (folder / "store").as_uri()
        self.store = JobStore(Objects.open(self.url), "job")
        self.attempts = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> Workdir:
        """The next attempt."""
        self.attempts += 1
        self.store.claim(self.attempts)
        self.workdir = Workdir(self.folder / f"node-{self.attempts}")
        self.workdir.write_job(
            JobSpec(
                job_id=JobId(dag_id="d", run_id="r", task_id="t"),
                name="t",
                code_digest="0",
                program="train.py",
                seed=11,
                world_size=2,
                recipe=Recipe(accumulate=MICROS),
                checkpoint=CheckpointPlan(every_steps=5),
                clock=ClockSpec.real(),
            )
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = [self._rank(rank, port) for rank in range(2)]
        return self.workdir

    def _rank(self, rank: int, port: str) -> subprocess.Popen[bytes]:
        environ = os.environ | {
            "GPUCOST_STORE_URL": self.url,
            "GPUCOST_JOB": "job",
            "GPUCOST_ATTEMPT": str(self.attempts),
            "GPUCOST_WORKDIR": str(self.workdir.path),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        with (self.workdir.path / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, str(self.program)], env=environ, stdout=log, stderr=log)

    def wait_for(self, what: Callable[[Progress], bool]) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if (progress := self.workdir.progress()) and what(progress):
                return
            assert all(process.poll() is None for process in self.processes), self.log()
            time.sleep(0.01)
        pytest.fail(f"waited 60 s\n{self.log()}")

    def end(self) -> tuple[list[int], Result]:
        codes = [process.wait(60) for process in self.processes]
        result = self.workdir.result()
        assert result is not None, self.log()
        return codes, result

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.workdir.path.glob("rank-*.log")))


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[[str], Training]]:
    made: list[Training] = []

    def make(name: str) -> Training:
        made.append(one := Training(tmp_path / name))
        return one

    yield make
    for one in made:
        for process in one.processes:
            process.kill()
            process.wait()


def test_a_signal_to_one_process_stops_both_at_the_same_micro_step(training: Callable[[str], Training]) -> None:
    whole = training("whole")
    whole.start()
    codes, expected = whole.end()
    assert codes == [0, 0], whole.log()
    assert expected.step == STEPS

    interrupted = training("interrupted")
    for at_step, rank in ((7, 1), (19, 0), (33, 1)):
        interrupted.start()
        interrupted.wait_for(lambda progress, at=at_step: progress.step >= at)
        interrupted.processes[rank].send_signal(signal.SIGTERM)
        codes, result = interrupted.end()
        assert codes == [EXIT_STOPPED, EXIT_STOPPED], interrupted.log()
        assert (result.status, result.saved_step) == ("stopped", result.step)
    interrupted.start()
    codes, got = interrupted.end()
    assert codes == [0, 0], interrupted.log()
    assert (got.step, got.weights_digest, got.results) == (STEPS, expected.weights_digest, expected.results)


def test_a_request_and_a_kill_of_one_process(training: Callable[[str], Training]) -> None:
    whole = training("whole")
    whole.start()
    _, expected = whole.end()

    killed = training("killed")
    workdir = killed.start()
    killed.wait_for(lambda progress: progress.step >= 6)
    workdir.ask(Request(sequence=1, command=Command.SAVE))
    killed.wait_for(lambda progress: (progress.saved_step or 0) >= 6)
    killed.processes[1].kill()
    assert killed.processes[0].wait(60) not in (0, EXIT_STOPPED), "the other one does not go on alone"
    killed.start()
    codes, got = killed.end()
    assert codes == [0, 0], killed.log()
    assert got.weights_digest == expected.weights_digest


def test_processes_that_train_apart_are_refused(training: Callable[[str], Training]) -> None:
    apart = training("apart")
    apart.program.write_text(PROGRAM.replace("model = replicated(", "model = ("))
    apart.start()
    assert [process.wait(60) for process in apart.processes] == [1, 1]
    assert "checkpointed: 2 processes train, but the model is not replicated" in apart.log()


CENTRED = """
class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs):
        self.mean.lerp_(inputs.detach().mean(0), 0.2)
        return inputs - self.mean.clone()

prepare()
"""


def test_buffers_that_differ_between_the_processes_come_back(training: Callable[[str], Training]) -> None:
    """A forward pass without gradients lets the next one begin with each process's own buffers."""
    look = "            with torch.no_grad():\n                model(data[batch])\n"
    program = PROGRAM.replace("            time.sleep", f"{look}            time.sleep")
    program = program.replace("\nprepare()\n", CENTRED).replace("torch.nn.BatchNorm1d(8)", "Centred()")
    program = program.replace("epochs=6", "epochs=2")
    digests = []
    for name, steps in (("whole", ()), ("interrupted", (7,))):
        one = training(name)
        one.program.write_text(program)
        for at_step in steps:
            one.start()
            one.wait_for(lambda progress, at=at_step: progress.step >= at)
            one.processes[0].kill()
            one.processes[1].wait(60)
        one.start()
        codes, result = one.end()
        assert codes == [0, 0], one.log()
        digests.append(result.weights_digest)
    assert digests[0] == digests[1]


def test_processes_that_have_not_met_are_refused(training: Callable[[str], Training]) -> None:
    """Each would take itself for the only one, and write over the other's checkpoints."""
    apart = training("apart")
    apart.program.write_text(PROGRAM.replace("prepare()\n", "\n").replace("model = replicated(", "model = ("))
    apart.start()
    assert [process.wait(60) for process in apart.processes] == [1, 1]
    assert "WORLD_SIZE is 2, but the processes have not met: call prepare()" in apart.log()
