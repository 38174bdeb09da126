"""`python -m demo up`, `down`, `status`."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from .progress import make_progress
from .settings import SERVICES, StackError, StackSettings, ports_from_environment
from .stack import Stack

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The services behind gpucost's demo.",
)

Home = Annotated[Path, typer.Option(help="Folder for logs, secrets, databases and what is remembered.")]
HOME = Path(".gpucost")


def make_console() -> Console:
    """A console that is never narrower than the result table, also where the output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def open_stack(home: Path, services: str = "", title: str = "services") -> Stack:
    """A stack as the command line wants it: ports from the environment, progress on the terminal."""
    chosen = tuple(services.split(",")) if services else SERVICES
    settings = StackSettings(home=home, services=chosen, fixed_ports=ports_from_environment())
    return Stack(settings, make_progress(title))


@app.command()
def up(home: Home = HOME, services: Annotated[str, typer.Option(help="Only these, with commas.")] = "") -> None:
    """Start the services and wait until they are healthy."""
    begun = time.monotonic()
    stack = open_stack(home, services)
    stack.up()
    print(f"up after {time.monotonic() - begun:.0f} s")
    for name, url in stack.addresses().items():
        print(f"  {name:10} {url}")
    if "airflow" in stack.addresses():
        for user, password in stack.credentials().passwords.items():
            print(f"  airflow login: {user} / {password}")


@app.command()
def run(home: Home = HOME) -> None:
    """Start what does not run yet, run the demo's job, and hold it to its promises; the pages stay up."""
    from .job import run_demo

    stack = open_stack(home)
    try:
        stack.up()
        kept = run_demo(stack, make_console())
    except (KeyboardInterrupt, SystemExit):
        print("interrupted: ending the services")
        stack.down()
        raise
    if not kept:
        raise StackError(f"not every promise was kept, see above; the logs are in {home / 'logs'}")


@app.command()
def down(home: Home = HOME) -> None:
    """End the services that `up` started, and only those."""
    begun = time.monotonic()
    ended = open_stack(home).down()
    print(
        f"down: {ended} processes ended in {time.monotonic() - begun:.1f} s" if ended else "down: nothing was running"
    )


@app.command()
def status(home: Home = HOME) -> None:
    """Say what runs; exit status 0 when everything does."""
    stack = open_stack(home)
    states = stack.status()
    for name, state in states.items():
        print(f"  {name:14} {state}")
    if set(states.values()) != {"ready"}:
        raise typer.Exit(1)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


def main() -> None:
    """Run a command; exit status 1 with a message for what went wrong, 130 after Ctrl-C."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
