"""Moto's HTTP application, one request at a time, with a memory; a few of its actions are answered by us.

Which requests change something is told by the name of their action. A change is on disk before its answer is sent.
What only reads is not written down, receiving from SQS neither: messages that were out when the cloud was killed come
again, as SQS's delivery at least once allows.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.wrappers import Request, Response

from gpucost.rehearsal.api import wire
from gpucost.rehearsal.api.wire import Ec2Error
from gpucost.rehearsal.faults.gate import read_request
from gpucost.rehearsal.services import instance_types, launch_templates
from gpucost.rehearsal.services.lock import LOCK, let_receivers_wait_without_lock
from gpucost.rehearsal.services.memory import Memory, ec2_backend

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

READING = (
    "BatchGet", "Check", "Decode", "Describe", "Filter", "Get", "Head", "List", "Lookup", "Query", "Receive", "Scan",
    "Search", "Simulate", "Test", "Validate",
)  # fmt: skip
"""How the names of actions begin that change nothing."""

OWN_ACTIONS = {**instance_types.ACTIONS, **launch_templates.ACTIONS}
"""EC2's actions that are answered from moto's state, and not by moto."""


class MotoApp:
    """The WSGI application.

    Args:
        memory: where changes are kept.
        region: for requests that name none.
    """

    def __init__(self, memory: Memory, region: str) -> None:
        self._memory = memory
        self._region = region
        self._moto = DomainDispatcherApplication(create_backend_app)
        let_receivers_wait_without_lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        call = read_request(environ, self._region).call
        with LOCK:
            if call.service == "ec2" and call.action in OWN_ACTIONS:
                return _answer(call.action, _form(environ), call.region)(environ, start_response)
            if call.service == "ec2":
                ec2_backend(call.region)
            response = Response.from_app(self._moto, environ, buffered=True)
            if changes(call.action, environ.get("REQUEST_METHOD", "GET")):
                # also after an error: some of the work may have been done
                self._memory.keep(call.service, call.region)
                LOCK.notify_all()
        return response(environ, start_response)


def changes(action: str, method: str) -> bool:
    """Whether a request may change state: by its action, or by its HTTP method where a service has no actions."""
    if action:
        return not action.startswith(READING)
    return method not in {"GET", "HEAD", "OPTIONS"}


def _answer(action: str, form: Mapping[str, str], region: str) -> Response:
    try:
        request = wire.parse(action, form)
        if request.get("DryRun"):
            raise Ec2Error("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")  # noqa: TRY301
        status, headers, body = wire.answer(action, OWN_ACTIONS[action](request, region))
    except Ec2Error as error:
        status, headers, body = wire.answer(action, error)
    return Response(body, status=status, headers=headers)


def _form(environ: WSGIEnvironment) -> dict[str, str]:
    body = Request(environ).get_data(cache=False)
    environ["wsgi.input"] = io.BytesIO(body)
    text = body.decode("utf-8", errors="replace") or environ.get("QUERY_STRING", "")
    return dict(parse_qsl(text, keep_blank_values=True))
