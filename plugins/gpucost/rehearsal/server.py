"""Which request goes where? One HTTP server on loopback: the EC2 API, instance metadata, the rehearsal's controls."""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from moto.core.exceptions import ServiceException
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from gpucost.clock import SpecClock
from gpucost.rehearsal import timekeeping
from gpucost.rehearsal.api import wire
from gpucost.rehearsal.api.actions import Ec2Api
from gpucost.rehearsal.api.moto_side import ACCOUNT, MotoSide
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.journal import FileJournal
from gpucost.rehearsal.control import Control
from gpucost.rehearsal.interruptions.script import Script, load_rules
from gpucost.rehearsal.machines.hypervisor import Hypervisor
from gpucost.rehearsal.machines.imds import Imds
from gpucost.rehearsal.market.market import Market, load_market
from gpucost.rehearsal.settings import Settings

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
BACKLOG = 512
FORM = "application/x-www-form-urlencoded"


class _QuietHandler(MotoRequestHandler):
    """No line for every request: the log tells what happened to machines."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:  # noqa: ARG002
        log.debug("%s %s %s", self.command, self.path, code)


class RehearsalCloud:
    """An EC2 stand-in. `RehearsalCloud(settings).serve()` runs until `stop()`; or `start()`, use, `stop()`.

    Raises:
        MarketError, ValueError: at construction, when a file it is started with is wrong.
        OSError: the port is taken.
    """

    def __init__(self, settings: Settings) -> None:
        settings = settings.model_copy(update={"state_dir": settings.state_dir.resolve()})
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = load_market(settings.market)
        script = Script(load_rules(settings.script) if settings.script else [])
        # the port before the slow part: when it is taken, say so at once
        with socket.create_server((HOST, settings.port), backlog=BACKLOG) as listening:
            moto = MotoSide(file)
            kept = timekeeping.take_up(settings.state_dir, settings.speed, settings.origin, datetime.now(UTC))
            self._server = make_server(
                HOST, 0, self.wsgi, threaded=True, request_handler=_QuietHandler, fd=listening.fileno()
            )
        self.url = f"http://{HOST}:{self._server.port}"
        self.clock = SpecClock(kept.clock)
        self.market = Market(file, kept.first_origin)
        self._journal = FileJournal(settings.state_dir / "journal.jsonl")
        self._journal.write("start", clock=self.clock.spec.model_dump(mode="json"), url=self.url, pid=os.getpid())
        self.book = Book(self.market, self.clock, self._journal, visible_s=settings.terminated_visible_s)
        self._hypervisor = Hypervisor(
            self.book,
            self.clock,
            settings,
            script,
            cloud_id=f"rehearsal-{secrets.token_hex(8)}",
            imds_base=lambda instance_id: f"{self.url}/imds/{instance_id}/",
            warn=moto.warn,
        )
        self._imds = Imds(
            self.book,
            region=self.market.region,
            zones=self.market.zones,
            account=ACCOUNT,
            role_credentials=settings.role_credentials,
        )
        self._moto = moto
        self._api = Ec2Api(self.market, self.book, moto, self._hypervisor.wake)
        self._control = Control(self.market, self.book, self._hypervisor, script, self.clock)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)
        self._stop = threading.Event()

    def start(self) -> None:
        """Answer requests and run machines, in threads of this process."""
        self._hypervisor.start()
        self._thread.start()
        log.info("rehearsal cloud at %s: %s; clock %s, %g times as fast as real time",
                 self.url, self.market.file.label, self.clock.now().isoformat(timespec="seconds"),
                 self.clock.spec.speed)  # fmt: skip

    def serve(self) -> None:
        """Start, and return after `request_stop`, when everything has ended."""
        self.start()
        try:
            self._stop.wait()
        finally:
            self.stop()

    def request_stop(self) -> None:
        """Let `serve` return; may be called from a signal handler."""
        self._stop.set()

    def stop(self) -> None:
        """End the server and every process of every instance."""
        log.info("ending: every instance is killed")
        self._server.shutdown()
        self._hypervisor.stop()
        self._server.server_close()
        self._journal.write("stop", at=self.clock.now())
        self._journal.close()
        log.info("ended")

    def wsgi(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """The application: /rehearsal/ and /imds/ by path, our EC2 actions by name, the rest to moto."""
        path = environ.get("PATH_INFO", "/")
        if path.startswith("/rehearsal/"):
            return self._answer_control(Request(environ), path)(environ, start_response)
        if path.startswith("/imds/"):
            return self._answer_imds(Request(environ), path)(environ, start_response)
        form = _form(environ)
        action = form.get("Action", "")
        service, region = _scope(environ, self.market.region)
        if service == "ec2" and self._api.owns(action, form):
            return self._answer_ec2(action, form, region)(environ, start_response)
        answered: Iterable[bytes] = self._moto.wsgi(environ, start_response)
        return answered

    def _answer_control(self, request: Request, path: str) -> Response:
        status, document = self._control.answer(
            request.method, path.removeprefix("/rehearsal/"), request.get_data(cache=False)
        )
        return Response(json.dumps(document, indent=2), status=status, content_type="application/json")

    def _answer_imds(self, request: Request, path: str) -> Response:
        instance_id, _, rest = path.removeprefix("/imds/").partition("/")
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = self._imds.answer(instance_id, request.method, rest, headers)
        response = Response(answer.body, status=answer.status, content_type=answer.kind)
        response.headers.extend(answer.headers)
        return response

    def _answer_ec2(self, action: str, form: dict[str, str], region: str) -> Response:
        result: dict[str, Any] | Exception
        try:
            result = self._api.answer(action, form, region)
        except (wire.Ec2Error, ServiceException) as error:
            log.info("%s refused: %s", action, error)
            result = error
        status, headers, body = wire.answer(action, result)
        return Response(body, status=status, headers=headers)


def _form(environ: WSGIEnvironment) -> dict[str, str]:
    """The form of a query request; the body is put back for moto."""
    if environ.get("REQUEST_METHOD") != "POST" or not environ.get("CONTENT_TYPE", "").startswith(FORM):
        return {}
    body = Request(environ).get_data(cache=False)
    environ["wsgi.input"] = io.BytesIO(body)
    return dict(parse_qsl(body.decode("utf-8", errors="replace"), keep_blank_values=True))


def _scope(environ: WSGIEnvironment, default_region: str) -> tuple[str, str]:
    """Service and region from the signature: `Credential=KEY/DATE/REGION/SERVICE/aws4_request`."""
    _, _, credential = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")
    parts = credential.partition(",")[0].split("/")
    return (parts[-2], parts[-3]) if len(parts) >= 5 else ("ec2", default_region)


def write_endpoint(state_dir: Path, url: str) -> None:
    """Leave the address in `endpoint.json`, for whoever started us on any free port."""
    (state_dir / "endpoint.json").write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n", encoding="utf-8")
