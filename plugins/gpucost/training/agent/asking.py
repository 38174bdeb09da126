"""How is something asked of the program? By a request in the work folder, which it looks for at every step."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from gpucost.jobstore import Command
from gpucost.training.agent.say import say
from gpucost.training.workdir import Request, Workdir


class Told(Protocol):
    """The part of `Program` that is used here."""

    def ask_to_end(self) -> None:
        """Send SIGTERM to the training's processes."""
        ...


class ByRequest:
    """For a program that uses `checkpointed`.

    Args:
        workdir: where requests are left.
    """

    takes_recipe = True

    def __init__(self, workdir: Workdir) -> None:
        self._workdir = workdir
        self._sequence = 0

    def ask(self, program: Told, command: Command, why: str, gone_by: datetime | None) -> None:
        """Leave a request."""
        self._sequence += 1
        request = {"sequence": self._sequence, "command": command, "why": why, "gone_by": gone_by}
        try:
            self._workdir.ask(Request.model_validate(request))
        except OSError as error:
            say(f"the program cannot be asked to {command}: {error}")
            if command is Command.SAVE_AND_STOP:
                program.ask_to_end()

    def reserve(self) -> float:
        """Nothing: the program uploads what it saves."""
        return 0.0
