"""What is beside the machines, as a user meets it: regions, types, templates, networks, SQS, EventBridge, STS."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.system.rehearsal import ROOT, Cloud, expect_error, launch, wait_for

LISTED = {"usd_per_hour": "4.5", "source": "made up for a test", "as_of": "2026-11-30"}
CHEAP = {"usd_per_hour": "0.25", "source": "made up for a test", "as_of": "2026-11-30"}
GPU_8 = {"GpuInfo": {"Gpus": [{"Name": "H100", "Manufacturer": "NVIDIA", "Count": 8}]}}
DESCRIBED = {"VCpuInfo": {"DefaultVCpus": 208}, "MemoryInfo": {"SizeInMiB": 1916928}, **GPU_8}
SLEEPER = "#!/bin/sh\nsleep 600\n"


def pool(zone: str, instance_type: str) -> dict[str, Any]:
    return {"zone": zone, "instance_type": instance_type, "spot": CHEAP, "capacity": {"spot": 3, "on_demand": 3}}


def write_market(path: Path) -> Path:
    """Two regions of AWS and one of GCP, where moto knows neither the zones nor the type."""
    path.write_text(
        json.dumps(
            {
                "label": "Three regions, made up.",
                "seed": 1,
                "zones": [
                    {"name": "us-east-1a", "zone_id": "use1-az6"},
                    {"name": "us-east-1e", "zone_id": "use1-az3"},
                    {"name": "us-west-2a", "zone_id": "usw2-az2"},
                    {"name": "us-central1-a", "zone_id": "us-central1-a"},
                    {"name": "us-central1-c", "zone_id": "us-central1-c"},
                ],
                "instance_types": [
                    {"name": "g4dn.xlarge", "gpu": "1x T4", "on_demand": {"us-east-1": LISTED, "us-west-2": LISTED}},
                    {
                        "name": "a3-highgpu-8g",
                        "gpu": "8x H100",
                        "on_demand": {"us-central1": LISTED},
                        "describe": DESCRIBED,
                    },
                ],
                "pools": [
                    pool("us-east-1a", "g4dn.xlarge"),
                    pool("us-east-1e", "g4dn.xlarge"),
                    pool("us-west-2a", "g4dn.xlarge"),
                    pool("us-central1-a", "a3-highgpu-8g"),
                ],
                "disk": {"usd_per_gib_month": "0.08", "source": "made up for a test", "as_of": "2026-11-30"},
            }
        )
    )
    return path


def end(cloud: Cloud) -> None:
    cloud.process.send_signal(signal.SIGTERM)
    assert cloud.process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("services")
    running = launch(folder / "state", "--market", str(write_market(folder / "market.json")))
    yield running
    end(running)


def refused(call: Any, **parameters: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(**parameters)
    return str(caught.value.response["Error"]["Code"])


def queue_for(cloud: Cloud, name: str, rule: str, pattern: dict[str, Any], **target: Any) -> str:
    """A queue that gets what matches a rule; its URL."""
    sqs, events = cloud.client("sqs"), cloud.client("events")
    queue = sqs.create_queue(QueueName=name)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    events.put_rule(Name=rule, EventPattern=json.dumps(pattern))
    events.put_targets(Rule=rule, Targets=[{"Id": "queue", "Arn": arn, **target}])
    return str(queue)


def receive(cloud: Cloud, queue: str, *, wait_s: int = 5, count: int = 1) -> list[str]:
    """The bodies of `count` messages, each deleted."""
    sqs, bodies = cloud.client("sqs"), []
    end_at = time.monotonic() + wait_s
    while len(bodies) < count and time.monotonic() < end_at:
        for message in sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=1).get("Messages", []):
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            bodies.append(message["Body"])
    return bodies


def test_regions_and_zones_are_those_of_the_market_and_of_aws(cloud: Cloud) -> None:
    regions = {one["RegionName"] for one in cloud.ec2.describe_regions()["Regions"]}
    assert {"us-east-1", "us-west-2", "eu-central-1", "us-central1"} <= regions
    zones = {one["ZoneName"]: one for one in cloud.ec2.describe_availability_zones()["AvailabilityZones"]}
    assert zones["us-east-1e"]["ZoneId"] == "use1-az3"
    assert {(one["RegionName"], one["State"]) for one in zones.values()} == {("us-east-1", "available")}
    central = cloud.client("ec2", "us-central1")
    zones = {one["ZoneName"]: one["ZoneId"] for one in central.describe_availability_zones()["AvailabilityZones"]}
    assert zones == {"us-central1-a": "us-central1-a", "us-central1-c": "us-central1-c"}
    by_id = central.describe_availability_zones(ZoneIds=["us-central1-c"])["AvailabilityZones"]
    assert [one["ZoneName"] for one in by_id] == ["us-central1-c"]


def test_each_zone_has_a_default_subnet_and_takes_others(cloud: Cloud) -> None:
    for region, zone in (("us-east-1", "us-east-1e"), ("us-central1", "us-central1-c")):
        ec2 = cloud.client("ec2", region)
        mine = {"Name": "availability-zone", "Values": [zone]}
        (default,) = ec2.describe_subnets(Filters=[mine, {"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
        assert default["AvailabilityZone"] == zone
        vpc = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
        made = ec2.create_subnet(VpcId=vpc, CidrBlock="10.7.1.0/24", AvailabilityZone=zone)["Subnet"]
        assert made["AvailabilityZone"] == zone
        group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
        ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[ssh])
        (shown,) = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
        assert shown["IpPermissions"][0]["FromPort"] == 22
    assert refused(ec2.create_subnet, VpcId=vpc, CidrBlock="10.7.2.0/24", AvailabilityZone="us-central1-z") == (
        "InvalidParameterValue"
    )


def test_types_come_in_pages_and_by_filters(cloud: Cloud) -> None:
    pages = list(cloud.ec2.get_paginator("describe_instance_types").paginate())
    sizes = [len(page["InstanceTypes"]) for page in pages]
    names = [one["InstanceType"] for page in pages for one in page["InstanceTypes"]]
    assert max(sizes) == 100
    assert len(names) == len(set(names)) > 1000
    assert {"g4dn.xlarge", "m5.large"} <= set(names)
    (gpu,) = cloud.client("ec2", "us-central1").describe_instance_types(InstanceTypes=["a3-highgpu-8g"])[
        "InstanceTypes"
    ]
    assert (gpu["GpuInfo"]["Gpus"][0]["Count"], gpu["VCpuInfo"]["DefaultVCpus"]) == (8, 208)
    assert refused(cloud.ec2.describe_instance_types, InstanceTypes=["a3-highgpu-8g"]) == "InvalidInstanceType"
    wanted = [{"Name": "instance-type", "Values": ["g4dn.*"]}, {"Name": "vcpu-info.default-vcpus", "Values": ["4"]}]
    found = cloud.ec2.describe_instance_types(Filters=wanted)["InstanceTypes"]
    assert [one["InstanceType"] for one in found] == ["g4dn.xlarge"]
    assert refused(cloud.ec2.describe_instance_types, InstanceTypes=["zz.nonexist"]) == "InvalidInstanceType"
    assert refused(cloud.ec2.describe_instance_types, MaxResults=1000) == "InvalidParameterValue"
    assert refused(cloud.ec2.describe_instance_types, DryRun=True) == "DryRunOperation"
    assert refused(cloud.ec2.describe_instance_types, Filters=[{"Name": "colour", "Values": ["red"]}]) == (
        "InvalidParameterValue"
    )


def test_offered_is_what_is_sold(cloud: Cloud) -> None:
    def offered(region: str, kind: str, **more: Any) -> set[tuple[str, str]]:
        answer = cloud.client("ec2", region).describe_instance_type_offerings(LocationType=kind, **more)
        return {(one["Location"], one["InstanceType"]) for one in answer["InstanceTypeOfferings"]}

    assert offered("us-east-1", "availability-zone") == {
        ("us-east-1a", "g4dn.xlarge"),
        ("us-east-1e", "g4dn.xlarge"),
    }
    assert offered("us-east-1", "availability-zone-id") == {("use1-az6", "g4dn.xlarge"), ("use1-az3", "g4dn.xlarge")}
    assert offered("us-central1", "region") == {("us-central1", "a3-highgpu-8g")}
    here = [{"Name": "location", "Values": ["us-east-1e"]}]
    assert offered("us-east-1", "availability-zone", Filters=here) == {("us-east-1e", "g4dn.xlarge")}
    assert offered("us-central1", "availability-zone", Filters=[{"Name": "instance-type", "Values": ["g*"]}]) == set()


def template_in(cloud: Cloud, region: str, name: str) -> str:
    ec2 = cloud.client("ec2", region)
    data = {"ImageId": "ami-0rehearsal", "InstanceInitiatedShutdownBehavior": "terminate"}
    made = ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    return str(made["LaunchTemplate"]["LaunchTemplateId"])


def buy_in(cloud: Cloud, region: str, template: str, zone: str, instance_type: str) -> Any:
    specification = {"LaunchTemplateId": template, "Version": "$Latest"}
    overrides = [{"InstanceType": instance_type, "AvailabilityZone": zone}]
    return cloud.client("ec2", region).create_fleet(
        Type="instant",
        LaunchTemplateConfigs=[{"LaunchTemplateSpecification": specification, "Overrides": overrides}],
        TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
    )


def shown_soon(ec2: Any, wanted: list[dict[str, Any]]) -> Any:
    """The reservations that match: what was just launched is shown a little later."""
    return wait_for("the instance is shown", lambda: ec2.describe_instances(Filters=wanted)["Reservations"])


def test_regions_are_apart_and_all_of_them_sell(cloud: Cloud) -> None:
    templates = {region: template_in(cloud, region, "apart") for region in ("us-west-2", "us-central1")}
    assert refused(cloud.ec2.describe_launch_templates, LaunchTemplateNames=["apart"]).startswith(
        "InvalidLaunchTemplateName"
    )
    for region, zone, kind in (
        ("us-west-2", "us-west-2a", "g4dn.xlarge"),
        ("us-central1", "us-central1-a", "a3-highgpu-8g"),
    ):
        bought = buy_in(cloud, region, templates[region], zone, kind)
        (instance_id,) = bought["Instances"][0]["InstanceIds"]
        ec2 = cloud.client("ec2", region)
        mine = [{"Name": "instance-id", "Values": [instance_id]}]
        (reservation,) = shown_soon(ec2, mine)
        assert reservation["Instances"][0]["Placement"]["AvailabilityZone"] == zone
        assert cloud.ec2.describe_instances(Filters=mine)["Reservations"] == []
        ec2.terminate_instances(InstanceIds=[instance_id])


def test_a_region_where_nothing_is_sold_has_services_and_no_machines(cloud: Cloud) -> None:
    queue = cloud.client("sqs", "eu-west-1").create_queue(QueueName="far")["QueueUrl"]
    assert "far" in queue
    template = template_in(cloud, "eu-west-1", "far")
    message = expect_error(
        "UnsupportedOperation", lambda: buy_in(cloud, "eu-west-1", template, "eu-west-1a", "g4dn.xlarge")
    )
    assert message == "This rehearsal cloud sells in us-east-1, us-west-2, us-central1, not in eu-west-1."


def test_the_warning_and_the_recommendation_come_in_eventbridges_envelope(cloud: Cloud) -> None:
    queue = queue_for(cloud, "envelopes", "ec2", {"source": ["aws.ec2"], "detail": {"state": [{"exists": False}]}})
    zone = {"InstanceType": "g4dn.xlarge", "AvailabilityZone": "us-east-1e"}
    instance_id = cloud.one(cloud.template(SLEEPER), overrides=[zone])
    before = cloud.now()
    cloud.post("interrupt", {"instance_id": instance_id, "event": "rebalance"})
    cloud.post("interrupt", {"instance_id": instance_id, "event": "notice"})
    bodies = receive(cloud, queue, count=2)
    events = [json.loads(body) for body in bodies]
    for event, kind, detail in zip(
        events,
        ("EC2 Instance Rebalance Recommendation", "EC2 Spot Instance Interruption Warning"),
        ({}, {"instance-action": "terminate"}),
        strict=True,
    ):
        told_at = datetime.fromisoformat(event.pop("time"))
        assert before - timedelta(seconds=1) <= told_at <= cloud.now(), "times are those of the rehearsal clock"
        assert len(event.pop("id")) == 36
        assert event == {
            "version": "0",
            "detail-type": kind,
            "source": "aws.ec2",
            "account": "123456789012",
            "region": "us-east-1",
            "resources": [f"arn:aws:ec2:us-east-1e:instance/{instance_id}"],
            "detail": {"instance-id": instance_id, **detail},
        }
    assert bodies[0].startswith('{"version":"0","id":"')
    assert '"time":"20' in bodies[0]
    shown_soon(cloud.ec2, [{"Name": "instance-id", "Values": [instance_id]}])
    cloud.ec2.terminate_instances(InstanceIds=[instance_id])


def test_rules_deliver_what_their_targets_want(cloud: Cloud) -> None:
    events = cloud.client("events")
    pattern = {"source": ["training"], "detail": {"step": [{"numeric": [">", 10]}]}}
    whole = queue_for(cloud, "whole", "whole", pattern)
    transformer = {
        "InputPathsMap": {"job": "$.detail.job", "step": "$.detail.step"},
        "InputTemplate": '{"job": <job>, "text": "<job> is at <step>"}',
    }
    queues = {
        "filled": queue_for(cloud, "filled", "filled", pattern, InputTransformer=transformer),
        "part": queue_for(cloud, "part", "part", pattern, InputPath="$.detail"),
        "fixed": queue_for(cloud, "fixed", "fixed", pattern, Input='"go"'),
    }
    quiet = queue_for(cloud, "quiet", "quiet", pattern)
    events.disable_rule(Name="quiet")
    for step in (5, 11):
        detail = json.dumps({"job": "resnet", "step": step})
        put = events.put_events(Entries=[{"Source": "training", "DetailType": "Progress", "Detail": detail}])
        assert put["FailedEntryCount"] == 0
    forged = {"Source": "aws.ec2", "DetailType": "EC2 Spot Instance Interruption Warning", "Detail": "{}"}
    put = events.put_events(Entries=[forged, {"Source": "other", "DetailType": "Progress", "Detail": "{}"}])
    assert put["FailedEntryCount"] == 1
    assert put["Entries"][0]["ErrorCode"] == "NotAuthorizedForSourceException"
    assert put["Entries"][1]["EventId"]
    (body,) = receive(cloud, whole)
    event = json.loads(body)
    assert event["account"] == "123456789012"
    assert event["detail"] == {"job": "resnet", "step": 11}
    got = {name: receive(cloud, queue) for name, queue in queues.items()}
    assert json.loads(got["filled"][0]) == {"job": "resnet", "text": "resnet is at 11"}
    assert json.loads(got["part"][0]) == {"job": "resnet", "step": 11}
    assert got["fixed"] == ['"go"']
    assert receive(cloud, quiet, wait_s=1) == []


def test_a_waiting_receiver_keeps_nobody_waiting(cloud: Cloud) -> None:
    sqs = cloud.client("sqs")
    queue = sqs.create_queue(QueueName="slow")["QueueUrl"]
    got: list[Any] = []

    def wait() -> None:
        got.append(cloud.client("sqs").receive_message(QueueUrl=queue, WaitTimeSeconds=20)["Messages"])

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    asked = time.monotonic()
    cloud.client("sts").get_caller_identity()
    sqs.send_message(QueueUrl=queue, MessageBody="at last")
    thread.join(timeout=10)
    assert [message["Body"] for message in got[0]] == ["at last"]
    assert time.monotonic() - asked < 5, "neither the caller nor the receiver waited for the 20 s to pass"


def test_sts_says_who_asks_and_lends_roles(cloud: Cloud) -> None:
    sts, iam = cloud.client("sts"), cloud.client("iam")
    assert sts.get_caller_identity()["Account"] == "123456789012"
    role = iam.create_role(RoleName="node", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    lent = sts.assume_role(RoleArn=role, RoleSessionName="a-session", DurationSeconds=900)["Credentials"]
    borrower = cloud.client("sts", key=lent["AccessKeyId"], token=lent["SessionToken"])
    assert borrower.get_caller_identity()["Arn"].endswith("assumed-role/node/a-session")
    assert sts.get_session_token()["Credentials"]["SessionToken"]


def test_forty_at_once_make_forty_templates(cloud: Cloud) -> None:
    ec2, ids, faults = cloud.client("ec2"), [], []

    def make(number: int) -> None:
        try:
            data = {"ImageId": "ami-0rehearsal"}
            made = ec2.create_launch_template(LaunchTemplateName=f"at-once-{number}", LaunchTemplateData=data)
            ids.append(made["LaunchTemplate"]["LaunchTemplateId"])
        except ClientError as error:
            faults.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(set(ids)) == 40
    shown = ec2.describe_launch_templates(LaunchTemplateIds=ids)["LaunchTemplates"]
    assert {one["LaunchTemplateName"] for one in shown} == {f"at-once-{number}" for number in range(40)}


def test_a_killed_cloud_comes_back_with_everything_beside_the_machines(tmp_path: Path) -> None:
    market = str(write_market(tmp_path / "market.json"))
    state = tmp_path / "state"
    first = launch(state, "--market", market)
    sqs, ec2, west = first.client("sqs"), first.client("ec2"), first.client("ec2", "us-west-2")
    queue = queue_for(first, "kept", "ec2", {"source": ["aws.ec2"]})
    for text in ("read and deleted", "read", "never read"):
        sqs.send_message(QueueUrl=queue, MessageBody=text)
    for wanted in ("read and deleted", "read"):
        (message,) = sqs.receive_message(QueueUrl=queue, VisibilityTimeout=1)["Messages"]
        assert message["Body"] == wanted
        if wanted == "read and deleted":
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    template = first.template(SLEEPER)
    data = {"ImageId": "ami-0second", "InstanceType": "g4dn.xlarge"}
    ec2.create_launch_template_version(LaunchTemplateId=template, LaunchTemplateData=data, SourceVersion="1")
    ec2.create_tags(Resources=[template], Tags=[{"Key": "job", "Value": "42"}])
    template_in(first, "us-west-2", "in-the-west")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZone="us-east-1e")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
    first.client("iam").create_role(RoleName="node", AssumeRolePolicyDocument="{}")
    first.client("ssm").put_parameter(Name="/gpucost/image", Value="ami-0rehearsal", Type="String")
    images = {one["ImageId"] for one in ec2.describe_images(Owners=["amazon"])["Images"]}
    defaults = {one["SubnetId"] for one in west.describe_subnets()["Subnets"]}
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(timeout=10)

    second = launch(state, "--market", market)
    try:
        ec2, west = second.client("ec2"), second.client("ec2", "us-west-2")
        time.sleep(1)
        new_queue = second.client("sqs").get_queue_url(QueueName="kept")["QueueUrl"]
        assert sorted(receive(second, new_queue, count=2)) == ["never read", "read"]
        assert receive(second, new_queue, wait_s=1) == [], "what was deleted does not come again"
        versions = ec2.describe_launch_template_versions(LaunchTemplateId=template)["LaunchTemplateVersions"]
        assert {one["VersionNumber"]: one["LaunchTemplateData"]["ImageId"] for one in versions} == {
            1: "ami-0rehearsal",
            2: "ami-0second",
        }
        (shown,) = ec2.describe_launch_templates(LaunchTemplateIds=[template])["LaunchTemplates"]
        assert shown["Tags"] == [{"Key": "job", "Value": "42"}]
        assert len(west.describe_launch_templates(LaunchTemplateNames=["in-the-west"])["LaunchTemplates"]) == 1
        assert ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["AvailabilityZone"] == "us-east-1e"
        assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["VpcId"] == vpc
        assert second.client("iam").get_role(RoleName="node")["Role"]["RoleName"] == "node"
        parameter = second.client("ssm").get_parameter(Name="/gpucost/image")["Parameter"]
        assert parameter["Value"] == "ami-0rehearsal"
        assert {one["ImageId"] for one in ec2.describe_images(Owners=["amazon"])["Images"]} == images
        assert {one["SubnetId"] for one in west.describe_subnets()["Subnets"]} == defaults
        override = {"InstanceType": "g4dn.xlarge", "SubnetId": subnet}
        instance_id = second.one(template, overrides=[override])
        second.post("interrupt", {"instance_id": instance_id, "event": "notice"})
        kinds = [json.loads(body)["detail-type"] for body in receive(second, new_queue, count=4, wait_s=3)]
        assert "EC2 Spot Instance Interruption Warning" in kinds, "the rule of the first life still delivers"
    finally:
        end(second)


def test_the_state_of_another_moto_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "moto"
    folder.mkdir(mode=0o700)
    (folder / "sqs.123456789012.us-east-1.snapshot").write_bytes(b'{"format": 1, "moto": "4.0.0"}\nnot read')
    with pytest.raises(AssertionError):
        launch(tmp_path, "--market", str(ROOT / "include/market/three_zones.json"))
    (why,) = [line for line in (tmp_path / "server.log").read_text().splitlines() if "cannot start" in line]
    assert "pip install moto==4.0.0" in why
    assert "use another --state-dir" in why
