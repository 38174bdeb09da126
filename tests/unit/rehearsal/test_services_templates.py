"""What an instance is started with, from the data of a launch template."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from gpucost.rehearsal.book.records import Disk
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.templates import LARGEST_USER_DATA, launch_spec

ROOT_DISK = Disk("/dev/xvda", 8, "gp3", delete_on_termination=True)


def encoded(text: bytes) -> str:
    return base64.b64encode(text).decode()


def test_every_field_arrives() -> None:
    data = {
        "ImageId": "ami-1",
        "UserData": encoded(b"#!/bin/sh\n"),
        "IamInstanceProfile": {"Name": "node"},
        "MetadataOptions": {"InstanceMetadataTags": "enabled"},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "job", "Value": "42"}]}],
        "KeyName": "mine",
        "SecurityGroupIds": ["sg-1", "sg-2"],
    }
    spec = launch_spec(data, "lt-1", "3")
    assert (spec.image_id, spec.user_data, spec.profile) == ("ami-1", b"#!/bin/sh\n", "node")
    assert (spec.metadata_tags, spec.shutdown_behavior, spec.tags) == (True, "terminate", {"job": "42"})
    assert (spec.template_id, spec.template_version) == ("lt-1", "3")
    assert (spec.key_name, spec.security_groups) == ("mine", ("sg-1", "sg-2"))
    assert spec.disks == (ROOT_DISK,)


def test_groups_may_be_those_of_the_first_network_interface() -> None:
    assert launch_spec({"NetworkInterfaces": [{"DeviceIndex": 0, "Groups": ["sg-9"]}]}).security_groups == ("sg-9",)
    assert launch_spec({}).security_groups == ()


@pytest.mark.parametrize(
    ("mappings", "disks"),
    [
        ([], [ROOT_DISK]),
        ([{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": "100"}}], [Disk("/dev/sda1", 100)]),
        (
            [
                {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 500, "DeleteOnTermination": False}},
                {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 30, "VolumeType": "gp2"}},
            ],
            [Disk("/dev/xvda", 30, "gp2"), Disk("/dev/sdf", 500, delete_on_termination=False)],
        ),
        ([{"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 1, "DeleteOnTermination": "false"}}],
         [ROOT_DISK, Disk("/dev/sdf", 1, delete_on_termination=False)]),
        ([{"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"}], [ROOT_DISK]),
        ([{"DeviceName": "/dev/sdb", "NoDevice": "", "Ebs": {"VolumeSize": 5}}], [ROOT_DISK]),
    ],
)  # fmt: skip
def test_disks_are_the_mappings_with_the_root_first(mappings: list[dict[str, Any]], disks: list[Disk]) -> None:
    assert list(launch_spec({"BlockDeviceMappings": mappings}).disks) == disks


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ({"UserData": "#!/bin/sh"}, "InvalidUserData.Malformed"),
        ({"UserData": "abc"}, "InvalidUserData.Malformed"),
        ({"UserData": encoded(b"x" * (LARGEST_USER_DATA + 1))}, "InvalidParameterValue"),
        (
            {"BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": "much"}}]},
            "InvalidParameterValue",
        ),
        ({"BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 0}}]}, "InvalidParameterValue"),
        ({"BlockDeviceMappings": [{"Ebs": {"VolumeSize": 5}}]}, "MissingParameter"),
    ],
)
def test_what_ec2_refuses_is_refused(data: dict[str, Any], code: str) -> None:
    with pytest.raises(Ec2Error) as caught:
        launch_spec(data)
    assert caught.value.code == code


def test_user_data_may_be_wrapped_in_lines_and_as_long_as_ec2_allows() -> None:
    longest = b"x" * LARGEST_USER_DATA
    wrapped = base64.encodebytes(longest).decode()
    assert launch_spec({"UserData": wrapped}).user_data == longest
