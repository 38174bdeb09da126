"""What a queue receives when an event meets a rule."""

from __future__ import annotations

import json
from typing import Any

import pytest
from moto.events.models import Rule
from moto.sqs.models import sqs_backends

from gpucost.rehearsal.services import event_targets, queues

ACCOUNT = "123456789012"
EVENT = {
    "version": "0",
    "id": "id-0",
    "detail-type": "EC2 Spot Instance Interruption Warning",
    "source": "aws.ec2",
    "account": ACCOUNT,
    "time": 1_700_000_000.5,
    "region": "us-east-1",
    "resources": ["arn:aws:ec2:us-east-1a:instance/i-1"],
    "detail": {"instance-id": "i-1", "note": 'says "go"', "parts": [{"n": 3}]},
    "ingestion-time": 1_700_000_001.0,
}
WARNINGS = json.dumps({"source": ["aws.ec2"], "detail-type": ["EC2 Spot Instance Interruption Warning"]})


@pytest.fixture
def queue() -> Any:
    """An empty queue in another region than the rules."""
    backend = sqs_backends[ACCOUNT]["us-west-2"]
    made = backend.create_queue("warnings", tags={})
    yield made
    backend.delete_queue("warnings")


def rule(target: dict[str, Any], *, pattern: str | None = WARNINGS, state: str = "ENABLED") -> Rule:
    schedule = None if pattern else "rate(1 minute)"
    made = Rule("spot", ACCOUNT, "us-east-1", None, pattern, schedule, None, "default", state)
    made.put_targets([{"Id": "one", **target}])
    return made


def received(queue: Any, wanted: Rule) -> list[str]:
    event_targets.deliver(wanted, EVENT)
    return [message.body for message in queue.messages]


def test_the_whole_event_is_compact_json_in_awss_order(queue: Any) -> None:
    (body,) = received(queue, rule({"Arn": queue.queue_arn}))
    fields = ["version", "id", "detail-type", "source", "account", "time", "region", "resources", "detail"]
    assert list(json.loads(body)) == fields
    assert json.loads(body)["time"] == "2023-11-14T22:13:20Z"
    assert body.startswith('{"version":"0","id":"id-0","detail-type":"EC2 Spot')


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ({"Input": '{"fixed": true}'}, '{"fixed": true}'),
        ({"InputPath": "$.detail.parts[0].n"}, "3"),
        ({"InputPath": "$.resources[0]"}, '"arn:aws:ec2:us-east-1a:instance/i-1"'),
        (
            {"InputTransformer": {"InputPathsMap": {"who": "$.detail.instance-id"}, "InputTemplate": '"<who> goes"'}},
            '"i-1 goes"',
        ),
        (
            {
                "InputTransformer": {
                    "InputPathsMap": {"who": "$.detail.instance-id", "note": "$.detail.note", "list": "$.resources"},
                    "InputTemplate": '{"a": <who>, "b": "<who>: <note>", "c": <list>, "d": "<aws.events.rule-name>"}',
                }
            },
            '{"a": "i-1", "b": "i-1: says \\"go\\"", "c": ["arn:aws:ec2:us-east-1a:instance/i-1"], "d": "spot"}',
        ),
        ({"InputTransformer": {"InputPathsMap": {"no": "$.detail.nothing"}, "InputTemplate": '"[<no>]"'}}, '"[]"'),
    ],
)
def test_a_target_gets_its_own_text(queue: Any, target: dict[str, Any], body: str) -> None:
    assert received(queue, rule({"Arn": queue.queue_arn, **target})) == [body]


def test_nothing_comes_from_rules_that_do_not_concern_the_event(queue: Any) -> None:
    target = {"Arn": queue.queue_arn}
    assert received(queue, rule(target, state="DISABLED")) == []
    assert received(queue, rule(target, pattern=None)) == [], "a schedule is no match"
    assert received(queue, rule(target, pattern=json.dumps({"source": ["aws.health"]}))) == []
    at_noon = json.dumps({"time": [{"suffix": "12:00:00Z"}]})
    assert received(queue, rule(target, pattern=at_noon)) == [], "patterns see the time as text"
    evening = json.dumps({"time": [{"suffix": "22:13:20Z"}]})
    assert len(received(queue, rule(target, pattern=evening))) == 1


@pytest.fixture
def asked() -> Any:
    """How many messages asked for their fate, and what they are told; all is well again afterwards."""
    told: dict[str, int] = {"asked": 0, "copies": 1}

    def copies() -> int:
        told["asked"] += 1
        return told["copies"]

    queues.put_copies(copies)
    yield told
    queues.put_copies(lambda: 1)


def test_fate_is_asked_for_each_message_and_for_no_event_without_one(queue: Any, asked: dict[str, int]) -> None:
    assert received(queue, rule({"Arn": queue.queue_arn}, pattern=json.dumps({"source": ["aws.health"]}))) == []
    event_targets.deliver(rule({"Arn": f"arn:aws:sqs:us-west-2:{ACCOUNT}:nowhere"}), EVENT)
    assert asked["asked"] == 0
    asked["copies"] = 2
    first, second = received(queue, rule({"Arn": queue.queue_arn}))
    assert (first, asked["asked"]) == (second, 1)
    asked["copies"] = 0
    assert len(received(queue, rule({"Arn": queue.queue_arn}))) == 2, "the third is lost"


def test_what_only_moves_to_another_queue_asks_nothing(queue: Any, asked: dict[str, int]) -> None:
    received(queue, rule({"Arn": queue.queue_arn}))
    (message,) = queue.messages
    message.approximate_receive_count = 3
    asked["copies"] = 0
    queue.add_message(message)
    assert (len(queue.messages), asked["asked"]) == (2, 1)


def test_what_cannot_be_delivered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    event_targets.deliver(rule({"Arn": f"arn:aws:sqs:us-west-2:{ACCOUNT}:nowhere"}), EVENT)
    assert "rule spot: target arn:aws:sqs:us-west-2:123456789012:nowhere did not get an event" in caplog.text
    event_targets.deliver(rule({"Arn": f"arn:aws:lambda:us-west-2:{ACCOUNT}:function:handler"}), EVENT)
    assert "only targets of the kinds sqs, events and logs are rehearsed" in caplog.text
