"""What may happen to a request on its way? Stands before everything that answers as AWS, and applies the faults.

In this order: a fault that does no work; who asks; the work; a fault that comes after it; how late the answer is.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from werkzeug.wrappers import Response

from gpucost.rehearsal.faults.credentials import ISSUING, Credentials
from gpucost.rehearsal.faults.injector import NOTHING, Injector
from gpucost.rehearsal.faults.rules import FaultRule
from gpucost.rehearsal.protocol import catalogue, reading
from gpucost.rehearsal.protocol.answers import error_response
from gpucost.rehearsal.protocol.reading import Asked

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from werkzeug.serving import WSGIRequestHandler

log = logging.getLogger(__name__)

SKEW = "gpucost.skew_s"
"""The environ's key for how far ahead the clock is that this answer's Date header shows."""


class Gate:
    """Lets requests through to the application, or makes of them what the faults say.

    Args:
        injector: the faults.
        credentials: who may call.
        region: for requests that name none (metadata).
        pause: waits real seconds.
    """

    def __init__(
        self,
        injector: Injector,
        credentials: Credentials,
        *,
        region: str,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._injector = injector
        self._credentials = credentials
        self._region = region
        self._pause = pause

    def serve(self, environ: WSGIEnvironment, start_response: StartResponse, app: WSGIApplication) -> Iterable[bytes]:
        """Answer one request.

        Raises:
            ConnectionAbortedError: the connection was closed without an answer; the server takes it for a client
                that went away.
        """
        asked = reading.read(environ, self._region)
        skew_s = self._injector.skew(asked.call)
        environ[SKEW] = skew_s
        decision = self._injector.decide(asked.call)
        outcome = decision.outcome
        if outcome is not None and outcome.kind in {"error", "timeout"}:
            response = self._instead(environ, asked, outcome)
        else:
            refused = self._refusal(asked, skew_s)
            if refused is None and decision == NOTHING and asked.call.action not in ISSUING:
                return app(environ, start_response)
            response = refused or self._work(environ, asked, app)
            if outcome is not None:
                response = self._instead(environ, asked, outcome)
        if decision.delay_real_s:
            self._pause(decision.delay_real_s)
        return response(environ, start_response)

    def _refusal(self, asked: Asked, skew_s: float) -> Response | None:
        call = asked.call
        if call.service == "imds":
            return None
        refused = self._credentials.refusal(call, asked.signed_at, skew_s)
        if refused is None:
            return None
        log.info("%s:%s refused for %s: %s", call.service, call.action, call.access_key or "nobody", refused.code)
        return error_response(call.service, refused, as_json=asked.as_json)

    def _work(self, environ: WSGIEnvironment, asked: Asked, app: WSGIApplication) -> Response:
        response = Response.from_app(app, environ, buffered=True)
        if asked.call.service == "sts" and response.status_code < 300:
            response.set_data(self._credentials.learn(asked.call, response.get_data(as_text=True)))
        return response

    def _instead(self, environ: WSGIEnvironment, asked: Asked, rule: FaultRule) -> Response:
        """The error that the client gets instead of its answer; for a time-out there is none."""
        if rule.kind in {"error", "error-after"}:
            failure = catalogue.failure(rule.code or "InternalFailure", rule.message, rule.status)
            return error_response(asked.call.service, failure, as_json=asked.as_json)
        self._pause(rule.delay_real_s)
        connection: socket.socket | None = environ.get("werkzeug.socket")
        if connection is not None:
            # a client that went away while we held it is fine too
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError(f"fault {rule.id}: the connection is closed without an answer")


def showing_the_clouds_date(handler: type[WSGIRequestHandler]) -> type[WSGIRequestHandler]:
    """The HTTP handler, with a Date header that shows the clock of the cloud as the request's caller sees it."""

    class Dated(handler):  # type: ignore[misc,valid-type]  # a class made from the one given
        def date_time_string(self, timestamp: float | None = None) -> str:
            skew_s: float = getattr(self, "environ", {}).get(SKEW, 0.0)
            shown: str = super().date_time_string((timestamp or time.time()) + skew_s)
            return shown

    return Dated
