"""What makes a run what it is? Everything that must be put back for it to go on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpucost.training.checkpoints.engine import Stateful
from gpucost.training.program import randomness
from gpucost.training.program.position import Position
from gpucost.training.program.stepping import Stepping


@dataclass
class RunState:
    """A run's state at a step boundary, or between two micro-steps.

    Args:
        things: model, optimizer and the rest, by name; each keeps its own state.
        stepping: holds the gradients of a batch that is not complete.
        step: optimizer steps done.
        epoch: the present epoch, from 0.
        position: where in the epoch.
        extra: plain values of the program.
        finished: whether the program has said that the training is complete.
        saveable: whether a run that resumes from here meets what comes next in the program, and nothing twice.
    """

    things: Mapping[str, Stateful]
    stepping: Stepping
    step: int = 0
    epoch: int = 0
    position: Position = field(default_factory=Position)
    extra: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    saveable: bool = True
    _random: dict[str, Any] | None = None

    def stepped(self, complete: bool) -> None:
        """A step is done, or a micro-step where it is not complete; the generators have been drawn from since."""
        self.step += complete
        self.saveable = True
        self._random = None

    def shared(self) -> dict[str, Any]:
        """What is the same on all processes, as plain containers and tensors; rank 0's is saved."""
        return {
            "things": {name: thing.state_dict() for name, thing in self.things.items()},
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position.saved(),
            "scaler": self.stepping.scaler_state(),
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
        self.step, self.epoch = shared["step"], shared["epoch"]
        self.position = Position.of(shared["position"])
        self.stepping.take_scaler(shared["scaler"])
        self.extra, self.finished = shared["extra"], shared["finished"]
        self.stepping.take(own["partial"])
        self._random = own["random"]

    def take_random(self, *, for_good: bool = True) -> None:
        """Put the random generators back.

        Done for good when the first batch is handed out: what comes before it in the program, such as making a data
        loader's iterator, may draw from them, and did so before the saved step in the run that saved.

        Args:
            for_good: it need not be done again.
        """
        if self._random is not None:
            randomness.restore(self._random)
        if for_good:
            self._random = None
