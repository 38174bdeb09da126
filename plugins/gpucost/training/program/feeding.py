"""Which batches does the program get? Those that are left of the epoch, cut as the recipe and the processes want it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpucost.recipe import Options
from gpucost.training.program import sampler
from gpucost.training.program.position import Cut
from gpucost.training.program.sampler import Share
from gpucost.training.program.state import RunState
from gpucost.training.ranks import Ranks

_FOR_WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context")
"""Arguments of DataLoader that it refuses where no worker loads."""


class Feed:
    """Hands out the batches of one run.

    Args:
        state: knows where the run is, and is told.
        options: batch, accumulate, workers.
        ranks: the processes of this training.
        seed: of the order of samples.
        say: takes a line for people.
    """

    def __init__(self, state: RunState, options: Options, ranks: Ranks, seed: int, say: Callable[[str], None]) -> None:
        self._state = state
        self._options = options
        self._ranks = ranks
        self._seed = seed
        self._say = say
        self._fed: int | None = None
        """The epoch whose batches were asked for."""
        self._loaded: Iterator[Any] = iter(())

    def close(self) -> None:
        """End the processes that load data.

        Torch does so when its iterator goes, but not at python's exit, which then waits for them; and the traceback of
        whatever ends the program, which may come from the iterator itself, keeps it until then.
        """
        loaded, self._loaded = self._loaded, iter(())
        if (end := getattr(loaded, "_shutdown_workers", None)) is not None:
            end()

    def batch(self, batch_size: int) -> int:
        """Samples of a batch where the program asks for `batch_size`."""
        return self._options.batch or batch_size

    def batches(
        self, data: Any, batch_size: int, *, shuffle: bool, drop_last: bool, loader: dict[str, Any]
    ) -> Iterator[Any]:
        """The batches that are left of the present epoch; see `Run.batches`."""
        state = self._state
        left = self._left(data if isinstance(data, int) else len(data), batch_size, shuffle, drop_last)
        self._loaded = sampler.load(
            data, [one.indices for one in left], seed=self._seed, epoch=state.epoch, **self._loading(data, loader)
        )
        state.take_random()
        epoch = state.epoch
        try:
            for share in left:
                batch = next(self._loaded)
                state.position.given += 1
                state.saveable = False
                with state.stepping.hand_out(share):
                    yield batch
        finally:
            self.close()
            # A loop that was left early may be closed late.
            if state.epoch == epoch:
                # What the program does after the batches, it does again when it resumes from here.
                state.saveable = False
                state.stepping.end_batches()

    def _left(self, samples: int, batch_size: int, shuffle: bool, drop_last: bool) -> list[Share]:
        state, position = self._state, self._state.position
        if self._fed == state.epoch:
            raise ValueError(
                f"run.batches: asked for twice in epoch {state.epoch}, expected once in an epoch of run.epochs(), for "
                "the data that is trained on; evaluate with a loader of your own"
            )
        self._fed = state.epoch
        cut = Cut(
            samples, self.batch(batch_size), self._options.accumulate or 1, scaled=state.stepping.scaler is not None
        )
        order: dict[str, Any] = {
            "seed": self._seed, "epoch": state.epoch, "shuffle": shuffle, "drop_last": drop_last
        }  # fmt: skip
        before = position.cut
        if position.recut(cut, self._ranks, **order):
            state.stepping.forget()
            if before is not None and before.samples != samples and position.begin:
                self._say(
                    f"the data has {samples} samples now and had {before.samples} when the run was saved: some come "
                    f"twice in epoch {state.epoch}, or not at all"
                )
        shares = cut.shares(position.begin, self._ranks, **order)
        if not shares and not position.begin:
            raise ValueError(
                f"run.batches: {samples} samples in batches of {cut.batch} for {self._ranks.size} processes make no "
                "batch at all; expected a batch of as many samples as processes at least, and as many in the data"
            )
        return shares[position.given :]

    def _loading(self, data: Any, loader: dict[str, Any]) -> dict[str, Any]:
        workers = self._options.workers
        if workers is None:
            return loader
        if isinstance(data, int):
            self._say("recipe.workers has no effect: the program asks for index batches, which nobody has to load")
            return loader
        kept = {name: value for name, value in loader.items() if workers or name not in _FOR_WORKERS}
        return {**kept, "num_workers": workers}
