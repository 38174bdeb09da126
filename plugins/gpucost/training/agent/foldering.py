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
from gpucost.training.outage import brief, store_errors

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

    def finish(self, until: float) -> bool:
        """Keep what the program has saved last; whether that was done before `until` (real seconds, monotonic)."""
        done = threading.Event()

        def save() -> None:
            try:
                self._save(final=True)
                done.set()
            except self._errors as error:
                say(f"folder: what was saved last is not kept: {brief(error)}")

        # A thread, because a store that hangs must not keep the node from saying why it ended.
        last = threading.Thread(target=save, name="last files", daemon=True)
        last.start()
        last.join(max(0.0, until - self._real()))
        return done.is_set()

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
