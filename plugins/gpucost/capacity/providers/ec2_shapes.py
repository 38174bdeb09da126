"""EC2's request and response shapes, to and from ours; pure."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from typing import Any, Literal

from gpucost.capacity.providers.base import LaunchRequest, Machine
from gpucost.capacity.sites import Site
from gpucost.market.pool import CapacityType, Pool

TAG_TOKEN = "gpucost:token"  # noqa: S105 - the name of a tag; the token is no secret
TAG_INSTALLATION = "gpucost:installation"
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) GMT\)")


def template_data(site: Site, start_script: str) -> dict[str, Any]:
    """What all nodes of a site share: image, network, role, disk, start script, and an end that ends the bill."""
    data: dict[str, Any] = {
        "ImageId": site.image,
        "UserData": base64.b64encode(start_script.encode()).decode(),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "InstanceMetadataTags": "enabled"},
        "BlockDeviceMappings": [
            {
                "DeviceName": site.root_device,
                "Ebs": {"VolumeSize": site.volume_gib, "VolumeType": "gp3", "DeleteOnTermination": True},
            }
        ],
    }
    if site.role:
        data["IamInstanceProfile"] = {"Name": site.role}
    if site.security_groups:
        data["SecurityGroupIds"] = list(site.security_groups)
    return data


def fleet_request(request: LaunchRequest, site: Site, template: str) -> dict[str, Any]:
    """CreateFleet for one machine of one pool."""
    pool = request.pool
    override: dict[str, Any] = {"InstanceType": pool.instance_type}
    if pool.zone in site.subnets:
        override["SubnetId"] = site.subnets[pool.zone]
    else:
        override["AvailabilityZone"] = pool.zone
    capacity: dict[str, Any] = {
        "TotalTargetCapacity": 1,
        "DefaultTargetCapacityType": str(pool.capacity_type),
    }
    if pool.capacity_type is CapacityType.SPOT and request.max_price is not None:
        override["MaxPrice"] = str(request.max_price.amount)
    marks = {TAG_TOKEN: request.client_token, TAG_INSTALLATION: installation(site)}
    tags = [{"Key": key, "Value": value} for key, value in {**request.tags, **marks}.items()]
    body: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": request.client_token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": template, "Version": "$Default"},
                "Overrides": [override],
            }
        ],
        "TargetCapacitySpecification": capacity,
        "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
    }
    if pool.capacity_type is CapacityType.SPOT:
        body["SpotOptions"] = {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
    return body


def installation(site: Site) -> str:
    """Which gpucost a machine belongs to: staging and production may share an account, but never an object store."""
    return hashlib.sha256(f"{site.store.endpoint or ''} {site.store.url}".encode()).hexdigest()[:12]


def as_machine(instance: dict[str, Any], region: str, zone_ids: dict[str, str]) -> Machine:
    """One instance of DescribeInstances."""
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    zone = instance["Placement"]["AvailabilityZone"]
    spot = instance.get("InstanceLifecycle") == "spot"
    code = instance.get("StateReason", {}).get("Code", "")
    state = instance["State"]["Name"]
    return Machine(
        instance_id=instance["InstanceId"],
        state=state,
        pool=Pool(
            provider="aws",
            region=region,
            zone=zone,
            zone_id=zone_ids.get(zone, zone),
            instance_type=instance["InstanceType"],
            capacity_type=CapacityType.SPOT if spot else CapacityType.ON_DEMAND,
        ),
        client_token=tags.get(TAG_TOKEN, ""),
        tags=tags,
        launched_at=instance["LaunchTime"],
        ended_at=_end_time(instance.get("StateTransitionReason", "")) if state == "terminated" else None,
        ended_by=_ended_by(code) if state == "terminated" else None,
        end_code=code,
    )


def _end_time(transition: str) -> datetime | None:
    """EC2 shows the moment of a transition inside a sentence: 'User initiated (2026-11-30 16:43:14 GMT)'."""
    match = _WHEN.search(transition)
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if match else None


def _ended_by(code: str) -> Literal["provider", "us", "self"]:
    if code == "Client.InstanceInitiatedShutdown":
        return "self"
    # Where EC2 gives no reason, it is not taken for an interruption: that could make an hour free that is billed.
    return "provider" if code.startswith("Server.") else "us"
