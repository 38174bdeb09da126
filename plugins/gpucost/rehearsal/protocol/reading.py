"""What does a request ask for? Read once, by everybody who must know: service, action, parameters, who signed it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from werkzeug.wrappers import Request

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

IMDS = "/imds/"
FORM = "application/x-www-form-urlencoded"

UNSIGNED_ACTIONS = frozenset({"AssumeRoleWithSAML", "AssumeRoleWithWebIdentity"})
"""STS actions that bring another proof than a signature."""

_SIGNING_ALIASES = {"eventbridge": "events"}
_KEPT = "gpucost.asked"
"""The environ's key for what was read already."""


@dataclass(frozen=True)
class Call:
    """One request, as far as rules look at it.

    Args:
        service: its signing name: ec2, sqs, events, sts ...; imds for instance metadata.
        action: CreateFleet, ReceiveMessage ...; for imds `INSTANCE-ID/latest/...`.
        region: of the signature; for imds the rehearsal's first one.
        access_key: of the signature; empty when the request is not signed.
    """

    service: str
    action: str
    region: str = ""
    access_key: str = ""


@dataclass(frozen=True)
class Asked:
    """One request.

    Args:
        call: who asks what.
        form: the parameters of a query request, from the body or from the address.
        signed_at: the signature's time; None when it tells none.
        as_json: whether it is in a JSON protocol (it has X-Amz-Target).
    """

    call: Call
    form: Mapping[str, str] = field(default_factory=dict)
    signed_at: datetime | None = None
    as_json: bool = False


def read(environ: WSGIEnvironment, region: str) -> Asked:
    """What a request asks for; its body can be read again afterwards, and a second reading costs nothing.

    Signed by header or by query parameters (presigned). An unsigned request with an Action is taken for EC2's, unless
    it is one of STS's that need no signature.

    Args:
        environ: the request.
        region: for requests that name none.
    """
    kept: Asked | None = environ.get(_KEPT)
    if kept is None:
        kept = environ[_KEPT] = _read(environ, region)
    return kept


def _read(environ: WSGIEnvironment, region: str) -> Asked:
    path = environ.get("PATH_INFO", "/")
    if path.startswith(IMDS):
        return Asked(Call("imds", path.removeprefix(IMDS), region))
    query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    form = {**query, **_body_form(environ)}
    _, _, credential = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")
    credential = credential.partition(",")[0].strip() or query.get("X-Amz-Credential", "")
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    action = target.rpartition(".")[2] or form.get("Action", "")
    parts = credential.split("/")
    if len(parts) >= 5:
        service = _SIGNING_ALIASES.get(parts[-2], parts[-2])
        call = Call(service, action, parts[-3], "/".join(parts[:-4]))
    elif action and not target:
        call = Call("sts" if action in UNSIGNED_ACTIONS else "ec2", action, region)
    else:
        call = Call("", action, region)
    return Asked(call, form, _signed_at(environ.get("HTTP_X_AMZ_DATE", "")), as_json=bool(target))


def _body_form(environ: WSGIEnvironment) -> dict[str, str]:
    if environ.get("REQUEST_METHOD") != "POST" or not environ.get("CONTENT_TYPE", "").startswith(FORM):
        return {}
    body = Request(environ).get_data(cache=False)
    environ["wsgi.input"] = io.BytesIO(body)
    environ["CONTENT_LENGTH"] = str(len(body))
    return dict(parse_qsl(body.decode("utf-8", errors="replace"), keep_blank_values=True))


def _signed_at(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        # presigned or made by hand: there is no time to judge by
        return None
