"""What the rehearsal cloud shows of instances, and how it is filtered, by boto3."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.system.rehearsal import SLEEPER, TYPE, ZONES, Cloud, expect_error, wait_for


@pytest.fixture(autouse=True)
def _no_leftovers(no_leftovers: None) -> None:
    """Every test leaves the shared cloud empty."""


def found(cloud: Cloud, *filters: tuple[str, str], **more: Any) -> set[str]:
    pages = cloud.ec2.get_paginator("describe_instances").paginate(
        Filters=[{"Name": name, "Values": [value]} for name, value in filters], **more
    )
    return {i["InstanceId"] for page in pages for r in page["Reservations"] for i in r["Instances"]}


def test_describe_finds_by_tag_state_lifecycle_and_token_and_in_pages(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    spot = [cloud.one(template, tags={"gpucost:job": f"find-{n}"}, ClientToken=f"find-{n}") for n in range(7)]
    owned = cloud.one(template, spot=False, tags={"gpucost:job": "other"})

    living = ("instance-state-name", "*ing")
    cloud.wait_state(owned, "running")
    assert found(cloud, ("tag:gpucost:job", "find-*"), living) == set(spot)
    assert found(cloud, ("tag:gpucost:job", "find-?"), living, PaginationConfig={"PageSize": 5}) == set(spot)
    assert found(cloud, ("tag:gpucost:job", "find-1"), living) == {spot[1]}
    assert found(cloud, ("client-token", "find-2"), ("instance-type", TYPE)) == {spot[2]}
    assert found(cloud, ("instance-lifecycle", "spot"), ("tag-key", "gpucost:job"), living) == set(spot)
    assert owned not in found(cloud, ("instance-lifecycle", "spot"))
    assert "InstanceLifecycle" not in cloud.show(owned)
    cloud.ec2.create_tags(Resources=[spot[0]], Tags=[{"Key": "added", "Value": "later"}])
    assert found(cloud, ("tag:added", "later")) == {spot[0]}
    expect_error("InvalidParameterValue", lambda: found(cloud, ("no-such-filter", "x")))


def test_every_filter_finds_its_instance_and_not_the_other(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    spot = cloud.one(template, zones=[ZONES[1]], tags={"a": "1"})
    cloud.ec2.run_instances(
        ImageId="ami-0other", InstanceType="g5.xlarge", MinCount=1, MaxCount=1, ClientToken="other-token",
        Placement={"AvailabilityZone": ZONES[2]},
    )  # fmt: skip
    shown = cloud.wait_state(spot, "running")
    (other,) = found(cloud, ("client-token", "other-token"))
    cloud.wait_state(other, "running")
    reservation = cloud.ec2.describe_instances(InstanceIds=[spot])["Reservations"][0]
    for name, value in {
        "availability-zone": ZONES[1],
        "availability-zone-id": "use1-az1",
        "iam-instance-profile.arn": shown["IamInstanceProfile"]["Arn"],
        "image-id": "ami-0rehearsal",
        "instance-id": spot,
        "instance-lifecycle": "spot",
        "instance-type": "g4dn.*",
        "private-dns-name": shown["PrivateDnsName"],
        "private-ip-address": shown["PrivateIpAddress"],
        "reservation-id": reservation["ReservationId"],
        "spot-instance-request-id": shown["SpotInstanceRequestId"],
        "subnet-id": shown["SubnetId"],
        "tag:a": "?",
        "tag-key": "a",
    }.items():
        assert found(cloud, (name, value), ("instance-state-name", "running")) == {spot}, name
    today = f"{shown['LaunchTime']:%Y-%m-%dT%H:%M:%S}*"
    assert spot in found(cloud, ("launch-time", today))
    assert found(cloud, ("launch-time", "2001-*")) == set()
    assert found(cloud, ("image-id", "ami-0other"), ("instance-state-code", "16")) == {other}
    assert found(cloud, ("vpc-id", shown["VpcId"]), ("instance-state-name", "running")) >= {spot}
    expect_error("InvalidParameterValue", lambda: found(cloud, ("no-such-filter", "x")))


def test_instances_of_one_launch_share_a_reservation(cloud: Cloud) -> None:
    run = cloud.ec2.run_instances(ImageId="ami-0", InstanceType=TYPE, MinCount=2, MaxCount=2)
    fleet = cloud.buy(cloud.template(SLEEPER), zones=ZONES[:1], count=2)
    (group,) = fleet["Instances"]
    reservations = {
        r["ReservationId"]: {i["InstanceId"] for i in r["Instances"]}
        for r in cloud.ec2.describe_instances(
            Filters=[{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        )["Reservations"]
    }
    assert reservations[run["ReservationId"]] == {one["InstanceId"] for one in run["Instances"]}
    assert set(group["InstanceIds"]) in reservations.values()
    assert len(reservations) == 2


def test_unknown_and_malformed_ids(cloud: Cloud) -> None:
    expect_error(
        "InvalidInstanceID.NotFound", lambda: cloud.ec2.describe_instances(InstanceIds=["i-0000000000000000f"])
    )
    expect_error("InvalidInstanceID.Malformed", lambda: cloud.ec2.describe_instances(InstanceIds=["machine"]))
    one = cloud.one(cloud.template(SLEEPER))
    expect_error("InvalidParameterCombination", lambda: cloud.ec2.describe_instances(InstanceIds=[one], MaxResults=5))
    expect_error("InvalidNextToken", lambda: cloud.ec2.describe_instances(NextToken="made up"))


def test_a_page_is_neither_too_small_nor_too_large(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2", parameter_validation=False)
    few = "Value ( 4 ) for parameter maxResults is invalid. Expecting a value greater than 5."
    for describe in (
        ec2.describe_instances,
        ec2.describe_instance_status,
        ec2.describe_spot_instance_requests,
        ec2.describe_tags,
        ec2.describe_volumes,
        ec2.describe_instance_types,
        ec2.describe_instance_type_offerings,
    ):
        assert expect_error("InvalidParameterValue", lambda: describe(MaxResults=4)) == few  # noqa: B023
        expect_error("InvalidParameterValue", lambda: describe(MaxResults=1001))  # noqa: B023
        describe(MaxResults=5)
    expect_error("InvalidParameterValue", lambda: ec2.describe_launch_templates(MaxResults=201))
    ec2.describe_launch_templates(MaxResults=1)
    ec2.describe_fleets(MaxResults=1)
    wanted = {"InstanceTypes": [TYPE], "TargetCapacity": 1}
    expect_error("InvalidParameterValue", lambda: ec2.get_spot_placement_scores(**wanted, MaxResults=9))


def test_what_a_machine_prints_is_shown(cloud: Cloud) -> None:
    one = cloud.one(cloud.template("#!/bin/sh\nyes 0123456789 | head -c 100000\necho the end\nsleep 600\n"))

    def printed() -> str:
        return str(cloud.ec2.get_console_output(InstanceId=one)["Output"])

    wait_for("all is printed", lambda: printed().endswith("the end\n"))
    assert len(printed()) == 64 * 1024, "the last 64 KiB, and no more"
    expect_error("InvalidInstanceID.NotFound", lambda: cloud.ec2.get_console_output(InstanceId="i-0000000000000000f"))


def test_what_is_not_rehearsed_of_machines_says_so(cloud: Cloud) -> None:
    one = cloud.one(cloud.template(SLEEPER))
    volume = cloud.show(one)["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
    for action, call in {
        "ModifyInstanceMetadataOptions": lambda: cloud.ec2.modify_instance_metadata_options(
            InstanceId=one, HttpTokens="optional"
        ),
        "AssociateAddress": lambda: cloud.ec2.associate_address(InstanceId=one, PublicIp="198.51.100.1"),
        "AttachVolume": lambda: cloud.ec2.attach_volume(InstanceId=one, VolumeId=volume, Device="/dev/sdz"),
        "CreateImage": lambda: cloud.ec2.create_image(InstanceId=one, Name="image"),
        "CreateSnapshot": lambda: cloud.ec2.create_snapshot(VolumeId=volume),
        "CreateVolume": lambda: cloud.ec2.create_volume(AvailabilityZone=ZONES[0], Size=8),
        "DescribeInstanceCreditSpecifications": lambda: cloud.ec2.describe_instance_credit_specifications(),
        "DescribeVolumeStatus": lambda: cloud.ec2.describe_volume_status(),
        "ModifyInstanceCreditSpecification": lambda: cloud.ec2.modify_instance_credit_specification(
            InstanceCreditSpecifications=[{"InstanceId": one, "CpuCredits": "standard"}]
        ),
        "GetPasswordData": lambda: cloud.ec2.get_password_data(InstanceId=one),
    }.items():
        assert expect_error("UnsupportedOperation", call).startswith(f"{action} is not rehearsed. ")


def test_status_shows_the_running_or_all(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    runs, ends = cloud.one(template), cloud.one(template)
    cloud.wait_state(runs, "running")
    cloud.ec2.get_waiter("instance_status_ok").wait(InstanceIds=[runs], WaiterConfig={"Delay": 1, "MaxAttempts": 5})
    cloud.ec2.terminate_instances(InstanceIds=[ends])
    cloud.wait_state(ends, "terminated")

    def states(**more: Any) -> dict[str, str]:
        answer = cloud.ec2.describe_instance_status(**more)
        return {one["InstanceId"]: one["InstanceState"]["Name"] for one in answer["InstanceStatuses"]}

    assert states() == {runs: "running"}
    assert states(InstanceIds=[runs, ends], IncludeAllInstances=True) == {runs: "running", ends: "terminated"}
    ok = [{"Name": "instance-status.status", "Values": ["ok"]}]
    assert states(Filters=ok, IncludeAllInstances=True) == {runs: "running"}


def test_attributes_are_shown_and_the_shutdown_behaviour_changes(cloud: Cloud) -> None:
    user_data = "#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.1; done\nshutdown -h now\nsleep 600\n"
    template = cloud.template(user_data, InstanceInitiatedShutdownBehavior="terminate")
    one = cloud.one(template, spot=False)

    def attribute(name: str) -> Any:
        return cloud.ec2.describe_instance_attribute(InstanceId=one, Attribute=name)

    assert base64.b64decode(attribute("userData")["UserData"]["Value"]).decode() == user_data
    assert attribute("instanceType")["InstanceType"]["Value"] == TYPE
    assert attribute("blockDeviceMapping")["BlockDeviceMappings"][0]["DeviceName"] == "/dev/xvda"
    expect_error("UnsupportedOperation", lambda: attribute("sriovNetSupport"))
    behaviour = {"Value": "stop"}
    cloud.ec2.modify_instance_attribute(InstanceId=one, InstanceInitiatedShutdownBehavior=behaviour)
    assert attribute("instanceInitiatedShutdownBehavior")["InstanceInitiatedShutdownBehavior"] == behaviour
    expect_error(
        "UnsupportedOperation",
        lambda: cloud.ec2.modify_instance_attribute(InstanceId=one, InstanceType={"Value": "g5.xlarge"}),
    )
    cloud.wait_state(one, "running")
    (cloud.folder(one) / "go").touch()
    cloud.wait_state(one, "stopped")


def test_spot_requests_are_filtered_and_cancelled(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    first, second = cloud.one(template, zones=[ZONES[0]]), cloud.one(template, zones=[ZONES[1]])
    requests = [cloud.show(one)["SpotInstanceRequestId"] for one in (first, second)]

    def matching(*filters: tuple[str, str]) -> set[str]:
        answer = cloud.ec2.describe_spot_instance_requests(
            SpotInstanceRequestIds=requests, Filters=[{"Name": name, "Values": [value]} for name, value in filters]
        )
        return {one["InstanceId"] for one in answer["SpotInstanceRequests"]}

    assert matching(("state", "active"), ("status-code", "fulfilled")) == {first, second}
    assert matching(("launched-availability-zone", ZONES[1])) == {second}
    assert matching(("instance-id", first), ("launch.instance-type", TYPE), ("type", "one-time")) == {first}
    cancelled = cloud.ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=requests[:1])
    assert cancelled["CancelledSpotInstanceRequests"] == [{"SpotInstanceRequestId": requests[0], "State": "cancelled"}]
    assert matching(("state", "cancelled"), ("status-code", "request-canceled-and-instance-running")) == {first}
    assert cloud.state(first) in {"pending", "running"}, "the instance runs on"
    cloud.ec2.terminate_instances(InstanceIds=[second])
    assert matching(("state", "closed"), ("status-code", "instance-terminated-by-user")) == {second}
    expect_error(
        "InvalidSpotInstanceRequestID.NotFound",
        lambda: cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=["sir-00000000"]),
    )
