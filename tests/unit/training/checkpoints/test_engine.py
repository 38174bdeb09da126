"""A checkpoint comes back as it was, or not at all."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch

from gpucost.clock import ManualClock
from gpucost.jobstore import FencedOut, JobStore
from gpucost.objects import Objects
from gpucost.training.checkpoints.engine import Checkpoints, weights_digest

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


def test_what_was_saved_comes_back(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), step=10, epoch=2)
    found = engine.restore()
    assert found is not None
    manifest, loaded = found
    assert (manifest.step, manifest.epoch, manifest.attempt, manifest.created_at) == (10, 2, 1, NOW)
    assert len(manifest.parts) > 2
    assert loaded["step"] == 10
    assert torch.equal(loaded["weights"], state(10)["weights"])


def test_nothing_saved_is_nothing_restored(store: JobStore, warnings: list[str]) -> None:
    assert checkpoints(store, warnings).restore() is None
    assert warnings == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest gone", "manifest torn"])
def test_a_torn_newest_one_is_skipped_and_said(store: JobStore, warnings: list[str], damage: str) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), step=10, epoch=0)
    key = engine.save(state(20), step=20, epoch=0)
    part = store.manifest(key).parts[1].key
    data = store.objects.get(part)
    if damage == "flip":
        store.objects.put(part, data[:500] + bytes([data[500] ^ 4]) + data[501:])
    elif damage == "truncate":
        store.objects.put(part, data[:-1])
    elif damage == "missing":
        store.objects.delete([part])
    elif damage == "manifest gone":
        store.objects.delete([key])
    else:
        store.objects.put(key, store.objects.get(key)[:-20])

    found = engine.restore()
    assert found is not None
    assert found[1]["step"] == 10
    assert len(warnings) == 1
    assert key in warnings[0]


def test_a_torn_one_does_not_count_among_those_kept(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    engine.save(state(10), step=10, epoch=0)
    torn = engine.save(state(20), step=20, epoch=0)
    store.objects.delete([store.manifest(torn).parts[0].key])
    again = checkpoints(store, warnings, attempt=2)
    again.restore()
    newest = again.save(state(30), step=30, epoch=0)
    store.objects.delete([store.manifest(newest).parts[0].key])
    found = again.restore()
    assert found is not None
    assert found[1]["step"] == 10


def test_a_newer_attempt_shuts_the_older_one_out(store: JobStore, warnings: list[str]) -> None:
    old = checkpoints(store, warnings, attempt=1)
    old.save(state(10), step=10, epoch=0)
    store.claim(2)
    with pytest.raises(FencedOut, match="attempt 2 owns the job"):
        old.save(state(20), step=20, epoch=0)
    assert len(store.head().checkpoints) == 1
    assert list(store.objects.scan(store.checkpoint_root(20, 1))) == []


def test_only_the_newest_are_kept(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings, keep=3)
    for step in range(10, 60, 10):
        engine.save(state(step), step=step, epoch=0)
    assert [store.manifest(key).step for key in store.head().checkpoints] == [50, 40, 30]
    folders = {stat.key.split("/")[3] for stat in store.objects.scan("jobs/job/checkpoints")}
    assert len(folders) == 3


def test_what_a_killed_attempt_left_is_swept_and_nothing_else(store: JobStore, warnings: list[str]) -> None:
    checkpoints(store, warnings, attempt=1).save(state(10), step=10, epoch=0)
    store.objects.put(f"{store.checkpoint_root(20, 1)}/00000-abc.part", b"half a save")
    engine = checkpoints(store, warnings, attempt=2)
    store.objects.put(f"{store.checkpoint_root(30, 2)}/00000-abc.part", b"being written")
    assert engine.sweep() == 1
    assert engine.restore() is not None
    assert [stat.key for stat in store.objects.scan(store.checkpoint_root(30, 2))] != []


def test_a_state_that_could_not_be_loaded_is_refused_when_saved(store: JobStore, warnings: list[str]) -> None:
    engine = checkpoints(store, warnings)
    with pytest.raises(ValueError, match="keep to tensors, numbers"):
        engine.save({"numpy": np.random.get_state()}, step=1, epoch=0)
    assert store.head().checkpoints == ()


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
