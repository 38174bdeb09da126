"""The timeline of a job: what happened, line by line, and below it the present state; then a table of its attempts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .progress import is_live

STYLES: Mapping[str, str] = {
    "quote": "cyan",
    "placement": "bold cyan",
    "lease": "blue",
    "attempt": "blue",
    "checkpoint": "dim",
    "interruption": "bold red",
    "notice": "bold yellow",
    "resume": "bold green",
    "release": "blue",
    "charge": "magenta",
    "finish": "bold green",
    "failure": "bold red",
    "warning": "yellow",
}
"""How a kind of event is drawn; any other kind is drawn plain."""

KIND_WIDTH = max(len(kind) for kind in STYLES)


@dataclass(frozen=True)
class TimelineEvent:
    """Something that happened to a job."""

    at: datetime
    """By the rehearsal's clock; aware."""
    kind: str
    """One word, a key of `STYLES` where one fits."""
    text: str
    """One sentence for a person."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """More figures, shown dimmed after the sentence as `name=value`."""


@dataclass(frozen=True)
class AttemptRow:
    """One line of the result table: one attempt on one lease."""

    attempt: int
    pool: str
    """Where it ran, e.g. `us-east-1a g5.xlarge spot`."""
    start: datetime
    end: datetime
    dollars: Decimal
    steps: int
    """Steps that counted in the end."""
    lost: int
    """Steps that were done and had to be done again."""
    resumed_at: int | None
    """The step it went on from; None when it began from the start."""
    ended_because: str


class Timeline:
    """Shows events as they come, and one status line that always is the last.

    Args:
        start: events show the time since this moment; by default since the first event.
        live: draw on the terminal; by default where there is one for it.
        console: where to draw.
        write: where plain lines go.
        plain_every: real seconds between two status lines where there is no terminal.
        monotonic: counts real seconds.
    """

    def __init__(
        self,
        start: datetime | None = None,
        *,
        live: bool | None = None,
        console: Console | None = None,
        write: Callable[[str], object] = print,
        plain_every: float = 5.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plain_every = plain_every
        self._monotonic = monotonic
        self._plain_at = -plain_every
        self._start = start
        self._console = console or Console(highlight=False)
        self._write = write
        self._status = Text("")
        self._last_plain = ""
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if is_live() if live is None else live:
            # Only the status line is drawn again and again; events scroll by above it and stay in the terminal.
            self._live = Live(console=self._console, get_renderable=self._footer, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def event(self, event: TimelineEvent) -> None:
        """Show that something happened."""
        self._start = self._start or event.at
        clock = f"{event.at:%H:%M:%S} +{since(event.at - self._start)}"
        detail = "  ".join(f"{name}={value}" for name, value in event.detail.items())
        if self._live is None:
            self._write(f"{clock}  {event.kind:{KIND_WIDTH}}  {event.text}" + (f"  {detail}" if detail else ""))
            return
        # A grid keeps the second line of a long sentence below its first.
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(min_width=KIND_WIDTH, no_wrap=True)
        grid.add_column(overflow="fold")
        style = STYLES.get(event.kind, "")
        sentence = Text(event.text, style=style if style.startswith("bold") else "")
        sentence.append(f"  {detail}" if detail else "", style="dim")
        grid.add_row(Text(clock), Text(event.kind, style=style), sentence)
        self._console.print(grid)

    def status(self, text: str) -> None:
        """Replace the status line, e.g. by what `progress_line` returns; in plain mode a line when it changed."""
        if self._live is not None:
            self._status = Text(text)
        elif text != self._last_plain and self._monotonic() - self._plain_at >= self._plain_every:
            self._last_plain, self._plain_at = text, self._monotonic()
            self._write(text)

    def _footer(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        if self._status.plain:
            grid.add_row(self._spinner, self._status)
        return grid


def progress_line(
    *,
    step: int,
    steps: int,
    steps_per_second: float | None = None,
    loss: float | None = None,
    money: Decimal | None = None,
    width: int = 24,
) -> str:
    """The usual status line: `[####----] step 300/1200  41.2 steps/s  loss 0.412  $0.0312 so far`."""
    filled = width * min(step, steps) // steps if steps > 0 else 0
    parts = [f"[{'#' * filled}{'-' * (width - filled)}] step {step}/{steps}"]
    if steps_per_second is not None:
        parts.append(f"{steps_per_second:.1f} steps/s")
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if money is not None:
        parts.append(f"${money:.4f} so far")
    return "  ".join(parts)


def since(passed: timedelta) -> str:
    """A duration as `h:mm:ss`."""
    seconds = int(passed.total_seconds())
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def result_table(rows: Sequence[AttemptRow]) -> Table:
    """The attempts of a job with their sums; print it with `rich.console.Console`. Readable at 100 columns."""
    table = Table(title="attempts", title_justify="left", box=None, pad_edge=False, padding=(0, 1), show_footer=True)
    table.add_column("#", justify="right")
    table.add_column("pool", overflow="fold", min_width=12)
    table.add_column("from - to", no_wrap=True)
    table.add_column("hours", justify="right", no_wrap=True, footer=f"{sum(map(_hours, rows)):.2f}")
    table.add_column(
        "dollars", justify="right", no_wrap=True, footer=f"{sum((r.dollars for r in rows), Decimal(0)):.4f}"
    )
    table.add_column("steps", justify="right", no_wrap=True, footer=str(sum(row.steps for row in rows)))
    table.add_column("lost", justify="right", no_wrap=True, footer=str(sum(row.lost for row in rows)))
    table.add_column("resumed\nat", justify="right", no_wrap=True)
    table.add_column("ended because", overflow="fold", min_width=14)
    for row in rows:
        table.add_row(
            str(row.attempt),
            Text(row.pool),
            f"{row.start:%H:%M:%S}-{row.end:%H:%M:%S}",
            f"{_hours(row):.2f}",
            f"{row.dollars:.4f}",
            str(row.steps),
            str(row.lost),
            "" if row.resumed_at is None else str(row.resumed_at),
            Text(row.ended_because),
        )
    return table


def _hours(row: AttemptRow) -> float:
    return (row.end - row.start).total_seconds() / 3600
