"""What if a program saves by itself? Its folder is restored before it starts, and kept while it runs and at its end."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

from gpucost.jobstore import Command, FencedOut
from gpucost.training.agent.asking import Told
from gpucost.training.agent.say import say
from gpucost.training.agent.watch import Repeat
from gpucost.training.outage import brief, patiently, store_errors

LEAST_RESERVE_SECONDS = 5.0
"""Real seconds for the last upload while nothing tells how long one takes."""
RESULTS = "results.json"


class Sync(Protocol):
    """The part of `foldersync.FolderSync` that is used here."""

    def restore(self) -> bool:
        """Bring the folder back; whether there was anything."""
        ...

    def save(self, final: bool = False) -> bool:
        """Keep the folder; whether anything had changed."""
        ...


class LastSave(threading.Thread):
    """Keeps what the program has saved last; a store that hangs must not keep the node from saying why it ended.

    It is watched over as a program is. Asked to end, it goes on: it is what there is to do before the end.

    Args:
        save: what to do.
        errors: that it may raise, told in one line.
    """

    def __init__(self, save: Callable[[], None], errors: tuple[type[Exception], ...]) -> None:
        super().__init__(name="last files", daemon=True)
        self.done = False
        self._save = save
        self._errors = errors
        self._abandoned = False
        self.start()

    def run(self) -> None:
        """Thread's work."""
        try:
            self._save()
            self.done = True
        except self._errors as error:
            say(f"folder: what was saved last is not kept: {brief(error)}")

    def exit_code(self) -> int | None:
        """None while it works, and nobody has left it alone."""
        return None if self.is_alive() and not self._abandoned else 0

    def kill(self) -> None:
        """Leave it alone."""
        self._abandoned = True

    def ask_to_end(self) -> None:
        """Go on."""

    def dump_stacks(self) -> int:
        """There is no program."""
        return 0


class FolderKeeper:
    """Keeps the folder of a program that saves by itself.

    Args:
        sync: moves the files.
        folder: where they lie.
        every_seconds: real seconds between two looks for changed files.
        real: real seconds, monotonic.
    """

    takes_recipe = False

    def __init__(
        self, sync: Sync, folder: Path, every_seconds: float, real: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self._sync = sync
        self._real = real
        self._lock = threading.Lock()
        self._longest = 0.0
        self._asked_to_end = False
        self._errors: tuple[type[Exception], ...] = (*store_errors(), FencedOut)
        self.thread = Repeat("folder", every_seconds, self._save, self._errors)

    def restore(self) -> None:
        """Bring back what an earlier attempt has kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sync.restore()

    def ask(self, program: Told, command: Command, _why: str, _gone_by: datetime | None) -> None:
        """Keep what is there; or tell the program to save and end, as a machine that shuts down would."""
        if command is Command.SAVE:
            self.thread.soon()
        elif not self._asked_to_end:
            self._asked_to_end = True
            program.ask_to_end()

    def reserve(self) -> float:
        """Real seconds that the last upload will need."""
        return max(LEAST_RESERVE_SECONDS, 1.5 * self._longest)

    def last_save(self, patience: float | None) -> LastSave:
        """Begin to keep what the program has saved last.

        Args:
            patience: real seconds to wait for a store that is away; None: as `outage` says.
        """
        return LastSave(lambda: patiently(lambda: self._save(final=True), say, patience=patience), self._errors)

    def results(self) -> dict[str, float]:
        """Final metrics: the numbers in the folder's results.json, where there is one."""
        try:
            document = json.loads((self.folder / RESULTS).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            say(f"{RESULTS} cannot be read and counts as none: {error}")
            return {}
        items = document.items() if isinstance(document, dict) else []
        return {name: float(value) for name, value in items if _is_number(value)}

    def _save(self, final: bool = False) -> None:
        with self._lock:
            began = self._real()
            self._sync.save(final=final)
            self._longest = max(self._longest, self._real() - began)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
