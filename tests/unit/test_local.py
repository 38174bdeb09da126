"""A run on one's own machine: the job file, what changed since the last run, and what is shown."""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from gpucost.bundle import pack_code
from gpucost.job import JobId
from gpucost.jobstore import ExitRecord, GpuUse, Heartbeat, JobSpec, JobStore, Manifest, Phase, Telemetry
from gpucost.local import stand
from gpucost.local.jobfile import JobFile, JobFileError, include_folder, read_job
from gpucost.local.node import METADATA, NO_METADATA, environment
from gpucost.local.place import Busy, NoPlace, Place
from gpucost.local.screen import BEHIND_BYTES, Follower, Screen, status_line
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.training.agent.relay import CHUNK_BYTES, LOG_KEPT_BYTES, LOG_LIMIT_BYTES, punch_hole
from gpucost.training.workdir import Progress

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
JOB = JobId(dag_id="local", run_id="me", task_id="try")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job file's folder, beside an include/ folder."""
    (tmp_path / "include" / "programs" / "digits").mkdir(parents=True)
    (tmp_path / "include" / "programs" / "digits" / "train.py").write_text("1")
    (tmp_path / "include" / "recipes").mkdir()
    (tmp_path / "mine" / "code").mkdir(parents=True)
    (tmp_path / "mine" / "code" / "train.py").write_text("2")
    return tmp_path / "mine"


def read(folder: Path, text: str, *changes: str) -> JobFile:
    (folder / "job.yaml").write_text(text)
    return read_job(folder / "job.yaml", changes, folder.parent / "include", NOW)


def faults(folder: Path, text: str, *changes: str) -> list[str]:
    with pytest.raises(JobFileError) as wrong:
        read(folder, text, *changes)
    return wrong.value.faults


GOOD = "name: try\ncode: code\n"


def test_what_matters_only_for_buying_may_be_left_out(folder: Path) -> None:
    found = read(folder, GOOD)
    assert found.code == folder / "code"
    assert found.job.deadline > NOW
    assert found.job.budget is None


def test_what_is_given_about_buying_is_checked_as_in_airflow(folder: Path) -> None:
    text = GOOD + "deadline: 2026-12-01 08:00:00\nwork_hours: 0\nbudget: 5\n"
    told = faults(folder, text)
    assert len(told) == 3
    assert told[0].startswith("work_hours: got 0, expected greater than 0")
    assert told[1].startswith("deadline: got datetime.datetime(2026, 12, 1, 8, 0), expected ")
    assert told[2] == "budget: got 5 (int), expected text such as '12.50 USD'"


def test_code_is_looked_for_beside_the_file_and_then_below_include(folder: Path) -> None:
    assert read(folder, "name: try\ncode: programs/digits\n").code == folder.parent / "include/programs/digits"
    assert faults(folder, "name: try\ncode: nowhere\n") == [
        f"code: got 'nowhere', expected a folder with the program, in {folder} or {folder.parent / 'include'}"
    ]
    assert faults(folder, GOOD + "program: main.py\n") == [
        f"program: 'main.py' is not in {str(folder / 'code')!r}, expected a file there"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("code: code\n", "name: is missing, expected it in the job file: What people call this training."),
        (GOOD + "sede: 1\n", "sede: got 1, expected no such field; did you mean seed?"),
        (
            GOOD + "checkpoint: {xyz: 1}\n",
            "checkpoint.xyz: got 1, expected no such field; there are every_steps, keep",
        ),
        (
            GOOD + "folder_sync: {every_second: 1}\n",
            "folder_sync.every_second: got 1, expected no such field; did you mean every_seconds?",
        ),
        (GOOD + "world_size: 0\n", "world_size: got 0, expected greater than or equal to 1"),
        (
            GOOD + "program: ../x.py\n",
            "program: got '../x.py', expected a path inside the code folder such as 'train.py'",
        ),
        ("- a\n", "got ['a'], expected the job's fields, such as 'name: digits'"),
        ("", "got None, expected the job's fields, such as 'name: digits'"),
        ("name: 2026-13-45\n", "is no YAML: month must be in 1..12"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_was_expected(folder: Path, text: str, told: str) -> None:
    assert faults(folder, text) == [told]


def test_a_wrong_option_of_the_recipe_is_named(folder: Path) -> None:
    (fault,) = faults(folder, GOOD + "recipe: {precision: int3}\n")
    assert fault.startswith("recipe.precision: got 'int3', expected ")
    assert fault.count("int3") == 1


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    (fault,) = faults(folder, "name: [try\n")
    assert fault.startswith("is no YAML: ")
    assert "line 2" in fault
    assert "\n" not in fault
    (fault,) = faults(folder, "[" * 3000)
    assert fault.startswith("is no YAML: maximum recursion depth")
    with pytest.raises(JobFileError, match="cannot be read: No such file or directory; expected a YAML file"):
        read_job(folder / "gone.yaml", (), folder, NOW)


def test_set_replaces_what_the_file_says(folder: Path) -> None:
    changes = (
        "seed=3",
        "checkpoint.every_steps=5",
        "recipe.batch=32",
        "arguments=[--epochs, 3]",
        "data.train=s3://b/x",
    )
    job = read(folder, GOOD + "seed: 1\ncheckpoint: {keep: 4}\nrecipe: {batch: 64, clip_norm: 1.0}\n", *changes).job
    assert (job.seed, job.checkpoint.every_steps, job.checkpoint.keep) == (3, 5, 4)
    assert job.recipe.chosen() == {"batch": 32, "clip_norm": 1.0}
    assert (job.arguments, job.data) == (("--epochs", "3"), {"train": "s3://b/x"})
    assert read(folder, GOOD + "recipe: {batch: 64}\n", "recipe.batch=null").job.recipe.chosen() == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("seed", "--set: got 'seed', expected FIELD=VALUE such as seed=3 or recipe.batch=64"),
        (".x=1", "--set: got '.x=1', expected FIELD=VALUE such as seed=3 or recipe.batch=64"),
        ("name.x=1", "--set name.x: name is 'try', expected one that has fields"),
        ("seed=[", "--set seed: got '[', expected a YAML value such as 3 or [a, b]"),
        ("name=2026-13-45", "--set name: got '2026-13-45', expected a YAML value such as 3 or [a, b]"),
        ("seed=-1", "seed: got -1, expected greater than or equal to 0"),
    ],
)
def test_a_set_that_makes_no_sense(folder: Path, change: str, told: str) -> None:
    assert faults(folder, GOOD, change) == [told]


def test_data_beside_the_file_is_named_as_a_node_needs_it(folder: Path) -> None:
    (folder / "clicks.tsv").write_text("1")
    text = GOOD + "data: {clicks: clicks.tsv, labels: 's3://b/labels/'}\n"
    assert read(folder, text).job.data == {"clicks": (folder / "clicks.tsv").as_uri(), "labels": "s3://b/labels/"}
    assert faults(folder, text, "data.clicks=gone.tsv") == [
        f"data.clicks: got 'gone.tsv', expected s3://, file:///, or a path that exists in {folder}"
    ]


def test_a_recipe_may_be_the_name_of_a_file(folder: Path) -> None:
    include = folder.parent / "include"
    (include / "recipes" / "small.yaml").write_text("precision: bf16\nbatch: 8\n")
    text = GOOD + "recipe: small\n"
    assert read(folder, text).job.recipe.chosen() == {"precision": "bf16", "batch": 8}
    assert read(folder, text, "recipe.batch=4").job.recipe.chosen() == {"precision": "bf16", "batch": 4}
    (folder / "small.yaml").write_text("batch: 2\n")
    assert read(folder, text).job.recipe.chosen() == {"batch": 2}
    (fault,) = faults(folder, text, "recipe=large")
    places = f"{folder} or {include}"
    assert fault == f"recipe: got 'large', expected the name of a YAML file below {places}; there are: small"
    (folder / "small.yaml").write_text("- 1\n")
    (fault,) = faults(folder, text)
    assert fault.startswith(f"recipe: {folder / 'small.yaml'}: got [1], expected a mapping of options")


def test_the_shipped_jobs_are_good() -> None:
    files = sorted((ROOT / "include" / "jobs").glob("*.yaml"))
    assert [read_job(file, (), include_folder({}), NOW).job.name for file in files] == [file.stem for file in files]


def spec(**fields: object) -> JobSpec:
    return JobSpec.model_validate({"job_id": JOB, "name": "try", "code_digest": "a", "program": "train.py", **fields})


def finished(number: int) -> ExitRecord:
    return ExitRecord(attempt=number, reason=Reason.COMPLETED, at=NOW, step=9)


def test_an_attempt_follows_the_last_one_and_fences_it_out() -> None:
    objects = Objects.in_memory()
    first = stand.newest(objects, JOB)
    assert (first.number, first.spec, first.ending, first.saved_step) == (1, None, None, None)
    assert stand.begin(first, spec(), b"zip", "local-1", NOW) == 1
    store = JobStore(objects, JOB.key)
    store.commit(Manifest(job=JOB.key, attempt=1, step=30, created_at=NOW, parts=()))
    store.write_exit(finished(1))

    second = stand.newest(objects, JOB)
    assert (second.number, second.saved_step, second.ending) == (2, 30, finished(1))
    assert stand.begin(second, spec(seed=2), b"zip", "local-2", NOW) == 2
    assert store.head().fence == 2
    assert [member.lease_id for member in store.attempt(2).members] == ["local-2"]
    assert store.attempt(2).expires_at - NOW >= timedelta(days=365)
    assert store.spec().seed == 2
    assert stand.newest(objects, JOB).ending is None


def test_the_newest_generation_is_found() -> None:
    objects = Objects.in_memory()
    for job_id in (JOB, JOB.next_generation()):
        stand.begin(stand.look(objects, job_id), spec(job_id=job_id), b"", "local-1", NOW)
    assert stand.newest(objects, JOB).job_id.generation == 2


def test_what_the_agent_is_told_is_what_the_file_says(folder: Path) -> None:
    text = (
        GOOD
        + "gpu: {count: 2}\nworld_size: 2\nthreads: 3\nrecipe: {batch: 8}\nhang: {times: 9}\ndata: {x: 's3://b/x'}\n"
    )
    job = read(folder, text).job
    told = stand.spec_of(JOB, job, "digest")
    assert (told.gpu_count, told.world_size, told.threads, told.code_digest) == (2, 2, 3, "digest")
    assert (told.recipe, told.hang, told.data, told.program) == (job.recipe, job.hang, job.data, "train.py")


def test_changes_are_told_by_field_and_by_file(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for name in ("train.py", "model.py"):
        (code / name).write_text("1")
    digest, before = pack_code(code)
    objects = Objects.in_memory()
    stand.begin(stand.newest(objects, JOB), spec(code_digest=digest, recipe={"batch": 8}), before, "local-1", NOW)
    stood = stand.newest(objects, JOB)
    assert stand.changes(stood, spec(code_digest=digest, recipe={"batch": 8}), before) == []

    (code / "model.py").write_text("2")
    new_digest, after = pack_code(code)
    changed = spec(code_digest=new_digest, recipe={"precision": "bf16"}, arguments=("--epochs", "3"))
    assert stand.changes(stood, changed, after) == [
        f"code: {digest[:12]} -> {new_digest[:12]} (model.py)",
        "arguments: [] -> ['--epochs', '3']",
        "recipe.batch: 8 -> not set",
        "recipe.precision: not set -> bf16",
    ]


def test_the_agent_finds_the_environment_of_a_node(tmp_path: Path) -> None:
    place = Place(tmp_path, "s3://bucket/x")
    base = {
        "PATH": "/bin",
        "PYTHONPATH": "plugins",
        "GPUCOST_SHUTDOWN": "poweroff",
        "GPUCOST_STORE_ENDPOINT": "http://s3",
        "AIRFLOW_CONN_GPUCOST_DB": "secret",
        "AWS_ACCESS_KEY_ID": "key",
    }
    told = environment(base, place, "job", "local-1", 1)
    assert told == {
        METADATA: NO_METADATA,
        "PATH": "/bin",
        "AWS_ACCESS_KEY_ID": "key",
        "GPUCOST_STORE_ENDPOINT": "http://s3",
        "GPUCOST_STORE_URL": "s3://bucket/x",
        "GPUCOST_JOB": "job",
        "GPUCOST_LEASE": "local-1",
        "GPUCOST_ATTEMPT": "1",
        "GPUCOST_WORKDIR": str(tmp_path / "work"),
    }
    assert environment({METADATA: "http://169.254.169.254/"}, place, "job", "l", 1)[METADATA] != NO_METADATA


def test_one_run_has_the_folder_at_a_time(tmp_path: Path) -> None:
    place = Place.beside(tmp_path / "job.yaml", "two words/and a slash")
    assert place.folder == tmp_path / ".gpucost-run" / "two-words-and-a-slash"
    with place.held() as lock:
        with pytest.raises(Busy, match=f"process {os.getpid()}, "), place.held():
            pass
        inherited = os.dup(lock)
    with pytest.raises(Busy), place.held():
        pass
    os.close(inherited)
    with place.held():
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / ".gpucost-run").write_text("a file")
    with pytest.raises(NoPlace, match=r"\.gpucost-run/try: .*, expected a folder"):
        Place.beside(tmp_path / "job.yaml", "try")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    place = Place.beside(tmp_path / "job.yaml", "try")
    (place.folder / "lock").mkdir()
    with pytest.raises(NoPlace, match=r"\.gpucost-run/try/lock: Is a directory"), place.held():
        pass


def screen(now: list[float]) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, width=40), real=lambda: now[0]), out


def test_without_a_terminal_the_status_comes_now_and_then_and_only_when_it_changed() -> None:
    now = [0.0]
    shown, out = screen(now)
    for moment, line in ((1, "a"), (11, "b"), (12, "c"), (25, "b"), (26, "d" * 100)):
        now[0] = moment
        shown.status(line)
    assert out.getvalue() == f"gpucost: b\ngpucost: {'d' * 100}\n"


def test_of_the_agents_log_only_its_own_news_is_shown() -> None:
    shown, out = screen([0.0])
    shown.agent(
        "gpucost agent: waiting up to 60 s for the object store: refused\n"
        "gpucost agent: instance metadata: refused\n"
        "gpucost agent: bad_program: the program failed; end of its log:\nreading data\n"
    )
    assert out.getvalue() == "gpucost agent: waiting up to 60 s for the object store: refused\n"


def test_the_log_is_shown_as_it_is_each_line_once(tmp_path: Path) -> None:
    shown, out = screen([0.0])
    log = tmp_path / "log"
    follower = Follower(log, shown.program)
    follower.follow()
    log.write_text("[bold]one[/bold] " + "x" * 60 + "\n 10 %\r 20 %\r 30 %\n\nhalf")
    follower.follow()
    assert "half" not in out.getvalue()
    follower.follow(final=True)
    assert out.getvalue() == "[bold]one[/bold] " + "x" * 60 + "\n 30 %\n\nhalf\n"


def test_of_a_flood_the_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("y" * 99 + "\n" + ("x" * 99 + "\n") * (BEHIND_BYTES // 100) + "the end\n")
    told: list[str] = []
    Follower(log, told.append).follow()
    text = "".join(told)
    assert text.startswith("[gpucost: ")
    assert f"bytes left out here; what is kept of them is in {log}]" in text
    assert text.endswith("the end\n")
    assert len(text) < 100_000


def test_what_the_agent_has_taken_from_a_long_log_is_left_out(tmp_path: Path) -> None:
    """While it is followed, as after it: what was given back reads as zeros."""
    log = tmp_path / "log"
    lines = ("x" * 99 + "\n") * (CHUNK_BYTES // 100)
    told: list[str] = []
    follower = Follower(log, told.append)
    with log.open("w") as file:
        while file.tell() < LOG_LIMIT_BYTES + 2 * CHUNK_BYTES:
            file.write(lines)
            file.flush()
            follower.follow()
        shown = file.tell()
        while file.tell() < shown + 3 * LOG_KEPT_BYTES:
            file.write(lines)
        file.write("the end\n")
    punch_hole(log, LOG_LIMIT_BYTES + CHUNK_BYTES, log.stat().st_size - LOG_KEPT_BYTES - LOG_LIMIT_BYTES - CHUNK_BYTES)
    follower.follow(final=True)
    text = "".join(told)
    assert "\0" not in text
    assert text.count("bytes left out here") == 1
    assert text.endswith("x\nthe end\n")


def test_the_status_line() -> None:
    assert status_line(None, None, 61) == "0:01:01 · starting"
    progress = Progress(
        step=120, total_steps=276, at=NOW, phase=Phase.SAVING, loss=0.12345, steps_per_second=31.24, saved_step=100
    )
    assert (
        status_line(progress, None, 5)
        == "0:00:05 · step 120 of 276 · saving · loss 0.1235 · 31.2 steps/s · saved at 100"
    )
    assert status_line(Progress(step=1, at=NOW), None, 5) == "0:00:05 · step 1 · nothing saved yet"


def test_the_status_line_says_what_the_machine_does_where_that_is_known() -> None:
    def line(**telemetry: object) -> str:
        told = Telemetry.model_validate(telemetry)
        beat = Heartbeat(lease_id="l", job="j", attempt=1, sequence=1, at=NOW, phase=Phase.TRAINING, telemetry=told)
        return status_line(None, beat, 0)

    assert line(cpu_percent=81.6) == "0:00:00 · starting · CPU 82 %"
    gpu = GpuUse(index=1, utilization_percent=97, memory_used=3 * 2**30)
    assert line(gpus=(gpu, GpuUse(index=2))) == "0:00:00 · starting · GPU 1 97 %, 3.0 GiB"
    assert line(memory_used=5) == "0:00:00 · starting"
