"""`python -m demo run`, `up`, `down`, `status`, `cli`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from pydantic import ValidationError
from rich.console import Console

from .airflow_api import AirflowError
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
Market = Annotated[Path | None, typer.Option(help="Market file of the rehearsal cloud; left out: three zones.")]
Speed = Annotated[float, typer.Option(help="Rehearsal seconds per real second.")]
SPEED = StackSettings.speed


def make_console() -> Console:
    """A console that is never narrower than the result table, also where the output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


EXPECTED = (
    StackError,
    AirflowError,
    ValidationError,
    httpx.HTTPError,
    OSError,
    RuntimeError,
    subprocess.SubprocessError,
)
"""What may go wrong without being a mistake of ours: it becomes one message, without a traceback."""


def message(error: Exception) -> str:
    """What went wrong, for a person; of values that were refused only the names, since they may be secret."""
    if isinstance(error, ValidationError):
        details = error.errors(include_input=False, include_url=False, include_context=False)
        fields = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'value'}: {one['msg']}" for one in details)
        return f"{error.title} is not as expected: {fields}"
    text = str(error) or type(error).__name__
    if isinstance(error, httpx.RequestError):
        with suppress(RuntimeError):  # it may know of no request
            return f"{error.request.method} {error.request.url}: {text}"
    return text


@contextmanager
def explained(home: Path) -> Iterator[None]:
    """Say in one message what went wrong and whether services still run, and leave with exit status 1."""
    try:
        yield
    except typer.Exit:
        raise
    except EXPECTED as error:
        print(f"error: {message(error)}", file=sys.stderr)
        # Where not even this can be told, the first message is the one that matters.
        with suppress(*EXPECTED):
            if Stack(StackSettings(home=home)).lives():
                print("services are still running; `make down` ends them", file=sys.stderr)
        raise typer.Exit(1) from None


def open_stack(
    home: Path, services: str = "", *, fixed_ports: bool = False, market: Path | None = None, speed: float = SPEED
) -> Stack:
    """A stack as the command line wants it: progress on the terminal, and what starts, with ports of the environment.

    Args:
        home: its folder.
        services: some of `SERVICES`, with commas; all by default.
        fixed_ports: heed the environment's ports; only a start needs them.
        market, speed: of the rehearsal cloud; only a start needs them.
    """
    chosen = tuple(name.strip() for name in services.split(",")) if services else SERVICES
    ports = ports_from_environment() if fixed_ports else {}
    settings = StackSettings(home=home, services=chosen, fixed_ports=ports, market=market, speed=speed)
    return Stack(settings, make_progress("services"))


@app.command()
def up(
    home: Home = HOME,
    services: Annotated[str, typer.Option(help="Only these, with commas.")] = "",
    market: Market = None,
    speed: Speed = SPEED,
) -> None:
    """Start the services and wait until they are healthy."""
    begun = time.monotonic()
    with explained(home):
        stack = open_stack(home, services, fixed_ports=True, market=market, speed=speed)
        stack.up()
        print(f"up after {time.monotonic() - begun:.0f} s")
        for name, url in stack.addresses().items():
            print(f"  {name:10} {url}")
        if "airflow" in stack.addresses():
            for user, password in stack.credentials().passwords.items():
                print(f"  airflow login: {user} / {password}")


@app.command()
def run(home: Home = HOME, market: Market = None, speed: Speed = SPEED) -> None:
    """Start what does not run yet, run the demo's job, and hold it to its promises; the pages stay up."""
    from .earlier import end_interrupted
    from .job import DAG_ID, run_demo

    with explained(home):
        stack = open_stack(home, fixed_ports=True, market=market, speed=speed)
        with stack.demo():
            try:
                stack.up()
                kept = run_demo(stack, make_console())
            except (KeyboardInterrupt, SystemExit):
                print("interrupted: ending the services")
                try:
                    end_interrupted(stack, DAG_ID, print)
                finally:
                    stack.down()
                raise
        if not kept:
            raise StackError(f"not every promise was kept, see above; the logs are in {home / 'logs'}")


@app.command()
def down(home: Home = HOME) -> None:
    """End the services that `up` started, and only those."""
    begun = time.monotonic()
    with explained(home):
        ended = open_stack(home).down()
        took = time.monotonic() - begun
        print(f"down: {ended} processes ended in {took:.1f} s" if ended else "down: nothing was running")


@app.command()
def status(home: Home = HOME) -> None:
    """Say what runs; exit status 0 when everything does."""
    with explained(home):
        states = open_stack(home).status()
    for name, state in states.items():
        print(f"  {name:14} {state}")
    if set(states.values()) != {"ready"}:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def cli(context: typer.Context, home: Home = HOME) -> None:
    """Run `gpucost` with this stack's connections, e.g. `leases`, `quotes`, `reap --dry-run`, `report JOB`."""
    with explained(home):
        environment = open_stack(home).environment() | {"AIRFLOW_HOME": str((home / "airflow").absolute())}
        # In this one's place, so that Ctrl-C is the command's own: it may have something to save.
        os.execve(sys.executable, [sys.executable, "-m", "gpucost", *context.args], environment)  # noqa: S606


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


def main() -> None:
    """Run a command; exit status 1 with a message for what went wrong (see `explained`), 130 after Ctrl-C."""
    signal.signal(signal.SIGTERM, _terminate)
    app()


if __name__ == "__main__":
    main()
