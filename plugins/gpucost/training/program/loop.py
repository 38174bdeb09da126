"""How does a plain PyTorch loop survive interruptions? About ten lines of change.

    prepare()                                           # seeds, threads, deterministic algorithms
    model, optimizer = ...
    with checkpointed(model, optimizer, epochs=10) as run:
        for epoch in run.epochs():
            for batch in run.batches(len(images), 64):  # indices, in an order fixed by (seed, epoch)
                ...
                run.step(loss=loss)                     # last in the step: count, log, save when due
            run.log(accuracy=evaluate(model))
        run.finish({"accuracy": evaluate(model)})

A run that was interrupted anywhere ends with the same weights, bit for bit on CPU, as one that never was.
Outside gpucost the same program keeps its checkpoints in `./checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpucost.jobstore import Phase
from gpucost.training.checkpoints.engine import Stateful
from gpucost.training.program import applying, processes, sampler
from gpucost.training.program.boundary import Boundary, Plan, Wish
from gpucost.training.program.feeding import Feed
from gpucost.training.program.keeping import Keeper
from gpucost.training.program.position import Position
from gpucost.training.program.processes import bare
from gpucost.training.program.randomness import seed_everything
from gpucost.training.program.reporting import Reporter
from gpucost.training.program.state import RunState
from gpucost.training.program.stepping import Stepping
from gpucost.training.ranks import Ranks, ranks
from gpucost.training.surroundings import Surroundings

if TYPE_CHECKING:
    import numpy as np
    import torch


def checkpointed(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: Mapping[str, Stateful] | None = None,
    seed: int | None = None,
    steps_per_epoch: int | None = None,
    every_steps: int | None = None,
    log_every: int = 10,
    folder: str | Path | None = "checkpoints",
) -> Run:
    """A training run that goes on from its newest checkpoint; use it in a `with` statement.

    Args:
        model: on its device already.
        optimizer: made from the model's parameters.
        epochs: how many to train.
        scheduler: learning rate schedule; step it before `run.step`, or after the epoch's batches.
        scaler: gradient scaler of mixed precision.
        extra: other things with state_dict and load_state_dict that belong to the state, by name.
        seed: for the order of samples; None: the job's seed.
        steps_per_epoch: optimizer steps per epoch, where it is not the number of batches.
        every_steps: optimizer steps between two checkpoints; None: as the job says.
        log_every: steps between two logged lines of metrics.
        folder: where checkpoints go outside gpucost; None: nowhere.
    """
    around = Surroundings.find()
    state = _state(around, model, optimizer, scheduler, scaler, extra or {})
    return Run(
        state,
        around,
        model=model,
        epochs=epochs,
        seed=around.seed if seed is None else seed,
        steps_per_epoch=steps_per_epoch,
        every_steps=around.options.checkpoint_every_steps or every_steps or around.plan.every_steps,
        log_every=log_every,
        folder=None if folder is None else Path(folder),
    )


def _state(
    around: Surroundings,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None,
    scaler: Stateful | None,
    extra: Mapping[str, Stateful],
) -> RunState:
    """What is kept, once the recipe has been applied to it."""
    if ranks().size > 1 and bare(model) is model:
        raise ValueError(
            f"checkpointed: {ranks().size} processes train, but the model is not replicated, so each would train its "
            "own; call model = replicated(model) before the optimizer is made (FSDP's sharded models are not there yet)"
        )
    with processes.refused_recipe_ends():
        options = around.options
        applying.apply(options, model)
        stepping = Stepping(model, optimizer, scheduler, options)
        if scaler is not None and ((options.accumulate or 1) > 1 or stepping.scaler is not None):
            raise ValueError(
                "recipe: accumulate and fp16 cannot be applied to a program with a scaler of its own; "
                "take it out, and call run.backward(loss) in place of scaler.scale(loss).backward()"
            )
    things: dict[str, Stateful] = {"model": bare(model), "optimizer": optimizer}
    things |= {name: thing for name, thing in (("scheduler", scheduler), ("scaler", scaler)) if thing is not None}
    return RunState(things | {f"extra.{name}": thing for name, thing in extra.items()}, stepping)


def steps_per_epoch(samples: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Optimizer steps in an epoch of `run.batches`, for a schedule: a recipe may change the batch.

    Args:
        samples: in the epoch.
        batch_size: as passed to `run.batches`.
        drop_last: as passed to `run.batches`.
    """
    with processes.refused_recipe_ends():
        batch = Surroundings.find().options.batch or batch_size
    return _steps(samples, batch, drop_last)


def _steps(samples: int, batch: int, drop_last: bool) -> int:
    whole, rest = divmod(samples, batch)
    return whole + (not drop_last and rest >= ranks().size)


class Run:
    """One training run; made by `checkpointed`."""

    def __init__(
        self,
        state: RunState,
        around: Surroundings,
        *,
        model: torch.nn.Module,
        epochs: int,
        seed: int,
        steps_per_epoch: int | None,
        every_steps: int,
        log_every: int,
        folder: Path | None,
    ) -> None:
        self._state = state
        self._model = model
        self._options = around.options
        self._remarks = around.remarks
        self._epochs = epochs
        self._seed = seed
        self._steps_per_epoch = steps_per_epoch
        self._log_every = log_every
        self._ranks: Ranks = ranks()
        self._reporter = Reporter(around.workdir, around.clock, silent=self._ranks.rank > 0)
        self._boundary = Boundary(self._reporter, self._ranks)
        least, most = self._options.checkpoint_min_seconds, self._options.checkpoint_max_seconds
        self._plan = Plan(every_steps, least or 0.0, most, self._ranks)
        self._keeper = Keeper(state, around, self._ranks, self._reporter, self._boundary, self._plan, folder)
        self._feed = Feed(state, self._options, self._ranks, seed, self._reporter.say)
        self._learn_total()

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._state.epoch

    @property
    def extra(self) -> dict[str, Any]:
        """Plain values of the program (tensors, numbers, text, lists, dicts) that are saved and restored."""
        return self._state.extra

    def __enter__(self) -> Self:
        """Restore the newest checkpoint, if there is one."""
        self._boundary.listen()
        try:
            self._begin()
        except BaseException:
            self._boundary.give_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what loads data, and give SIGTERM back to whoever had it."""
        self._feed.close()
        self._boundary.give_back()
        self._reporter.progress(Phase.ENDED, self.steps, self.epoch)
        if kind is None and not self._state.finished:
            self._reporter.say("the loop ended without run.finish(...), which says that the training is complete")

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, the present one first."""
        state = self._state
        while state.epoch < self._epochs and not state.finished:
            yield state.epoch
            state.epoch += 1
            state.position = Position()
            state.saveable = True

    def batches(
        self, data: Any, batch_size: int, *, shuffle: bool = True, drop_last: bool = False, **loader: Any
    ) -> Iterator[Any]:
        """The batches that are left of the present epoch; where a recipe or several processes cut them, the parts.

        Once in an epoch, for the data that is trained on. A loop that leaves it early decides so before a step, from
        what is restored (`run.steps`, `run.extra`).

        Args:
            data: a number of samples, for batches of indices (int64 tensors); or a dataset with a length, for
                batches from torch's DataLoader. A dataset's `set_epoch(epoch)` is called if it has one.
            batch_size: samples per optimizer step, over all processes and micro-steps.
            shuffle: in an order that is a function of (seed, epoch); else as they lie.
            drop_last: leave out a smaller last batch.
            loader: further arguments for DataLoader, such as num_workers and collate_fn.

        Raises:
            ValueError: it is the second time in this epoch, or there is no batch at all.
        """
        if self._steps_per_epoch is None:
            samples = data if isinstance(data, int) else len(data)
            self._steps_per_epoch = _steps(samples, self._feed.batch(batch_size), drop_last)
            self._learn_total()
        yield from self._feed.batches(data, batch_size, shuffle=shuffle, drop_last=drop_last, loader=loader)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, made right for parts of unequal size and for fp16.

        A loop with `loss.backward()` works, too: parts of a batch then count alike, whatever their size, and fp16 is
        refused.

        Args:
            loss: the mean over this batch's samples.
        """
        self._state.stepping.backward(loss)

    def rng(self, stream: str = "", index: int | None = None) -> np.random.Generator:
        """Random numbers of the present epoch (of one sample, with `index`): the same after a resumption.

        Args:
            stream: a name that keeps two uses apart.
            index: the sample; None: for the epoch, e.g. one draw of an array with a row per sample.
        """
        return sampler.generator(self._seed, self.epoch, stream=stream, index=index)

    def step(self, **metrics: Any) -> None:
        """One optimizer step is done, or one of the micro-steps that make it; call it last in the step.

        Counts, logs every `log_every` steps, saves when due, and does what the agent asks.

        Args:
            metrics: numbers or one-element tensors, e.g. loss; `loss` also shows as the run's present loss.
        """
        self._refuse_what_does_nothing()
        complete = self._state.stepping.at_boundary
        self._state.stepped(complete)
        if complete and self.steps % self._log_every == 0 and metrics:
            self.log(**metrics)
        wish = self._boundary.agree(complete and self._plan.due(self.steps), may_save=complete)
        if wish or self._reporter.due():
            loss = _numbers({"loss": metrics["loss"]})["loss"] if "loss" in metrics else None
            self._reporter.progress(Phase.TRAINING, self.steps, self.epoch, loss)
        if wish is Wish.STOP:
            self._keeper.stop()
        if wish is Wish.SAVE:
            self._keeper.save()

    def log(self, **metrics: Any) -> None:
        """Log metrics of the present step, e.g. after an epoch's evaluation."""
        self._reporter.metrics(self.steps, _numbers(metrics))

    def save(self) -> bool:
        """Save now, unless this step is saved already; whether the step is saved.

        Call it right after `run.step`, and on all processes. When the object store is away, training goes on and a
        warning says so.

        Raises:
            ValueError: a run that resumes from here would lose a batch, or do the end of the epoch twice.
        """
        if not self._state.saveable:
            raise ValueError(
                f"run.save: called in epoch {self.epoch} within a step or after the batches, expected right after "
                "run.step(...): a run that resumed from here would lose a batch, or do the end of the epoch twice"
            )
        return self._keeper.save()

    def finish(self, results: Mapping[str, Any] | None = None) -> None:
        """The training is complete: save, and leave the results.

        Args:
            results: final metrics, e.g. accuracy on held-out data.
        """
        self._keeper.finish(self._model, _numbers(results or {}))

    def _begin(self) -> None:
        self._reporter.progress(Phase.RESTORING, 0, 0)
        if self._ranks.rank > 0:
            # Every process draws its own numbers; rank 0 those that it would draw if it were alone.
            seed_everything((self._seed + self._ranks.rank) % 2**32)
        for remark in self._remarks:
            self._reporter.say(f"recipe: {remark}")
        self._keeper.restore()
        # Once more when batches are asked for; a program with a loader of its own does not.
        self._state.take_random(for_good=False)
        self._reporter.progress(Phase.TRAINING, self.steps, self.epoch)
        # A mere save that is asked for by now has nothing to save.
        if self._boundary.agree(due=False) is Wish.STOP:
            self._keeper.stop()

    def _refuse_what_does_nothing(self) -> None:
        if self._state.position.cut is not None:
            return
        given = {"batch": self._options.batch, "accumulate": (self._options.accumulate or 1) > 1}
        if useless := [name for name, value in given.items() if value]:
            with processes.refused_recipe_ends():
                raise ValueError(
                    f"recipe: {', '.join(useless)} would do nothing, since the program does not get its batches from "
                    "run.batches(...); use that, or take the option out"
                )

    def _learn_total(self) -> None:
        if self._steps_per_epoch is not None:
            self._reporter.total_steps = self._epochs * self._steps_per_epoch


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    # item(): of a tensor that takes part in autograd, float() would warn.
    return {name: float(value.item() if hasattr(value, "item") else value) for name, value in values.items()}
