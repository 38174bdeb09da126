"""`gpucost rehearsal`: start the cloud, and ask a running one. The same as `python -m gpucost.rehearsal`."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpucost.rehearsal.interruptions.script import InterruptionKind
from gpucost.rehearsal.settings import Settings
from gpucost.rehearsal.wording import faults as faults_of

if TYPE_CHECKING:
    from types import FrameType

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, invoke_without_command=True)
log = logging.getLogger(__name__)

STATE_DIR = Path(".gpucost/rehearsal")
WIDE = 200
SHOWN = 200
"""Characters of an answer that is not understood."""

Url = Annotated[str, typer.Option(envvar="GPUCOST_REHEARSAL_URL", help="Of a running cloud; else from --state-dir.")]
StateDir = Annotated[Path, typer.Option(help="Machines' folders, the journal, the clock: one folder is one cloud.")]


@app.callback()
def rehearsal(
    context: typer.Context,
    market: Annotated[Path | None, typer.Option(help="A market file, or a folder of traces. Required.")] = None,
    state_dir: StateDir = STATE_DIR,
    port: Annotated[int, typer.Option(help="On 127.0.0.1; 0: the one of the last start, or any free one.")] = 0,
    speed: Annotated[
        float | None,
        typer.Option(help="Rehearsal seconds per real second; left out: as at the last start, at first 1."),
    ] = None,
    origin: Annotated[str | None, typer.Option(help="What a new clock shows, ISO 8601 with offset.")] = None,
    offset_hours: Annotated[float | None, typer.Option(help="Traces: how far into them the cloud begins.")] = None,
    spot_capacity: Annotated[int | None, typer.Option(help="Traces: spot instances of one pool.")] = None,
    on_demand_capacity: Annotated[int | None, typer.Option(help="Traces: on-demand instances of one pool.")] = None,
    role_credentials: Annotated[Path | None, typer.Option(help="Mode-600 JSON: access_key, secret_key.")] = None,
    image_path: Annotated[str, typer.Option(help="Folders that the image puts on PATH, joined by ':'.")] = "",
    script: Annotated[Path | None, typer.Option(help='JSON {"rules": […]}: interruptions at a progress.')] = None,
    habits: Annotated[Path | None, typer.Option(help="JSON: how often the cloud warns, and for nothing.")] = None,
    faults: Annotated[Path | None, typer.Option(help='JSON {"rules": […]}: faults from the start on.')] = None,
    seed: Annotated[int | None, typer.Option(help="Of the faults' random numbers.")] = None,
    boot_s: Annotated[float | None, typer.Option(help="pending -> running, rehearsal seconds.")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="No machine may use more, whatever its type has.")] = None,
    consistency_lag_real_s: Annotated[
        float | None, typer.Option(help="How long at most a new instance is not shown yet, real seconds.")
    ] = None,
    keep_machines_real_s: Annotated[
        float | None, typer.Option(help="How long machines go on without a cloud, real seconds.")
    ] = None,
) -> None:
    """An EC2 on this machine, on loopback only: prices that move, machines that vanish, answers that get lost.

    Without a command it runs until Ctrl-C, which ends its machines. SIGTERM lets them go on for a cloud that is
    started again on the same --state-dir.
    """
    if context.invoked_subcommand is not None:
        return
    given = {key: value for key, value in context.params.items() if value is not None}
    given["image_path"] = tuple(Path(part) for part in image_path.split(":") if part)
    if market is None:
        raise typer.BadParameter(
            "expected a market file, such as include/market/small.json, or a folder of traces", param_hint="--market"
        )
    try:
        settings = Settings.model_validate(given)
    except ValidationError as wrong:
        for fault in faults_of(wrong, "options"):
            typer.echo(f"error: {fault}", err=True)
        raise typer.Exit(2) from wrong
    raise typer.Exit(_run(settings))


def _run(settings: Settings) -> int:
    """Run until told to end; 0 after a clean end, 1 when it could not start."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s rehearsal: %(message)s")
    for noisy in ("botocore", "werkzeug", "moto"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # moto and the EC2 model take a second to import: only now that the arguments are good
    from gpucost.rehearsal.cloud import RehearsalCloud

    try:
        cloud = RehearsalCloud(settings)
    except (OSError, ValueError) as error:
        log.error("cannot start: %s", error)  # noqa: TRY400 (the sentence, not the stack)
        return 1

    def end(number: int, _frame: FrameType | None) -> None:
        # a supervisor that restarts us says SIGTERM; a person who is done says Ctrl-C
        cloud.request_stop(machines_go_on=number == signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    cloud.serve()
    return 0


@app.command()
def status(
    url: Url = "",
    state_dir: StateDir = STATE_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Its clock, and every machine that it has or had."""
    found = _ask(url, state_dir, "GET", "status", "instances")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(f"{found['market']}\nnow {found['now']}, regions {', '.join(found['regions'])}")
    table = Table("instance", "state", "type", "zone", "lifecycle", "launched (UTC)", "ended", "why", "job", box=None)
    for one in found["instances"]:
        times = [_minute(one[name]) for name in ("launched", "ended")]
        why = one["reason"] or (f"notice for {_minute(one['action_at'])}" if one["action_at"] else "")
        place = (one["instance_type"], one["zone"], one["lifecycle"])
        table.add_row(one["instance_id"], one["state"], *place, *times, why, escape(one["tags"].get("gpucost:job", "")))
    Console(width=WIDE).print(table)


@app.command()
def interrupt(
    instance_id: Annotated[str, typer.Argument(help="A spot instance.")],
    event: Annotated[
        str, typer.Option(help="notice: gone after two minutes; no-notice: at once; false-notice; rebalance.")
    ] = "notice",
    url: Url = "",
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Take a spot instance back, or warn for nothing."""
    known: tuple[str, ...] = InterruptionKind.__args__  # type: ignore[attr-defined]  # a Literal's values
    if event not in known:
        raise typer.BadParameter(f"got {event!r}, expected one of {', '.join(known)}", param_hint="--event")
    asked = {"instance_id": instance_id, "event": event}
    one = _ask(url, state_dir, "POST", "interrupt", "action_at", asked)
    due = f", terminates at {one['action_at']}" if one["action_at"] and event == "notice" else ""
    typer.echo(f"{instance_id}: {event}{due}")


@app.command()
def invoice(
    url: Url = "",
    state_dir: StateDir = STATE_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="With every segment, for programs.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Rows of a Cost and Usage Report.")] = False,
) -> None:
    """What every machine cost so far."""
    if as_csv:
        typer.echo(_ask_text(url, state_dir, "GET", "invoice.csv"), nl=False)
        return
    bill = _ask(url, state_dir, "GET", "invoice", "disk_total")
    if as_json:
        typer.echo(json.dumps(bill, indent=2))
        return
    table = Table("instance", "type", "zone", "lifecycle", "seconds", "billed", "compute", "disk", "why free", box=None)
    for line in bill["lines"]:
        place = (line["instance_type"], line["zone"], line["lifecycle"])
        free = "interrupted in its first hour" if line["free_first_hour"] else ""
        figures = (str(line["seconds"]), str(line["billed_seconds"]), line["amount"], line["disk_amount"])
        table.add_row(line["instance_id"], *place, *figures, free)
    Console(width=WIDE).print(table)
    typer.echo(f"as of {bill['as_of']}: {bill['total']} {bill['currency']}, {bill['disk_total']} of it for disks")


def _minute(moment: str | None) -> str:
    return datetime.fromisoformat(moment).strftime("%m-%d %H:%M:%S") if moment else ""


def _ask(
    url: str, state_dir: Path, method: str, path: str, expected: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    text = _ask_text(url, state_dir, method, path, body)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or expected not in found:
        typer.echo(f"error: what answers is no rehearsal cloud: {text[:SHOWN]!r}; give another --url", err=True)
        raise typer.Exit(1)
    return found


def _ask_text(url: str, state_dir: Path, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
    import httpx

    address = f"{url or _found(state_dir)}/rehearsal/{path}"
    try:
        answer = httpx.request(method, address, json=body, trust_env=False, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as away:
        typer.echo(f"error: no rehearsal cloud answers at {address}: {away}; start one, or give --url", err=True)
        raise typer.Exit(1) from away
    if answer.is_error:
        typer.echo(f"error: {_said(answer.text)}", err=True)
        raise typer.Exit(1)
    return answer.text


def _said(text: str) -> str:
    """The sentence of an answer that refuses; all of it when it is no such answer (of another server, say)."""
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:SHOWN]


def _found(state_dir: Path) -> str:
    try:
        return str(json.loads((state_dir / "endpoint.json").read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError) as missing:
        typer.echo(f"error: no rehearsal cloud was started on {state_dir}; give --state-dir or --url", err=True)
        raise typer.Exit(1) from missing
