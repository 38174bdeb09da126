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

import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpucost.jobstore import Command, FencedOut, Phase
from gpucost.training.checkpoints.engine import Checkpoints, Stateful, weights_digest
from gpucost.training.outage import brief, patiently, store_errors
from gpucost.training.program import sampler
from gpucost.training.program.reporting import Reporter, say
from gpucost.training.program.state import RunState
from gpucost.training.surroundings import Surroundings
from gpucost.training.workdir import EXIT_FENCED, EXIT_STOPPED, EXIT_STORE, Request, Result

if TYPE_CHECKING:
    import numpy as np
    import torch

LAST_SAVE_TRIES = 3
"""Tries at the last save; each waits for the store by itself. The agent ends the program when time is up."""


class Stopped(SystemExit):
    """The run saved and stops because it was asked to. Leaves quietly, running `finally` blocks."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


class Fenced(SystemExit):
    """A newer attempt owns the job; this one stops without saving."""

    def __init__(self) -> None:
        super().__init__(EXIT_FENCED)


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
    things: dict[str, Stateful] = {"model": model, "optimizer": optimizer}
    things |= {name: thing for name, thing in (("scheduler", scheduler), ("scaler", scaler)) if thing is not None}
    things |= {f"extra.{name}": thing for name, thing in (extra or {}).items()}
    return Run(
        things,
        around,
        model=model,
        epochs=epochs,
        seed=around.seed if seed is None else seed,
        steps_per_epoch=steps_per_epoch,
        every_steps=every_steps or around.plan.every_steps,
        log_every=log_every,
        folder=None if folder is None else Path(folder),
    )


class Run:
    """One training run; made by `checkpointed`."""

    def __init__(
        self,
        things: Mapping[str, Stateful],
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
        self._state = RunState(things)
        self._model = model
        self._around = around
        self._epochs = epochs
        self._seed = seed
        self._steps_per_epoch = steps_per_epoch
        self._every_steps = every_steps
        self._log_every = log_every
        self._folder = folder
        self._reporter = Reporter(around.workdir, around.clock)
        self._checkpoints: Checkpoints | None = None
        self._sigterm = threading.Event()
        self._old_handler: Any = None
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
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._begin()
        except BaseException:
            self._give_back_sigterm()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give SIGTERM back to whoever had it."""
        self._give_back_sigterm()
        self._reporter.progress(Phase.ENDED, self.steps, self.epoch)
        if kind is None and not self._state.finished:
            say("the loop ended without run.finish(...), which says that the training is complete")

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, the present one first."""
        state = self._state
        while state.epoch < self._epochs and not state.finished:
            yield state.epoch
            state.epoch += 1
            state.batch = 0

    def batches(
        self, data: Any, batch_size: int, *, shuffle: bool = True, drop_last: bool = False, **loader: Any
    ) -> Iterator[Any]:
        """The batches that are left of the present epoch.

        Args:
            data: a number of samples, for batches of indices (int64 tensors); or a dataset with a length, for
                batches from torch's DataLoader. A dataset's `set_epoch(epoch)` is called if it has one.
            batch_size: samples per batch.
            shuffle: in an order that is a function of (seed, epoch); else as they lie.
            drop_last: leave out a smaller last batch.
            loader: further arguments for DataLoader, such as num_workers and collate_fn.
        """
        size = data if isinstance(data, int) else len(data)
        planned = sampler.batches(
            size, batch_size, seed=self._seed, epoch=self.epoch, shuffle=shuffle, drop_last=drop_last
        )
        if self._steps_per_epoch is None:
            self._steps_per_epoch = len(planned)
            self._learn_total()
        iterator = sampler.load(data, planned[self._state.batch :], seed=self._seed, epoch=self.epoch, **loader)
        self._state.take_random()
        for batch in iterator:
            self._state.batch += 1
            yield batch

    def rng(self, stream: str = "", index: int | None = None) -> np.random.Generator:
        """Random numbers of the present epoch (of one sample, with `index`): the same after a resumption.

        Args:
            stream: a name that keeps two uses apart.
            index: the sample; None: for the epoch, e.g. one draw of an array with a row per sample.
        """
        return sampler.generator(self._seed, self.epoch, stream=stream, index=index)

    def step(self, **metrics: Any) -> None:
        """One optimizer step is done; call it last in the step.

        Counts, logs every `log_every` steps, saves when due, and does what the agent asks.

        Args:
            metrics: numbers or one-element tensors, e.g. loss; `loss` also shows as the run's present loss.
        """
        self._state.step += 1
        if self.steps % self._log_every == 0 and metrics:
            self.log(**metrics)
        request = self._reporter.asked()
        stop = self._is_stop(request)
        if self._reporter.due() or request or stop:
            loss = _numbers({"loss": metrics["loss"]})["loss"] if "loss" in metrics else None
            self._reporter.progress(Phase.TRAINING, self.steps, self.epoch, loss)
        if stop:
            self._leave_stopped()
        if self.steps % self._every_steps == 0 or request:
            self.save()

    def log(self, **metrics: Any) -> None:
        """Log metrics of the present step, e.g. after an epoch's evaluation."""
        self._reporter.metrics(self.steps, _numbers(metrics))

    def save(self) -> bool:
        """Save now, unless this step is saved already; whether the step is saved.

        Call it at a step boundary only. When the object store is away, training goes on and a warning says so.
        """
        if self._checkpoints is None:
            return False
        if self._reporter.saved_step == self.steps:
            return True
        self._reporter.progress(Phase.SAVING, self.steps, self.epoch)
        try:
            self._checkpoints.save(self._state.capture(), step=self.steps, epoch=self.epoch)
        except store_errors() as away:
            say(f"step {self.steps} could not be saved; training goes on: {brief(away)}")
            return False
        except FencedOut as fenced:
            self._leave_fenced(fenced)
        else:
            self._reporter.saved_step = self.steps
        finally:
            self._reporter.progress(Phase.TRAINING, self.steps, self.epoch)
        return True

    def finish(self, results: Mapping[str, Any] | None = None) -> None:
        """The training is complete: save, and leave the results.

        Args:
            results: final metrics, e.g. accuracy on held-out data.
        """
        self._state.finished = True
        if not self._last_save():
            say("the finished model could not be saved: the object store is away")
            raise SystemExit(EXIT_STORE)
        self._result("finished", _numbers(results or {}), weights_digest(self._model))

    def _begin(self) -> None:
        self._reporter.progress(Phase.RESTORING, 0, 0)
        try:
            patiently(self._restore, say)
        except store_errors() as away:
            say(f"the object store cannot be reached, so the run cannot go on from its checkpoint: {brief(away)}")
            raise SystemExit(EXIT_STORE) from away
        except FencedOut as fenced:
            self._leave_fenced(fenced)
        self._reporter.progress(Phase.TRAINING, self.steps, self.epoch)
        # A mere save that is asked for by now has nothing to save.
        if self._is_stop(self._reporter.asked()):
            self._leave_stopped()

    def _restore(self) -> None:
        opened = self._around.open_store(self._folder)
        self._reporter.resumed_step = 0
        if opened is None:
            return
        store, attempt = opened
        store.check_fence(attempt)
        self._checkpoints = Checkpoints(store, attempt, self._around.clock, keep=self._around.plan.keep, warn=say)
        found = self._checkpoints.restore()
        self._checkpoints.sweep()
        if found is None:
            return
        manifest, state = found
        self._state.take(state)
        self._reporter.resumed_step = self._reporter.saved_step = self.steps
        where = f"{self._folder}/; remove it to start anew" if self._around.workdir is None else manifest.created_at
        say(f"going on from step {self.steps} (epoch {self.epoch}), saved by attempt {manifest.attempt}, {where}")

    def _learn_total(self) -> None:
        if self._steps_per_epoch is not None:
            self._reporter.total_steps = self._epochs * self._steps_per_epoch

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._sigterm.set()

    def _give_back_sigterm(self) -> None:
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    def _is_stop(self, request: Request | None) -> bool:
        return self._sigterm.is_set() or (request is not None and request.command is Command.SAVE_AND_STOP)

    def _last_save(self) -> bool:
        return self._checkpoints is None or any(self.save() for _ in range(LAST_SAVE_TRIES))

    def _leave_stopped(self) -> None:
        if self.steps > 0:
            self._last_save()
        self._result("stopped")
        say(f"stopped at step {self.steps}; saved: {self._reporter.saved_step}")
        raise Stopped

    def _leave_fenced(self, fenced: FencedOut) -> None:
        self._result("fenced")
        say(f"stopped: {fenced}")
        raise Fenced from fenced

    def _result(self, status: Any, results: Mapping[str, float] | None = None, digest: str | None = None) -> None:
        self._reporter.result(
            Result(
                status=status,
                step=self.steps,
                saved_step=self._reporter.saved_step,
                results=dict(results or {}),
                weights_digest=digest,
            )
        )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    # item(): of a tensor that takes part in autograd, float() would warn.
    return {name: float(value.item() if hasattr(value, "item") else value) for name, value in values.items()}
