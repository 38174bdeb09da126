"""Data and wheels come onto the node whole, in bounded pieces, or the error says which field is wrong and why."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpucost.job import JobId, TrainingJob, unknown_data
from gpucost.jobstore import JobSpec
from gpucost.objects import NotAllowed, Objects, StoreError
from gpucost.reasons import Reason
from gpucost.training.agent import download
from gpucost.training.agent.download import PARALLEL, Fetcher, in_parallel
from gpucost.training.agent.fetch import CannotFetch, arguments, fetch_data, install_wheels, path_of, variables
from gpucost.training.workdir import Workdir

MIB = 1 << 20


class Store:
    """Buckets in memory, and a way to fetch from them; what goes wrong is set by the test."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.bucket = Objects.in_memory()
        self.said: list[str] = []
        self.reads = 0
        self.slept: list[float] = []
        self.before_read: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def fetch(self, **data: str) -> None:
        fetch_data(data, self.into, {}, self.said.append, fetcher=self.fetcher())

    def fetcher(self) -> Fetcher:
        return Fetcher({}, self.said.append, open_store=lambda _: Counted(self), sleep=self.slept.append)

    def read(self) -> None:
        with self._lock:
            self.reads += 1
            self.before_read()


class Counted(Objects):
    """The bucket, with every piece that is read told to the test."""

    def __init__(self, owner: Store) -> None:
        super().__init__(owner.bucket._store)
        self._owner = owner

    def get_range(self, key: str, start: int, end: int, etag: str) -> bytes:
        self._owner.read()
        return super().get_range(key, start, end, etag)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PIECE_BYTES", 1000)


def test_one_object_becomes_one_file(store: Store) -> None:
    content = os.urandom(12_345)
    store.bucket.put("clicks/day 1 é.tsv", content)
    store.fetch(clicks="s3://bucket/clicks/day 1 é.tsv")
    path = path_of("clicks", "s3://bucket/clicks/day 1 é.tsv", store.into)
    assert path == store.into / "clicks" / "day 1 é.tsv"
    assert path.read_bytes() == content
    assert store.reads == 13
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert store.said == ["data.clicks: 1 files, 12345 bytes, s3://bucket/clicks/day 1 é.tsv"]


def test_a_folder_keeps_the_paths_below_it_and_only_those(store: Store) -> None:
    store.bucket.put("set/a.csv", b"1")
    store.bucket.put("set/deep/b.csv", b"22")
    store.bucket.put("set/empty", b"")
    store.bucket.put("set/deep/marker", b"")
    store.bucket.put("set/deep/marker/c.csv", b"333")
    store.bucket.put("settings", b"no part of it")
    (store.into / "set" / "old").mkdir(parents=True)
    (store.into / "set" / "old" / "left.csv").write_text("of an earlier attempt")
    store.fetch(set="s3://bucket/set/")
    folder = path_of("set", "s3://bucket/set/", store.into)
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
        "a.csv": b"1",
        "deep/b.csv": b"22",
        "empty": b"",
        "deep/marker/c.csv": b"333",
    }


def test_a_folder_of_one_file_is_still_a_folder(store: Store) -> None:
    store.bucket.put("set/a.csv", b"1")
    store.fetch(set="s3://bucket/set/")
    assert path_of("set", "s3://bucket/set/", store.into) == store.into / "set"


def test_what_is_there_whole_is_not_fetched_again_and_what_changed_is(store: Store) -> None:
    store.bucket.put("set/a", b"a" * 1500)
    store.bucket.put("set/b", b"b" * 1500)
    store.fetch(set="s3://bucket/set/")
    assert store.reads == 4
    (store.into / "set" / "b").write_bytes(b"B" * 1500)
    store.fetch(set="s3://bucket/set/")
    assert store.reads == 6
    assert (store.into / "set" / "b").read_bytes() == b"b" * 1500


def test_a_store_that_goes_away_is_waited_for_and_said_once(store: Store) -> None:
    store.bucket.put("k", b"x" * 20_000)

    def away_for_a_while() -> None:
        if 5 <= store.reads < 15:
            raise StoreError("connection refused")

    store.before_read = away_for_a_while
    store.fetch(x="s3://bucket/k")
    assert (store.into / "x" / "k").read_bytes() == b"x" * 20_000
    assert len(store.slept) == 10
    assert sum("waiting" in line for line in store.said) <= 2


def test_a_store_that_stays_away_ends_it_with_its_own_error(store: Store) -> None:
    store.bucket.put("k", b"x" * 5000)

    def away() -> None:
        raise StoreError("connection refused")

    store.before_read = away
    fetcher = Fetcher({}, store.said.append, open_store=lambda _: Counted(store), patience=0.0)
    with pytest.raises(StoreError, match="connection refused"):
        fetch_data({"x": "s3://bucket/k"}, store.into, {}, store.said.append, fetcher=fetcher)
    assert not (store.into / "x" / "k").exists()


def test_an_object_that_changes_meanwhile_is_refused(store: Store) -> None:
    store.bucket.put("k", b"x" * 5000)
    store.before_read = lambda: store.bucket.put("k", b"y" * 5000) if store.reads == 2 else None
    with pytest.raises(CannotFetch, match=r"data.x: s3://bucket/k: .* while it was fetched; start again"):
        store.fetch(x="s3://bucket/k")
    assert not (store.into / "x" / "k").exists()


def test_credentials_that_may_not_read_are_told_at_once(store: Store) -> None:
    store.bucket.put("k", b"x")

    def denied() -> None:
        raise NotAllowed("403 Forbidden")

    store.before_read = denied
    with pytest.raises(CannotFetch, match=r"data.x: s3://bucket/k: not allowed \(403 Forbidden\); let the") as told:
        store.fetch(x="s3://bucket/k")
    assert told.value.reason is Reason.NOT_AUTHORIZED
    assert store.slept == []


Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_too_small_is_told_before_the_first_byte(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.bucket.put("a", b"x" * 3000)
    store.bucket.put("b", b"x" * 3000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 5_000, 5_000))
    with pytest.raises(CannotFetch, match=r"data.x, data.y: 6000 bytes are needed and 5000 bytes are free") as told:
        store.fetch(x="s3://bucket/a", y="s3://bucket/b")
    assert told.value.reason is Reason.DISK_FULL
    assert store.reads == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 4_000, 6_000))
    store.fetch(x="s3://bucket/a", y="s3://bucket/b")


def test_a_digest_is_verified(store: Store, tmp_path: Path) -> None:
    store.bucket.put("k", b"content")
    right = hashlib.sha256(b"content").hexdigest()
    store.fetch(x=f"s3://bucket/k#sha256={right.upper()}")
    assert path_of("x", f"s3://bucket/k#sha256={right}", store.into).read_bytes() == b"content"
    with pytest.raises(CannotFetch, match=f"has sha256 {right}; it is another file"):
        store.fetch(x=f"s3://bucket/k#sha256={'0' * 64}")
    (tmp_path / "local").write_bytes(b"content")
    with pytest.raises(CannotFetch, match=f"has sha256 {right}; it is another file"):
        store.fetch(x=f"file://{tmp_path}/local#sha256={'0' * 64}")


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://bucket/none", "there is no such object; correct the key, or end it with /"),
        ("s3://bucket/none/", "there is no object below it"),
        ("s3://bucket", "expected s3://bucket/key"),
        ("s3://bucket/", "expected s3://bucket/key"),
        ("https://host/file", "nodes reach nothing but the object store; copy it there"),
        ("gs://bucket/key", "expected s3://bucket/key"),
        ("clicks.tsv", "expected s3://bucket/key"),
        ("file:///no/such/file", "there is no such file or folder on this machine"),
        ("file://host/path", "expected s3://bucket/key"),
        ("s3://bucket/key#sha256=12", "after # expected sha256= and 64 hexadecimal digits"),
        ("s3://bucket/key#v2", "after # expected sha256="),
        (f"s3://bucket/folder/#sha256={'0' * 64}", "a folder has no digest"),
    ],
)
def test_a_wrong_uri_is_named_with_its_field(store: Store, uri: str, why: str) -> None:
    with pytest.raises(CannotFetch, match=r"^data\.clicks: ") as told:
        store.fetch(clicks=uri)
    assert uri in str(told.value)
    assert why in str(told.value)
    assert told.value.reason is Reason.BAD_REQUEST


def test_an_empty_folder_of_this_machine_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CannotFetch, match="the folder is empty"):
        store.fetch(x=f"file://{tmp_path}/empty")


def test_files_and_folders_of_this_machine_are_linked_and_left_alone(store: Store, tmp_path: Path) -> None:
    (tmp_path / "my set").mkdir()
    (tmp_path / "my set" / "a.csv").write_text("1")
    folder, file = f"file://{tmp_path}/my%20set", f"file://{tmp_path}/my%20set/a.csv"
    for _ in range(2):
        store.fetch(folder=folder, file=file)
        assert (path_of("folder", folder, store.into) / "a.csv").read_text() == "1"
        assert path_of("file", file, store.into).read_text() == "1"
        assert path_of("file", file, store.into).name == "a.csv"
    store.bucket.put("k/b.csv", b"2")
    store.fetch(folder="s3://bucket/k/", file="s3://bucket/k/b.csv")
    assert [path.name for path in path_of("folder", "s3://bucket/k/", store.into).iterdir()] == ["b.csv"]
    assert [path.name for path in (tmp_path / "my set").iterdir()] == ["a.csv"], "the source is never written to"


def test_requests_are_bounded_and_the_first_error_stops_the_rest() -> None:
    lock, running, most, started = threading.Lock(), 0, 0, 0
    together = threading.Barrier(PARALLEL, timeout=10)

    def work(number: int) -> None:
        nonlocal running, most, started
        with lock:
            running, started = running + 1, started + 1
            most = max(most, running)
        if number < PARALLEL:
            together.wait()
        with lock:
            running -= 1
        if number == 20:
            raise ValueError("the twentieth")

    with pytest.raises(ValueError, match="the twentieth"):
        in_parallel(work, range(10_000))
    assert most == PARALLEL
    assert started < 1000


def _spec(**fields: Any) -> JobSpec:
    return JobSpec(
        job_id=JobId(dag_id="d", run_id="r", task_id="t"), name="n", code_digest="c", program="train.py", **fields
    )


def test_arguments_and_variables_name_the_files(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    data = {"clicks": "s3://b/day1.tsv", "images-2": "s3://b/images/"}
    spec = _spec(data=data, arguments=("--train", "{data.clicks}", "--images={data.images-2}/x", "{data}", "{}"))
    assert arguments(spec, workdir) == [
        "--train",
        f"{tmp_path}/data/clicks/day1.tsv",
        f"--images={tmp_path}/data/images-2/x",
        "{data}",
        "{}",
    ]
    assert variables(spec, workdir) == {
        "GPUCOST_DATA_CLICKS": f"{tmp_path}/data/clicks/day1.tsv",
        "GPUCOST_DATA_IMAGES_2": f"{tmp_path}/data/images-2",
    }


def test_an_argument_that_names_no_data_is_refused_with_the_known_names(tmp_path: Path) -> None:
    spec = _spec(data={"clicks": "s3://b/k", "ads": "s3://b/a"}, arguments=("{data.klicks}",))
    with pytest.raises(ValueError, match=r"arguments: \{data.klicks\} names no data of the job; known: clicks, ads"):
        arguments(spec, Workdir(tmp_path))
    assert unknown_data(spec.arguments, spec.data) == ["klicks"]


@pytest.mark.parametrize(
    ("data", "arguments", "why"),
    [
        ({"clicks": "s3://b/k"}, ("{data.klicks}",), "'klicks' is no name in data; known: clicks"),
        ({}, ("{data.clicks}",), "'clicks' is no name in data; known: none"),
        ({"../up": "s3://b/k"}, (), "got the name '../up', expected letters"),
        ({"a-b": "s3://b/k", "A_B": "s3://b/k"}, (), "'a-b' and 'A_B' are one name as an environment variable"),
    ],
)
def test_a_job_whose_data_have_wrong_names_is_refused(
    data: dict[str, str], arguments: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainingJob.model_validate(
            {
                "name": "n",
                "code": "c",
                "work_hours": 1,
                "deadline": "2026-12-01T00:00:00Z",
                "data": data,
                "arguments": arguments,
            }
        )


def _wheel(folder: Path, name: str, tag: str = "py3-none-any") -> Path:
    wheel = folder / f"{name}-1.0-{tag}.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", f"word = '{name}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_wheels_are_installed_and_replace_what_was_there(store: Store, tmp_path: Path) -> None:
    site = tmp_path / "site"
    one, two = _wheel(tmp_path, "first_tiny"), _wheel(tmp_path, "second_tiny")
    store.bucket.put(f"wheels/{one.name}", one.read_bytes())
    install_wheels([f"s3://bucket/wheels/{one.name}"], site, os.environ, store.said.append, fetcher=store.fetcher())
    assert (site / "first_tiny.py").read_text() == "word = 'first_tiny'\n"
    install_wheels([two.as_uri()], site, os.environ, store.said.append, fetcher=store.fetcher())
    assert (site / "second_tiny.py").exists()
    assert not (site / "first_tiny.py").exists()
    assert store.said[-1] == f"environment.wheels: installed {two.name}"


def test_a_wheel_for_another_platform_is_refused_in_pips_words(store: Store, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "strange_tiny", "cp27-cp27m-win32")
    with pytest.raises(CannotFetch, match="is not a supported wheel on this platform") as told:
        install_wheels([wheel.as_uri()], tmp_path / "site", os.environ, store.said.append, fetcher=store.fetcher())
    assert told.value.reason is Reason.BAD_REQUEST
    assert "give wheels for this machine's python" in str(told.value)
    assert not (tmp_path / "site").exists()


def test_a_python_without_pip_is_told(store: Store, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    wheel = _wheel(tmp_path, "first_tiny")
    with pytest.raises(CannotFetch, match=r"pip could not install them \(exit code 1\).*\nNo module named pip"):
        install_wheels([wheel.as_uri()], tmp_path / "site", {}, store.said.append, python=str(python))


def test_what_is_no_wheel_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CannotFetch, match=r"environment.wheels.0: s3://b/x.tar.gz: expected a file .* ends with .whl"):
        install_wheels(["s3://b/x.tar.gz"], tmp_path / "site", {}, store.said.append)
