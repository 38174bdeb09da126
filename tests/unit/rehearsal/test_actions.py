"""The rules behind the EC2 actions: what is ours, what is seen when, scores, tags, tokens, prices."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import botocore.loaders
import botocore.model
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.rehearsal.api import actions, requests, scores, specs
from gpucost.rehearsal.api.visibility import Visibility, longest_real_s
from gpucost.rehearsal.book.records import Disk, LaunchSpec
from gpucost.rehearsal.protocol import tag_rules
from gpucost.rehearsal.protocol.wire import Ec2Error


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(Ec2Error) as caught:
        call()
    return caught.value.code


def test_every_action_is_one_of_ec2s_and_answered_in_one_way() -> None:
    model = botocore.model.ServiceModel(botocore.loaders.Loader().load_service_model("ec2", "service-2"))
    ours = {*actions.ACTIONS, *actions.REFUSED}
    assert ours <= set(model.operation_names)
    assert not set(actions.ACTIONS) & set(actions.REFUSED)


@pytest.mark.parametrize(
    ("action", "form", "ours"),
    [
        ("DescribeInstances", {"InstanceId.1": "i-0a"}, True),
        ("GetConsoleOutput", {"InstanceId": "i-0a"}, True),
        ("RebootInstances", {}, False),
        ("ModifyInstanceMetadataOptions", {"InstanceId": "i-0a"}, False),
        ("AttachVolume", {"VolumeId": "vol-0a", "InstanceId": "i-0a"}, False),
        ("ModifyInstanceCreditSpecification", {"InstanceCreditSpecification.1.InstanceId": "i-0a"}, False),
        ("DescribeVolumeStatus", {}, False),
        ("AssociateAddress", {"InstanceId": "i-0a"}, False),
    ],
)
def test_what_is_about_machines_is_answered_or_refused_here(action: str, form: dict[str, str], ours: bool) -> None:
    assert (actions.refusal_of(action, form) is None) is ours


@pytest.mark.parametrize(
    ("action", "form"),
    [
        ("AssociateAddress", {"NetworkInterfaceId": "eni-0a"}),
        ("CreateRoute", {"GatewayId": "igw-0a", "InstanceId": ""}),
        ("CreateLaunchTemplate", {"LaunchTemplateData.InstanceType": "g4dn.xlarge"}),
        ("DescribeImages", {"ImageId.1": "ami-0a"}),
        ("NoSuchAction", {}),
    ],
)
def test_what_is_not_about_machines_is_motos(action: str, form: dict[str, str]) -> None:
    assert action not in actions.ACTIONS
    assert actions.refusal_of(action, form) is None


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_created_is_unseen_until_its_lag_is_over() -> None:
    watch = Watch()
    visibility = Visibility(2.0, seed=1, monotonic=watch)
    ids = [f"i-{n}" for n in range(50)]
    visibility.hide(*ids)
    seen_at = {}
    for tenth in range(21):
        watch.now = 100.0 + tenth / 10
        seen_at |= {one: tenth for one in ids if one not in seen_at and visibility.sees(one)}
    assert set(seen_at) == set(ids), "after two seconds everything is seen"
    assert len(set(seen_at.values())) > 5, "each has a lag of its own"
    assert visibility.sees("i-of-an-earlier-life")


def test_the_same_seed_gives_the_same_lags() -> None:
    def seen(seed: int) -> list[bool]:
        watch = Watch()
        visibility = Visibility(2.0, seed, watch)
        visibility.hide(*[str(n) for n in range(50)])
        watch.now += 1.0
        return [visibility.sees(str(n)) for n in range(50)]

    assert seen(1) == seen(1) != seen(2)


def test_no_lag_hides_nothing_and_a_fast_clock_shortens_it() -> None:
    visibility = Visibility(0.0)
    visibility.hide("i-1")
    assert visibility.sees("i-1")
    assert longest_real_s(1.5, speed=1.0) == 1.5
    assert longest_real_s(1.5, speed=3600.0) * 3600 == pytest.approx(300)


@given(st.floats(0, 1000), st.floats(1, 1000), st.integers(1, 20))
def test_scores_are_one_to_ten_and_low_for_few_types(free: float, target: float, types: int) -> None:
    found = scores.score(free, target, types)
    assert 1 <= found <= (10 if types > 2 else 3)
    assert scores.score(free + target, target, types) >= found, "more capacity never scores lower"


@pytest.mark.parametrize(("free", "expected"), [(0, 1), (5, 5), (9, 8), (10, 9), (19, 9), (20, 10)])
def test_scores_by_the_documented_formula(free: int, expected: int) -> None:
    assert scores.score(free, 10, types=3) == expected


@pytest.mark.parametrize(
    "tags",
    [
        [{"Key": "aws:x", "Value": "1"}],
        [{"Key": "AWS:x", "Value": "1"}],
        [{"Key": "", "Value": "1"}],
        [{"Key": "k" * 129, "Value": "1"}],
        [{"Key": "k", "Value": "v" * 257}],
        [{"Key": "k", "Value": "1"}, {"Key": "k", "Value": "2"}],
    ],
)
def test_tags_that_no_resource_can_have(tags: list[dict[str, str]]) -> None:
    assert refused(lambda: tag_rules.read(tags)) == "InvalidParameterValue"


def test_fifty_tags_beside_those_of_aws() -> None:
    fifty = {f"k{n}": "" for n in range(50)}
    tag_rules.check_number({**fifty, "aws:ec2:fleet-id": "fleet-1"})
    assert refused(lambda: tag_rules.check_number({**fifty, "one more": ""})) == "TagLimitExceeded"
    assert tag_rules.read([{"Key": "k" * 128, "Value": "v" * 256}, {"Key": "empty"}])["empty"] == ""
    specifications = [{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}, {"ResourceType": "volume"}]
    assert tag_rules.tags_for(specifications, "instance") == {"a": "b"}
    assert tag_rules.tags_for(specifications, "fleet") == {}


@pytest.mark.parametrize("text", ["-1", "0", "0.0009", "NaN", "Infinity", "cheap"])
def test_prices_that_are_none(text: str) -> None:
    assert refused(lambda: requests.price(text, "MaxPrice")) == "InvalidParameterValue"


def test_prices() -> None:
    assert requests.price("0.001", "MaxPrice") == Decimal("0.001")
    assert requests.price(None, "MaxPrice") is requests.price("", "MaxPrice") is None


DATA = {"ImageId": "ami-1", "UserData": "aGk=", "KeyName": "k", "IamInstanceProfile": {"Name": "from template"}}


def test_the_request_goes_before_its_launch_template_parameter_by_parameter() -> None:
    template = LaunchSpec(tags={"a": "template", "b": "template"}, template_id="lt-1", template_version="3")
    asked = {"ImageId": "ami-2", "IamInstanceProfile": {"Arn": "arn:mine"}, "MaxCount": 3}
    spec = specs.spec_of(specs.merged(DATA, asked), template, {"a": "request"})
    assert (spec.image_id, spec.profile, spec.key_name, spec.user_data) == ("ami-2", "arn:mine", "k", b"hi")
    assert spec.tags == {
        "a": "request", "b": "template", "aws:ec2launchtemplate:id": "lt-1", "aws:ec2launchtemplate:version": "3"
    }  # fmt: skip
    assert (spec.template_id, spec.template_version) == ("lt-1", "3")
    assert specs.spec_of(DATA, None, {"a": "request"}).tags == {"a": "request"}


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"ImageId": None}, "MissingParameter"),
        ({"ImageId": "image"}, "InvalidAMIID.Malformed"),
        ({"ImageId": "resolve:ssm:my-image"}, "UnsupportedOperation"),
        ({"IamInstanceProfile": {"Name": "a", "Arn": "arn:a"}}, "InvalidParameterCombination"),
        (
            {"BlockDeviceMappings": [{"DeviceName": "/dev/sdf", "Ebs": {"VolumeType": "gp3"}}]},
            "InvalidBlockDeviceMapping",
        ),
        ({"BlockDeviceMappings": [{"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 0}}]}, "InvalidBlockDeviceMapping"),
        ({"BlockDeviceMappings": [{"Ebs": {"VolumeSize": 10}}]}, "MissingParameter"),
    ],
)
def test_launch_parameters_that_ec2_refuses(wrong: dict[str, Any], code: str) -> None:
    assert refused(lambda: specs.spec_of({**DATA, **wrong}, None, {})) == code


def test_a_root_volume_keeps_its_default_size_when_only_its_type_is_named() -> None:
    mappings = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeType": "gp3"}}]
    assert specs.spec_of({**DATA, "BlockDeviceMappings": mappings}, None, {}).disks == (Disk("/dev/sda1", 8, "gp3"),)
