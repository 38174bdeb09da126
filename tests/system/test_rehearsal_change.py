"""Ending, stopping and tagging what runs on the rehearsal cloud, by boto3."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.rehearsal import SLEEPER, ZONES, Cloud, expect_error


@pytest.fixture(autouse=True)
def _no_leftovers(no_leftovers: None) -> None:
    """Every test leaves the shared cloud empty."""


def test_terminating_is_for_all_or_for_none_and_can_be_said_again(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    one, other = cloud.one(template), cloud.one(template)
    expect_error(
        "InvalidInstanceID.NotFound",
        lambda: cloud.ec2.terminate_instances(InstanceIds=[one, "i-00000000000000000", other]),
    )
    assert {cloud.state(one), cloud.state(other)} <= {"pending", "running"}, "one unknown id, and nothing is terminated"
    answer = cloud.ec2.terminate_instances(InstanceIds=[other, one, one])
    assert [change["InstanceId"] for change in answer["TerminatingInstances"]] == [other, one]
    assert {change["CurrentState"]["Name"] for change in answer["TerminatingInstances"]} == {"shutting-down"}
    cloud.wait_state(one, "terminated")
    again = cloud.ec2.terminate_instances(InstanceIds=[one])["TerminatingInstances"]
    assert [(c["PreviousState"]["Name"], c["CurrentState"]["Name"]) for c in again] == [("terminated", "terminated")]
    expect_error("DryRunOperation", lambda: cloud.ec2.terminate_instances(InstanceIds=[other], DryRun=True))


def test_on_demand_stops_and_starts_again(cloud: Cloud) -> None:
    one = cloud.one(cloud.template(SLEEPER), zones=[ZONES[0]], spot=False)
    first_launch = cloud.show(one)["LaunchTime"]
    expect_error("IncorrectInstanceState", lambda: cloud.ec2.stop_instances(InstanceIds=[one]))
    cloud.wait_state(one, "running")
    (change,) = cloud.ec2.stop_instances(InstanceIds=[one])["StoppingInstances"]
    assert (change["PreviousState"]["Name"], change["CurrentState"]["Name"]) == ("running", "stopping")
    stopped = cloud.wait_state(one, "stopped")
    assert stopped["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert cloud.ec2.stop_instances(InstanceIds=[one])["StoppingInstances"][0]["CurrentState"]["Name"] == "stopped"
    assert len(cloud.buy(cloud.template(SLEEPER), zones=[ZONES[0]], spot=False, count=2)["Instances"]) == 1
    expect_error("InsufficientInstanceCapacity", lambda: cloud.ec2.start_instances(InstanceIds=[one]))
    others = [i["instance_id"] for i in cloud.get("status")["instances"] if i["state"] in {"pending", "running"}]
    cloud.ec2.terminate_instances(InstanceIds=others)
    for other in others:
        cloud.wait_state(other, "terminated")
    (change,) = cloud.ec2.start_instances(InstanceIds=[one])["StartingInstances"]
    assert change["CurrentState"]["Name"] == "pending"
    assert cloud.wait_state(one, "running")["LaunchTime"] > first_launch
    cloud.ec2.terminate_instances(InstanceIds=[one])
    expect_error("IncorrectInstanceState", lambda: cloud.ec2.start_instances(InstanceIds=[one]))


def test_one_time_spot_instances_cannot_be_stopped_and_nothing_reboots(cloud: Cloud) -> None:
    one = cloud.one(cloud.template(SLEEPER))
    message = expect_error("UnsupportedOperation", lambda: cloud.ec2.stop_instances(InstanceIds=[one]))
    assert "one-time Spot Instance request" in message
    message = expect_error("UnsupportedOperation", lambda: cloud.ec2.start_instances(InstanceIds=[one]))
    assert message == (
        f"You can't start the Spot Instance '{one}' because it is associated with a one-time Spot Instance "
        "request. You can only start Spot Instances associated with persistent Spot Instance requests."
    )
    expect_error("UnsupportedOperation", lambda: cloud.ec2.reboot_instances(InstanceIds=[one]))
    assert "CreateFleet" in expect_error("UnsupportedOperation", lambda: cloud.ec2.request_spot_instances())


def tags_of(cloud: Cloud, *resources: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    wanted = [{"Name": "resource-id", "Values": list(resources)}]
    for page in cloud.ec2.get_paginator("describe_tags").paginate(Filters=wanted):
        for tag in page["Tags"]:
            found.setdefault(tag["ResourceId"], {})[tag["Key"]] = tag["Value"]
    return found


def test_tags_of_our_resources_and_of_others_in_one_request(cloud: Cloud) -> None:
    answer = cloud.buy(cloud.template(SLEEPER))
    one, fleet = answer["Instances"][0]["InstanceIds"][0], answer["FleetId"]
    subnet = cloud.ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    mixed = [one, subnet, fleet]
    cloud.ec2.create_tags(Resources=mixed, Tags=[{"Key": "team", "Value": "blue"}, {"Key": "empty", "Value": ""}])
    for resource, tags in tags_of(cloud, *mixed).items():
        assert (tags["team"], tags["empty"]) == ("blue", ""), resource
    assert set(tags_of(cloud, *mixed)) == set(mixed)
    kinds = cloud.ec2.describe_tags(Filters=[{"Name": "tag:team", "Values": ["blue"]}])["Tags"]
    assert {tag["ResourceId"]: tag["ResourceType"] for tag in kinds} == {
        one: "instance", subnet: "subnet", fleet: "fleet"
    }  # fmt: skip
    cloud.ec2.delete_tags(Resources=mixed, Tags=[{"Key": "team", "Value": "red"}, {"Key": "empty"}])
    assert all(tags["team"] == "blue" and "empty" not in tags for tags in tags_of(cloud, *mixed).values())
    cloud.ec2.delete_tags(Resources=mixed)
    left = tags_of(cloud, *mixed)
    assert set(left) == {one}
    assert {key.split(":")[0] for key in left[one]} == {"aws"}, "AWS's own tags stay"


def test_tagging_is_for_all_or_for_none_and_has_limits(cloud: Cloud) -> None:
    one = cloud.one(cloud.template(SLEEPER))
    subnet = cloud.ec2.describe_subnets()["Subnets"][0]["SubnetId"]

    def tag(*resources: str, **tags: str) -> Any:
        return cloud.ec2.create_tags(
            Resources=list(resources), Tags=[{"Key": key, "Value": value} for key, value in tags.items()]
        )

    unknown = "i-00000000000000000"
    expect_error("InvalidInstanceID.NotFound", lambda: tag(subnet, one, unknown, wrong="1"))
    expect_error("InvalidSubnetID.NotFound", lambda: tag(one, "subnet-00000000000000000", wrong="1"))
    assert not any("wrong" in tags for tags in tags_of(cloud, one, subnet).values())
    expect_error("InvalidParameterValue", lambda: tag(one, **{"aws:mine": "1"}))
    expect_error("InvalidParameterValue", lambda: tag(one, **{"k" * 129: "1"}))
    expect_error("InvalidParameterValue", lambda: tag(one, k="v" * 257))
    tag(one, **{f"k{n}": "v" for n in range(49)})
    expect_error("TagLimitExceeded", lambda: tag(one, **{"over": "1", "and over": "1"}))
    twice = [{"Key": "a", "Value": "1"}, {"Key": "a", "Value": "2"}]
    expect_error("InvalidParameterValue", lambda: cloud.ec2.create_tags(Resources=[one], Tags=twice))
    expect_error("InvalidParameterValue", lambda: cloud.buy(cloud.template(SLEEPER), tags={"aws:mine": "1"}))
