"""`gpucost run job.yaml` as a developer types it: real processes, Ctrl-C, edits in between, kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucost.jobstore import ExitRecord, JobStore
from gpucost.local.place import HOME
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.training.workdir import Progress, Workdir

PLUGINS = Path(__file__).parents[2] / "plugins"

TRAINS = textwrap.dedent(
    """
    import sys, time
    import torch
    from gpucost.training import checkpointed, prepare

    prepare()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with checkpointed(model, optimizer, epochs=12) as run:
        for epoch in run.epochs():
            print("epoch", epoch)
            for batch in run.batches(100, 10):
                loss = model(torch.rand(10, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(float(sys.argv[1]))
                run.step(loss=loss)
        run.finish({"last_loss": loss.item()})
    """
)
RAISES = "print('reading data')\nraise RuntimeError('column 7 is not a number')\n"
NEVER_STOPS = textwrap.dedent(
    """
    import signal, subprocess, sys, time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    print("runs now", flush=True)
    time.sleep(300)
    """
)


class Desk:
    """A developer's folder with one job file, and the commands that run it."""

    def __init__(self, folder: Path, source: str, arguments: str = "[]") -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        (folder / "code").mkdir()
        self.program = folder / "code" / "train.py"
        self.program.write_text(source)
        self.file = folder / "job.yaml"
        self.file.write_text(
            f"name: try\ncode: code\narguments: {arguments}\ngpu: {{count: 0}}\nseed: 7\n"
            "checkpoint: {every_steps: 1000}\n"
        )

    @property
    def home(self) -> Path:
        return self.folder / HOME / "try"

    def start(self, *options: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": str(PLUGINS)}
        command = [sys.executable, "-m", "gpucost", "run", str(self.file), *options]
        # A group of its own, as a shell gives it: what the test's own group gets is not meant for it.
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        self.started.append(process)
        return process

    def run(self, *options: str) -> tuple[int, str]:
        return self.ended(self.start(*options))

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    def wait_for(self, what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        until = time.monotonic() + 120
        while not what():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                pytest.fail(f"ended, or waited too long: {process.communicate()[0]}")
            time.sleep(0.02)

    def has_done(self, steps: int) -> Callable[[], bool]:
        return lambda: bool((progress := self.progress()) and progress.step >= steps)

    def has_said(self, line: str) -> Callable[[], bool]:
        log = self.home / "work" / "program.log"
        return lambda: log.exists() and line in log.read_text()

    def progress(self) -> Progress | None:
        return Workdir(self.home / "work").progress()

    def record(self, attempt: int, generation: int = 1) -> ExitRecord:
        jobs = self.home / "store" / "jobs"
        (key,) = (path.name for path in jobs.iterdir() if path.name.endswith(f"-g{generation}"))
        record = JobStore(Objects.open((self.home / "store").as_uri()), key).exit_record(attempt)
        assert record is not None
        return record

    def left(self) -> list[str]:
        """Everything that still runs below the command."""
        mark = f"GPUCOST_WORKDIR={self.home / 'work'}".encode()
        return [
            _read(path.with_name("cmdline")).replace(b"\0", b" ").decode()
            for path in Path("/proc").glob("[0-9]*/environ")
            if mark in _read(path)
        ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(source: str, arguments: str = "[]") -> Desk:
        desks.append(Desk(tmp_path_factory.mktemp("desk"), source, arguments))
        return desks[-1]

    yield make
    for one in desks:
        for process in one.started:
            process.kill()
            process.wait()
        until = time.monotonic() + 120
        while one.left():
            assert time.monotonic() < until, one.left()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(desk: Callable[..., Desk]) -> tuple[Desk, int, str]:
    """A job that ran to its end at once, with the command's exit code and what it said."""
    job = desk(TRAINS, "['0']")
    return (job, *job.run())


def test_ctrl_c_an_edit_and_a_second_run_end_as_one_undisturbed_run(
    desk: Callable[..., Desk], undisturbed: tuple[Desk, int, str]
) -> None:
    whole, *_ = undisturbed
    disturbed = desk(TRAINS, "['0.05']")
    first = disturbed.start()
    disturbed.wait_for(disturbed.has_done(12), first)
    first.send_signal(signal.SIGINT)
    code, said = disturbed.ended(first)
    saved = disturbed.record(1).step
    assert (code, disturbed.record(1).saved_step) == (75, saved)
    assert "saving and stopping" in said
    assert f"interrupted at step {saved} " in said
    assert f"run it again to go on from step {saved}" in said
    assert disturbed.left() == []

    disturbed.program.write_text(TRAINS + "# a comment\n")
    code, said = disturbed.run("--set", "arguments=['0']")
    assert code == 0
    assert f"attempt 2, goes on from step {saved}" in said
    assert "changed since attempt 1: arguments: ['0.05'] -> ['0']" in said
    assert "changed since attempt 1: code: " in said
    assert "(train.py)" in said
    assert disturbed.record(2).weights_digest == whole.record(1).weights_digest is not None
    assert disturbed.record(2).results == whole.record(1).results


def test_a_completed_run_and_what_comes_after_it(undisturbed: tuple[Desk, int, str]) -> None:
    job, code, said = undisturbed
    record = job.record(1)
    assert code == 0
    assert "attempt 1, starts from nothing" in said
    assert [said.count(f"epoch {number}\n") for number in range(12)] == [1] * 12
    assert "completed at step 120 after " in said
    assert f"last_loss  {record.results['last_loss']:.6g}" in said
    assert f"checkpoints: {(job.home / 'store').as_uri()}/jobs/" in said
    assert "newest: step 120" in said

    code, said = job.run()
    assert (code, said) == (0, "try is completed, at step 120; --fresh starts it anew\n")
    code, said = job.run("--set", "seed=8")
    assert code == 2
    assert "--fresh starts it anew. Changed since then:\n  seed: 7 -> 8" in said

    code, said = job.run("--fresh", "--set", "seed=8")
    assert code == 0
    assert "attempt 1, starts from nothing" in said
    assert job.record(1, generation=2).weights_digest != record.weights_digest
    assert job.record(1) == record


def test_a_program_that_raises(desk: Callable[..., Desk]) -> None:
    job = desk(RAISES)
    code, said = job.run()
    assert code == 1
    assert job.record(1).reason is Reason.BAD_PROGRAM
    assert said.count("reading data") == 1
    assert said.count("RuntimeError: column 7 is not a number") == 1
    assert "bad_program at step 0 after " in said
    assert "the program failed: exit code 1 at step 0" in said
    assert job.left() == []


def test_a_killed_command_leaves_nothing_and_loses_nothing(desk: Callable[..., Desk]) -> None:
    job = desk(TRAINS, "['0.05']")
    command = job.start()
    job.wait_for(job.has_done(5), command)
    command.kill()
    command.wait()
    until = time.monotonic() + 120
    while job.left() and time.monotonic() < until:
        time.sleep(0.05)
    assert job.left() == []
    record = job.record(1)
    assert record.reason is Reason.INTERRUPTED
    assert record.saved_step == record.step >= 5


def test_two_at_once_are_refused_and_a_second_ctrl_c_ends_it_at_once(desk: Callable[..., Desk]) -> None:
    job = desk(NEVER_STOPS)
    first = job.start()
    job.wait_for(job.has_said("runs now"), first)
    code, said = job.run()
    assert code == 2
    assert said.startswith(f"error: this job runs already on this machine (process {first.pid}, ")
    assert first.poll() is None

    first.send_signal(signal.SIGINT)
    assert first.stdout is not None
    assert any("saving and stopping" in line for line in iter(first.stdout.readline, ""))
    assert len(job.left()) >= 3  # The agent, the program, and what that one started.
    first.send_signal(signal.SIGINT)
    code, said = job.ended(first)
    assert code == 128 + signal.SIGKILL
    assert "ended at once" in said
    assert job.left() == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("seed=-1", "seed: got -1, expected greater than or equal to 0"),
        ("program=trian.py", "program: 'trian.py' is not in "),
        ("sede=1", "sede: got 1, expected no such field; did you mean seed?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(desk: Callable[..., Desk], change: str, told: str) -> None:
    job = desk(RAISES)
    code, said = job.run("--set", change)
    assert code == 2
    assert said.startswith(f"error: {job.file}: {told}")
    assert said.count("\n") == 1
    assert not job.home.exists()
