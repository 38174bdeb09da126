"""A program that knows nothing of gpucost survives by its folder; data and wheels reach it from a real S3 server."""

from __future__ import annotations

import io
import random
import signal
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import torch
from boto3.session import Session

from demo.settings import StackSettings
from demo.stack import Stack
from gpucost.job import Environment, FolderSync
from gpucost.jobstore import JobStore
from gpucost.objects import Objects
from gpucost.reasons import Reason
from tests.system.nodes import Job, Node, nodes, small  # noqa: F401

EVERY_SECONDS = 1.0
TOTAL = 5000

# It saves as people do: to another name, then renamed. On SIGTERM it saves once more.
PROGRAM = textwrap.dedent(
    """
    import json, os, signal, sys, time
    import torch

    folder = os.environ["GPUCOST_FOLDER"]
    file = os.path.join(folder, "model.pt")
    os.makedirs(folder, exist_ok=True)
    state = {"step": 0, "sum": torch.zeros((), dtype=torch.int64)}
    if os.path.exists(file):
        state = torch.load(file, weights_only=True)
    print("starts at", state["step"])

    def save():
        torch.save(state, file + ".tmp")
        os.replace(file + ".tmp", file)

    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    while state["step"] < int(sys.argv[1]) and not stopped:
        state["step"] += 1
        state["sum"] += state["step"]
        time.sleep(0 if os.path.exists(sys.argv[2]) else 0.05)
        if state["step"] % 7 == 0:
            save()
    save()
    print("stops at", state["step"])
    if stopped:
        sys.exit(75)
    with open(os.path.join(folder, "results.json"), "w") as results:
        json.dump({"sum": state["sum"].item()}, results)
    """
)


def said(node: Node, words: str) -> int | None:
    """The number behind these words in the program's log."""
    for line in node.workdir.log.read_text().splitlines() if node.workdir.log.exists() else ():
        if line.startswith(words):
            return int(line.removeprefix(words))
    return None


def kept_step(job: Job) -> int:
    """The step of the model in the newest checkpoint of the folder; 0 before the first."""
    for key in job.store.head().checkpoints:
        parts = [part for part in job.store.manifest(key).parts if part.path == "model.pt"]
        data = b"".join(job.objects.get(part.key) for part in parts)
        return int(torch.load(io.BytesIO(data), weights_only=True)["step"]) if data else 0
    return 0


def has_kept_more(job: Job, than: int) -> bool:
    return kept_step(job) > than


def kept_at(job: Job) -> datetime:
    """When the newest checkpoint was made."""
    return job.store.manifest(job.store.head().checkpoints[0]).created_at


def wait_until(what: Callable[[], bool], node: Node, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until or node.process.poll() is not None:
            pytest.fail(f"attempt {node.number}: waited for {what}\n{node.log()}")
        time.sleep(0.05)


def test_killed_at_random_moments_it_loses_one_interval_at_most_and_none_on_a_notice(
    small: Callable[..., Job],  # noqa: F811
    nodes: list[Node],  # noqa: F811
    tmp_path: Path,
) -> None:
    hurry = tmp_path / "hurry"
    job = small(str(TOTAL), str(hurry), source=PROGRAM, folder_sync=FolderSync(every_seconds=EVERY_SECONDS))
    chance = random.Random(20261130)
    for moment in ("kill", "kill", "anywhere", "term", "kill", "term"):
        kept = kept_step(job)
        nodes.append(node := job.start())
        if moment == "anywhere":  # While it starts, restores, or runs.
            time.sleep(chance.uniform(0.0, 3.0))
            node.power_off()
            continue
        wait_until(partial(has_kept_more, job, kept), node)
        assert said(node, "starts at") == kept
        time.sleep(chance.uniform(0.0, 1.5 * EVERY_SECONDS))
        if moment == "kill":
            node.power_off()
            late = (datetime.now(UTC) - kept_at(job)).total_seconds()
            assert late < EVERY_SECONDS + 10, "one interval, and what a busy machine needs to upload"
        else:
            node.process.send_signal(signal.SIGTERM)
            record = node.end()
            assert record.reason is Reason.INTERRUPTED
            assert "what it saved is kept" in record.message
            assert said(node, "stops at") == kept_step(job), "nothing was lost"
    kept = kept_step(job)
    assert 0 < kept < TOTAL

    hurry.touch()
    nodes.append(last := job.start())
    record = last.end(120)
    assert record.reason is Reason.COMPLETED, record
    assert record.results == {"sum": TOTAL * (TOTAL + 1) / 2}
    assert said(last, "starts at") == kept
    assert len(job.store.head().checkpoints) == 2


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A real S3 server: its address, and the credentials as environment variables."""
    stack = Stack(StackSettings(home=tmp_path_factory.mktemp("store"), services=("s3",), any_ports=True))
    stack.up()
    try:
        pair = stack.credentials().store
        yield (
            stack.addresses()["s3"],
            {"AWS_ACCESS_KEY_ID": pair.access_key, "AWS_SECRET_ACCESS_KEY": pair.secret_key},
        )
    finally:
        stack.down()


def bucket_of(s3: tuple[str, dict[str, str]], name: str) -> Objects:
    endpoint, credentials = s3
    session = Session(
        aws_access_key_id=credentials["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=credentials["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    client = session.client("s3", endpoint_url=endpoint)
    if name not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=name)
    return Objects.open(f"s3://{name}", endpoint=endpoint, session=session)


def move_to(job: Job, objects: Objects) -> None:
    """The job's documents lie on the S3 server from now on."""
    for stat in job.objects.scan("jobs"):
        objects.put(stat.key, job.objects.get(stat.key))
    job.objects, job.store = objects, JobStore(objects, job.store.key)


def around(s3: tuple[str, dict[str, str]], bucket: str) -> tuple[str, ...]:
    variables = {"GPUCOST_STORE_URL": f"s3://{bucket}", "GPUCOST_STORE_ENDPOINT": s3[0], **s3[1]}
    return ("env", *(f"{name}={value}" for name, value in variables.items()))


def wheel() -> bytes:
    """A package of one module, for any python."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_of_the_job.py", "factor = 3\n")
        info = "tiny_of_the_job-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-of-the-job\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


READER = textwrap.dedent(
    """
    import json, os, pathlib, sys, time
    import tiny_of_the_job

    folder = pathlib.Path(os.environ["GPUCOST_FOLDER"])
    tries = folder / "tries.txt"
    number = int(tries.read_text()) + 1 if tries.exists() else 1
    (folder / "big.bin").exists() or (folder / "big.bin").write_bytes(os.urandom(5_000_000))
    (folder / "next.tmp").write_text(str(number))
    (folder / "next.tmp").replace(tries)
    print("starts at", number)
    if number == 1:
        time.sleep(600)

    size = pathlib.Path(sys.argv[1]).stat().st_size
    files = sorted(file.relative_to(sys.argv[2]).as_posix() for file in pathlib.Path(sys.argv[2]).rglob("*.csv"))
    assert files == ["a.csv", "deep/b c.csv"], files
    assert pathlib.Path(os.environ["GPUCOST_DATA_SHARED"], "here.csv").read_text() == "of this machine"
    (folder / "results.json").write_text(json.dumps({"size": size * tiny_of_the_job.factor, "tries": number}))
    """
)


def test_data_and_wheels_come_from_a_real_s3_server_and_the_folder_survives_there(
    small: Callable[..., Job],  # noqa: F811
    nodes: list[Node],  # noqa: F811
    s3: tuple[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    data, jobs = bucket_of(s3, "data"), bucket_of(s3, "jobs")
    data.put("clicks/day 1.tsv", b"x" * 30_000_000)
    data.put("set/a.csv", b"1")
    data.put("set/deep/b c.csv", b"2")
    data.put("wheels/tiny_of_the_job-1.0-py3-none-any.whl", wheel())
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "here.csv").write_text("of this machine")
    job = small(
        "{data.clicks}",
        "{data.set}",
        source=READER,
        folder_sync=FolderSync(every_seconds=EVERY_SECONDS),
        data={"clicks": "s3://data/clicks/day 1.tsv", "set": "s3://data/set/", "shared": f"file://{tmp_path}/shared"},
        environment=Environment(wheels=("s3://data/wheels/tiny_of_the_job-1.0-py3-none-any.whl",)),
    )
    move_to(job, jobs)

    nodes.append(first := job.start(around=around(s3, "jobs")))
    wait_until(lambda: len(job.store.head().checkpoints) > 0, first)
    first.power_off()
    nodes.append(second := job.start(around=around(s3, "jobs")))
    record = second.end(120)
    assert record.reason is Reason.COMPLETED, record
    assert record.results == {"size": 90_000_000.0, "tries": 2.0}
    parts = {key: job.store.manifest(key).parts for key in job.store.head().checkpoints}
    assert len(parts) == 2
    newest = next(iter(parts))
    assert {part.path for part in parts[newest]} == {None, "big.bin", "tries.txt", "results.json"}
    folder = newest.rsplit("/", 1)[0]
    assert all(part.key.startswith(folder) for part in parts[newest]), "no checkpoint depends on another"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://data/none.csv", "data.x: s3://data/none.csv: there is no such object; correct the key"),
        ("s3://data/none/", "data.x: s3://data/none/: there is no object below it"),
        ("s3://nobodys-bucket/k", "data.x: s3://nobodys-bucket/k: "),
    ],
)
def test_data_that_are_not_there_end_the_attempt_with_the_field(
    small: Callable[..., Job],  # noqa: F811
    nodes: list[Node],  # noqa: F811
    s3: tuple[str, dict[str, str]],
    uri: str,
    words: str,
) -> None:
    bucket_of(s3, "data")
    job = small(source="print('never')", name=f"wrong-data-{hash(uri)}", data={"x": uri})
    move_to(job, bucket_of(s3, "jobs"))
    nodes.append(node := job.start(around=around(s3, "jobs")))
    record = node.end(120)
    assert record.reason is Reason.BAD_REQUEST
    assert words in record.message


def test_a_key_that_may_not_read_is_told(
    small: Callable[..., Job],  # noqa: F811
    nodes: list[Node],  # noqa: F811
    s3: tuple[str, dict[str, str]],
) -> None:
    bucket_of(s3, "data").put("k", b"1")
    job = small(source="print('never')", data={"x": "s3://data/k"})
    wrong = ("env", f"GPUCOST_STORE_ENDPOINT={s3[0]}", "AWS_ACCESS_KEY_ID=AKIAWRONG", "AWS_SECRET_ACCESS_KEY=wrong")
    nodes.append(node := job.start(around=wrong))
    record = node.end(120)
    assert record.reason is Reason.NOT_AUTHORIZED
    assert "data.x: s3://data/k: not allowed" in record.message
