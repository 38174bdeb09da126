"""What makes a run what it is? Everything that must be put back for it to go on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpucost.training.checkpoints.engine import Stateful
from gpucost.training.program import randomness
from gpucost.training.program.stepping import Stepping


@dataclass
class RunState:
    """A run's state at a step boundary, or between two micro-steps.

    Args:
        things: model, optimizer and the rest, by name; each keeps its own state.
        stepping: holds the gradients of a batch that is not complete.
        step: optimizer steps done.
        epoch: the present epoch, from 0.
        batch: batches of this epoch, or micro-steps' shares of them, that the program has been given.
        extra: plain values of the program.
        finished: whether the program has said that the training is complete.
    """

    things: Mapping[str, Stateful]
    stepping: Stepping
    step: int = 0
    epoch: int = 0
    batch: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    _random: dict[str, Any] | None = None

    def shared(self) -> dict[str, Any]:
        """What is the same on all processes, as plain containers and tensors; rank 0's is saved."""
        return {
            "things": {name: thing.state_dict() for name, thing in self.things.items()},
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "extra": self.extra,
            "finished": self.finished,
        }

    def own(self) -> dict[str, Any]:
        """What each process has of its own."""
        return {"random": randomness.capture(), "partial": self.stepping.capture()}

    def take(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Go back to what was saved, but for the random generators: see `take_random`.

        Raises:
            ValueError: the checkpoint was made with other things.
        """
        if shared["things"].keys() != self.things.keys():
            raise ValueError(
                f"checkpointed: got {sorted(self.things)}, but the checkpoint holds {sorted(shared['things'])}; "
                "pass the same things as the run that saved it, or start anew"
            )
        for name, thing in self.things.items():
            thing.load_state_dict(shared["things"][name])
        self.step, self.epoch, self.batch = shared["step"], shared["epoch"], shared["batch"]
        self.extra, self.finished = shared["extra"], shared["finished"]
        self.stepping.take(own["partial"])
        self._random = own["random"]

    def take_random(self) -> None:
        """Put the random generators back, once.

        Done when the first batch is handed out: what comes before it in the program, such as making a data
        loader's iterator, may draw from them, and did so before the saved step in the run that saved.
        """
        if self._random is not None:
            randomness.restore(self._random)
            self._random = None
