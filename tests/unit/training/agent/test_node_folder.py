"""The files between agent and program, the program's environment, and what the agent must not load."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpucost.job import JobId
from gpucost.jobstore import Command, JobSpec
from gpucost.training.agent import launching
from gpucost.training.agent.attempt import package_root
from gpucost.training.agent.main import EXIT_CODES
from gpucost.training.agent.say import say
from gpucost.training.workdir import Progress, Request, Result, Workdir

SPEC = JobSpec(
    job_id=JobId(dag_id="d", run_id="r", task_id="t"),
    name="t",
    code_digest="0",
    program="train.py",
    arguments=("--epochs", "3"),
    seed=9,
    threads=2,
)


def test_words_come_over_and_an_earlier_attempts_are_cleared(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path / "work")
    assert (workdir.progress(), workdir.request(), workdir.result(), workdir.request_mark()) == (None, None, None, 0)
    progress = Progress(step=3, at=datetime(2026, 11, 30, tzinfo=UTC))
    workdir.write_progress(progress)
    workdir.write_result(Result(status="stopped", step=3))
    workdir.write_job(SPEC)
    workdir.code.mkdir()
    (workdir.code / "old.py").write_text("")
    assert workdir.progress() == progress
    assert workdir.job() == SPEC
    workdir.clear()
    assert list(workdir.path.iterdir()) == []


def test_every_request_changes_the_mark(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    marks = {workdir.request_mark()}
    for sequence in range(1, 20):
        workdir.ask(Request(sequence=sequence, command=Command.SAVE))
        marks.add(workdir.request_mark())
    assert len(marks) == 20


def test_the_programs_environment_comes_from_the_job(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    base = {"PYTHONPATH": "/other", "HOME": "/root", "WORLD_SIZE": "8"}
    env = launching.environment(SPEC, base, workdir, Path("/opt/agent.zip"), port=4711)
    assert env["PYTHONPATH"] == f"/opt/agent.zip:{tmp_path}/site:/other"
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["PYTHONHASHSEED"]) == ("2", "2", "9")
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("0", "0", "1", "127.0.0.1")
    assert env["MASTER_PORT"] == "4711"
    assert env["GPUCOST_WORKDIR"] == str(tmp_path)
    assert env["HOME"] == "/root"
    assert launching.command(SPEC, python="/usr/bin/python3") == ["/usr/bin/python3", "train.py", "--epochs", "3"]


def test_several_processes_are_started_by_the_launcher(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"world_size": 2})
    env = launching.environment(
        spec, {"WORLD_SIZE": "8", "RANK": "3"}, Workdir(tmp_path), Path("/opt/agent.zip"), port=4711
    )
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & env.keys()
    assert launching.command(spec, ["--data", "/x"], "/usr/bin/python3")[1:] == [
        "-m", "gpucost.training.agent.launch", "2", "train.py", "--data", "/x",
    ]  # fmt: skip


def test_the_agent_loads_neither_torch_nor_airflow() -> None:
    code = (
        "import sys, gpucost.training.agent.main; "
        "print([name for name in ('torch', 'numpy', 'airflow', 'boto3') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(package_root())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("count", "seen"), [(0, ""), (1, None)])
def test_a_job_without_a_gpu_does_not_take_one_that_is_there(tmp_path: Path, count: int, seen: str | None) -> None:
    spec = SPEC.model_copy(update={"gpu_count": count})
    env = launching.environment(spec, {}, Workdir(tmp_path), Path("/opt/agent.zip"), port=4711)
    assert env.get("CUDA_VISIBLE_DEVICES") == seen


def test_only_completion_exits_with_zero() -> None:
    assert [reason for reason, code in EXIT_CODES.items() if code == 0] == ["completed"]


def test_an_agent_whose_log_is_full_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stderr", full)
        say("more than fits")
        with contextlib.suppress(OSError):  # Closing tries once more.
            full.close()
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    say("there is room again")
    assert log.getvalue() == "gpucost agent: there is room again\n"
