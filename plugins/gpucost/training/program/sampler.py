"""In which order are the samples seen? A pure function of (seed, epoch), with no state to save.

Randomness that belongs to one sample (augmentation, masking) comes from `generator`, a pure function of
(seed, epoch, stream, index): however often a run is interrupted, and whichever worker loads a sample, it
meets the same samples, changed in the same way, in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpucost.training.program.randomness import seed_everything

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of 0 .. size-1.

    numpy promises that a bit generator's raw stream stays the same between versions, but not that
    `permutation` does; hence a stable sort of raw numbers, which gives every node the same order.
    """
    import numpy as np

    raw = np.random.PCG64(_seed_sequence(seed, epoch, "order")).random_raw(size)
    return np.argsort(raw, kind="stable").astype(np.int64)


def batches(
    size: int, batch_size: int, *, seed: int, epoch: int, shuffle: bool = True, drop_last: bool = False, begin: int = 0
) -> list[NDArray[np.int64]]:
    """The epoch's batches of sample indices; the last one may be smaller.

    Args:
        size: samples of an epoch.
        batch_size: samples of a batch.
        seed: the job's seed.
        epoch: the epoch.
        shuffle: whether their order is that of (seed, epoch); else as they lie.
        drop_last: leave out a smaller last batch.
        begin: so many samples of the order are left out, for the program has had them.

    Raises:
        ValueError: there is no sample, or `batch_size` is less than 1.
    """
    import numpy as np

    if size < 1:
        raise ValueError(f"size: got {size}, expected at least one sample")
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}, expected 1 or more")
    indices = order(size, seed, epoch) if shuffle else np.arange(size, dtype=np.int64)
    end = size - (size - begin) % batch_size if drop_last else size
    return [indices[start : start + batch_size] for start in range(begin, end, batch_size)]


@dataclass(frozen=True)
class Share:
    """What one process does of a batch in one micro-step.

    Args:
        indices: its samples.
        micro: which micro-step of the batch it is, from 0.
        micros: how many the batch has.
        weight: what the mean loss over these samples is multiplied by, so that the sum over the micro-steps, averaged
            over the processes, is the mean over the whole batch.
    """

    indices: NDArray[np.int64]
    micro: int
    micros: int
    weight: float

    @property
    def last(self) -> bool:
        """Whether the optimizer's step follows."""
        return self.micro == self.micros - 1


def shares(
    planned: Sequence[NDArray[np.int64]], *, accumulate: int, rank: int, world_size: int, whole: int | None = None
) -> list[Share]:
    """One process's shares of all batches: each batch is cut into `accumulate` micro-steps for each process.

    A smaller batch than the others has fewer micro-steps, not smaller ones: batch normalization fails on a
    share of one sample. One with fewer samples than processes is left out: they must all do the same number of steps.

    Args:
        planned: batches, from `batches`.
        accumulate: micro-steps per batch.
        rank: this process.
        world_size: how many processes train.
        whole: samples of a batch that is not a smaller last one; None: as the first has.
    """
    import numpy as np

    found = []
    usual = max(1, (whole or len(planned[0])) // (accumulate * world_size)) if planned else 1
    for batch in planned:
        micros = min(accumulate, len(batch) // world_size, -(-len(batch) // (usual * world_size)))
        if micros == 0:
            continue
        parts = np.array_split(batch, micros * world_size)
        for micro in range(micros):
            own = parts[micro * world_size + rank]
            found.append(Share(own, micro, micros, len(own) * world_size / len(batch)))
    return found


LAST_BATCH_SECONDS = 30
"""Real seconds for which a process that loads data outlives its SIGTERM, so that the loop gets its last batch."""


def load(data: Any, planned: Sequence[NDArray[np.int64]], *, seed: int, epoch: int, **loader: Any) -> Iterator[Any]:
    """The planned batches of `data`.

    What a dataset draws in a worker process from the global generators of torch, numpy and python is a function of
    (seed, epoch, the batch's first index): a worker's own state could not be saved.

    Args:
        data: a number of samples: the batches are tensors of indices. Or a dataset with `__getitem__`: they come
            from torch's DataLoader; its `set_epoch(epoch)` is called if it has one.
        planned: from `batches`.
        seed: the job's seed.
        epoch: the epoch.
        loader: further arguments for DataLoader.
    """
    import torch

    if isinstance(data, int):
        return (torch.from_numpy(indices) for indices in planned)
    from torch.utils.data import DataLoader

    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)
    # Its own generator: the seeds that the loader draws for its workers must not come from the run's.
    own = torch.Generator().manual_seed(seed)
    loader["worker_init_fn"] = functools.partial(
        _begin_worker, then=loader.get("worker_init_fn"), seed=seed, epoch=epoch
    )
    return iter(DataLoader(data, batch_sampler=_Lists(planned), generator=own, **loader))


class _Lists:
    """Batches as lists of numbers, each made when it is asked for: an epoch of them takes a list's 36 bytes a sample.

    Args:
        planned: the batches.
    """

    def __init__(self, planned: Sequence[NDArray[np.int64]]) -> None:
        self._planned = planned

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self._planned)


def _begin_worker(worker: int, then: Callable[[int], None] | None, seed: int, epoch: int) -> None:
    from torch.utils.data import get_worker_info

    # A machine that shuts down signals every process: the loop still needs its batch to reach the step boundary.
    signal.signal(signal.SIGTERM, _let_one_pass)
    if then is not None:
        then(worker)
    if (info := get_worker_info()) is not None:
        _seed_each_batch(info.dataset, seed, epoch)


def _seed_each_batch(data: Any, seed: int, epoch: int) -> None:
    """Change the worker's own copy of the dataset: a loader asks for a batch by `__getitems__` where there is one."""
    getitems = getattr(data, "__getitems__", None) or (lambda indices: [data[index] for index in indices])

    def seeded(indices: list[int]) -> Any:
        seed_everything(int(_seed_sequence(seed, epoch, "loader", indices[0]).generate_state(1)[0]))
        return getitems(indices)

    if hasattr(data, "__dict__"):  # Else it is a plain list or the like, which draws nothing.
        data.__getitems__ = seeded


def _let_one_pass(_number: int, _frame: FrameType | None) -> None:
    # A second one is torch's, for a worker that does not end when told to.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Python's own at its exit may be the first, and is waited for without end.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LAST_BATCH_SECONDS)


def generator(seed: int, epoch: int, *, stream: str = "", index: int | None = None) -> np.random.Generator:
    """Random numbers that depend on nothing but the arguments.

    Args:
        seed: the job's seed.
        epoch: the epoch.
        stream: a name, so that two uses (shifts, flips) are independent of each other.
        index: the sample; None: for the epoch as a whole, e.g. one draw of an array with a row per sample.
    """
    import numpy as np

    return np.random.Generator(np.random.PCG64(_seed_sequence(seed, epoch, stream, index)))


def _seed_sequence(seed: int, epoch: int, stream: str, index: int | None = None) -> np.random.SeedSequence:
    import numpy as np

    name = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big")
    return np.random.SeedSequence([seed, epoch, name, 0 if index is None else index + 1])
