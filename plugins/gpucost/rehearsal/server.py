"""Which request goes where? One HTTP server on loopback: the EC2 API, instance metadata, the rehearsal's controls."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from moto.core.exceptions import ServiceException
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.wrappers import Request, Response

from gpucost.rehearsal.api import wire
from gpucost.rehearsal.api.actions import Ec2Api
from gpucost.rehearsal.control import Control
from gpucost.rehearsal.faults.gate import Gate, showing_the_clouds_date
from gpucost.rehearsal.machines.imds import Imds
from gpucost.rehearsal.services.moto_side import MotoSide

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
BACKLOG = 512
FORM = "application/x-www-form-urlencoded"


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
    return socket.create_server((HOST, port), backlog=BACKLOG)


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
        path = environ.get("PATH_INFO", "/")
        if path.startswith("/rehearsal/"):
            return self._answer_control(Request(environ), path)(environ, start_response)
        return self.gate.serve(environ, start_response, self._behind_gate)

    def _behind_gate(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path.startswith("/imds/"):
            return self._answer_imds(Request(environ), path)(environ, start_response)
        form = _form(environ)
        action = form.get("Action", "")
        service, region = _scope(environ, self.default_region)
        if service == "ec2" and self.api.owns(action, form):
            return self._answer_ec2(action, form, region)(environ, start_response)
        answered: Iterable[bytes] = self.moto.wsgi(environ, start_response)
        return answered

    def _answer_control(self, request: Request, path: str) -> Response:
        status, document = self.control.answer(
            request.method, path.removeprefix("/rehearsal/"), request.get_data(cache=False)
        )
        if isinstance(document, str):
            return Response(document, status=status, content_type="text/csv; charset=utf-8")
        return Response(json.dumps(document, indent=2), status=status, content_type="application/json")

    def _answer_imds(self, request: Request, path: str) -> Response:
        instance_id, _, rest = path.removeprefix("/imds/").partition("/")
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = self.imds.answer(instance_id, request.method, rest, headers)
        response = Response(answer.body, status=answer.status, content_type=answer.kind)
        response.headers.extend(answer.headers)
        return response

    def _answer_ec2(self, action: str, form: dict[str, str], region: str) -> Response:
        result: dict[str, Any] | Exception
        try:
            result = self.api.answer(action, form, region)
        except (wire.Ec2Error, ServiceException) as error:
            log.info("%s refused: %s", action, error)
            result = error
        except Exception as error:
            # a mistake of ours must look to clients like one of AWS's: they know what to do then
            log.exception("%s failed", action)
            result = wire.Ec2Error("InternalError", f"An internal error has occurred: {type(error).__name__}")
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
