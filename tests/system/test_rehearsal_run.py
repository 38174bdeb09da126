"""RunInstances on the rehearsal cloud, by boto3, as AWS documents it."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.system.rehearsal import SLEEPER, TYPE, ZONES, Cloud, expect_error, forty_at_once, tag_specifications

P3 = "p3.2xlarge"
SPOT = {"MarketType": "spot"}


@pytest.fixture(autouse=True)
def _no_leftovers(no_leftovers: None) -> None:
    """Every test leaves the shared cloud empty."""


def run(cloud: Cloud, count: int = 1, *, least: int | None = None, **more: Any) -> Any:
    given = {"ImageId": "ami-0123456789abcdef0", "InstanceType": TYPE, **more}
    return cloud.ec2.run_instances(MinCount=least or count, MaxCount=count, **given)


def ids(answer: Any) -> list[str]:
    return [one["InstanceId"] for one in answer["Instances"]]


def test_direct_parameters_are_what_the_instances_get(cloud: Cloud) -> None:
    group = cloud.ec2.create_security_group(GroupName=f"g-{uuid.uuid4().hex[:8]}", Description="for a test")["GroupId"]
    cloud.ec2.create_key_pair(KeyName=(key := f"k-{uuid.uuid4().hex[:8]}"))
    answer = run(
        cloud,
        2,
        UserData=SLEEPER,
        Placement={"AvailabilityZone": ZONES[2]},
        IamInstanceProfile={"Name": "trainer"},
        SecurityGroupIds=[group],
        KeyName=key,
        InstanceInitiatedShutdownBehavior="terminate",
        MetadataOptions={"InstanceMetadataTags": "enabled"},
        TagSpecifications=tag_specifications(instance={"Name": "direct"}),
    )
    assert answer["ReservationId"].startswith("r-")
    assert [one["AmiLaunchIndex"] for one in answer["Instances"]] == [0, 1]
    assert {one["State"]["Name"] for one in answer["Instances"]} == {"pending"}
    first = ids(answer)[0]
    assert cloud.wait_file(first, "started") == "up\n"
    shown = cloud.wait_state(first, "running")
    assert (shown["Placement"]["AvailabilityZone"], shown["KeyName"]) == (ZONES[2], key)
    assert (shown["SecurityGroups"][0]["GroupId"], "InstanceLifecycle" in shown) == (group, False)
    assert shown["IamInstanceProfile"]["Arn"].endswith(":instance-profile/trainer")
    assert shown["Tags"] == [{"Key": "Name", "Value": "direct"}]
    attribute = cloud.ec2.describe_instance_attribute(InstanceId=first, Attribute="instanceInitiatedShutdownBehavior")
    assert attribute["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"


def test_a_launch_template_is_used_and_the_request_goes_before_it(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER, InstanceType=P3)
    wanted = {"LaunchTemplate": {"LaunchTemplateId": template}, "MinCount": 1, "MaxCount": 1}
    (plain,) = cloud.ec2.run_instances(**wanted)["Instances"]
    assert (plain["InstanceType"], plain["ImageId"]) == (P3, "ami-0rehearsal")
    tags = {tag["Key"]: tag["Value"] for tag in plain["Tags"]}
    assert (tags["from"], tags["aws:ec2launchtemplate:id"]) == ("template", template)
    (mine,) = cloud.ec2.run_instances(
        **wanted, InstanceType=TYPE, ImageId="ami-0mine", TagSpecifications=tag_specifications(instance={"from": "me"})
    )["Instances"]
    assert (mine["InstanceType"], mine["ImageId"]) == (TYPE, "ami-0mine")
    assert {"Key": "from", "Value": "me"} in mine["Tags"]
    other = cloud.ec2.run_instances(**wanted, InstanceMarketOptions=SPOT, IamInstanceProfile={"Name": "other"})
    assert other["Instances"][0]["IamInstanceProfile"]["Arn"].endswith("/other")
    expect_error(
        "InvalidLaunchTemplateId.NotFound",
        lambda: cloud.ec2.run_instances(LaunchTemplate={"LaunchTemplateId": "lt-0"}, MinCount=1, MaxCount=1),
    )


def test_volumes_are_those_of_the_mappings(cloud: Cloud) -> None:
    mappings = [
        {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 40}},
        {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 100, "DeleteOnTermination": False}},
    ]
    (one,) = ids(run(cloud, BlockDeviceMappings=mappings))
    shown = cloud.show(one)
    assert shown["RootDeviceName"] == "/dev/sda1"
    kept = {device["DeviceName"]: device["Ebs"]["DeleteOnTermination"] for device in shown["BlockDeviceMappings"]}
    assert kept == {"/dev/sda1": True, "/dev/sdf": False}


def test_a_volume_that_outlives_its_instance_is_shown_and_paid_for_until_it_is_deleted(cloud: Cloud) -> None:
    (one,) = ids(
        run(
            cloud,
            Placement={"AvailabilityZone": ZONES[1]},
            BlockDeviceMappings=[
                {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 40}},
                {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 100, "DeleteOnTermination": False}},
            ],
            TagSpecifications=tag_specifications(instance={"Name": "machine"}, volume={"Name": "scratch"}),
        )
    )

    def volumes(*filters: tuple[str, str], **more: Any) -> dict[str, Any]:
        wanted = [{"Name": name, "Values": [value]} for name, value in filters]
        found = cloud.ec2.describe_volumes(Filters=wanted, **more)["Volumes"]
        return {volume["VolumeId"]: volume for volume in found}

    def deleted(volume: str) -> str | None:
        lines = cloud.get("invoice")["lines"]
        return next(disk["deleted"] for line in lines for disk in line["disks"] if disk["volume_id"] == volume)

    mine = volumes(("attachment.instance-id", one))
    assert set(mine) == {device["Ebs"]["VolumeId"] for device in cloud.show(one)["BlockDeviceMappings"]}
    root, data = sorted(mine.values(), key=lambda volume: volume["Size"])
    assert [(v["Size"], v["State"], v["VolumeType"], v["AvailabilityZone"]) for v in (root, data)] == [
        (40, "in-use", "gp3", ZONES[1]), (100, "in-use", "gp3", ZONES[1])
    ]  # fmt: skip
    assert [(a["Device"], a["DeleteOnTermination"]) for v in (root, data) for a in v["Attachments"]] == [
        ("/dev/sda1", True), ("/dev/sdf", False)
    ]  # fmt: skip
    kept = data["VolumeId"]
    assert root["Tags"] == data["Tags"] == [{"Key": "Name", "Value": "scratch"}]
    cloud.ec2.create_tags(Resources=[kept, one], Tags=[{"Key": "crew", "Value": "night"}])
    cloud.ec2.delete_tags(Resources=[kept], Tags=[{"Key": "Name"}])
    assert set(volumes(("tag:crew", "night"), ("status", "in-use"))) == {kept}
    expect_error("VolumeInUse", lambda: cloud.ec2.delete_volume(VolumeId=kept))

    cloud.ec2.terminate_instances(InstanceIds=[one])
    cloud.wait_state(one, "terminated")
    assert volumes(VolumeIds=[kept])[kept]["State"] == "available"
    assert volumes(VolumeIds=[kept])[kept]["Attachments"] == []
    assert root["VolumeId"] not in volumes(("availability-zone", ZONES[1]))
    assert deleted(root["VolumeId"])
    assert deleted(kept) is None, "it is paid for on and on"
    rows = cloud.ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [kept]}])["Tags"]
    assert [(row["ResourceType"], row["Key"], row["Value"]) for row in rows] == [("volume", "crew", "night")]
    cloud.ec2.delete_volume(VolumeId=kept)
    assert deleted(kept), "its bill has an end"
    for gone in (kept, root["VolumeId"], "vol-00000000000000000"):
        expect_error("InvalidVolume.NotFound", lambda: cloud.ec2.describe_volumes(VolumeIds=[gone]))  # noqa: B023
        expect_error("InvalidVolume.NotFound", lambda: cloud.ec2.delete_volume(VolumeId=gone))  # noqa: B023
    expect_error("InvalidParameterValue", lambda: cloud.ec2.delete_volume(VolumeId="disk"))


def test_a_fault_is_not_spent_on_a_launch_that_could_not_be(cloud: Cloud) -> None:
    zone = {"Placement": {"AvailabilityZone": ZONES[0]}}
    rule = {"id": "once", "kind": "refuse", "code": "Unsupported", "times": 1}
    cloud.post("faults", {"rules": [rule]})
    try:
        expect_error("InsufficientInstanceCapacity", lambda: run(cloud, 3, **zone))
        expect_error("Unsupported", lambda: run(cloud, 1, **zone))
        assert len(ids(run(cloud, 1, **zone))) == 1
    finally:
        cloud.post("faults/clear", {"id": "once"})


def test_as_many_as_there_are_but_not_fewer_than_the_minimum(cloud: Cloud) -> None:
    zone = {"Placement": {"AvailabilityZone": ZONES[0]}}
    message = expect_error("InsufficientInstanceCapacity", lambda: run(cloud, 3, **zone))
    assert ZONES[0] in message
    assert ZONES[1] in message, "it says where there is some"
    assert not living(cloud), "nothing is launched"
    assert len(ids(run(cloud, 5, least=1, **zone))) == 2
    message = expect_error("InsufficientInstanceCapacity", lambda: run(cloud, 3, InstanceType=P3))
    assert "not specifying" not in message, "no zone was named"
    spot = {"InstanceMarketOptions": SPOT, "InstanceType": P3, **zone}
    assert len(ids(run(cloud, 9, least=2, **spot))) == 2
    assert "Spot" in expect_error("InsufficientInstanceCapacity", lambda: run(cloud, **spot))


def living(cloud: Cloud) -> list[str]:
    return [one["instance_id"] for one in cloud.get("status")["instances"] if one["state"] in {"pending", "running"}]


def test_without_a_zone_all_go_to_one_that_has_enough(cloud: Cloud) -> None:
    run(cloud, 2, Placement={"AvailabilityZone": ZONES[0]})
    answer = run(cloud, 2)
    (zone,) = {one["Placement"]["AvailabilityZone"] for one in answer["Instances"]}
    assert zone != ZONES[0]


def test_spot_options(cloud: Cloud) -> None:
    options = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.5", "SpotInstanceType": "one-time"}}
    tags = tag_specifications(spot_instances_request={"for": "spot"})
    (shown,) = run(cloud, InstanceMarketOptions=options, TagSpecifications=tags)["Instances"]
    assert shown["InstanceLifecycle"] == "spot"
    found = cloud.ec2.describe_spot_instance_requests(Filters=[{"Name": "tag:for", "Values": ["spot"]}])
    (request,) = found["SpotInstanceRequests"]
    assert (request["InstanceId"], request["SpotPrice"], request["State"]) == (
        shown["InstanceId"],
        "0.500000",
        "active",
    )

    def buy(**spot: Any) -> Any:
        return run(cloud, InstanceMarketOptions={"MarketType": "spot", "SpotOptions": spot})

    assert "0.01" in expect_error("SpotMaxPriceTooLow", lambda: buy(MaxPrice="0.01"))
    assert "one-time" in expect_error("UnsupportedOperation", lambda: buy(SpotInstanceType="persistent"))
    assert "terminate" in expect_error("UnsupportedOperation", lambda: buy(InstanceInterruptionBehavior="stop"))


def test_what_is_wrong_is_refused_as_ec2_refuses_it(cloud: Cloud) -> None:
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in cloud.ec2.describe_subnets()["Subnets"]}
    for code, wrong in {
        "InvalidAMIID.Malformed": {"ImageId": "image-1"},
        "InvalidParameterValue": {"InstanceType": "zz.nonexist"},
        "Unsupported": {"Placement": {"AvailabilityZone": "us-east-1d"}},
        "InvalidSubnetID.NotFound": {"SubnetId": "subnet-00000000"},
        "InvalidKeyPair.NotFound": {"KeyName": "nobody's"},
        "InvalidGroup.NotFound": {"SecurityGroupIds": ["sg-00000000000000000"]},
        "InvalidBlockDeviceMapping": {
            "BlockDeviceMappings": [{"DeviceName": "/dev/sdf", "Ebs": {"VolumeType": "gp3"}}]
        },
        "InvalidParameterCombination": {
            "IamInstanceProfile": {"Name": "a", "Arn": "arn:aws:iam::1:instance-profile/a"}
        },
        "DryRunOperation": {"DryRun": True},
        "UnsupportedOperation": {"Placement": {"Tenancy": "dedicated"}},
    }.items():
        arguments: dict[str, Any] = wrong
        expect_error(code, lambda: run(cloud, **arguments))  # noqa: B023
    contrary = {"Placement": {"AvailabilityZone": ZONES[0]}, "SubnetId": subnets[ZONES[1]]}
    assert ZONES[1] in expect_error("InvalidParameterValue", lambda: run(cloud, **contrary))
    expect_error("InvalidParameterValue", lambda: run(cloud, UserData="x" * 17_000))
    expect_error("InvalidParameterValue", lambda: cloud.ec2.run_instances(ImageId="ami-0", MinCount=3, MaxCount=2))
    expect_error("MissingParameter", lambda: cloud.ec2.run_instances(InstanceType=TYPE, MinCount=1, MaxCount=1))
    assert not living(cloud)


def test_a_client_token_is_one_reservation_also_for_forty_at_once(cloud: Cloud) -> None:
    tokens = [f"run-{uuid.uuid4()}" for _ in range(5)]
    answers = forty_at_once(lambda number: run(cloud, ClientToken=tokens[number % 5], InstanceMarketOptions=SPOT))
    assert len({answer["ReservationId"] for answer in answers}) == 5
    assert len({one for answer in answers for one in ids(answer)}) == len(living(cloud)) == 5
    again = {"ClientToken": tokens[1], "InstanceMarketOptions": SPOT}
    expect_error("IdempotentParameterMismatch", lambda: run(cloud, InstanceType=P3, **again))
    (first,) = ids(run(cloud, **again))
    cloud.ec2.terminate_instances(InstanceIds=[first])
    cloud.wait_state(first, "terminated")
    expect_error("IdempotentInstanceTerminated", lambda: run(cloud, **again))


def test_quotas_and_faults_are_raised(cloud: Cloud) -> None:
    europe = Cloud(cloud.process, cloud.url, cloud.state_dir, cloud.client("ec2", "eu-west-1"))
    assert "limit of 8" in expect_error("VcpuLimitExceeded", lambda: run(europe, 3))
    expect_error("MaxSpotInstanceCountExceeded", lambda: run(europe, 4, InstanceMarketOptions=SPOT))
    assert len(ids(run(europe, 5, least=1))) == 2
    cloud.post("faults", {"rules": [{"id": "none", "kind": "refuse", "code": "InsufficientInstanceCapacity"}]})
    try:
        expect_error("InsufficientInstanceCapacity", lambda: run(cloud))
    finally:
        cloud.post("faults/clear", {"id": "none"})
