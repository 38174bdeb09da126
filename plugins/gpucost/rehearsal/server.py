"""Which request goes where? One HTTP server on loopback: the EC2 API, instance metadata, the rehearsal's controls."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.wrappers import Request, Response

from gpucost.rehearsal import callers
from gpucost.rehearsal.api.actions import Ec2Api
from gpucost.rehearsal.control import Control
from gpucost.rehearsal.faults.gate import Gate, showing_the_clouds_date
from gpucost.rehearsal.machines.imds import Imds
from gpucost.rehearsal.protocol import reading, wire
from gpucost.rehearsal.protocol.reading import Asked
from gpucost.rehearsal.services.moto_side import MotoSide

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
BACKLOG = 512


class _QuietHandler(MotoRequestHandler):
    """No line for every request: the log tells what happened to machines."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:  # noqa: ARG002
        log.debug("%s %s %s", self.command, self.path, code)


def listen(port: int, earlier: int) -> socket.socket:
    """A socket on the port asked for; for any free one (0) on that of the folder's earlier cloud.

    Args:
        port: 0 for any.
        earlier: what machines of an earlier start ask for their metadata; 0 when there was none.

    Raises:
        OSError: the port is taken.
    """
    if not port and earlier:
        try:
            return socket.create_server((HOST, earlier), backlog=BACKLOG)
        except OSError:
            log.warning("port %d, which machines of an earlier start ask for their metadata, is taken", earlier)
    elif earlier not in {0, port}:
        log.warning("port %d is not %d, which machines of an earlier start ask for their metadata", port, earlier)
    try:
        return socket.create_server((HOST, port), backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"port: cannot listen on {port}: {error.strerror}; give another --port, or 0 for any") from error


def serving(listening: socket.socket, application: WSGIApplication) -> BaseWSGIServer:
    """A server of `application` on a socket that listens; it duplicates the socket."""
    return make_server(
        HOST,
        0,
        application,
        threaded=True,
        request_handler=showing_the_clouds_date(_QuietHandler),
        fd=listening.fileno(),
    )


@dataclass(frozen=True)
class Router:
    """The application: /rehearsal/ and /imds/ by path, our EC2 actions by name, the rest to moto.

    Args:
        control, gate, imds, api, moto: who answers; everything but `control` stands behind the `gate`.
        default_region: of a request that is not signed.
    """

    control: Control
    gate: Gate
    imds: Imds
    api: Ec2Api
    moto: MotoSide
    default_region: str

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        refused = callers.refusal(environ)
        if refused is not None:
            log.warning("%s %s refused: %s", environ.get("REQUEST_METHOD"), environ.get("PATH_INFO"), refused)
            return _document(403, {"error": refused})(environ, start_response)
        path = environ.get("PATH_INFO", "/")
        if path.startswith("/rehearsal/"):
            return self._answer_control(environ, path)(environ, start_response)
        return self.gate.serve(environ, start_response, self._behind_gate)

    def _behind_gate(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path.startswith(reading.IMDS):
            return self._answer_imds(Request(environ), path)(environ, start_response)
        asked = reading.read(environ, self.default_region)
        if asked.call.service == "ec2":
            response = self._answer_ec2(asked)
            if response is not None:
                return response(environ, start_response)
        answered: Iterable[bytes] = self.moto.wsgi(environ, start_response)
        return answered

    def _answer_control(self, environ: WSGIEnvironment, path: str) -> Response:
        wrong = callers.no_json(environ)
        if wrong is not None:
            return _document(415, {"error": wrong})
        request = Request(environ)
        name = path.removeprefix("/rehearsal/")
        try:
            status, document = self.control.answer(request.method, name, request.get_data(cache=False))
        except Exception as error:
            log.exception("%s %s failed", request.method, path)
            return _document(500, {"error": f"{request.method} {path} failed: {type(error).__name__}; see the log"})
        if isinstance(document, str):
            return Response(document, status=status, content_type="text/csv; charset=utf-8")
        return _document(status, document)

    def _answer_imds(self, request: Request, path: str) -> Response:
        instance_id, _, rest = path.removeprefix(reading.IMDS).partition("/")
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = self.imds.answer(instance_id, request.method, rest, headers)
        response = Response(answer.body, status=answer.status, content_type=answer.kind)
        response.headers.extend(answer.headers)
        return response

    def _answer_ec2(self, asked: Asked) -> Response | None:
        """The answer to a request for EC2; None when it is moto's to answer."""
        action, form = asked.call.action, asked.form
        if self.api.owns(action, form):
            return wire.respond(action, lambda: self.api.answer(action, form, asked.call.region))
        try:
            wire.check_action(action)
            wire.check_characters(form)
        except wire.Ec2Error as error:
            return wire.refuse(action, error)
        return None


def _document(status: int, document: Mapping[str, Any]) -> Response:
    return Response(json.dumps(document, indent=2) + "\n", status=status, content_type="application/json")
