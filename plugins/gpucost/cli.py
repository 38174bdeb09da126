"""`gpucost`: the same rooms from a terminal, with Airflow's connections and settings; `run` needs neither."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gpucost.rehearsal.terminal import app as rehearsal

if TYPE_CHECKING:
    from gpucost.lifecycle.services import Services

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False, help=__doc__)
app.add_typer(rehearsal, name="rehearsal")
console = Console()

# Whether the schema is up to date is no answer to what was asked.
logging.getLogger("alembic").setLevel(logging.WARNING)

WIDEST = 1000
"""Characters; no table is wider."""


@app.command()
def quotes() -> None:
    """Prices in force in every pool of the sites, cheapest first."""
    services = _services()
    table = Table("pool", "per instance-hour", "GPU", "as of (UTC)", "source", box=None)
    with _answers():
        found = services.provider.quotes(services.clock.now())
    for quote in sorted(found, key=lambda one: one.price.amount):
        gpu = f"{quote.instance.gpu_count} x {quote.instance.gpu_kind}"
        table.add_row(quote.pool.key, str(quote.price), gpu, f"{quote.as_of:%Y-%m-%d %H:%M}", quote.source)
    _print_whole(table)


@app.command()
def leases(job: Annotated[str, typer.Argument(help="The job's key; left out: every open lease.")] = "") -> None:
    """Machines that are paid for: where, since when, until when at the latest."""
    services = _services()
    table = Table("lease", "state", "instance", "pool", "price", "launched (UTC)", "expires (UTC)", box=None)
    for lease in services.leases.of_job(job) if job else services.leases.open():
        launched = f"{lease.launched_at:%m-%d %H:%M}" if lease.launched_at else ""
        row = (lease.id, str(lease.state), lease.instance_id or "", lease.pool.key, str(lease.price), launched)
        table.add_row(*row, f"{lease.expires_at:%m-%d %H:%M}")
    _print_whole(table)


@app.command()
def reap(dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be ended.")] = False) -> None:
    """End machines whose job is over, whose time is up, or that belong to nobody."""
    from gpucost.lifecycle.reaping import reap as reap_once

    services = _services()
    with _answers():
        findings = reap_once(services, dry_run=dry_run)
    for finding in findings:
        verb = "would end" if dry_run else "ends"
        price = f", {finding.at_stake}" if finding.at_stake else ""
        console.print(
            f"{verb} {finding.instance_id or finding.lease_id}: {finding.why}{price}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print(f"{len(findings)} found", highlight=False)


@app.command()
def report(job: Annotated[str, typer.Argument(help="The job's key.")]) -> None:
    """What a job cost, attempt by attempt."""
    books = _services().books
    try:
        page = books.report(job).markdown()
    except LookupError as unknown:
        typer.echo(f"error: {unknown.args[0]}", err=True)
        raise typer.Exit(2) from unknown
    console.print(page, highlight=False, markup=False, soft_wrap=True)


@app.command()
def run(
    job_file: Annotated[Path, typer.Argument(help="YAML with the job's fields, e.g. include/jobs/digits.yaml.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Instead of the file's, e.g. recipe.batch=32; repeatable."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew, from nothing; nothing is deleted.")] = False,
    store: Annotated[str, typer.Option(help="file:///folder or s3://bucket/prefix; left out: beside the file.")] = "",
) -> None:
    """Run a job on this machine, without Airflow. Ctrl-C saves and stops; the same command goes on from there."""
    from gpucost.local.jobfile import JobFileError
    from gpucost.local.run import NotRun
    from gpucost.local.run import run as run_job

    try:
        code = run_job(job_file, changes or [], console, fresh=fresh, store_url=store)
    except JobFileError as wrong:
        for fault in wrong.faults:
            typer.echo(f"error: {job_file}: {fault}", err=True)
        raise typer.Exit(2) from wrong
    except NotRun as reason:
        typer.echo(str(reason) if reason.code == 0 else f"error: {reason}", err=reason.code != 0)
        raise typer.Exit(reason.code) from reason
    raise typer.Exit(code)


def _services() -> Services:
    from gpucost.hooks.gpucost import GpuCostHook

    try:
        return GpuCostHook().services()
    except (ValueError, ConnectionError) as wrong:
        typer.echo(f"error: {wrong}", err=True)
        raise typer.Exit(2) from wrong


@contextmanager
def _answers() -> Iterator[None]:
    """Say what the cloud refused, in one line instead of a traceback."""
    from gpucost.capacity.providers.base import ProviderError

    try:
        yield
    except ProviderError as refused:
        typer.echo(f"error: {refused}", err=True)
        raise typer.Exit(1) from refused


def _print_whole(table: Table) -> None:
    """One line per row however narrow the terminal: ids are there to be copied, and lines to be searched."""
    wide = console.options.update(width=WIDEST)
    width = Measurement.get(console, wide, table).maximum
    Console(width=max(width, console.width)).print(table)


if __name__ == "__main__":
    app()
