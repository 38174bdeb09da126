"""Where both sides meet: a zombie changes nothing, a torn checkpoint does not exist, the first word stands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.jobstore import (
    AttemptRecord,
    Command,
    Control,
    ExitRecord,
    FencedOut,
    Head,
    Heartbeat,
    JobSpec,
    JobStore,
    Live,
    Manifest,
    Member,
    MetricPoint,
    Part,
    Phase,
)
from gpucost.objects import Conflict, ObjectMissing, Objects
from gpucost.reasons import Reason
from gpucost.recipe import Recipe
from tests.fakes.rooms import START, TASK


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> JobStore:
    return JobStore(Objects.in_memory() if request.param == "memory" else Objects.open(f"file://{tmp_path}"), "job")


def checkpoint(store: JobStore, step: int, attempt: int) -> Manifest:
    """Its part is in the store; its manifest is not."""
    key = f"{store.checkpoint_root(step, attempt)}/part-0"
    store.objects.put(key, b"weights")
    part = Part(key=key, size=7, sha256="0" * 64)
    return Manifest(job=store.key, attempt=attempt, step=step, created_at=START, parts=(part,))


def test_documents_come_back_as_they_were(store: JobStore) -> None:
    spec = JobSpec(
        job_id=TASK, name="digits", code_digest="d", program="train.py", recipe=Recipe(precision="bf16", clip_norm=0.1)
    )
    attempt = AttemptRecord(
        number=3, members=(Member(lease_id="l"),), created_at=START, expires_at=START + timedelta(hours=1)
    )
    store.write_spec(spec)
    store.write_code("d", b"zip")
    store.write_attempt(attempt)
    assert (store.spec(), store.code("d"), store.attempt(3)) == (spec, b"zip", attempt)


def test_nothing_asked_is_go_on(store: JobStore) -> None:
    assert store.control(1) == Control()
    asked = Control(sequence=1, command=Command.SAVE_AND_STOP, why="dearer now", expires_at=START)
    store.ask(1, asked)
    assert store.control(1) == asked
    assert store.control(2).command is Command.RUN


# Who may write.


def test_a_newer_attempt_fences_the_older_one_out(store: JobStore) -> None:
    store.claim(1)
    store.commit(checkpoint(store, 10, attempt=1))
    store.claim(2)
    zombie = checkpoint(store, 20, attempt=1)
    for write in (lambda: store.commit(zombie), lambda: store.claim(1), lambda: store.check_fence(1)):
        with pytest.raises(FencedOut, match="attempt 1 of job: attempt 2 owns the job now"):
            write()
    assert [store.manifest(key).step for key in store.head().checkpoints] == [10]


def test_claiming_again_is_allowed(store: JobStore) -> None:
    store.claim(2)
    assert store.claim(2).fence == 2


class Interleaved:
    """Objects that let others act just before each write and delete."""

    def __init__(self, objects: Objects, others: Iterator[object]) -> None:
        self._objects = objects
        self._others = others

    def __getattr__(self, name: str) -> object:
        if name in ("put", "put_new", "put_if_match", "delete"):
            next(self._others, None)
        return getattr(self._objects, name)


@given(st.integers(min_value=0, max_value=6), st.booleans())
def test_whenever_the_next_attempt_claims_the_old_one_s_checkpoint_counts_whole_or_not_at_all(
    turn: int, saves: bool
) -> None:
    objects = Objects.in_memory()
    newer = JobStore(objects, "job")
    newer.claim(1)
    newer.commit(checkpoint(newer, 10, attempt=1))

    def others() -> Iterator[None]:
        for _ in range(turn):
            yield
        newer.claim(2)
        if saves:
            newer.commit(checkpoint(newer, 11, attempt=2))
        yield

    acting = others()
    older = JobStore(Interleaved(objects, acting), "job")  # type: ignore[arg-type]
    manifest = checkpoint(newer, 20, attempt=1)
    try:
        older.commit(manifest)
        committed = True
    except FencedOut:
        committed = False
    for _ in acting:  # if it was not its turn yet, it claims now
        pass
    head = newer.head()
    assert head.fence == 2
    steps = [newer.manifest(key).step for key in head.checkpoints]
    assert (20 in steps) is committed, "what was refused must not be resumed from, what was accepted must"
    assert (11 in steps) is saves
    for key in head.checkpoints:
        for part in newer.manifest(key).parts:
            assert objects.get(part.key) == b"weights"


def test_too_many_writers_are_reported_not_waited_for(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.claim(1)

    def never(*_: object) -> None:
        raise Conflict("somebody was faster")

    monkeypatch.setattr(store.objects, "put_if_match", never)
    with pytest.raises(Conflict, match="changed under 50 tries"):
        store.claim(2)


# Which checkpoints are whole.


def test_the_newest_checkpoints_are_kept_and_the_others_leave_nothing(store: JobStore) -> None:
    store.claim(1)
    for step in (10, 20, 30):
        store.commit(checkpoint(store, step, attempt=1), keep=2)
    assert [store.manifest(key).step for key in store.head().checkpoints] == [30, 20]
    folders = {stat.key.split("/")[3] for stat in store.objects.scan(f"{store.root}/checkpoints")}
    assert folders == {"000000000030-0001", "000000000020-0001"}


def test_committing_again_changes_nothing(store: JobStore) -> None:
    store.claim(1)
    manifest = checkpoint(store, 10, attempt=1)
    assert store.commit(manifest) == store.commit(manifest)
    assert len(store.head().checkpoints) == 1


def test_the_head_names_a_checkpoint_only_after_its_manifest_and_forgets_it_before(store: JobStore) -> None:
    written: list[str] = []
    objects = store.objects

    class Noting:
        def __getattr__(self, name: str) -> object:
            method = getattr(objects, name)
            if name not in ("put", "put_new", "put_if_match", "delete"):
                return method

            def noted(target: str | list[str], *rest: object) -> object:
                written.extend(
                    f"{name} {key.rsplit('/', 1)[1]}" for key in ([target] if isinstance(target, str) else target)
                )
                return method(target, *rest)

            return noted

    store.claim(1)
    store.commit(checkpoint(store, 10, attempt=1), keep=2)
    store.commit(checkpoint(store, 20, attempt=1), keep=2)
    manifest = checkpoint(store, 30, attempt=1)
    JobStore(Noting(), "job").commit(manifest, keep=2)  # type: ignore[arg-type]
    assert written == ["put manifest.json", "put_if_match head.json", "delete manifest.json", "delete part-0"]


def test_a_checkpoint_without_a_manifest_does_not_exist(store: JobStore) -> None:
    store.claim(1)
    checkpoint(store, 10, attempt=1)
    assert store.head().checkpoints == ()


def test_a_torn_manifest_is_an_error_and_not_an_empty_checkpoint(store: JobStore) -> None:
    store.claim(1)
    key = store.commit(checkpoint(store, 10, attempt=1))
    store.objects.put(key, store.objects.get(key)[:20])
    with pytest.raises(ValueError, match="Manifest"):
        store.manifest(key)


def test_before_the_first_attempt_the_head_is_empty(store: JobStore) -> None:
    assert store.head() == Head(fence=0, checkpoints=())


# What came of it.


def test_the_first_word_on_why_it_ended_stands(store: JobStore) -> None:
    assert store.exit_record(1) is None
    first = ExitRecord(attempt=1, reason=Reason.COMPLETED, at=START, step=100, results={"accuracy": 0.97})
    store.write_exit(first)
    store.write_exit(first.model_copy(update={"reason": Reason.INTERRUPTED}))
    assert store.exit_record(1) == first
    assert store.exit_record(2) is None


def test_chunks_come_in_order_whatever_order_they_were_written_in(store: JobStore) -> None:
    for index in (10, 2, 1, 0):
        store.write_metrics(1, index, [MetricPoint(step=index, at=START, values={"loss": 1.0})])
        store.write_log(1, index, f"line {index}\n")
    assert [index for index, _ in store.metrics(1)] == [0, 1, 2, 10]
    assert [points[0].step for _, points in store.metrics(1, after=1)] == [2, 10]
    assert [index for index, _ in store.metrics(1, after=0, most=2)] == [1, 2]
    assert "".join(text for _, text in store.log(1)) == "line 0\nline 1\nline 2\nline 10\n"
    assert store.log(1, after=10) == store.metrics(2) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_diverged_survives(store: JobStore, loss: float) -> None:
    def same(found: float | None) -> bool:
        return found is not None and (found == loss or (math.isnan(found) and math.isnan(loss)))

    store.write_metrics(1, 0, [MetricPoint(step=0, at=START, values={"loss": loss})])
    assert same(store.metrics(1)[0][1][0].values["loss"])
    live = Live(store.objects)
    live.write(heartbeat("l", loss=loss))
    beat = live.read("l")
    assert beat is not None
    assert same(beat.loss)
    store.write_exit(ExitRecord(attempt=1, reason=Reason.COMPLETED, at=START, results={"loss": loss}))
    record = store.exit_record(1)
    assert record is not None
    assert same(record.results["loss"])


def test_a_document_of_a_newer_release_is_still_read(store: JobStore) -> None:
    store.objects.put(f"{store.attempt_root(1)}/control.json", b'{"sequence": 2, "command": "save", "colour": "red"}')
    assert store.control(1).command is Command.SAVE


def test_one_listing_shows_which_heartbeats_changed(store: JobStore) -> None:
    live = Live(store.objects)
    live.write(heartbeat("one"))
    live.write(heartbeat("two"))
    before = live.etags()
    live.write(heartbeat("two", sequence=1))
    after = live.etags()
    assert set(before) == {"one", "two"}
    assert (before["one"] == after["one"], before["two"] == after["two"]) == (True, False)
    live.forget("one")
    live.forget("one")
    assert live.read("one") is None
    assert set(live.etags()) == {"two"}


def test_what_was_never_written_is_missed_by_name(store: JobStore) -> None:
    with pytest.raises(ObjectMissing, match=r"spec\.json"):
        store.spec()


def heartbeat(lease: str, sequence: int = 0, loss: float | None = None) -> Heartbeat:
    return Heartbeat(
        lease_id=lease, job="job", attempt=1, sequence=sequence, at=START, phase=Phase.TRAINING, step=5, loss=loss
    )
