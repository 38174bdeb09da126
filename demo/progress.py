"""Services coming up, as a live table on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

WAITING, STARTING, READY, RUNNING, FAILED, ENDED = "waiting", "starting", "ready", "was running", "failed", "ended"
"""States of a service."""

_STYLES = {WAITING: "dim", STARTING: "yellow", READY: "green", RUNNING: "green", FAILED: "bold red", ENDED: "dim"}


def is_live(stream: IO[str] | None = None, environ: Mapping[str, str] | None = None) -> bool:
    """May we draw on this terminal? Not in CI, not where colour is unwanted, not on a dumb or absent terminal."""
    stream = sys.stdout if stream is None else stream
    environ = os.environ if environ is None else environ
    plain = environ.get("CI") or environ.get("NO_COLOR") or environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not plain


@dataclass
class Row:
    """What is shown of one service."""

    name: str
    state: str = WAITING
    seconds: float = 0.0
    note: str = ""
    """Its address when it is ready, what it waits for before."""


class Progress(Protocol):
    """Shows services coming up."""

    def update(self, name: str, state: str, seconds: float = 0.0, note: str = "") -> None:
        """The present state of one service; `seconds` since its start."""
        ...

    def say(self, text: str) -> None:
        """A sentence beside the table."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Silent:
    """Shows nothing (tests, and code that only wants a stack)."""

    def update(self, name: str, state: str, seconds: float = 0.0, note: str = "") -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@dataclass
class PlainProgress(Silent):
    """One line per change of state."""

    write: Callable[[str], object] = print
    _states: dict[str, str] = field(default_factory=dict)

    def update(self, name: str, state: str, seconds: float = 0.0, note: str = "") -> None:
        if self._states.get(name) == state or state == WAITING:
            return
        self._states[name] = state
        took = f" after {seconds:.1f} s" if state in (READY, FAILED) else ""
        # What a starting service waits for changes all the time: only the live table shows it.
        what = f"  {note}" if note and state != STARTING else ""
        self.write(f"{name}: {state}{took}{what}")

    def say(self, text: str) -> None:
        self.write(text)


class LiveProgress(Silent):
    """A table that is drawn again in place."""

    def __init__(self, console: Console | None = None, title: str = "services") -> None:
        self._console = console or Console()
        self._title = title
        self._rows: dict[str, Row] = {}
        self._begun = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, name: str, state: str, seconds: float = 0.0, note: str = "") -> None:
        self._rows[name] = Row(name, state, seconds, note)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _table(self) -> Table:
        elapsed = time.monotonic() - self._begun
        table = Table(title=f"{self._title}  {elapsed:.0f} s", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("service", min_width=15)
        table.add_column("state", min_width=11)
        table.add_column("seconds", justify="right")
        table.add_column("", overflow="ellipsis", no_wrap=True)
        for row in list(self._rows.values()):
            style = _STYLES[row.state]
            seconds = f"{row.seconds:.1f}" if row.state in (STARTING, READY, FAILED) else ""
            mark = self._spinner if row.state == STARTING else Text("●" if row.state != WAITING else "·", style=style)
            note = Text(row.note, style="" if row.state in (READY, RUNNING) else "dim")
            table.add_row(mark, row.name, Text(row.state, style=style), seconds, note)
        return table


def make_progress(title: str = "services") -> Progress:
    """The live table where there is a terminal for it, else plain lines."""
    return LiveProgress(title=title) if is_live() else PlainProgress()
