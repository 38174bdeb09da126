"""A checkpoint comes back as it was, or not at all."""

from __future__ import annotations

import itertools
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucost.clock import ManualClock
from gpucost.jobstore import FencedOut, JobStore, TornHead
from gpucost.objects import Objects, StoreError
from gpucost.training.checkpoints import loading
from gpucost.training.checkpoints.engine import Checkpoints, TornCheckpoint, weights_digest
from gpucost.training.checkpoints.manifests import sealed

NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.fixture
def store() -> JobStore:
    return JobStore(Objects.in_memory(), "job")


@pytest.fixture
def warnings() -> list[str]:
    return []


def checkpoints(store: JobStore, warnings: list[str], attempt: int = 1, keep: int = 2) -> Checkpoints:
    store.claim(attempt)
    return Checkpoints(store, attempt, ManualClock(NOW), keep=keep, part_bytes=1000, warn=warnings.append)


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.arange(500, dtype=torch.float32) + step, "names": ["a", "b"]}


def own(step: int) -> dict[str, Any]:
    return {"random": step * 7}


def test_what_was_saved_comes_back(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), own(10), step=10, epoch=2)
    found = engine.restore()
    assert found is not None
    manifest, loaded, its_own = found
    assert (manifest.step, manifest.epoch, manifest.attempt, manifest.created_at) == (10, 2, 1, NOW)
    assert len(manifest.parts) > 2
    assert loaded["step"] == 10
    assert torch.equal(loaded["weights"], state(10)["weights"])
    assert its_own == own(10)


def test_nothing_saved_is_nothing_restored(store: JobStore, warnings: list[str]) -> None:
    assert checkpoints(store, warnings).restore() is None
    assert warnings == []


def flip(store: JobStore, key: str, at: int = 500, bit: int = 4) -> None:
    data = bytearray(store.objects.get(key))
    data[at] ^= bit
    store.objects.put(key, bytes(data))


def truncate(store: JobStore, key: str) -> None:
    store.objects.put(key, store.objects.get(key)[:-1])


def swap(store: JobStore, one: str, other: str) -> None:
    first, second = store.objects.get(one), store.objects.get(other)
    store.objects.put(one, second)
    store.objects.put(other, first)


def forge(store: JobStore, key: str, **changes: Any) -> None:
    """Another manifest under `key`, whole in itself."""
    store.objects.put(key, sealed(store.manifest(key).model_copy(update=changes)).model_dump_json().encode())


def edit(store: JobStore, key: str, old: str, new: str) -> None:
    text = store.objects.get(key).decode()
    assert text.count(old) == 1
    store.objects.put(key, text.replace(old, new).encode())


DAMAGES: dict[str, tuple[Callable[[JobStore, str, list[str], str], object], str]] = {
    "a bit of a part": (lambda store, key, parts, older: flip(store, parts[1]), "has sha256"),
    "a part truncated": (lambda store, key, parts, older: truncate(store, parts[1]), "has 999 bytes, expected 1000"),
    "a part missing": (lambda store, key, parts, older: store.objects.delete([parts[1]]), "is missing"),
    "a part empty": (lambda store, key, parts, older: store.objects.put(parts[0], b""), "has 0 bytes"),
    "the last part missing": (lambda store, key, parts, older: store.objects.delete([parts[-1]]), "is missing"),
    "two parts swapped": (lambda store, key, parts, older: swap(store, parts[0], parts[1]), "has sha256"),
    "a part of the one before": (
        lambda store, key, parts, older: store.objects.put(
            parts[1], store.objects.get(store.manifest(older).parts[1].key)
        ),
        "has sha256",
    ),
    "manifest missing": (lambda store, key, parts, older: store.objects.delete([key]), "manifest is missing"),
    "manifest truncated": (lambda store, key, parts, older: truncate(store, key), "cannot be read"),
    "manifest empty": (lambda store, key, parts, older: store.objects.put(key, b""), "cannot be read"),
    "manifest says another epoch": (
        lambda store, key, parts, older: edit(store, key, '"epoch":3', '"epoch":2'),
        "its digest differs",
    ),
    "manifest says another world size": (
        lambda store, key, parts, older: edit(store, key, '"world_size":1', '"world_size":9'),
        "its digest differs",
    ),
    "manifest without its digest": (
        lambda store, key, parts, older: edit(store, key, '"digest"', '"digist"'),
        "its digest differs",
    ),
    "manifest of another job": (
        lambda store, key, parts, older: forge(store, key, job="other"),
        "is one of job other",
    ),
    "manifest of another step": (
        lambda store, key, parts, older: store.objects.put(key, store.objects.get(older)),
        "is one of step 10, attempt 1",
    ),
    "manifest of another attempt": (
        lambda store, key, parts, older: forge(store, key, attempt=7),
        "is one of step 20, attempt 7",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_newest_one_is_skipped_and_said(store: JobStore, warnings: list[str], damage: str) -> None:
    engine = checkpoints(store, warnings)
    older = engine.save(state(10), own(10), step=10, epoch=0)
    key = engine.save(state(20), own(20), step=20, epoch=3)
    harm, said = DAMAGES[damage]
    harm(store, key, [part.key for part in store.manifest(key).parts], older)
    found = engine.restore()
    assert found is not None
    assert (found[0].step, found[1]["step"], found[2]) == (10, 10, own(10))
    (warning,) = warnings
    assert key in warning
    assert said in warning


def test_if_none_is_whole_the_training_does_not_begin_anew(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    keys = [engine.save(state(step), own(step), step=step, epoch=0) for step in (10, 20)]
    for key in keys:
        flip(store, store.manifest(key).parts[0].key)
    before = {stat.key for stat in store.objects.scan("")}
    with pytest.raises(TornCheckpoint, match="none of this job's 2 checkpoints is whole") as torn:
        engine.restore()
    assert all(key in str(torn.value) for key in keys)
    assert "start a new job" in str(torn.value)
    assert {stat.key for stat in store.objects.scan("")} == before


def test_one_that_torch_refuses_though_it_is_whole_is_not_skipped(
    store: JobStore, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), own(10), step=10, epoch=0)
    monkeypatch.setattr(loading, "check_loadable", lambda state: None)
    engine.save({"path": Path("x")}, own(20), step=20, epoch=0)
    with pytest.raises(ValueError, match=r"whole checkpoint cannot be loaded by torch .* another version"):
        engine.restore()
    assert warnings == []


def test_one_of_another_world_size_is_refused_with_what_to_do(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    forge(store, engine.save(state(10), own(10), step=10, epoch=0), world_size=2)
    with pytest.raises(ValueError, match=r"saved by 2 processes, but 1 are training.* set world_size=2"):
        engine.restore()


def test_a_store_that_is_away_is_not_torn(
    store: JobStore, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), own(10), step=10, epoch=0)
    key = engine.save(state(20), own(20), step=20, epoch=0)
    get = store.objects.get_with_etag
    away = {key}

    def sometimes(wanted: str) -> tuple[bytes, str]:
        if wanted in away:
            raise StoreError("connection refused")
        return get(wanted)

    monkeypatch.setattr(store.objects, "get_with_etag", sometimes)
    for hidden in (key, store.root + "/head.json"):
        away = {hidden}
        with pytest.raises(StoreError):
            engine.restore()
    away = set()
    away = {store.manifest(key).parts[1].key}
    with pytest.raises(StoreError):
        engine.restore()
    away = set()
    found = engine.restore()
    assert found is not None
    assert found[0].step == 20
    assert warnings == []


def test_damage_on_the_way_is_read_again(store: JobStore, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), own(10), step=10, epoch=0)
    get = store.objects.get_with_etag
    seen: set[str] = set()

    def damaged_once(wanted: str) -> tuple[bytes, str]:
        data, etag = get(wanted)
        first = wanted not in seen
        seen.add(wanted)
        return (data[:-1], etag) if first else (data, etag)

    monkeypatch.setattr(store.objects, "get_with_etag", damaged_once)
    assert engine.restore() is not None
    assert warnings == []


@pytest.mark.parametrize("garbled", [b"", b"{", b"\x00" * 90, b"null", b'{"fence": -1}'])
def test_a_garbled_head_does_not_look_like_no_checkpoints(store: JobStore, warnings: list[str], garbled: bytes) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), own(10), step=10, epoch=0)
    store.objects.put(f"{store.root}/head.json", garbled)
    before = {stat.key: stat.etag for stat in store.objects.scan("")}
    for call in (engine.restore, engine.sweep, lambda: engine.save(state(20), own(20), step=20, epoch=0)):
        with pytest.raises(TornHead, match=r"head.json cannot be read: got .* Put back an older version"):
            call()
    assert {stat.key: stat.etag for stat in store.objects.scan("")} == before


DAMAGE = st.sampled_from(["flip", "cut", "delete", "swap", "garbage", "older content"])


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_to_the_newest_no_other_state_comes_back(data: st.DataObject) -> None:
    store, warnings = JobStore(Objects.in_memory(), "job"), list[str]()
    engine = checkpoints(store, warnings)
    older = engine.save(state(10), own(10), step=10, epoch=1)
    newest = engine.save(state(20), own(20), step=20, epoch=2)
    names = [part.key for part in store.manifest(newest).parts] + [newest]
    others = [part.key for part in store.manifest(older).parts] + [older]
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(names))
        content = store.objects.get(key) if key in {stat.key for stat in store.objects.scan("")} else b""
        kind = data.draw(DAMAGE)
        if kind == "flip" and content:
            flip(store, key, data.draw(st.integers(0, len(content) - 1)), 1 << data.draw(st.integers(0, 7)))
        elif kind == "cut":
            store.objects.put(key, content[: data.draw(st.integers(0, len(content)))])
        elif kind == "delete":
            store.objects.delete([key])
        elif kind == "swap" and content:
            other = data.draw(st.sampled_from(names))
            if other in {stat.key for stat in store.objects.scan("")}:
                swap(store, key, other)
        elif kind == "garbage":
            store.objects.put(key, data.draw(st.binary(max_size=1500)))
        else:
            store.objects.put(key, store.objects.get(data.draw(st.sampled_from(others))))
    found = engine.restore()
    assert found is not None
    manifest, shared, its_own = found
    step = manifest.step
    assert (step, manifest.epoch) in {(10, 1), (20, 2)}
    assert (shared["step"], shared["names"], its_own) == (step, ["a", "b"], own(step))
    assert torch.equal(shared["weights"], state(step)["weights"])
    assert (step == 10) == bool(warnings)


def test_a_torn_one_does_not_count_among_those_kept(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), own(10), step=10, epoch=0)
    torn = engine.save(state(20), own(20), step=20, epoch=0)
    store.objects.delete([store.manifest(torn).parts[0].key])
    again = checkpoints(store, warnings, attempt=2)
    again.restore()
    newest = again.save(state(30), own(30), step=30, epoch=0)
    store.objects.delete([store.manifest(newest).parts[0].key])
    found = again.restore()
    assert found is not None
    assert found[1]["step"] == 10


def test_a_newer_attempt_shuts_the_older_one_out(store: JobStore, warnings: list[str]) -> None:
    old = checkpoints(store, warnings, attempt=1)
    old.save(state(10), own(10), step=10, epoch=0)
    store.claim(2)
    with pytest.raises(FencedOut, match="attempt 2 owns the job"):
        old.save(state(20), own(20), step=20, epoch=0)
    assert len(store.head().checkpoints) == 1
    assert list(store.objects.scan(store.checkpoint_root(20, 1))) == []


def test_only_the_newest_are_kept(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings, keep=3)
    for step in range(10, 60, 10):
        engine.save(state(step), own(step), step=step, epoch=0)
    assert [store.manifest(key).step for key in store.head().checkpoints] == [50, 40, 30]
    folders = {stat.key.split("/")[3] for stat in store.objects.scan("jobs/job/checkpoints")}
    assert len(folders) == 3


def test_what_a_killed_attempt_left_is_swept_and_nothing_else(store: JobStore, warnings: list[str]) -> None:
    checkpoints(store, warnings, attempt=1).save(state(10), own(10), step=10, epoch=0)
    store.objects.put(f"{store.checkpoint_root(20, 1)}/00000-abc.part", b"half a save")
    engine = checkpoints(store, warnings, attempt=2)
    store.objects.put(f"{store.checkpoint_root(30, 2)}/00000-abc.part", b"being written")
    assert engine.sweep() == 1
    assert engine.restore() is not None
    assert [stat.key for stat in store.objects.scan(store.checkpoint_root(30, 2))] != []


def test_a_state_that_could_not_be_loaded_is_refused_when_saved(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    with pytest.raises(ValueError, match="keep to tensors, numbers"):
        engine.save({"numpy": np.random.get_state()}, {}, step=1, epoch=0)
    assert store.head().checkpoints == ()


def test_also_if_only_a_later_state_could_not_be_loaded(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    key = engine.save(state(1), own(1), step=1, epoch=0)
    for shared, its_own in ((state(2) | {"best": np.float64(0.5)}, own(2)), (state(2), {"best": np.float64(0.5)})):
        with pytest.raises(ValueError, match="keep to tensors, numbers"):
            engine.save(shared, its_own, step=2, epoch=0)
    assert store.head().checkpoints == (key,)
    found = engine.restore()
    assert found is not None
    assert found[1]["step"] == 1


class TestFailedSaves:
    """A save that fails leaves what was there, and no rubbish."""

    @pytest.mark.parametrize("nth", range(1, 9))
    def test_whichever_write_fails_the_one_before_stays_and_a_later_one_succeeds(
        self, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch, nth: int
    ) -> None:
        store = JobStore(Objects.open((tmp_path / "store").as_uri()), "job")
        engine = checkpoints(store, warnings)
        engine.save(state(10), own(10), step=10, epoch=0)
        before = files(tmp_path)
        writes = itertools.count(1)
        for name in ("put", "put_if_match"):
            monkeypatch.setattr(store.objects, name, full_at(nth, writes, getattr(store.objects, name)))
        with pytest.raises(StoreError, match="No space left"):
            engine.save(state(20), own(20), step=20, epoch=0)
        monkeypatch.undo()
        assert files(tmp_path) == before
        found = engine.restore()
        assert found is not None
        assert found[1]["step"] == 10
        engine.save(state(30), own(30), step=30, epoch=0)
        assert [store.manifest(key).step for key in store.head().checkpoints] == [30, 10]

    def test_what_could_not_be_deleted_at_once_is_by_the_next_save(
        self, store: JobStore, warnings: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = checkpoints(store, warnings)
        monkeypatch.setattr(store.objects, "put", full_at(3, itertools.count(1), store.objects.put))
        monkeypatch.setattr(Objects, "local", False)
        with pytest.raises(StoreError):
            engine.save(state(10), own(10), step=10, epoch=0)
        monkeypatch.undo()
        assert list(store.objects.scan(store.checkpoint_root(10, 1))) != []
        engine.save(state(20), own(20), step=20, epoch=0)
        assert list(store.objects.scan(store.checkpoint_root(10, 1))) == []

    def test_a_save_whose_last_answer_was_lost_counts(
        self, store: JobStore, warnings: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = checkpoints(store, warnings)
        change = store.objects.put_if_match

        def lost(key: str, data: bytes, etag: str) -> None:
            change(key, data, etag)
            raise StoreError("connection closed")

        monkeypatch.setattr(store.objects, "put_if_match", lost)
        keys = [engine.save(state(step), own(step), step=step, epoch=0) for step in (10, 20, 30)]
        monkeypatch.undo()
        engine.save(state(40), own(40), step=40, epoch=0)
        assert [store.manifest(key).step for key in store.head().checkpoints] == [40, 30]
        assert list(store.objects.scan(keys[0].rsplit("/", 1)[0])) == []

    def test_what_a_killed_writer_left_half_written_is_swept(self, tmp_path: Path, warnings: list[str]) -> None:
        store = JobStore(Objects.open((tmp_path / "store").as_uri()), "job")
        checkpoints(store, warnings, attempt=1).save(state(10), own(10), step=10, epoch=0)
        before = files(tmp_path)
        folder = tmp_path / "store" / store.checkpoint_root(20, 1)
        folder.mkdir()
        (folder / "00000-abc.part").write_bytes(b"whole")
        (folder / "00001-abc.part#1").write_bytes(b"ha")  # As obstore names what it has not finished.
        engine = checkpoints(store, warnings, attempt=2)
        assert engine.sweep() == 1
        assert files(tmp_path).keys() == before.keys()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full_at(nth: int, writes: Iterator[int], write: Callable[..., None]) -> Callable[..., None]:
    def sometimes(*arguments: Any) -> None:
        if next(writes) >= nth:
            raise StoreError("No space left on device (os error 28)")
        write(*arguments)

    return sometimes


def test_neither_saving_nor_restoring_holds_the_state_a_second_time() -> None:
    size, part = 40_000_000, 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        store = JobStore(Objects.open(Path(folder).as_uri()), "job")
        store.claim(1)
        engine = Checkpoints(store, 1, ManualClock(NOW), part_bytes=part)
        weights = torch.arange(size // 4, dtype=torch.int32)
        assert peak(lambda: engine.save({"weights": weights}, {}, step=1, epoch=0)) < 10 * part
        found: list[Any] = []
        assert peak(lambda: found.append(engine.restore())) < 10 * part
        assert torch.equal(found[0][1]["weights"], weights)


def peak(work: Callable[[], object]) -> int:
    """Bytes that Python held at most beside what it held before; tensors are not among them."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class TestWeightsDigest:
    """One flipped bit, another name, shape or dtype: another digest."""

    def test_equal_models_have_equal_digests(self) -> None:
        assert weights_digest(self._model()) == weights_digest(self._model())

    def test_the_last_bit_counts(self) -> None:
        model = self._model()
        before = weights_digest(model)
        with torch.no_grad():
            bits = next(model.parameters()).view(torch.int32)
            bits[0, 0] += 1
        assert weights_digest(model) != before

    def test_shape_and_type_count(self) -> None:
        flat, square = torch.nn.Module(), torch.nn.Module()
        flat.register_buffer("x", torch.zeros(4))
        square.register_buffer("x", torch.zeros(2, 2))
        whole = torch.nn.Module()
        whole.register_buffer("x", torch.zeros(4, dtype=torch.int32))
        assert len({weights_digest(module) for module in (flat, square, whole)}) == 3

    def _model(self) -> torch.nn.Sequential:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.float32)
