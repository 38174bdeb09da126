"""What many actions read in the same way: client tokens, prices, price caps."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.book.book import Plan, TokenReused
from gpucost.rehearsal.book.records import Instance, Launch
from gpucost.rehearsal.protocol.wire import Ec2Error

LONGEST_TOKEN = 64


def launch_once(
    context: Context,
    kind: Literal["fleet", "reservation"],
    region: str,
    request: Mapping[str, Any],
    tags: Mapping[str, str],
    plan: Callable[[datetime], Plan],
) -> Launch:
    """Launch under the request's client token: the same request again is the same launch.

    Source: https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html. Tokens are regional here; that
    RunInstances with an explicit zone has tokens of each zone is not rehearsed.

    Raises:
        Ec2Error: InvalidParameterValue for a token that is none, IdempotentParameterMismatch.
    """
    token = str(request.get("ClientToken") or "")
    if len(token) > LONGEST_TOKEN or not token.isascii():
        raise Ec2Error("InvalidParameterValue", f"ClientToken: got {token!r}, expected up to 64 ASCII characters.")
    plain = json.dumps({key: value for key, value in request.items() if key != "DryRun"}, sort_keys=True, default=str)
    digest = hashlib.sha256(plain.encode()).hexdigest()
    try:
        made = context.book.launch_once(kind, region, token, digest, json.loads(plain), tags, _hiding(context, plan))
    except TokenReused as error:
        raise Ec2Error(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in previous request(s).",
        ) from error
    return made


def _hiding(context: Context, plan: Callable[[datetime], Plan]) -> Callable[[datetime], Plan]:
    """A plan whose launches the API does not show at once: hidden inside the book's lock, before anybody can look."""

    def hidden(now: datetime) -> Plan:
        orders, answer = plan(now)

        def make(launched: list[list[Instance]]) -> dict[str, Any]:
            for one in (one for group in launched for one in group):
                context.visibility.hide(one.launch_id, one.id, *([one.spot_request_id] if one.spot_request_id else []))
            return answer(launched)

        return orders, make

    return hidden


_PRICE = re.compile(r"[0-9]{1,9}(\.[0-9]{0,12})?|\.[0-9]{1,12}")


def price(text: Any, name: str) -> Decimal | None:
    """A price in US dollars per hour, or None when none is given; `name` is the parameter's, for the message.

    EC2 takes no price cap below USD 0.001: InvalidParameterValue (API reference, FleetLaunchTemplateOverridesRequest).
    """
    if text in (None, ""):
        return None
    # plain digits: Decimal would take '1e9999999', '1_0' and the digits of every script, too
    if not _PRICE.fullmatch(str(text)):
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{text}' for {name}.")
    found = Decimal(str(text))
    if found < Decimal("0.001"):
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{text}' for {name}; expected USD 0.001 or more.")
    return found


def not_rehearsed(what: str, instead: str) -> Ec2Error:
    """The refusal of something that EC2 has and this cloud has not; `instead` says what to do."""
    return Ec2Error("UnsupportedOperation", f"{what} is not rehearsed. {instead}")
