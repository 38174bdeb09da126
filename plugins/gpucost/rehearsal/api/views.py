"""How the API shows instances, spot requests and fleets: plain dicts in EC2's own names.

Source: the pages of these structures in https://docs.aws.amazon.com/AWSEC2/latest/APIReference/.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from gpucost.rehearsal.book.addresses import private_address as private_address
from gpucost.rehearsal.book.addresses import private_dns as private_dns
from gpucost.rehearsal.book.records import Ending, Instance, Launch
from gpucost.rehearsal.book.volumes import volume_id

STATE_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
"""From the API reference, InstanceState."""

PRODUCT = "Linux/UNIX"
ARCHITECTURE = "x86_64"

_OF_TEMPLATE = frozenset({"LaunchTemplateId", "LaunchTemplateName", "Version"})
_OF_OVERRIDE = frozenset(
    {
        "AvailabilityZone",
        "AvailabilityZoneId",
        "ImageId",
        "InstanceType",
        "MaxPrice",
        "Priority",
        "SubnetId",
        "WeightedCapacity",
    }
)


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as the API lists them."""
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def tags_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The inverse of `tag_list`, of something that is shown already."""
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags") or []}


def state(name: str) -> dict[str, Any]:
    """An InstanceState."""
    return {"Code": STATE_CODES[name], "Name": name}


def filter_time(moment: datetime) -> str:
    """A time as filters compare it, for example 2026-11-30T16:43:14.000Z."""
    return f"{moment:%Y-%m-%dT%H:%M:%S}.000Z"


def transition_reason(ending: Ending | None, ended: datetime | None) -> str:
    """StateTransitionReason, for example `User initiated (2026-11-30 16:43:14 GMT)`; empty while it lives."""
    if ending is None or ended is None:
        return ""
    return f"{ending.transition} ({ended.strftime('%Y-%m-%d %H:%M:%S')} GMT)"


def profile_arns(one: Instance, account: str) -> list[str]:
    """The ARN of its instance profile, if it has one."""
    profile = one.spec.profile
    if profile is None:
        return []
    return [profile if profile.startswith("arn:") else f"arn:aws:iam::{account}:instance-profile/{profile}"]


def block_devices(one: Instance) -> list[dict[str, Any]]:
    """Its volumes, as InstanceBlockDeviceMapping."""
    return [
        {
            "DeviceName": disk.device,
            "Ebs": {
                "AttachTime": one.created,
                "DeleteOnTermination": disk.delete_on_termination,
                "Status": "attached",
                "VolumeId": volume_id(one.id, disk.device),
            },
        }
        for disk in one.spec.disks
    ]


def reservation_id(one: Instance) -> str:
    """Its reservation: that of its RunInstances; a fleet makes one for each pool and lifecycle."""
    if one.launch_id.startswith("r-"):
        return one.launch_id
    return f"r-{_hex(one.launch_id, one.pool.zone, one.pool.instance_type, one.lifecycle)}"


def reservation(name: str, account: str, instances: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A Reservation of instances that are shown already."""
    return {"ReservationId": name, "OwnerId": account, "Groups": [], "Instances": list(instances)}


def instance(one: Instance, zone_ids: Mapping[str, str], account: str) -> dict[str, Any]:
    """An Instance as DescribeInstances shows it."""
    spec = one.spec
    shown: dict[str, Any] = {
        "InstanceId": one.id,
        "ImageId": spec.image_id,
        "InstanceType": one.pool.instance_type,
        "AmiLaunchIndex": one.index,
        "Architecture": ARCHITECTURE,
        "ClientToken": one.client_token,
        "KeyName": spec.key_name,
        "LaunchTime": one.launched,
        "Placement": {
            "AvailabilityZone": one.pool.zone,
            "AvailabilityZoneId": zone_ids[one.pool.zone],
            "Tenancy": "default",
            "GroupName": "",
        },
        "PlatformDetails": PRODUCT,
        "RootDeviceName": spec.disks[0].device,
        "RootDeviceType": "ebs",
        "SecurityGroups": [{"GroupId": group, "GroupName": group} for group in spec.security_groups],
        "State": state(one.state),
        "StateTransitionReason": transition_reason(one.ending, one.ended),
        "Tags": tag_list(one.tags),
        "Monitoring": {"State": "disabled"},
        "VirtualizationType": "hvm",
        "MetadataOptions": {
            "State": "applied",
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "InstanceMetadataTags": "enabled" if spec.metadata_tags else "disabled",
        },
    }
    if one.lifecycle == "spot":
        shown |= {"InstanceLifecycle": "spot", "SpotInstanceRequestId": one.spot_request_id}
    if one.ending is not None:
        shown["StateReason"] = {"Code": one.ending.code, "Message": one.ending.message}
    for arn in profile_arns(one, account):
        shown["IamInstanceProfile"] = {"Arn": arn, "Id": "AIPAREHEARSALPROFILE"}
    if one.state != "terminated":
        shown |= {
            "BlockDeviceMappings": block_devices(one),
            "PrivateDnsName": private_dns(one),
            "PrivateIpAddress": private_address(one),
            "PublicDnsName": "",
            "SubnetId": spec.subnet_id,
            "VpcId": spec.vpc_id,
        }
    return {key: value for key, value in shown.items() if value is not None}


def check_status(one: Instance) -> str:
    """The status of its checks: they pass while it runs."""
    return {"running": "ok", "pending": "initializing"}.get(one.state, "not-applicable")


def instance_status(one: Instance, zone_ids: Mapping[str, str]) -> dict[str, Any]:
    """An InstanceStatus."""
    checks: dict[str, Any] = {"Status": check_status(one)}
    if one.state == "running":
        checks["Details"] = [{"Name": "reachability", "Status": "passed"}]
    return {
        "AvailabilityZone": one.pool.zone,
        "AvailabilityZoneId": zone_ids[one.pool.zone],
        "InstanceId": one.id,
        "InstanceState": state(one.state),
        "InstanceStatus": checks,
        "SystemStatus": checks,
    }


def spot_state(one: Instance) -> str:
    """The state of its spot request."""
    if one.request_cancelled is not None:
        return "cancelled"
    return "active" if one.ending is None else "closed"


def spot_request(one: Instance, zone_ids: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, Any]:
    """A SpotInstanceRequest: how the request of a spot instance stands, and since when."""
    code, message, since = "fulfilled", "Your spot request is fulfilled.", one.launched
    if one.ending is not None and one.ended is not None:
        code, message, since = one.ending.spot_status, one.ending.spot_message, one.ended
    elif one.request_cancelled is not None:
        code, since = "request-canceled-and-instance-running", one.request_cancelled
        message = "Your Spot request is canceled, but your instance is still running."
    elif one.notice_at is not None:
        code, since = "marked-for-termination", one.notice_at
        message = "Your Spot Instance is marked for termination because capacity is no longer available."
    return {
        "SpotInstanceRequestId": one.spot_request_id,
        "InstanceId": one.id,
        "State": spot_state(one),
        "Status": {"Code": code, "Message": message, "UpdateTime": since},
        "CreateTime": one.created,
        "LaunchedAvailabilityZone": one.pool.zone,
        "LaunchedAvailabilityZoneId": zone_ids[one.pool.zone],
        "ProductDescription": PRODUCT,
        "SpotPrice": f"{one.max_price:.6f}" if one.max_price is not None else None,
        "Tags": tag_list(tags),
        "Type": "one-time",
        "InstanceInterruptionBehavior": "terminate",
        "LaunchSpecification": {"InstanceType": one.pool.instance_type, "ImageId": one.spec.image_id or ""},
    }


def override(asked: Mapping[str, Any]) -> dict[str, Any]:
    """An override as answers show it: what has no place in them is left out."""
    return {name: value for name, value in asked.items() if name in _OF_OVERRIDE}


def _config(asked: Mapping[str, Any]) -> dict[str, Any]:
    template = {name: value for name, value in asked["LaunchTemplateSpecification"].items() if name in _OF_TEMPLATE}
    return {
        "LaunchTemplateSpecification": template,
        "Overrides": [override(each) for each in asked.get("Overrides") or []],
    }


def fleet(one: Launch, instances: list[Instance]) -> dict[str, Any]:
    """A FleetData as DescribeFleets shows an instant fleet.

    Its status is always fulfilled, whatever it got; what it got is told as it was launched.
    """
    shown: dict[str, Any] = {
        "FleetId": one.id,
        "FleetState": _fleet_state(one, instances),
        "ActivityStatus": "fulfilled",
        "ClientToken": one.client_token,
        "CreateTime": one.created,
        "Type": "instant",
        "FulfilledCapacity": _units(one, {"spot", "on-demand"}),
        "FulfilledOnDemandCapacity": _units(one, {"on-demand"}),
        "LaunchTemplateConfigs": [_config(each) for each in one.request["LaunchTemplateConfigs"]],
        "TargetCapacitySpecification": one.request["TargetCapacitySpecification"],
        "Tags": tag_list(one.tags),
        "Errors": one.answer["Errors"],
        "Instances": [
            {key: group[key] for key in ("LaunchTemplateAndOverrides", "Lifecycle", "InstanceIds", "InstanceType")}
            for group in one.answer["Instances"]
        ],
    }
    return shown | {key: one.request[key] for key in ("SpotOptions", "OnDemandOptions") if key in one.request}


def _fleet_state(one: Launch, instances: list[Instance]) -> str:
    if one.deleted is None:
        return "active"
    return "deleted" if all(each.state == "terminated" for each in instances) else "deleted_terminating"


def _units(one: Launch, lifecycles: set[str]) -> float:
    return sum(
        len(group["InstanceIds"]) * float(group["LaunchTemplateAndOverrides"]["Overrides"].get("WeightedCapacity", 1))
        for group in one.answer["Instances"]
        if group["Lifecycle"] in lifecycles
    )


def _hex(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:17]
