"""The order of samples is a permutation, and a function of (seed, epoch) alone."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpucost.training.program import sampler

seeds = st.integers(0, 2**32 - 1)
epochs = st.integers(0, 10_000)


@given(size=st.integers(1, 500), seed=seeds, epoch=epochs)
def test_every_sample_comes_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(sampler.order(size, seed, epoch)) == list(range(size))


@given(size=st.integers(1, 200), seed=seeds, epoch=epochs)
def test_nothing_but_the_arguments_matters(size: int, seed: int, epoch: int) -> None:
    first = sampler.order(size, seed, epoch)
    np.random.seed(1)
    sampler.order(size, seed + 1, epoch)
    assert np.array_equal(first, sampler.order(size, seed, epoch))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(sampler.order(100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_never_changes_between_versions() -> None:
    # Written down once: a job that is resumed on a node with another numpy must meet the same order.
    assert sampler.order(8, seed=7, epoch=3).tolist() == [5, 7, 3, 0, 6, 1, 4, 2]


@given(size=st.integers(1, 300), batch=st.integers(1, 50), seed=seeds, drop_last=st.booleans())
def test_batches_cover_the_epoch(size: int, batch: int, seed: int, drop_last: bool) -> None:
    planned = sampler.batches(size, batch, seed=seed, epoch=2, drop_last=drop_last)
    seen = [int(index) for indices in planned for index in indices]
    assert len(seen) == len(set(seen)) == (size - size % batch if drop_last else size)
    assert all(len(indices) == batch for indices in planned[:-1])


def test_without_shuffle_samples_come_as_they_lie() -> None:
    planned = sampler.batches(5, 2, seed=1, epoch=0, shuffle=False)
    assert [indices.tolist() for indices in planned] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("size", "batch", "field"), [(0, 1, "size: got 0"), (3, 0, "batch_size: got 0")])
def test_impossible_batches_are_refused(size: int, batch: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        sampler.batches(size, batch, seed=0, epoch=0)


@given(seed=seeds, epoch=epochs, index=st.integers(0, 10**9))
def test_a_samples_randomness_is_its_own(seed: int, epoch: int, index: int) -> None:
    def draw(stream: str = "flip", index: int = index) -> tuple[int, ...]:
        return tuple(sampler.generator(seed, epoch, stream=stream, index=index).integers(0, 2**63, 2))

    assert draw() == draw()
    assert draw() != draw(index=index + 1)
    assert draw() != draw(stream="shift")


class Numbers:
    """A dataset whose samples depend on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


def test_a_dataset_is_loaded_in_the_planned_order_without_touching_the_global_generator() -> None:
    planned = sampler.batches(10, 4, seed=1, epoch=3)
    torch.manual_seed(5)
    loaded = [batch.tolist() for batch in sampler.load(Numbers(), planned, seed=1, epoch=3)]
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    assert loaded == [[300 + index for index in indices] for indices in planned]


class Signalled:
    """A dataset whose worker gets SIGTERM while it loads the first sample, as when the whole machine is told to end."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGTERM)
        return index + BONUS


BONUS = 0


def set_bonus(worker: int) -> None:
    global BONUS
    BONUS = 10 + worker


def test_a_worker_delivers_its_batches_although_the_machine_is_told_to_end() -> None:
    planned = sampler.batches(4, 2, seed=1, epoch=0, shuffle=False)
    loader = sampler.load(Signalled(1), planned, seed=1, epoch=0, num_workers=1, worker_init_fn=set_bonus)
    assert [batch.tolist() for batch in loader] == [[10, 11], [12, 13]]


def test_a_worker_that_is_told_twice_ends() -> None:
    planned = sampler.batches(4, 2, seed=1, epoch=0, shuffle=False)
    loader = sampler.load(Signalled(2), planned, seed=1, epoch=0, num_workers=1)
    with pytest.raises(RuntimeError, match="worker"):
        list(loader)


class Augmented:
    """A dataset that draws from the global generators, as torchvision's transforms do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + torch.rand(1).item() + float(np.random.rand()) + random.random()


def test_what_a_dataset_draws_in_workers_is_the_same_after_a_resume_and_another_in_each_epoch() -> None:
    def loaded(epoch: int, begin: int) -> list[list[float]]:
        planned = sampler.batches(12, 3, seed=1, epoch=epoch)[begin:]
        return [batch.tolist() for batch in sampler.load(Augmented(), planned, seed=1, epoch=epoch, num_workers=2)]

    whole = loaded(0, 0)
    assert loaded(0, 1) == whole[1:]
    fractions = {round(value % 1, 9) for batch in whole + loaded(1, 0) for value in batch}
    assert len(fractions) == 24
