"""Parameters in, XML out, filters and pages; judged by botocore's own serializer and parser."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import botocore.loaders
import botocore.model
import botocore.parsers
import botocore.serialize
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.core.exceptions import ServiceException

from gpucost.rehearsal.protocol import filters, tag_rules, wire
from gpucost.rehearsal.protocol.wire import Ec2Error


@pytest.fixture(scope="module")
def model() -> botocore.model.ServiceModel:
    return botocore.model.ServiceModel(botocore.loaders.Loader().load_service_model("ec2", "service-2"))


def sent(model: botocore.model.ServiceModel, action: str, parameters: dict[str, Any]) -> dict[str, str]:
    """The form that boto3 would send."""
    serializer = botocore.serialize.create_serializer("ec2")
    body: dict[str, Any] = serializer.serialize_to_request(parameters, model.operation_model(action))["body"]
    return {key: str(value) for key, value in body.items()}


def received(model: botocore.model.ServiceModel, action: str, answer: tuple[int, dict[str, str], str]) -> Any:
    """What boto3 would hand to its caller."""
    status, headers, body = answer
    parser = botocore.parsers.create_parser("ec2")
    shape = model.operation_model(action).output_shape
    return parser.parse({"status_code": status, "headers": headers, "body": body.encode()}, shape)


def test_a_fleet_request_arrives_as_it_was_sent(model: botocore.model.ServiceModel) -> None:
    request = {
        "Type": "instant",
        "ClientToken": "token",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": "lt-1", "Version": "$Latest"},
                "Overrides": [
                    {"InstanceType": "g4dn.xlarge", "AvailabilityZone": "us-east-1a", "MaxPrice": "0.3", "Priority": 2},
                    {"InstanceType": "g5.xlarge", "SubnetId": "subnet-1"},
                ],
            }
        ],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 3, "DefaultTargetCapacityType": "spot"},
        "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}],
    }
    assert wire.parse("CreateFleet", sent(model, "CreateFleet", request)) == request


def test_times_arrive_aware_and_nonsense_is_refused(model: botocore.model.ServiceModel) -> None:
    start = datetime(2026, 11, 30, 16, 0, tzinfo=UTC)
    form = sent(model, "DescribeSpotPriceHistory", {"StartTime": start, "InstanceTypes": ["g4dn.xlarge"]})
    assert wire.parse("DescribeSpotPriceHistory", form) == {"StartTime": start, "InstanceTypes": ["g4dn.xlarge"]}
    with pytest.raises(wire.Ec2Error) as caught:
        wire.parse("DescribeSpotPriceHistory", {"StartTime": "yesterday-ish"})
    assert caught.value.code == "InvalidParameterValue"
    with pytest.raises(wire.Ec2Error):
        wire.parse("DescribeInstances", {"MaxResults": "many"})


def test_an_answer_reaches_the_caller_whole(model: botocore.model.ServiceModel) -> None:
    launched = datetime(2026, 11, 30, 16, 43, 14, tzinfo=UTC)
    instance = {
        "InstanceId": "i-1",
        "LaunchTime": launched,
        "State": {"Code": 16, "Name": "running"},
        "Tags": [{"Key": "a<b&c", "Value": "ü"}],
    }
    answer = wire.answer("DescribeInstances", {"Reservations": [{"ReservationId": "r-1", "Instances": [instance]}]})
    got = received(model, "DescribeInstances", answer)
    assert got["Reservations"] == [{"ReservationId": "r-1", "Instances": [instance]}]
    assert "NextToken" not in got


def test_an_error_reaches_the_caller_with_its_code(model: botocore.model.ServiceModel) -> None:
    answer = wire.answer("TerminateInstances", wire.Ec2Error("InvalidInstanceID.NotFound", "no such instance"))
    assert answer[0] == 400
    error = received(model, "TerminateInstances", answer)["Error"]
    assert (error["Code"], error["Message"]) == ("InvalidInstanceID.NotFound", "no such instance")


@pytest.mark.parametrize(
    ("result", "code", "status"),
    [
        ({"Tags": [{"Key": "bell", "Value": "\x07"}]}, "InternalError", 500),
        ({"Tag": []}, "InternalError", 500),
        (ZeroDivisionError("a mistake"), "InternalError", 500),
        (ServiceException("InvalidSubnetID.NotFound", "none"), "InvalidSubnetID.NotFound", 400),
        (wire.Ec2Error("UnauthorizedOperation", "no"), "UnauthorizedOperation", 403),
    ],
)
def test_whatever_goes_wrong_is_answered_in_ec2s_form(
    model: botocore.model.ServiceModel, result: Any, code: str, status: int
) -> None:
    def make() -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    response = wire.respond("DescribeTags", make)
    assert response.status_code == status
    answer = (status, {"Content-Type": str(response.content_type)}, response.get_data(as_text=True))
    assert received(model, "DescribeTags", answer)["Error"]["Code"] == code


def name_values(item: Mapping[str, str]) -> Iterable[str]:
    return [item["name"]] if "name" in item else []


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ([{"Name": "name", "Values": ["job-*"]}], ["job-1", "job-22"]),
        ([{"Name": "name", "Values": ["job-?"]}], ["job-1"]),
        ([{"Name": "name", "Values": ["a[b]"]}], ["a[b]"]),
        ([{"Name": "name", "Values": ["job-1", "a*"]}], ["job-1", "a[b]"]),
        ([{"Name": "name", "Values": ["job-*"]}, {"Name": "tag:big", "Values": ["yes"]}], ["job-22"]),
        ([{"Name": "tag-key", "Values": ["b*"]}], ["job-22"]),
        ([{"Name": "name", "Values": ["x\\*"]}], []),
        ([], ["job-1", "job-22", "a[b]"]),
    ],
)
def test_filters(wanted: list[dict[str, Any]], chosen: list[str]) -> None:
    items = [{"name": "job-1"}, {"name": "job-22", "big": "yes"}, {"name": "a[b]"}]
    got = filters.select(
        items, wanted, {"name": name_values}, lambda item: {k: v for k, v in item.items() if k != "name"}
    )
    assert [item["name"] for item in got] == chosen


def test_an_unknown_filter_is_refused() -> None:
    with pytest.raises(wire.Ec2Error, match="colour"):
        filters.select([], [{"Name": "colour", "Values": ["red"]}], {}, lambda _item: {})


def test_pages_give_everything_once_in_order() -> None:
    items = list(range(11))
    got: list[int] = []
    token: str | None = None
    while True:
        page, token = filters.page(items, {"MaxResults": 5, "NextToken": token})
        assert len(page) <= 5
        got += page
        if token is None:
            break
    assert got == items
    with pytest.raises(wire.Ec2Error, match="InvalidNextToken"):
        filters.page(items, {"NextToken": "made-up"})


def test_pages_lose_nothing_when_items_fall_out_of_the_list() -> None:
    items = list(range(100, 130))
    got, token = filters.page(items, {"MaxResults": 10}, number=lambda one: one)
    rest, _ = filters.page(items[7:], {"NextToken": token}, number=lambda one: one)
    assert got + rest == items, "the first seven are gone meanwhile, and nobody behind them is left out"
    assert filters.page(items[:10], {"NextToken": token}, number=lambda one: one) == ([], None)


@pytest.mark.parametrize("token", ["LTN8", "wrJ8", "fA==", "MXwyfA"])
def test_a_token_that_is_no_place_is_refused(token: str) -> None:
    with pytest.raises(Ec2Error, match="InvalidNextToken"):
        filters.page([1, 2, 3], {"NextToken": token})


@given(st.text("ab*?", max_size=8), st.text("ab", max_size=8))
def test_a_pattern_matches_what_fnmatch_matches(pattern: str, value: str) -> None:
    assert bool(filters.pattern(pattern).fullmatch(value)) == fnmatch.fnmatchcase(value, pattern)


def test_a_pattern_of_many_stars_takes_no_time_to_speak_of() -> None:
    begun = time.process_time()
    assert not filters.pattern("*a" * 40 + "*b").fullmatch("a" * 256)
    assert time.process_time() - begun < 0.5, "it took hours when every star was tried at every place"


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00", "1e400", "x", "²"])
def test_a_time_that_is_none_is_refused_and_not_our_mistake(moment: str) -> None:
    with pytest.raises(Ec2Error, match="InvalidParameterValue"):
        wire.parse("DescribeSpotPriceHistory", {"StartTime": moment})


def test_an_action_that_ec2_has_not_is_refused_by_name() -> None:
    wire.check_action("RunInstances")
    with pytest.raises(Ec2Error, match="InvalidAction: The action RunInstance is not valid"):
        wire.check_action("RunInstance")


def test_tags_are_for_resources_that_there_are() -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}]
    assert tag_rules.tags_for(tags, "instance") == {"a": "b"}
    assert tag_rules.tags_for(tags, "volume") == {}
    with pytest.raises(Ec2Error, match="'banana' is not a valid taggable resource type"):
        tag_rules.tags_for([*tags, {"ResourceType": "banana", "Tags": []}], "instance")
