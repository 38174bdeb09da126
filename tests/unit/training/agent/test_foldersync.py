"""A program's folder is kept as pictures of one moment, and the newest whole one comes back on another node."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpucost.clock import ManualClock
from gpucost.jobstore import FencedOut, JobStore, Manifest, Part
from gpucost.objects import Objects, StoreError
from gpucost.training.agent.download import CannotFetch
from gpucost.training.agent.foldersync import FolderSync
from gpucost.training.agent.picture import Entry, Index, check_paths, is_appended, look_at, open_for_writing
from gpucost.training.checkpoints import manifests
from gpucost.training.checkpoints.agreement import TornCheckpoint

NOW = datetime(2026, 11, 30, tzinfo=UTC)
PART = 1000


Usage = namedtuple("Usage", "total used free")


class Watched(Objects):
    """A store in memory that counts what is uploaded, and does what the test wants before each upload."""

    def __init__(self) -> None:
        super().__init__(Objects.in_memory()._store)
        self.uploaded = 0
        self.puts: list[str] = []
        self.before_put: Callable[[str], None] = lambda _: None
        self._one_at_a_time = threading.Lock()  # Parts are uploaded by several threads.

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        with self._one_at_a_time:
            self.before_put(key)
        super().put(key, data)
        if key.endswith(".part"):
            self.uploaded += len(data)
            self.puts.append(key)


class Node:
    """A program's folder on one of several nodes of a job."""

    def __init__(self, tmp_path: Path, objects: Objects, attempt: int) -> None:
        self.store = JobStore(objects, "job")
        self.store.claim(attempt)
        self.folder = tmp_path / f"node-{attempt}" / "saves"
        self.warned: list[str] = []
        self.sync = FolderSync(
            self.store,
            attempt,
            ManualClock(NOW),
            self.folder,
            warn=self.warned.append,
            part_bytes=PART,
            patience=0.0,
            proc=tmp_path / "proc",
        )

    def write(self, path: str, content: bytes) -> None:
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(".tmpwriting")
        temporary.write_bytes(content)
        temporary.replace(place)

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }


@pytest.fixture
def objects() -> Watched:
    return Watched()


@pytest.fixture
def node(tmp_path: Path, objects: Watched) -> Callable[[int], Node]:
    return lambda attempt: Node(tmp_path, objects, attempt)


Make = Callable[[int], Node]


def test_a_folder_comes_back_as_it_was(node: Make) -> None:
    first = node(1)
    assert first.sync.restore() is False
    first.write("model.pt", os.urandom(2 * PART + 17))
    first.write("deep/er/größe 1.bin", os.urandom(PART))
    first.write("empty", b"")
    (first.folder / "no files").mkdir()
    (first.folder / "latest").symlink_to("deep/er")
    (first.folder / "deep" / "up").symlink_to(first.folder.absolute() / "model.pt")
    os.utime(first.folder / "model.pt", ns=(10**18 + 123, 10**18 + 123))
    (first.folder / "model.pt").chmod(0o750)
    assert first.sync.save()

    second = node(2)
    assert second.sync.restore() is True
    assert second.files() == first.files()
    assert (second.folder / "no files").is_dir()
    assert (second.folder / "latest").readlink() == Path("deep/er")
    assert (second.folder / "deep" / "up").resolve() == (second.folder / "model.pt").resolve()
    status = (second.folder / "model.pt").stat()
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (10**18 + 123, 0o750)
    assert second.warned == first.warned == []


def test_what_the_node_had_before_is_replaced(node: Make) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    first.sync.save()
    second = node(2)
    second.write("of/the/code.txt", b"2")
    second.sync.restore()
    assert second.files() == {"model.pt": b"1"}
    assert [path.name for path in second.folder.parent.iterdir()] == ["saves"]


def test_nothing_is_saved_when_nothing_changed(node: Make, objects: Watched) -> None:
    first = node(1)
    assert first.sync.save() is False
    assert first.sync.save(final=True) is False
    first.write("model.pt", b"1")
    assert first.sync.save() is True
    assert first.sync.save() is False
    second = node(2)
    second.sync.restore()
    before = len(objects.puts)
    assert second.sync.save() is False
    assert second.sync.save(final=True) is False
    assert len(objects.puts) == before


def test_files_that_stay_are_not_uploaded_again(node: Make, objects: Watched) -> None:
    first = node(1)
    first.write("big", os.urandom(50 * PART))
    first.write("step", b"1")
    first.sync.save()
    objects.uploaded = 0
    for step in range(2, 6):
        first.write("step", b"%d" % step)
        assert first.sync.save()
    second = node(2)
    second.sync.restore()
    second.write("step", b"6")
    assert second.sync.save()
    assert objects.uploaded < 5 * PART
    third = node(3)
    third.sync.restore()
    assert third.files() == {**first.files(), "step": b"6"}


def test_the_same_content_written_again_is_not_uploaded_again(node: Make, objects: Watched) -> None:
    first = node(1)
    content = os.urandom(5 * PART)
    first.write("model.pt", content)
    first.sync.save()
    objects.uploaded = 0
    first.write("model.pt", content)
    first.write("copy.pt", content)
    assert first.sync.save()
    assert objects.uploaded < PART
    second = node(2)
    second.sync.restore()
    assert second.files() == {"model.pt": content, "copy.pt": content}


def test_two_are_kept_and_steps_grow_over_attempts(node: Make) -> None:
    for attempt in (1, 2, 3):
        one = node(attempt)
        one.sync.restore()
        for number in range(2):
            one.write("step", b"%d.%d" % (attempt, number))
            assert one.sync.save()
        assert one.sync.saved_step == 2 * attempt
    keys = one.store.head().checkpoints
    assert [one.store.manifest(key).step for key in keys] == [6, 5]
    left = {stat.key.rsplit("/", 1)[0] for stat in one.store.objects.scan("jobs/job/checkpoints")}
    assert left == {key.rsplit("/", 1)[0] for key in keys}


def test_deleted_files_do_not_come_back_but_an_emptied_folder_is_not_believed(node: Make) -> None:
    first = node(1)
    first.write("old", b"1")
    first.write("new", b"2")
    first.sync.save()
    (first.folder / "old").unlink()
    assert first.sync.save()
    shutil.rmtree(first.folder)
    assert first.sync.save() is False
    assert first.sync.save(final=True) is False
    first.folder.mkdir()
    assert first.sync.save() is False
    assert first.warned == ["folder saves: no file is left; the last checkpoint is kept"]
    second = node(2)
    second.sync.restore()
    assert second.files() == {"new": b"2"}


@pytest.mark.parametrize(
    "name", ["model.pt.tmp", "model.pt.tmp.1234", ".tmpAb12Cd", "tmp0a1b2c3_", "tmp-checkpoint-5/a", "x.incomplete"]
)
def test_a_name_that_says_half_written_puts_the_save_off_and_is_never_kept(node: Make, name: str) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    first.sync.save()
    first.write("model.pt", b"2")
    place = first.folder / name
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"half")
    assert first.sync.save() is False
    place.write_bytes(b"half and more")
    assert first.sync.save() is False
    assert first.sync.save() is True, "it lies still, so nobody is writing it any more"
    assert first.sync.save(final=True) is False
    assert any(f"{name} is left out" in line for line in first.warned)
    second = node(2)
    second.sync.restore()
    assert second.files() == {"model.pt": b"2"}


def test_a_program_that_is_always_writing_is_saved_all_the_same(node: Make) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    saved = []
    for number in range(7):
        (first.folder / "next.tmp").write_bytes(b"x" * number)
        saved.append(first.sync.save())
    assert saved == [False, False, False, False, False, True, False]
    assert "not saved 3 times in a row, because files are being written: next.tmp" in first.warned[0]


@pytest.mark.parametrize("name", [".metadata", "checkpoint.part1", "attempt", "tmpfs-notes", "model.template"])
def test_other_names_are_kept(node: Make, name: str) -> None:
    first = node(1)
    first.write(name, b"1")
    assert first.sync.save()
    second = node(2)
    second.sync.restore()
    assert second.files() == {name: b"1"}


def test_a_file_that_changes_while_it_is_uploaded_is_taken_anew(node: Make, objects: Watched) -> None:
    first = node(1)
    first.write("a", b"a" * 5 * PART)
    first.write("b", b"b")
    once = iter([True])

    def change(_: str) -> None:
        if next(once, False):
            first.write("a", b"A" * 5 * PART)

    objects.before_put = change
    assert first.sync.save()
    second = node(2)
    second.sync.restore()
    assert second.files() == {"a": b"A" * 5 * PART, "b": b"b"}


def test_a_file_that_never_rests_waits_and_is_said_once_and_taken_at_the_end(node: Make, objects: Watched) -> None:
    first = node(1)
    numbers = iter(range(1, 10_000))
    first.write("a", b"0")
    objects.before_put = lambda _: first.write("a", b"busy %d" % next(numbers))
    for _ in range(5):
        assert first.sync.save() is False
    assert first.store.head().checkpoints == ()
    assert len(first.warned) == 1
    assert "not saved 3 times in a row, because files are being written: a;" in first.warned[0]
    assert first.sync.save(final=True)
    assert len(first.store.head().checkpoints) == 1


def test_a_file_that_never_rests_does_not_keep_the_others_from_being_saved(node: Make, objects: Watched) -> None:
    first = node(1)
    numbers = iter(range(1, 10_000))
    first.write("busy/a", b"0")
    first.write("model.pt", b"1")
    first.sync.save()
    objects.before_put = lambda _: first.write("busy/a", b"busy %d" % next(numbers))
    first.write("busy/new", b"n")
    first.write("model.pt", b"2")
    assert [first.sync.save() for _ in range(6)] == [False] * 5 + [True]
    second = node(2)
    second.sync.restore()
    assert second.files() == {"busy/a": b"0", "busy/new": b"n", "model.pt": b"2"}


def test_a_file_that_is_always_open_does_not_keep_the_others_from_being_saved(node: Make, tmp_path: Path) -> None:
    first = node(1)
    first.write("train.out", b"line")
    first.write("model.pt", b"1")
    process = tmp_path / "proc" / "17"
    (process / "fd").mkdir(parents=True)
    (process / "fdinfo").mkdir()
    (process / "fd" / "3").symlink_to((first.folder / "train.out").resolve())
    (process / "fdinfo" / "3").write_text("flags:\t0100001\n")
    assert [first.sync.save() for _ in range(7)] == [False] * 5 + [True, False]
    first.write("model.pt", b"2")
    assert first.sync.save() is True, "at once, as it is known by now"
    second = node(2)
    second.sync.restore()
    assert second.files() == {"model.pt": b"2"}


def test_a_log_that_is_appended_to_is_taken_at_the_length_it_had(node: Make, objects: Watched) -> None:
    first = node(1)
    first.write("train.log", b"one\n")

    def grow(_: str) -> None:
        with (first.folder / "train.log").open("ab") as log:
            log.write(b"more\n")

    objects.before_put = grow
    assert first.sync.save()
    second = node(2)
    second.sync.restore()
    assert second.files()["train.log"].startswith(b"one\n")


def test_a_file_that_vanishes_while_it_is_read_is_not_in_the_picture(node: Make, objects: Watched) -> None:
    first = node(1)
    for name in "abcdefghijkl":
        first.write(name, name.encode() * 3 * PART)

    def vanish(_: str) -> None:
        for name in "ghijkl":
            (first.folder / name).unlink(missing_ok=True)

    objects.before_put = vanish
    assert first.sync.save()
    second = node(2)
    second.sync.restore()
    assert sorted(second.files()) == list("abcdef")


def test_an_open_file_is_waited_for(node: Make, tmp_path: Path) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    process = tmp_path / "proc" / "17"
    (process / "fd").mkdir(parents=True)
    (process / "fdinfo").mkdir()
    (process / "fd" / "3").symlink_to((first.folder / "model.pt").resolve())
    (process / "fdinfo" / "3").write_text("pos:\t0\nflags:\t0100001\nmnt_id:\t1\n")
    assert first.sync.save() is False
    (process / "fdinfo" / "3").write_text("pos:\t0\nflags:\t0100000\nmnt_id:\t1\n")
    assert first.sync.save() is True, "read only"
    first.write("model.pt", b"2")
    (process / "fdinfo" / "3").write_text("pos:\t0\nflags:\t0100002\nmnt_id:\t1\n")
    assert first.sync.save() is False
    assert first.sync.save(final=True) is True


def test_the_kernel_tells_what_this_process_has_open(tmp_path: Path) -> None:
    for name in ("written", "read", "lines.log"):
        (tmp_path / name).write_text("x")
    with (tmp_path / "written").open("r+"), (tmp_path / "read").open(), (tmp_path / "lines.log").open("a"):
        assert open_for_writing(tmp_path, ["written", "read", "lines.log", "other"]) == ["written"]
    assert open_for_writing(tmp_path, ["written"]) == []


def test_a_torn_newest_is_skipped_and_does_not_count_as_kept(node: Make, objects: Watched) -> None:
    first = node(1)
    for number in (1, 2):
        first.write("model.pt", b"%d" % number * 3 * PART)
        first.sync.save()
    newest = first.store.manifest(first.store.head().checkpoints[0])
    flipped = bytearray(objects.get(newest.parts[-1].key))
    flipped[7] ^= 1
    objects.put(newest.parts[-1].key, bytes(flipped))

    second = node(2)
    assert second.sync.restore()
    assert second.files() == {"model.pt": b"1" * 3 * PART}
    assert len(second.warned) == 1
    assert "is torn and was skipped" in second.warned[0]
    second.write("model.pt", b"3")
    second.sync.save()
    third = node(3)
    assert third.sync.restore()
    assert third.files() == {"model.pt": b"3"}
    steps = [third.store.manifest(key).step for key in third.store.head().checkpoints]
    assert steps == [3, 2, 1], "two whole ones, besides the torn one"


def test_when_all_are_torn_it_is_an_error_and_the_folder_stays(node: Make, objects: Watched) -> None:
    first = node(1)
    first.write("model.pt", b"1" * 3 * PART)
    first.sync.save()
    manifest = first.store.manifest(first.store.head().checkpoints[0])
    objects.delete([manifest.parts[-1].key])
    second = node(2)
    second.write("here", b"before")
    with pytest.raises(TornCheckpoint, match=r"none of the folder's 1 checkpoints is whole: .* is missing"):
        second.sync.restore()
    assert second.files() == {"here": b"before"}


def test_a_newer_attempt_ends_the_older_ones_saves(node: Make) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    first.sync.save()
    node(2)
    first.write("model.pt", b"2")
    with pytest.raises(FencedOut):
        first.sync.save()
    with pytest.raises(FencedOut):
        first.sync.save(final=True)
    third = node(3)
    third.sync.restore()
    assert third.files() == {"model.pt": b"1"}


def test_a_save_that_the_store_cut_off_goes_on_where_it_was(node: Make, objects: Watched) -> None:
    first = node(1)
    first.write("model.pt", os.urandom(20 * PART))

    def away(_: str) -> None:
        if len(objects.puts) >= 12:
            raise StoreError("connection refused")

    objects.before_put = away
    with pytest.raises(StoreError, match="connection refused"):
        first.sync.save()
    assert first.store.head().checkpoints == ()
    objects.before_put = lambda _: None
    assert first.sync.save()
    assert len(objects.puts) == len(set(objects.puts)) == 21
    second = node(2)
    second.sync.restore()
    assert second.files() == first.files()


def test_a_commit_whose_answer_was_lost_counts(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    commit = JobStore.commit

    def lost(self: JobStore, manifest: Manifest, keep: int = 2) -> str:
        commit(self, manifest, keep)
        raise StoreError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(JobStore, "commit", lost)
        assert first.sync.save() is True
    first.write("model.pt", b"2")
    assert first.sync.save() is True
    assert [first.store.manifest(key).step for key in first.store.head().checkpoints] == [2, 1]


def test_what_killed_attempts_left_is_swept(node: Make, objects: Watched) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    first.sync.save()
    objects.put("jobs/job/checkpoints/000000000002-0001/aa.part", b"half a save")
    second = node(2)
    second.sync.restore()
    keys = {stat.key for stat in objects.scan("jobs/job/checkpoints")}
    assert {key for key in keys if "000000000002-0001" in key} == set()
    assert keys


def test_a_disk_that_is_too_small_is_told(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = node(1)
    first.write("model.pt", b"1" * 5 * PART)
    first.sync.save()
    second = node(2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(17, 0, 17))
    with pytest.raises(CannotFetch, match="folder saves: 5000 bytes are needed and 17 bytes are free"):
        second.sync.restore()
    assert not second.folder.exists()


def test_links_out_of_the_folder_and_strange_things_are_left_out_and_said(node: Make, tmp_path: Path) -> None:
    first = node(1)
    first.write("model.pt", b"1")
    (first.folder / "data").symlink_to(tmp_path)
    (first.folder / "up").symlink_to("../../secret")
    os.mkfifo(first.folder / "pipe")
    (first.folder / os.fsdecode(b"\xff\xfe")).mkdir()
    assert first.sync.save()
    second = node(2)
    second.sync.restore()
    assert [path.name for path in second.folder.iterdir()] == ["model.pt"]
    assert len(first.warned) == 4
    assert any("up is left out: it is a link out of the folder, to ../../secret" in line for line in first.warned)


@pytest.mark.parametrize(
    "entries",
    [
        [Entry(path="../out")],
        [Entry(path="/etc/passwd")],
        [Entry(path="a/../../out")],
        [Entry(path="")],
        [Entry(path="nobody/made/this")],
        [Entry(path="a"), Entry(path="a", size=1)],
        [Entry(path="a"), Entry(path="a/b")],
        [Entry(path="etc", kind="link", target="/etc")],
        [Entry(path="d", kind="folder"), Entry(path="d/l", kind="link", target="../..")],
        [Entry(path="l", kind="link", target="."), Entry(path="l/x")],
    ],
    ids=lambda entries: " ".join(entry.path for entry in entries),
)
def test_an_index_that_leads_out_of_the_folder_is_refused(node: Make, entries: list[Entry], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        check_paths(entries)
    first = node(1)
    text = Index(entries=tuple(entries)).model_dump_json().encode()
    root = first.store.checkpoint_root(1, 1)
    parts = [_part(first.store.objects, f"{root}/i.part", text, None)]
    parts += [_part(first.store.objects, f"{root}/{n}.part", b"", one.path) for n, one in enumerate(entries)]
    manifest = Manifest(job="job", attempt=1, step=1, created_at=NOW, parts=tuple(parts))
    first.store.commit(manifests.sealed(manifest))
    with pytest.raises(TornCheckpoint, match="it is no checkpoint of a folder"):
        node(2).sync.restore()
    assert not (tmp_path / "node-2" / "saves").exists()


def _part(objects: Objects, key: str, data: bytes, path: str | None) -> Part:
    objects.put(key, data)
    return Part(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest(), path=path)


def test_links_that_stay_inside_are_allowed() -> None:
    check_paths(
        [
            Entry(path="a", kind="folder"),
            Entry(path="a/b", kind="folder"),
            Entry(path="a/b/up", kind="link", target="../../x"),
        ]
    )


def test_names_of_files_that_are_right_at_any_length() -> None:
    assert is_appended("runs/events.out.tfevents.1700.host.1.0")
    assert is_appended("metrics.jsonl")
    assert not is_appended("log/model.pt")


def test_saves_of_two_threads_do_not_meet(node: Make) -> None:
    first = node(1)
    first.write("model.pt", os.urandom(30 * PART))
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(first.sync.save(final=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, False, True]


def test_random_histories_end_with_the_same_folder(tmp_path: Path) -> None:
    """Over many saves, restores and nodes that die, the folder is always one that the program has had."""
    chance = random.Random(20261130)
    objects = Watched()
    had: list[dict[str, bytes]] = [{}]
    for attempt in range(1, 9):
        one = Node(tmp_path, objects, attempt)
        one.sync.restore()
        assert one.files() == had[-1] if one.folder.exists() else had[-1] == {}
        for _ in range(chance.randint(0, 6)):
            for _ in range(chance.randint(1, 4)):
                name = chance.choice(["a", "b/c", "b/d", "e é", "f/g/h"])
                if chance.random() < 0.25 and (one.folder / name).exists() and len(one.files()) > 1:
                    (one.folder / name).unlink()
                else:
                    one.write(name, chance.randbytes(chance.choice([0, 1, PART, 3 * PART + 5])))
            if one.sync.save(final=chance.random() < 0.5):
                had.append(one.files())
    assert len(had) > 10
    assert look_at(one.folder).temporary == {}
