"""Moto's HTTP application, one request at a time, with a memory; a few of its actions are answered by us.

Which requests change something is told by the name of their action. A change is on disk before its answer is sent.
What only reads is not written down, receiving from SQS neither: messages that were out when the cloud was killed come
again, as SQS's delivery at least once allows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.wrappers import Response

from gpucost.rehearsal.protocol import reading, wire
from gpucost.rehearsal.protocol.answers import internal_error
from gpucost.rehearsal.protocol.reading import Asked
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services import instance_types, launch_templates
from gpucost.rehearsal.services.lock import LOCK, let_receivers_wait_without_lock
from gpucost.rehearsal.services.memory import Memory, ec2_backend

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

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
        asked = reading.read(environ, self._region)
        call = asked.call
        with LOCK:
            if call.service == "ec2" and call.action in OWN_ACTIONS:
                return _answer(asked)(environ, start_response)
            if call.service == "ec2":
                ec2_backend(call.region)
            response = self._of_moto(environ, asked)
            if changes(call.action, environ.get("REQUEST_METHOD", "GET")):
                # also after an error: some of the work may have been done
                self._memory.keep(call.service, call.region)
                LOCK.notify_all()
        return response(environ, start_response)

    def _of_moto(self, environ: WSGIEnvironment, asked: Asked) -> Response:
        try:
            response = Response.from_app(self._moto, environ, buffered=True)
        except Exception:
            log.exception("%s:%s failed in moto, or moto does not have it", asked.call.service, asked.call.action)
            return internal_error(asked.call.service, as_json=asked.as_json)
        if response.status_code == 500 and response.mimetype == "text/html":
            # Flask's page for an exception, which no SDK can read
            log.error("%s:%s failed in moto, or moto does not have it", asked.call.service, asked.call.action)
            return internal_error(asked.call.service, as_json=asked.as_json)
        return response


def changes(action: str, method: str) -> bool:
    """Whether a request may change state: by its action, or by its HTTP method where a service has no actions."""
    if action:
        return not action.startswith(READING)
    return method not in {"GET", "HEAD", "OPTIONS"}


def _answer(asked: Asked) -> Response:
    action, region = asked.call.action, asked.call.region

    def make() -> dict[str, Any]:
        request = wire.parse(action, asked.form)
        if request.get("DryRun"):
            raise Ec2Error("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
        return OWN_ACTIONS[action](request, region)

    return wire.respond(action, make)
