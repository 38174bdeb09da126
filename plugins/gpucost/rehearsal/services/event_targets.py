"""What arrives in a queue when an event meets a rule? The delivery from EventBridge to SQS, as AWS does it.

Moto's own delivery leaves the account out of the envelope, sends what a disabled rule or a schedule matches, knows
neither Input nor InputPath, breaks templates of plain text, looks for the queue in the rule's region only, and lets
everybody put events in the name of AWS.
Sources: https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-events-structure.html and
eb-transform-target-input.html, API_InputTransformer.html and API_Target.html of its API reference.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from moto.core.exceptions import ServiceException
from moto.events.models import EventsBackend, Rule
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

log = logging.getLogger(__name__)

Event = dict[str, Any]
"""An event in EventBridge's envelope."""

ENVELOPE = ("version", "id", "detail-type", "source", "account", "time", "region", "resources", "detail")

_motos_delivery: Any = Rule.send_to_targets
_motos_put_events: Any = EventsBackend.put_events

NOT_ALLOWED = {"ErrorCode": "NotAuthorizedForSourceException", "ErrorMessage": "Not authorized for the source."}
"""PutEvents' answer to an event whose source begins with `aws.`: only AWS's services have such."""

_TEMPLATE_PART = re.compile(r'"(?:\\.|[^"\\])*"|<([^<>\s]+)>')
_VARIABLE = re.compile(r"<([^<>\s]+)>")


def deliver_as_aws_does() -> None:
    """Make moto's rules deliver with this module, and keep AWS's names for AWS; once is enough."""

    def send_to_targets(rule: Any, original_event: Event, transform_input: bool = True) -> None:
        deliver(rule, original_event, transform_input=transform_input)

    def put_events(backend: Any, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        foreign = [one for one in events if not str(one.get("Source") or "").startswith("aws.")]
        answers = iter(_motos_put_events(backend, foreign) if foreign else [])
        return [next(answers) if any(one is put for put in foreign) else dict(NOT_ALLOWED) for one in events]

    Rule.send_to_targets = send_to_targets  # type: ignore[method-assign,assignment]
    EventsBackend.put_events = put_events  # type: ignore[method-assign,assignment]


def deliver(rule: Any, original: Event, *, transform_input: bool = True) -> bool:
    """Send an event to the targets of a rule, if the rule is enabled and matches; whether it did.

    Args:
        rule: moto's.
        original: the event with its time as a Unix time, as moto has it, or in ISO 8601.
        transform_input: False for what moto replays from an archive.
    """
    event = envelope(original)
    # a rule with a schedule and no pattern matches no event
    if not rule.state.startswith("ENABLED") or not rule.event_pattern.get_pattern():
        return False
    if not rule.event_pattern.matches_event(event):
        return False
    others = []
    for target in rule.targets:
        if parse_arn(target["Arn"]).service == "sqs":
            _to_queue(rule, target, body(rule, target, event) if transform_input else compact(event))
        else:
            others.append(target)
    if others:
        _to_others(rule, others, original, transform_input)
    return True


def envelope(original: Mapping[str, Any]) -> Event:
    """The event as targets see it: nothing but the envelope's fields, in AWS's order, the time in ISO 8601."""
    event = {name: original[name] for name in ENVELOPE}
    if not isinstance(event["time"], str):
        moment = datetime.fromtimestamp(float(event["time"]), UTC)
        event["time"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    return event


def body(rule: Any, target: Mapping[str, Any], event: Event) -> str:
    """What a target receives of an event: all of it, a part, a text of its own, or a template that is filled in."""
    if target.get("Input"):
        return str(target["Input"])
    if target.get("InputPath"):
        return compact(at(event, target["InputPath"]))
    transformer = target.get("InputTransformer")
    if not transformer:
        return compact(event)
    values = {name: at(event, path) for name, path in (transformer.get("InputPathsMap") or {}).items()}
    values |= {
        "aws.events.rule-arn": rule.arn,
        "aws.events.rule-name": rule.name,
        "aws.events.event.ingestion-time": event["time"],
        "aws.events.event": {name: value for name, value in event.items() if name != "detail"},
        "aws.events.event.json": event,
    }
    return _TEMPLATE_PART.sub(functools.partial(_filled, values), transformer.get("InputTemplate") or "")


def _filled(values: Mapping[str, Any], part: re.Match[str]) -> str:
    """Inside quotes a value stands as it is, outside it is JSON; a variable of an unknown path is nothing."""
    if part.group(1) is not None:
        value = values.get(part.group(1))
        return "" if value is None else compact(value)

    def plain(variable: re.Match[str]) -> str:
        value = values.get(variable.group(1))
        if value is None:
            return ""
        return json.dumps(value)[1:-1] if isinstance(value, str) else compact(value)

    return _VARIABLE.sub(plain, part.group())


def at(event: Any, path: str) -> Any:
    """The value at a JSON path of dots and indices such as `$.detail.instance-id`; None when it is not there."""
    found = event
    for key in re.findall(r"[^.\[\]]+", path.removeprefix("$")):
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def compact(value: Any) -> str:
    """JSON as AWS writes it into messages."""
    return json.dumps(value, separators=(",", ":"))


def _to_queue(rule: Any, target: Mapping[str, Any], text: str) -> None:
    arn = parse_arn(target["Arn"])
    group = (target.get("SqsParameters") or {}).get("MessageGroupId")
    try:
        queue = sqs_backends[arn.account][arn.region].get_queue(arn.resource_id)
        if queue.policy is None:
            _hint(queue.queue_arn)
        sqs_backends[arn.account][arn.region].send_message(queue.name, text, group_id=group)
    except (ServiceException, KeyError) as error:
        # as on AWS, whoever put the event hears nothing of it
        log.warning("rule %s: target %s did not get an event: %s", rule.name, target["Arn"], error)


@functools.cache
def _hint(queue_arn: str) -> None:
    """Said once for each queue: what works here, and would not on AWS."""
    log.warning("%s has no policy that lets events.amazonaws.com send messages: on AWS, no event would arrive there",
                queue_arn)  # fmt: skip


def _to_others(rule: Any, targets: list[Mapping[str, Any]], original: Event, transform_input: bool) -> None:
    shadow = copy.copy(rule)
    shadow.targets = targets
    moment = original["time"]
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment).timestamp()
    try:
        _motos_delivery(shadow, {**original, "time": moment}, transform_input)
    except NotImplementedError:
        log.warning("rule %s: only targets of the kinds sqs, events and logs are rehearsed, got %s",
                    rule.name, ", ".join(target["Arn"] for target in targets))  # fmt: skip
