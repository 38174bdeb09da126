"""What is an instance started with? From a launch template's data, or from RunInstances, which has the same fields."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from gpucost.rehearsal.book.records import Disk, LaunchSpec
from gpucost.rehearsal.protocol.tag_rules import tags_for
from gpucost.rehearsal.protocol.wire import Ec2Error

LARGEST_USER_DATA = 16 * 1024
"""Bytes, before base64: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html."""

ROOTS = frozenset({"/dev/xvda", "/dev/sda1"})
"""Names of the root device; images that are not in the rehearsal have one or the other."""


def launch_spec(data: Mapping[str, Any], template_id: str | None = None, version: str | None = None) -> LaunchSpec:
    """What `data` (RequestLaunchTemplateData, or RunInstances' parameters) starts an instance with.

    Raises:
        Ec2Error: in EC2's words: bad user data, a bad disk.
    """
    profile = data.get("IamInstanceProfile") or {}
    interfaces = data.get("NetworkInterfaces") or [{}]
    return LaunchSpec(
        image_id=data.get("ImageId"),
        user_data=user_data(data.get("UserData")),
        profile=profile.get("Arn") or profile.get("Name"),
        metadata_tags=(data.get("MetadataOptions") or {}).get("InstanceMetadataTags") == "enabled",
        shutdown_behavior="terminate" if data.get("InstanceInitiatedShutdownBehavior") == "terminate" else "stop",
        tags=tags_for(data.get("TagSpecifications"), "instance"),
        volume_tags=tags_for(data.get("TagSpecifications"), "volume"),
        template_id=template_id,
        template_version=version,
        key_name=data.get("KeyName") or None,
        security_groups=tuple(data.get("SecurityGroupIds") or interfaces[0].get("Groups") or ()),
        disks=disks(data.get("BlockDeviceMappings")),
    )


def user_data(encoded: Any) -> bytes | None:
    """The bytes of base64 user data.

    Raises:
        Ec2Error: it is not base64, or too long.
    """
    if not encoded:
        return None
    try:
        # lines are allowed, other characters are not: decoding leniently would run something else
        plain = base64.b64decode("".join(str(encoded).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Ec2Error("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from error
    if len(plain) > LARGEST_USER_DATA:
        raise Ec2Error("InvalidParameterValue", f"User data is limited to {LARGEST_USER_DATA} bytes")
    return plain


def disks(mappings: list[dict[str, Any]] | None) -> tuple[Disk, ...]:
    """The volumes that are made with an instance: the root disk first, 8 GiB of gp3 when nothing is said of it.

    Mappings without `Ebs` (instance store, NoDevice) make none.

    Raises:
        Ec2Error: a size that is none, or a mapping without a device name.
    """
    made: dict[str, Disk] = {}
    for mapping in mappings or []:
        if not mapping.get("DeviceName"):
            raise Ec2Error("MissingParameter", "BlockDeviceMappings: the mapping has no DeviceName.")
        ebs = mapping.get("Ebs")
        if ebs and mapping.get("NoDevice") is None:
            made[mapping["DeviceName"]] = _disk(mapping["DeviceName"], ebs)
    roots = [disk for name, disk in made.items() if name in ROOTS][:1] or [Disk()]
    return (*roots, *(disk for disk in made.values() if disk not in roots))


def _disk(device: str, ebs: Mapping[str, Any]) -> Disk:
    size = ebs.get("VolumeSize")
    try:
        gib = Disk.gib if size in (None, "") else int(str(size))
    except ValueError as error:
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{size}' for VolumeSize of {device}.") from error
    if gib < 1:
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{size}' for VolumeSize of {device}.")
    kept = str(ebs.get("DeleteOnTermination", True)).lower() == "false"
    return Disk(device, gib, ebs.get("VolumeType") or Disk.kind, delete_on_termination=not kept)
