"""The check of answers finds what is wrong with them: each case is an answer that boto3 alone would take."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError

from gpucost.rehearsal.protocol import wire
from tests.system.shapes import Shapes, WrongAnswer, check_shapes

INSTANCE = {
    "InstanceId": "i-1",
    "AmiLaunchIndex": 0,
    "EbsOptimized": False,
    "LaunchTime": datetime(2026, 11, 30, 16, 43, 14, tzinfo=UTC),
    "State": {"Code": 16, "Name": "running"},
    "Tags": [{"Key": "a<b", "Value": ""}],
}
GOOD = wire.answer("DescribeInstances", {"Reservations": [{"Instances": [INSTANCE]}]})

Answering = Callable[[int, str], tuple[Any, Shapes]]


class _Body(io.BytesIO):
    def stream(self) -> Any:
        yield self.read()


@pytest.fixture
def answering() -> Answering:
    """Makes a checked client whose every call is answered with this, without a network."""

    def make(status: int, body: str) -> tuple[Any, Shapes]:
        ec2 = boto3.client(
            "ec2",
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            config=Config(retries={"total_max_attempts": 1}),
        )
        ec2.meta.events.register(
            "before-send.ec2", lambda request, **_: AWSResponse(request.url, status, {}, _Body(body.encode()))
        )
        return ec2, check_shapes(ec2)

    return make


def test_a_right_answer_passes_and_is_counted(answering: Answering) -> None:
    ec2, shapes = answering(GOOD[0], GOOD[2])
    assert ec2.describe_instances()["Reservations"][0]["Instances"] == [INSTANCE]
    assert shapes.checked == {"DescribeInstances": 1}


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("<instanceId>i-1</instanceId>", "<instanceID>i-1</instanceID>", r"Instances\[0\]: <instanceID> is not in"),
        ("<instanceId>i-1</instanceId>", "<instanceId>i-1</instanceId>" * 2, "<instanceId> comes 2 times"),
        ("<code>16</code>", "<code>running</code>", "State.Code: got 'running', expected integer"),
        ("<name>running</name>", "<name>up</name>", "State.Name: got 'up', expected one of pending"),
        ("<ebsOptimized>false</ebsOptimized>", "<ebsOptimized>False</ebsOptimized>", "'False', expected boolean"),
        ("14.000Z", "14", "LaunchTime: got '2026-11-30T16:43:14', expected timestamp"),
        ("<tagSet><item>", "<tagSet><member>", "no XML"),
        ("<tagSet>", "<tagSet>None", "stray text 'None'"),
        ("<requestId>", "<RequestId>", "no XML"),
        ("DescribeInstancesResponse", "DescribeInstanceResponse", "root: got"),
    ],
)
def test_a_wrong_answer_is_told(answering: Answering, right: str, wrong: str, told: str) -> None:
    assert right in GOOD[2]
    ec2, shapes = answering(200, GOOD[2].replace(right, wrong))
    with pytest.raises(WrongAnswer, match=told):
        ec2.describe_instances()
    assert not shapes.checked


def test_lists_have_items_only(answering: Answering) -> None:
    ec2, _ = answering(200, GOOD[2].replace("<item><key>", "<tag><key>").replace("</value></item>", "</value></tag>"))
    with pytest.raises(WrongAnswer, match=r"Tags: <tag> in a list, expected <item>"):
        ec2.describe_instances()


def test_actions_without_output_say_true(answering: Answering) -> None:
    status, _, body = wire.answer("CreateTags", {})
    ec2, shapes = answering(status, body)
    ec2.create_tags(Resources=["i-1"], Tags=[{"Key": "a", "Value": "b"}])
    assert shapes.checked == {"CreateTags": 1}


def test_errors_are_answers_too(answering: Answering) -> None:
    status, _, body = wire.answer("DescribeInstances", wire.Ec2Error("RequestLimitExceeded", "Slow down."))
    ec2, shapes = answering(status, body)
    with pytest.raises(ClientError, match="RequestLimitExceeded"):
        ec2.describe_instances()
    assert (status, shapes.checked) == (503, {"DescribeInstances": 1})
    ec2, _ = answering(400, body.replace("RequestID", "RequestId"))
    with pytest.raises(WrongAnswer, match="RequestID: missing"):
        ec2.describe_instances()
