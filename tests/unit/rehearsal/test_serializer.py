"""Answers in EC2's XML, judged by botocore's own parser: what is written is what a caller reads."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from xml.etree import ElementTree

import botocore.loaders
import botocore.model
import botocore.parsers
import hypothesis
import hypothesis.strategies as st
import pytest

from gpucost.rehearsal.protocol import serializer, wire

ACTIONS = [
    "CreateFleet",
    "DescribeBundleTasks",
    "DescribeFleets",
    "DescribeInstanceTypes",
    "DescribeInstances",
    "DescribeSpotInstanceRequests",
    "DescribeSpotPriceHistory",
    "DescribeVpnConnections",
    "GetEbsEncryptionByDefault",
    "GetSpotPlacementScores",
    "TerminateInstances",
]
MEMBERS = 5
"""Of a structure, at most; with all members of all structures, examples would have thousands of values."""


@functools.cache
def model() -> botocore.model.ServiceModel:
    return botocore.model.ServiceModel(botocore.loaders.Loader().load_service_model("ec2", "service-2"))


def read(action: str, body: str) -> Any:
    """What boto3 hands to its caller, for an answer with status 200."""
    response = {"status_code": 200, "headers": {}, "body": body.encode()}
    return botocore.parsers.create_parser("ec2").parse(response, model().operation_model(action).output_shape)


def values(shape: botocore.model.Shape) -> st.SearchStrategy[Any]:
    """Anything that the model allows for a shape."""
    if shape.type_name == "structure":
        return structures(shape)
    if shape.type_name == "list":
        return st.deferred(lambda: st.lists(values(shape.member), max_size=3))
    if getattr(shape, "enum", None):
        return st.sampled_from(shape.enum)
    return SCALARS[shape.type_name]


@st.composite
def structures(draw: st.DrawFn, shape: botocore.model.Shape) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(list(shape.members)), max_size=MEMBERS, unique=True)) if shape.members else []
    return {name: draw(values(shape.members[name])) for name in names}


# everything that XML 1.0 can hold, line ends and markup included
TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff") | st.sampled_from("\t\n\r&<>\"'")
)
MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 (bounds are naive by hypothesis' rule)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": TEXT,
    "boolean": st.booleans(),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "timestamp": MOMENTS.map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)),
    "blob": st.binary(),
}


@pytest.mark.parametrize("action", ACTIONS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_what_is_written_is_what_botocore_reads(action: str, data: st.DataObject) -> None:
    result: dict[str, Any] = data.draw(structures(model().operation_model(action).output_shape))
    status, headers, body = wire.answer(action, result)
    got = read(action, body)
    metadata = got.pop("ResponseMetadata")
    assert got == result
    assert (status, metadata["RequestId"]) == (200, headers["x-amzn-RequestId"])


def test_every_operation_of_the_model_can_be_written() -> None:
    for action in model().operation_names:
        writer = serializer.AnswerWriter(model().operation_model(action), "http://ec2.amazonaws.com/doc/2016-11-15")
        assert "<requestId>one</requestId>" in writer.body({}, "one"), action


@pytest.mark.parametrize(
    ("at", "shown"),
    [
        (datetime(2026, 11, 30, 16, 43, 14, tzinfo=UTC), "2026-11-30T16:43:14.000Z"),
        (datetime(2026, 11, 30, 16, 43, 14, 987_999, tzinfo=UTC), "2026-11-30T16:43:14.987Z"),
        (datetime(2026, 12, 1, 1, 43, 14, tzinfo=timezone(timedelta(hours=9))), "2026-11-30T16:43:14.000Z"),
    ],
)
def test_times_are_shown_as_ec2_shows_them(at: datetime, shown: str) -> None:
    _, _, body = wire.answer("DescribeSpotPriceHistory", {"SpotPriceHistory": [{"Timestamp": at}]})
    assert f"<timestamp>{shown}</timestamp>" in body


def test_none_is_left_out_and_empty_is_not() -> None:
    result: dict[str, Any] = {"Reservations": [], "NextToken": None}
    _, _, body = wire.answer("DescribeInstances", result)
    got = read("DescribeInstances", body)
    assert got["Reservations"] == []
    assert "NextToken" not in got


@pytest.mark.parametrize(
    ("instance", "told"),
    [
        ({"LaunchTimes": []}, r"Result\.Reservations: Reservation\.Instances: Instance\.LaunchTimes: unknown"),
        ({"State": {"Code": "16"}}, r"InstanceState\.Code: got '16', expected an integer"),
        ({"EbsOptimized": "false"}, r"EbsOptimized: got 'false', expected True or False"),
        ({"LaunchTime": datetime(2026, 11, 30)}, r"LaunchTime: .*expected a time with its zone"),  # noqa: DTZ001
        ({"LaunchTime": "2026-11-30"}, r"LaunchTime: .*expected a time"),
        ({"ImageId": 7}, r"ImageId: got 7, expected a string"),
        ({"Tags": {"Key": "a"}}, r"Tags: .*expected a list"),
        ({"Tags": ["a"]}, r"Tags: .*Tag: got 'a', expected a mapping"),
        ({"ImageId": "\x07"}, r"ImageId: got '\\x07' in a text"),
    ],
)
def test_an_answer_that_ec2_would_not_give_is_a_fault(instance: dict[str, Any], told: str) -> None:
    with pytest.raises(serializer.AnswerError, match=told):
        wire.answer("DescribeInstances", {"Reservations": [{"Instances": [instance]}]})


def test_actions_without_output_say_true_and_nothing_else() -> None:
    _, _, body = wire.answer("CreateTags", {})
    assert ElementTree.fromstring(body).findtext("{*}return") == "true"  # noqa: S314
    with pytest.raises(serializer.AnswerError, match="Tags"):
        wire.answer("CreateTags", {"Tags": []})


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("InvalidParameterValue", 400),
        ("DryRunOperation", 412),
        ("UnauthorizedOperation", 403),
        ("InsufficientInstanceCapacity", 500),
        ("InternalError", 500),
        ("RequestLimitExceeded", 503),
        ("ServiceUnavailable", 503),
        ("Unavailable", 503),
    ],
)
def test_errors_come_with_the_status_that_sdks_go_by(code: str, status: int) -> None:
    got, headers, body = wire.answer("CreateFleet", wire.Ec2Error(code, "a<b & \x07"))
    assert got == status
    root = ElementTree.fromstring(body)  # noqa: S314
    assert root.findtext("Errors/Error/Code") == code
    assert root.findtext("Errors/Error/Message") == "a<b & ?"
    assert root.findtext("RequestID") == headers["x-amzn-RequestId"]


def test_what_could_not_be_shown_again_is_refused() -> None:
    form = {"ResourceId.1": "i-1", "Tag.1.Key": "a", "Tag.1.Value": "bell \x07"}
    with pytest.raises(wire.Ec2Error) as caught:
        wire.parse("CreateTags", form)
    assert caught.value.code == "InvalidCharacter"
    assert "Tag.1.Value" in caught.value.message
