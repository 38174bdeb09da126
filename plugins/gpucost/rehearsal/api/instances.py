"""DescribeInstances, DescribeInstanceStatus, DescribeInstanceAttribute, ModifyInstanceAttribute.

Source: the pages of these actions in https://docs.aws.amazon.com/AWSEC2/latest/APIReference/.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpucost.rehearsal.api import views
from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.protocol import filters
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.moto_side import ACCOUNT

SHUTDOWN = "instanceInitiatedShutdownBehavior"


def describe(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeInstances: grouped by reservation; a page counts instances."""
    zone_ids = context.market.zone_ids(region)
    chosen = filters.select(
        _asked_for(context, request, region), request.get("Filters"), instance_filters(zone_ids), lambda one: one.tags
    )
    shown, token = filters.page(chosen, request, number=lambda one: one.number)
    reservations: dict[str, list[Instance]] = {}
    for one in shown:
        reservations.setdefault(views.reservation_id(one), []).append(one)
    return {
        "Reservations": [shown_reservation(context, name, group) for name, group in reservations.items()],
        "NextToken": token,
    }


def shown_reservation(context: Context, name: str, instances: Sequence[Instance]) -> dict[str, Any]:
    """A Reservation with these of its instances, all of one region."""
    zone_ids = context.market.zone_ids(instances[0].region)
    return views.reservation(name, ACCOUNT, [context.instance_views.of(one, zone_ids, ACCOUNT) for one in instances])


def describe_status(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeInstanceStatus: running instances, or all of them; their checks always pass here."""
    zone_ids = context.market.zone_ids(region)
    asked_for = _asked_for(context, request, region)
    if not request.get("IncludeAllInstances"):
        asked_for = [one for one in asked_for if one.state == "running"]
    names = ("availability-zone", "availability-zone-id", "instance-state-code", "instance-state-name")
    known = {name: values for name, values in instance_filters(zone_ids).items() if name in names}
    for kind in ("instance", "system", "attached-ebs"):
        known[f"{kind}-status.status"] = lambda one: [views.check_status(one)]
        known[f"{kind}-status.reachability"] = lambda one: ["passed"] if one.state == "running" else []
    chosen = filters.select(asked_for, request.get("Filters"), known, lambda _one: {})
    shown, token = filters.page(chosen, request, number=lambda one: one.number)
    return {"InstanceStatuses": [views.instance_status(one, zone_ids) for one in shown], "NextToken": token}


def _asked_for(context: Context, request: Mapping[str, Any], region: str) -> list[Instance]:
    ids = request.get("InstanceIds")
    if ids and request.get("MaxResults"):
        raise Ec2Error(
            "InvalidParameterCombination", "The parameter instancesSet cannot be used with the parameter maxResults"
        )
    return context.named(ids, region) if ids else context.instances(region)


def describe_attribute(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeInstanceAttribute: of the attributes that an instance has here."""
    one = _single(context, request, region)
    name = request.get("Attribute") or ""
    found = _attributes(one)
    if name not in found:
        raise not_rehearsed(f"Attribute '{name}'", f"Known here: {', '.join(sorted(found))}.")
    return {"InstanceId": one.id, **found[name]()}


def _attributes(one: Instance) -> dict[str, Callable[[], dict[str, Any]]]:
    spec = one.spec
    user_data = base64.b64encode(spec.user_data).decode() if spec.user_data else None
    return {
        "blockDeviceMapping": lambda: {"BlockDeviceMappings": views.block_devices(one)},
        "disableApiTermination": lambda: {"DisableApiTermination": {"Value": False}},
        "groupSet": lambda: {"Groups": [{"GroupId": group} for group in spec.security_groups]},
        SHUTDOWN: lambda: {"InstanceInitiatedShutdownBehavior": {"Value": spec.shutdown_behavior}},
        "instanceType": lambda: {"InstanceType": {"Value": one.pool.instance_type}},
        "rootDeviceName": lambda: {"RootDeviceName": {"Value": spec.disks[0].device}},
        "userData": lambda: {"UserData": {"Value": user_data} if user_data else {}},
    }


def modify_attribute(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """ModifyInstanceAttribute: the shutdown behaviour, also of a running instance."""
    one = _single(context, request, region)
    asked = {name for name, value in request.items() if value is not None} - {"InstanceId", "DryRun"}
    value = None
    if asked == {"Attribute", "Value"} and request["Attribute"] == SHUTDOWN:
        value = request["Value"]
    elif asked == {"InstanceInitiatedShutdownBehavior"}:
        value = request["InstanceInitiatedShutdownBehavior"].get("Value")
    else:
        raise not_rehearsed("Changing other attributes", f"{SHUTDOWN} can be changed here.")
    if value not in {"stop", "terminate"}:
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{value}' for {SHUTDOWN}; expected stop or terminate.")
    context.book.set_shutdown_behavior(one.id, "stop" if value == "stop" else "terminate")
    return {}


def _single(context: Context, request: Mapping[str, Any], region: str) -> Instance:
    if not request.get("InstanceId"):
        raise Ec2Error("MissingParameter", "The request must contain the parameter InstanceId")
    return context.named([request["InstanceId"]], region)[0]


def instance_filters(zone_ids: Mapping[str, str]) -> dict[str, Callable[[Instance], list[str]]]:
    """Filter name -> the values that an instance has for it; those of DescribeInstances that people use."""
    return {
        "architecture": lambda _one: [views.ARCHITECTURE],
        "availability-zone": lambda one: [one.pool.zone],
        "availability-zone-id": lambda one: [zone_ids[one.pool.zone]],
        "block-device-mapping.device-name": lambda one: [disk.device for disk in one.spec.disks],
        "client-token": lambda one: [one.client_token],
        "dns-name": lambda _one: [],
        "iam-instance-profile.arn": lambda one: views.profile_arns(one, ACCOUNT),
        "image-id": lambda one: [one.spec.image_id or ""],
        "instance-id": lambda one: [one.id],
        # on-demand instances have no lifecycle in the API, so no value of this filter finds them
        "instance-lifecycle": lambda one: ["spot"] if one.lifecycle == "spot" else [],
        "instance-state-code": lambda one: [str(views.STATE_CODES[one.state])],
        "instance-state-name": lambda one: [one.state],
        "instance-type": lambda one: [one.pool.instance_type],
        "instance.group-id": lambda one: list(one.spec.security_groups),
        "ip-address": lambda _one: [],
        "key-name": lambda one: [one.spec.key_name] if one.spec.key_name else [],
        "launch-index": lambda one: [str(one.index)],
        "launch-time": lambda one: [views.filter_time(one.launched)],
        "owner-id": lambda _one: [ACCOUNT],
        "private-dns-name": lambda one: [views.private_dns(one)] if one.state != "terminated" else [],
        "private-ip-address": lambda one: [views.private_address(one)] if one.state != "terminated" else [],
        "reservation-id": lambda one: [views.reservation_id(one)],
        "root-device-name": lambda one: [one.spec.disks[0].device],
        "spot-instance-request-id": lambda one: [one.spot_request_id] if one.spot_request_id else [],
        "state-reason-code": lambda one: [one.ending.code] if one.ending else [],
        "subnet-id": lambda one: [one.spec.subnet_id or ""],
        "tenancy": lambda _one: ["default"],
        "vpc-id": lambda one: [one.spec.vpc_id or ""],
    }
