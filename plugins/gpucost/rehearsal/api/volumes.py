"""DescribeVolumes, DeleteVolume: the volumes that are made with instances. Making others is not rehearsed.

Source: the pages of these actions, and of Volume, in https://docs.aws.amazon.com/AWSEC2/latest/APIReference/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpucost.rehearsal.api import views
from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.book.records import Disk, Instance
from gpucost.rehearsal.book.volumes import deleted_at, volume_id
from gpucost.rehearsal.protocol import filters
from gpucost.rehearsal.protocol.wire import Ec2Error

GP3 = {"Iops": 3000, "Throughput": 125}
"""What every volume of type gp3 has: https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html."""

_ID = re.compile(r"vol-[0-9a-f]+")


@dataclass(frozen=True)
class Found:
    """A volume that exists: the disk `disk` of `instance`, which may be terminated."""

    instance: Instance
    disk: Disk

    @property
    def id(self) -> str:
        """Its id."""
        return volume_id(self.instance.id, self.disk.device)

    @property
    def tags(self) -> Mapping[str, str]:
        """Its own tags."""
        return self.instance.volume_tags.get(self.disk.device, {})

    @property
    def attached(self) -> bool:
        """Whether its instance has it still."""
        return self.instance.state != "terminated"


def existing(context: Context, region: str) -> dict[str, Found]:
    """The volumes of a region by id, also of instances that the API does not show any more."""
    found = [
        Found(one, disk)
        for one in context.book.every()
        if one.region == region and context.visibility.sees(one.id)
        for disk in one.spec.disks
        if deleted_at(one, disk) is None
    ]
    return {one.id: one for one in found}


def named(context: Context, region: str, wanted: str) -> Found:
    """The volume with an id.

    Raises:
        Ec2Error: InvalidParameterValue, InvalidVolume.NotFound.
    """
    if not _ID.fullmatch(wanted):
        raise Ec2Error(
            "InvalidParameterValue", f"Value ({wanted}) for parameter volumeId is invalid. Expected: 'vol-...'."
        )
    found = existing(context, region).get(wanted)
    if found is None:
        raise Ec2Error("InvalidVolume.NotFound", f"The volume '{wanted}' does not exist.")
    return found


def describe(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeVolumes."""
    zone_ids = context.market.zone_ids(region)
    ids = request.get("VolumeIds")
    every = existing(context, region)
    asked_for = [named(context, region, one) for one in dict.fromkeys(ids)] if ids else list(every.values())
    chosen = filters.select(asked_for, request.get("Filters"), _filters(zone_ids), lambda one: one.tags)
    shown, token = filters.page(chosen, request)
    return {"Volumes": [_shown(one, zone_ids) for one in shown], "NextToken": token}


def delete(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DeleteVolume: one that outlived its instance."""
    wanted = request.get("VolumeId")
    if not wanted:
        raise Ec2Error("MissingParameter", "The request must contain the parameter VolumeId")
    with context.book.locked:
        found = named(context, region, wanted)
        if found.attached:
            raise Ec2Error("VolumeInUse", f"Volume {wanted} is currently attached to {found.instance.id}")
        context.book.delete_volume(found.instance.id, found.disk.device)
    return {}


def _state(one: Found) -> str:
    return "in-use" if one.attached else "available"


def _attachments(one: Found) -> list[dict[str, Any]]:
    if not one.attached:
        return []
    return [
        {
            "AttachTime": one.instance.created,
            "DeleteOnTermination": one.disk.delete_on_termination,
            "Device": one.disk.device,
            "InstanceId": one.instance.id,
            "State": "attached",
            "VolumeId": one.id,
        }
    ]


def _shown(one: Found, zone_ids: Mapping[str, str]) -> dict[str, Any]:
    zone = one.instance.pool.zone
    return {
        "Attachments": _attachments(one),
        "AvailabilityZone": zone,
        "AvailabilityZoneId": zone_ids[zone],
        "CreateTime": one.instance.created,
        "Encrypted": False,
        "MultiAttachEnabled": False,
        "Size": one.disk.gib,
        "SnapshotId": "",
        "State": _state(one),
        "Tags": views.tag_list(one.tags),
        "VolumeId": one.id,
        "VolumeType": one.disk.kind,
        **(GP3 if one.disk.kind == "gp3" else {}),
    }


def _filters(zone_ids: Mapping[str, str]) -> dict[str, Callable[[Found], list[str]]]:
    def attached(value: Callable[[Found], str]) -> Callable[[Found], list[str]]:
        return lambda one: [value(one)] if one.attached else []

    return {
        "attachment.attach-time": attached(lambda one: views.filter_time(one.instance.created)),
        "attachment.delete-on-termination": attached(lambda one: str(one.disk.delete_on_termination).lower()),
        "attachment.device": attached(lambda one: one.disk.device),
        "attachment.instance-id": attached(lambda one: one.instance.id),
        "attachment.status": attached(lambda _one: "attached"),
        "availability-zone": lambda one: [one.instance.pool.zone],
        "availability-zone-id": lambda one: [zone_ids[one.instance.pool.zone]],
        "create-time": lambda one: [views.filter_time(one.instance.created)],
        "encrypted": lambda _one: ["false"],
        "multi-attach-enabled": lambda _one: ["false"],
        "size": lambda one: [str(one.disk.gib)],
        "snapshot-id": lambda _one: [""],
        "status": lambda one: [_state(one)],
        "volume-id": lambda one: [one.id],
        "volume-type": lambda one: [one.disk.kind],
    }
