"""What does one machine of a request start with? The launch template's parameters under those of the request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.book.records import LaunchSpec
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.moto_side import RegionSide
from gpucost.rehearsal.services.templates import ROOTS, launch_spec

NAMES = frozenset(
    {
        "BlockDeviceMappings",
        "IamInstanceProfile",
        "ImageId",
        "InstanceInitiatedShutdownBehavior",
        "InstanceMarketOptions",
        "InstanceType",
        "KeyName",
        "MetadataOptions",
        "NetworkInterfaces",
        "Placement",
        "SecurityGroupIds",
        "SecurityGroups",
        "UserData",
    }
)
"""Parameters of a request that go before those of the launch template, whole.

Names: the API reference's pages RunInstances, RequestLaunchTemplateData and FleetLaunchTemplateOverridesRequest.
"""

LARGEST_DISK_GIB = 65_536
"""Of gp3: https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html."""

_IMAGE = re.compile(r"ami-[0-9A-Za-z]+")


def merged(template: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Launch parameters: the template's, and over them what the request says itself."""
    return {**template, **{name: value for name, value in request.items() if name in NAMES}}


def spec_of(
    data: Mapping[str, Any],
    template: LaunchSpec | None,
    tags: Mapping[str, str],
    volume_tags: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """What an instance is started with.

    Args:
        data: launch parameters, merged.
        template: what the launch template alone would start; None without one.
        tags: of the request, for instances; they go before the template's.
        volume_tags: of the request, for volumes; the same.

    Raises:
        Ec2Error: in EC2's words.
    """
    _check_image(data.get("ImageId"))
    _check_disks(data.get("BlockDeviceMappings") or [])
    if data.get("SecurityGroups"):
        raise not_rehearsed("Naming security groups by their names", "Use SecurityGroupIds.")
    profile = data.get("IamInstanceProfile") or {}
    if profile.get("Arn") and profile.get("Name"):
        raise Ec2Error(
            "InvalidParameterCombination",
            "The parameter 'iamInstanceProfile.name' may not be used in combination with 'iamInstanceProfile.arn'",
        )
    if template is None:
        return replace(launch_spec(data), tags=dict(tags), volume_tags=dict(volume_tags or {}))
    spec = launch_spec(data, template.template_id, template.template_version)
    of_template = {
        "aws:ec2launchtemplate:id": str(template.template_id),
        "aws:ec2launchtemplate:version": str(template.template_version),
    }
    of_volumes = {**template.volume_tags, **(volume_tags or {})}
    return replace(spec, tags={**template.tags, **tags, **of_template}, volume_tags=of_volumes)


def check_known(spec: LaunchSpec, moto: RegionSide) -> None:
    """Refuse a key pair or a security group that does not exist; raises Ec2Error."""
    if spec.key_name is not None and not moto.has_key_pair(spec.key_name):
        raise Ec2Error("InvalidKeyPair.NotFound", f"The key pair '{spec.key_name}' does not exist")
    for group in spec.security_groups:
        if not moto.has_group(group):
            raise Ec2Error("InvalidGroup.NotFound", f"The security group '{group}' does not exist")


def _check_image(image: str | None) -> None:
    """Any image that looks like one exists: the machines of a rehearsal all run on this machine."""
    if not image:
        raise Ec2Error("MissingParameter", "The request must contain the parameter ImageId")
    if image.startswith("resolve:"):
        raise not_rehearsed("An ImageId that is a Systems Manager parameter", "Name an image, such as ami-0123456789.")
    if not _IMAGE.fullmatch(image):
        raise Ec2Error("InvalidAMIID.Malformed", f'Invalid id: "{image}" (expecting "ami-...")')


def _check_disks(mappings: Sequence[Mapping[str, Any]]) -> None:
    """What makes EC2 refuse a mapping as such: no size for a further volume (nortontruter/infracoders-workshop#3)."""
    for mapping in mappings:
        ebs, device = mapping.get("Ebs") or {}, mapping.get("DeviceName")
        size = ebs.get("VolumeSize")
        if ebs and device not in ROOTS and size is None and not ebs.get("SnapshotId"):
            raise Ec2Error(
                "InvalidBlockDeviceMapping", f"Either snapshot ID or volume size must be provided for: {device}"
            )
        if size is not None and not 1 <= int(size) <= LARGEST_DISK_GIB:
            raise Ec2Error("InvalidBlockDeviceMapping", f"Volume of size {size}GB is invalid for: {device}")
