"""How is a run kept? Restored when it begins, saved on its way, left in an orderly way when it must end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from gpucost.jobstore import FencedOut, Phase, TornHead
from gpucost.training.checkpoints.agreement import TornCheckpoint
from gpucost.training.checkpoints.engine import Checkpoints, weights_digest
from gpucost.training.outage import brief, patiently, store_errors
from gpucost.training.program.boundary import Boundary, Plan
from gpucost.training.program.processes import bare
from gpucost.training.program.reporting import Reporter
from gpucost.training.program.state import RunState
from gpucost.training.ranks import Ranks
from gpucost.training.surroundings import Surroundings
from gpucost.training.workdir import EXIT_FENCED, EXIT_STOPPED, EXIT_STORE, EXIT_TORN, Result

if TYPE_CHECKING:
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


class Keeper:
    """Keeps one run's state; everything here is done by all its processes together.

    Args:
        state: what is kept.
        around: where the run is.
        ranks: the processes of this training.
        reporter: tells progress and results.
        boundary: knows by when the run must have ended.
        plan: is told of every save.
        folder: where checkpoints go outside gpucost; None: nowhere.
    """

    def __init__(
        self,
        state: RunState,
        around: Surroundings,
        ranks: Ranks,
        reporter: Reporter,
        boundary: Boundary,
        plan: Plan,
        folder: Path | None,
    ) -> None:
        self._state = state
        self._around = around
        self._ranks = ranks
        self._reporter = reporter
        self._boundary = boundary
        self._plan = plan
        self._folder = folder
        self._checkpoints: Checkpoints | None = None
        self._leaving: SystemExit | None = None

    def restore(self) -> None:
        """Go back to the newest whole checkpoint, if there is one.

        Raises:
            SystemExit: the store cannot be reached, a newer attempt owns the job, or no checkpoint is whole.
            ValueError: the checkpoint is of another world size, of other things, or torch refuses to load it.
        """
        try:
            # By rank 0's watch: where one gives up, all do.
            patiently(self._restore, self._reporter.say, real=lambda: self._ranks.broadcast(time.monotonic()))
        except store_errors() as away:
            self._reporter.say(
                f"the object store cannot be reached, so the run cannot go on from its checkpoint: {brief(away)}"
            )
            raise SystemExit(EXIT_STORE) from away
        except FencedOut as fenced:
            self._leave_fenced(fenced)
        except (TornCheckpoint, TornHead) as torn:
            # To start from nothing would throw work away that a person may be able to bring back.
            self._reporter.say(str(torn))
            raise SystemExit(EXIT_TORN) from torn

    def save(self, *, again: bool = False) -> bool:
        """Save now, unless this step is saved already; whether the step is saved.

        Args:
            again: even if the step is saved already: its state is another one by now.
        """
        state, reporter = self._state, self._reporter
        self._go_on_leaving()
        if self._checkpoints is None:
            return False
        if reporter.saved_step == state.step and state.stepping.at_boundary and not again:
            return True
        began = time.monotonic()
        reporter.progress(Phase.SAVING, state.step, state.epoch)
        try:
            self._checkpoints.save(state.shared(), state.own(), step=state.step, epoch=state.epoch)
        except store_errors() as away:
            reporter.say(f"step {state.step} could not be saved; training goes on: {brief(away)}")
            return False
        except FencedOut as fenced:
            self._leave_fenced(fenced)
        else:
            reporter.saved(state.step, time.monotonic() - began)
        finally:
            self._plan.saved()
            reporter.progress(Phase.TRAINING, state.step, state.epoch)
        return True

    def stop(self) -> NoReturn:
        """Save if there is anything to save and time for it, and leave.

        Raises:
            Stopped: always.
        """
        self._go_on_leaving()
        step = self._state.step
        note = self._save_if_it_fits() if step > 0 or not self._state.stepping.at_boundary else ""
        self._result("stopped", note=note)
        self._reporter.say(f"stopped at step {step}; saved: {self._reporter.saved_step}")
        self._leaving = Stopped()
        raise self._leaving

    def finish(self, model: torch.nn.Module, results: Mapping[str, float]) -> None:
        """Save the complete training, and leave its results.

        Raises:
            SystemExit: it cannot be saved.
        """
        self._go_on_leaving()
        if not self._state.finished:
            self._state.finished = True
            # The last step may be saved, but not what came after it: averaged weights, the end of a schedule.
            tries = range(LAST_SAVE_TRIES)
            if self._checkpoints is not None and not any(self.save(again=True) for _ in tries):
                self._reporter.say("the finished model could not be saved: the object store is away")
                raise SystemExit(EXIT_STORE)
        self._result("finished", results, weights_digest(bare(model)))

    def _restore(self) -> None:
        opened = self._around.open_store(self._folder, self._ranks)
        self._reporter.resumed_step = 0
        if opened is None:
            return
        store, attempt = opened
        self._checkpoints = Checkpoints(
            store, attempt, self._around.clock, ranks=self._ranks, keep=self._around.plan.keep, warn=self._reporter.say
        )
        found = self._checkpoints.restore()
        self._checkpoints.sweep()
        if found is None:
            return
        manifest, shared, own = found
        self._state.take(shared, own)
        step, epoch = self._state.step, self._state.epoch
        self._reporter.resumed_step = self._reporter.saved_step = step
        where = f"{self._folder}/; remove it to start anew" if self._around.workdir is None else manifest.created_at
        self._reporter.say(f"going on from step {step} (epoch {epoch}), saved by attempt {manifest.attempt}, {where}")

    def _save_if_it_fits(self) -> str:
        """Save before the stated time; what is certain not to be done by then is not begun, and is told."""
        for _ in range(LAST_SAVE_TRIES):
            if not self._boundary.fits(self._reporter.quickest_save):
                seconds = self._reporter.quickest_save or 0.0
                return f"no save was begun: it takes {seconds:.1f} s, and the node must be gone before"
            if self.save() or self._checkpoints is None:
                break
        return ""

    def _leave_fenced(self, fenced: FencedOut) -> NoReturn:
        self._result("fenced")
        self._reporter.say(f"stopped: {fenced}")
        self._leaving = Fenced()
        raise self._leaving from fenced

    def _go_on_leaving(self) -> None:
        # A program may call finish() or save() in a `finally`: a run that was told to stop has not finished.
        if self._leaving is not None:
            raise self._leaving

    def _result(
        self,
        status: Literal["finished", "stopped", "fenced"],
        results: Mapping[str, float] | None = None,
        digest: str | None = None,
        note: str = "",
    ) -> None:
        result = Result(
            status=status,
            step=self._state.step,
            saved_step=self._reporter.saved_step,
            results=dict(results or {}),
            weights_digest=digest,
            note=note,
        )
        self._reporter.result(result)
        # Nobody leaves before it is written: torchrun ends the others as soon as one has left.
        self._ranks.broadcast(None)
