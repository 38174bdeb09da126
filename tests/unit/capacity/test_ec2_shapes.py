"""What is sent to EC2 is what EC2 takes, by botocore's own model of it; what comes back is read as documented."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from gpucost.capacity.access import RoleAccess
from gpucost.capacity.providers.base import LaunchRequest
from gpucost.capacity.providers.ec2_shapes import as_machine, fleet_request, installation, template_data
from gpucost.capacity.sites import ListPrice, Site, StoreSettings
from gpucost.market.pool import CapacityType
from gpucost.money import InstanceHourPrice
from tests.fakes.provider import T4, pool
from tests.fakes.rooms import START

SITE = Site(
    region="us-east-1",
    image="ami-0abc",
    zones=("us-east-1a", "us-east-1b"),
    subnets={"us-east-1b": "subnet-b"},
    security_groups=("sg-1",),
    role="gpucost-node",
    volume_gib=50,
    instance_types={T4.name: ListPrice(price="0.526 USD", source="AWS list", as_of=START)},
    store=StoreSettings(url="s3://bucket/prefix"),
)


@cache
def ec2() -> ServiceModel:
    return ServiceModel(Loader().load_service_model("ec2", "service-2"), "ec2")


def refused(operation: str, body: dict[str, Any]) -> str:
    """What botocore's model of the operation says against a request; empty: nothing."""
    report = ParamValidator().validate(body, ec2().operation_model(operation).input_shape)
    return str(report.generate_report())


def request(zone: str = "a", capacity_type: CapacityType = CapacityType.SPOT) -> LaunchRequest:
    return LaunchRequest(
        pool=pool(zone, capacity_type),
        client_token="t" * 32,
        tags={"gpucost:lease": "lease-1", "Name": "gpucost digits"},
        max_price=InstanceHourPrice(amount="0.526"),
    )


@pytest.mark.parametrize("zone", ["a", "b"])
@pytest.mark.parametrize("capacity_type", CapacityType)
def test_a_fleet_request_is_valid(zone: str, capacity_type: CapacityType) -> None:
    body = fleet_request(request(zone, capacity_type), SITE, "gpucost-template")
    assert refused("CreateFleet", body) == ""
    [config] = body["LaunchTemplateConfigs"]
    [override] = config["Overrides"]
    place = {key: override.get(key) for key in ("AvailabilityZone", "SubnetId")}
    assert place == {
        "AvailabilityZone": None if zone == "b" else "us-east-1a",
        "SubnetId": "subnet-b" if zone == "b" else None,
    }
    assert body["Type"] == "instant"
    assert body["ClientToken"] == "t" * 32
    assert body["TargetCapacitySpecification"]["TotalTargetCapacity"] == 1
    assert body["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == str(capacity_type)


def test_a_wrong_request_would_be_seen() -> None:
    body = fleet_request(request(), SITE, "gpucost-template")
    assert "Unknown parameter" in refused("CreateFleet", body | {"Typ": "instant"})
    del body["TargetCapacitySpecification"]
    assert "Missing required parameter" in refused("CreateFleet", body)


def test_spot_is_never_paid_above_the_cap_and_ends_by_termination() -> None:
    spot = fleet_request(request(), SITE, "t")
    assert spot["LaunchTemplateConfigs"][0]["Overrides"][0]["MaxPrice"] == "0.526"
    assert spot["SpotOptions"]["InstanceInterruptionBehavior"] == "terminate"
    on_demand = fleet_request(request(capacity_type=CapacityType.ON_DEMAND), SITE, "t")
    assert "MaxPrice" not in on_demand["LaunchTemplateConfigs"][0]["Overrides"][0]
    assert "SpotOptions" not in on_demand


def test_the_machine_carries_our_tags_and_the_token_that_finds_it_again() -> None:
    [tags] = fleet_request(request(), SITE, "t")["TagSpecifications"]
    assert tags["ResourceType"] == "instance"
    named = {tag["Key"]: tag["Value"] for tag in tags["Tags"]}
    assert named == {
        "gpucost:lease": "lease-1",
        "Name": "gpucost digits",
        "gpucost:token": "t" * 32,
        "gpucost:installation": installation(SITE),
    }


def test_two_installations_in_one_account_do_not_share_machines() -> None:
    staging = SITE.model_copy(update={"store": SITE.store.model_copy(update={"url": "s3://staging"})})
    assert installation(staging) != installation(SITE)
    assert installation(SITE.model_copy(update={"image": "ami-1"})) == installation(SITE), "an upgrade changes nothing"


@pytest.mark.parametrize("changes", [{}, {"role": None, "security_groups": (), "subnets": {}}])
def test_a_launch_template_is_valid_and_its_machine_ends_for_good(changes: dict[str, Any]) -> None:
    site = SITE.model_copy(update=changes)
    script = RoleAccess().start_script(site, "agents/x.zip")
    data = template_data(site, script)
    assert refused("CreateLaunchTemplate", {"LaunchTemplateName": "gpucost-x", "LaunchTemplateData": data}) == ""
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert base64.b64decode(data["UserData"]).decode() == script
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["InstanceMetadataTags"] == "enabled", "the node learns from its tags who it is"
    [disk] = data["BlockDeviceMappings"]
    assert (disk["Ebs"]["VolumeSize"], disk["Ebs"]["DeleteOnTermination"]) == (50, True), "no disk is left behind"


def instance(**changes: Any) -> dict[str, Any]:
    """One instance as DescribeInstances shows it, after AWS's documentation."""
    return {
        "InstanceId": "i-0598c7d356eba48d7",
        "ImageId": "ami-0abc",
        "InstanceType": T4.name,
        "InstanceLifecycle": "spot",
        "SpotInstanceRequestId": "sir-1",
        "LaunchTime": START,
        "Placement": {"AvailabilityZone": "us-east-1a", "GroupName": "", "Tenancy": "default"},
        "State": {"Code": 16, "Name": "running"},
        "StateTransitionReason": "",
        "Tags": [{"Key": "gpucost:token", "Value": "token"}, {"Key": "gpucost:lease", "Value": "lease-1"}],
    } | changes


def ended(code: str, reason: str) -> dict[str, Any]:
    return instance(
        State={"Code": 48, "Name": "terminated"},
        StateReason={"Code": code, "Message": code},
        StateTransitionReason=reason,
    )


ZONES = {"us-east-1a": "use1-az-a"}


def test_a_running_spot_machine() -> None:
    machine = as_machine(instance(), "us-east-1", ZONES)
    assert (machine.instance_id, machine.state, machine.over) == ("i-0598c7d356eba48d7", "running", False)
    assert (machine.pool, machine.client_token) == (pool("a"), "token")
    assert (machine.launched_at, machine.ended_at, machine.ended_by) == (START, None, None)
    assert machine.tags["gpucost:lease"] == "lease-1"


def test_a_machine_without_a_lifecycle_is_on_demand_and_one_without_tags_is_nobody_s() -> None:
    bare = instance()
    del bare["InstanceLifecycle"], bare["Tags"]
    machine = as_machine(bare, "us-east-1", {})
    assert machine.pool.capacity_type is CapacityType.ON_DEMAND
    assert (machine.client_token, machine.tags, machine.pool.zone_id) == ("", {}, "us-east-1a")


@pytest.mark.parametrize(
    ("code", "by"),
    [
        ("Server.SpotInstanceTermination", "provider"),
        ("Server.SpotInstanceShutdown", "provider"),
        ("Server.InternalError", "provider"),
        ("Server.InsufficientInstanceCapacity", "provider"),
        ("Server.ScheduledStop", "provider"),
        ("Client.UserInitiatedShutdown", "us"),
        ("Client.InstanceTerminated", "us"),
        ("Client.VolumeLimitExceeded", "us"),
        ("Client.InstanceInitiatedShutdown", "self"),
    ],
)
def test_who_ended_it_is_what_the_state_reason_says(code: str, by: str) -> None:
    machine = as_machine(ended(code, "User initiated (2026-11-30 16:43:14 GMT)"), "us-east-1", ZONES)
    assert (machine.over, machine.ended_by, machine.end_code) == (True, by, code)
    assert machine.ended_at == datetime(2026, 11, 30, 16, 43, 14, tzinfo=UTC)


@pytest.mark.parametrize("reason", ["", "Server.SpotInstanceTermination", "User initiated"])
def test_an_end_whose_time_ec2_does_not_show_has_none(reason: str) -> None:
    assert as_machine(ended("Server.SpotInstanceTermination", reason), "us-east-1", ZONES).ended_at is None


def test_shutting_down_is_not_over() -> None:
    going = instance(
        State={"Code": 32, "Name": "shutting-down"},
        StateReason={"Code": "Client.UserInitiatedShutdown", "Message": ""},
        StateTransitionReason="User initiated (2026-11-30 16:43:14 GMT)",
    )
    machine = as_machine(going, "us-east-1", ZONES)
    assert (machine.over, machine.ended_at, machine.ended_by) == (False, None, None)
