"""What makes a run what it is? Everything that must be put back for it to go on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpucost.training.checkpoints.engine import Stateful
from gpucost.training.program import randomness


@dataclass
class RunState:
    """A run's state at a step boundary.

    Args:
        things: model, optimizer and the rest, by name; each keeps its own state.
        step: optimizer steps done.
        epoch: the present epoch, from 0.
        batch: batches of this epoch that the program has been given.
        extra: plain values of the program.
        finished: whether the program has said that the training is complete.
    """

    things: Mapping[str, Stateful]
    step: int = 0
    epoch: int = 0
    batch: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    _random: dict[str, Any] | None = None

    def capture(self) -> dict[str, Any]:
        """The state as plain containers and tensors, for a checkpoint."""
        return {
            "things": {name: thing.state_dict() for name, thing in self.things.items()},
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "extra": self.extra,
            "finished": self.finished,
            "random": randomness.capture(),
        }

    def take(self, saved: dict[str, Any]) -> None:
        """Go back to what `capture` gave, but for the random generators: see `take_random`.

        Raises:
            ValueError: the checkpoint was made with other things.
        """
        if saved["things"].keys() != self.things.keys():
            raise ValueError(
                f"checkpointed: got {sorted(self.things)}, but the checkpoint holds {sorted(saved['things'])}; "
                "pass the same things as the run that saved it, or start anew"
            )
        for name, thing in self.things.items():
            thing.load_state_dict(saved["things"][name])
        self.step, self.epoch, self.batch = saved["step"], saved["epoch"], saved["batch"]
        self.extra, self.finished = saved["extra"], saved["finished"]
        self._random = saved["random"]

    def take_random(self) -> None:
        """Put the random generators back, once.

        Done when the first batch is handed out: what comes before it in the program, such as making a data
        loader's iterator, may draw from them, and did so before the saved step in the run that saved.
        """
        if self._random is not None:
            randomness.restore(self._random)
            self._random = None
