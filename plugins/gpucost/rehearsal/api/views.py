"""How the API shows instances, spot requests and fleets: plain dicts in EC2's own names."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gpucost.rehearsal.book.records import Ending, Fleet, Instance
from gpucost.rehearsal.machines.imds import private_address

STATE_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
"""From the API reference, InstanceState."""

PRODUCT = "Linux/UNIX"


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as the API lists them."""
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def state(name: str) -> dict[str, Any]:
    """An InstanceState."""
    return {"Code": STATE_CODES[name], "Name": name}


def transition_reason(ending: Ending | None, ended: datetime | None) -> str:
    """StateTransitionReason, for example `User initiated (2026-11-30 16:43:14 GMT)`; empty while it lives."""
    if ending is None or ended is None:
        return ""
    return f"{ending.transition} ({ended.strftime('%Y-%m-%d %H:%M:%S')} GMT)"


def instance(one: Instance, zone_ids: Mapping[str, str], account: str) -> dict[str, Any]:
    """An Instance as DescribeInstances shows it."""
    spec = one.spec
    shown: dict[str, Any] = {
        "InstanceId": one.id,
        "ImageId": spec.image_id,
        "InstanceType": one.pool.instance_type,
        "AmiLaunchIndex": 0,
        "Architecture": "x86_64",
        "ClientToken": one.client_token,
        "LaunchTime": one.launched,
        "Placement": {
            "AvailabilityZone": one.pool.zone,
            "AvailabilityZoneId": zone_ids[one.pool.zone],
            "Tenancy": "default",
            "GroupName": "",
        },
        "PlatformDetails": PRODUCT,
        "RootDeviceType": "ebs",
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
    if spec.profile is not None:
        arn = spec.profile
        if not arn.startswith("arn:"):
            arn = f"arn:aws:iam::{account}:instance-profile/{spec.profile}"
        shown["IamInstanceProfile"] = {"Arn": arn, "Id": "AIPAREHEARSALPROFILE"}
    if one.state not in {"terminated"}:
        shown |= {"PrivateIpAddress": private_address(one), "SubnetId": spec.subnet_id, "VpcId": spec.vpc_id}
    return {key: value for key, value in shown.items() if value is not None}


def spot_request(one: Instance, zone_ids: Mapping[str, str]) -> dict[str, Any]:
    """A SpotInstanceRequest: how the request of a spot instance stands, and since when."""
    code, message, since, request_state = "fulfilled", "Your spot request is fulfilled.", one.launched, "active"
    if one.ending is not None and one.ended is not None:
        code, message, since = one.ending.spot_status, one.ending.spot_message, one.ended
        request_state = "closed"
    elif one.notice_at is not None:
        code, since = "marked-for-termination", one.notice_at
        message = "Your Spot Instance is marked for termination because capacity is no longer available."
    return {
        "SpotInstanceRequestId": one.spot_request_id,
        "InstanceId": one.id,
        "State": request_state,
        "Status": {"Code": code, "Message": message, "UpdateTime": since},
        "CreateTime": one.launched,
        "LaunchedAvailabilityZone": one.pool.zone,
        "LaunchedAvailabilityZoneId": zone_ids[one.pool.zone],
        "ProductDescription": PRODUCT,
        "SpotPrice": one.max_price,
        "Type": "one-time",
        "InstanceInterruptionBehavior": "terminate",
        "LaunchSpecification": {"InstanceType": one.pool.instance_type, "ImageId": one.spec.image_id or ""},
    }


def fleet(one: Fleet, instances: list[Instance]) -> dict[str, Any]:
    """A FleetData as DescribeFleets shows an instant fleet."""
    spec = one.request["TargetCapacitySpecification"]
    return {
        "FleetId": one.id,
        "FleetState": "active",
        "ActivityStatus": "fulfilled" if instances else "error",
        "ClientToken": one.client_token,
        "CreateTime": one.created,
        "Type": "instant",
        "FulfilledCapacity": float(sum(1 for i in instances if i.lifecycle == "spot")),
        "FulfilledOnDemandCapacity": float(sum(1 for i in instances if i.lifecycle == "on-demand")),
        "TargetCapacitySpecification": spec,
        "Tags": tag_list(one.tags),
        "Errors": one.answer["Errors"],
        "Instances": [
            {key: group[key] for key in ("LaunchTemplateAndOverrides", "Lifecycle", "InstanceIds", "InstanceType")}
            for group in one.answer["Instances"]
        ],
    }
