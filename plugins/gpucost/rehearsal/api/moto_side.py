"""Everything that moto does well, in this process: instance types, launch templates, networks, STS, SQS, EventBridge.

The only module that touches moto's backends; the other rooms ask it for plain values.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from typing import Any

from moto.core.exceptions import ServiceException
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES, InstanceType, InstanceTypeBackend
from moto.events.models import events_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from gpucost.rehearsal.api.wire import Ec2Error
from gpucost.rehearsal.book.records import Instance, LaunchSpec
from gpucost.rehearsal.market.market import MarketError, MarketFile

log = logging.getLogger(__name__)

ACCOUNT: str = str(DEFAULT_ACCOUNT_ID)
"""The account that everything belongs to."""

WARNING = "EC2 Spot Instance Interruption Warning"


class MotoSide:
    """What the rehearsal needs from moto, for one region.

    Raises:
        MarketError: the market names a zone or type that the API would not show like that.
    """

    def __init__(self, market: MarketFile) -> None:
        self.region = market.region
        self.wsgi = DomainDispatcherApplication(create_backend_app)
        self._add_types(market)
        self._ec2 = ec2_backends[ACCOUNT][market.region]
        self._check_zones(market)
        # the first look builds a thousand types and takes two seconds; nobody should wait for it later
        self._ec2.describe_instance_types([offer.name for offer in market.instance_types])

    def _add_types(self, market: MarketFile) -> None:
        for index, offer in enumerate(market.instance_types):
            if offer.name in INSTANCE_TYPES:
                continue
            if offer.describe is None:
                raise MarketError(
                    f"instance_types.{index}.describe: {offer.name} is not among moto's types, expected "
                    "DescribeInstanceTypes' answer for it"
                )
            INSTANCE_TYPES[offer.name] = offer.describe
            InstanceTypeBackend.instance_types.append(InstanceType(offer.name))
            zones = [zone for zone in market.zones if any(p.key == (zone.name, offer.name) for p in market.pools)]
            places = {
                "region": [market.region],
                "availability-zone": [zone.name for zone in zones],
                "availability-zone-id": [zone.zone_id for zone in zones],
            }
            for kind, locations in places.items():
                INSTANCE_TYPE_OFFERINGS[kind].setdefault(market.region, []).extend(
                    {"InstanceType": offer.name, "LocationType": kind, "Location": location} for location in locations
                )

    def _check_zones(self, market: MarketFile) -> None:
        known = {zone.name: zone.zone_id for zone in self._ec2.describe_availability_zones()}
        for index, zone in enumerate(market.zones):
            if known.get(zone.name) != zone.zone_id:
                raise MarketError(
                    f"zones.{index}: got {zone.name} = {zone.zone_id}, expected a pair that "
                    f"DescribeAvailabilityZones shows: {known}"
                )

    def knows_type(self, instance_type: str) -> bool:
        """Whether the instance type exists at all."""
        return instance_type in INSTANCE_TYPES

    def zone_names(self) -> list[str]:
        """Every zone of the region."""
        return [zone.name for zone in self._ec2.describe_availability_zones()]

    def zone_of_subnet(self, subnet_id: str) -> str:
        """The zone of a subnet; moto's InvalidSubnetID.NotFound when there is none."""
        return str(self._ec2.get_subnet(subnet_id).availability_zone)

    def subnet_of(self, subnet_id: str | None, zone: str) -> tuple[str | None, str | None]:
        """Subnet and VPC for an instance: the one asked for, or the zone's default."""
        subnet = self._ec2.get_subnet(subnet_id) if subnet_id else self._ec2.get_default_subnets().get(zone)
        return (None, None) if subnet is None else (str(subnet.id), str(subnet.vpc_id))

    def launch_template(self, wanted: dict[str, Any]) -> tuple[dict[str, Any], LaunchSpec]:
        """A launch template's data and what an instance is started with, from LaunchTemplateSpecification.

        Raises:
            ServiceException, Ec2Error: in EC2's words: no such template, no such version, bad user data.
        """
        if wanted.get("LaunchTemplateId"):
            template = self._ec2.get_launch_template(wanted["LaunchTemplateId"])
        elif wanted.get("LaunchTemplateName"):
            template = self._ec2.get_launch_template_by_name(wanted["LaunchTemplateName"])
        else:
            raise Ec2Error("MissingParameter", "LaunchTemplateSpecification needs LaunchTemplateId or -Name.")
        version = template.get_version(_version(wanted.get("Version")))
        data: dict[str, Any] = version.data
        profile = data.get("IamInstanceProfile") or {}
        return data, LaunchSpec(
            image_id=data.get("ImageId"),
            user_data=_user_data(data.get("UserData")),
            profile=profile.get("Arn") or profile.get("Name"),
            metadata_tags=(data.get("MetadataOptions") or {}).get("InstanceMetadataTags") == "enabled",
            shutdown_behavior="terminate" if data.get("InstanceInitiatedShutdownBehavior") == "terminate" else "stop",
            tags=tags_for(data.get("TagSpecifications"), "instance"),
            template_id=template.id,
            template_version=str(version.number),
        )

    def warn(self, instance: Instance) -> None:
        """Put the interruption warning on the default event bus, from where rules bring it to SQS."""
        assert instance.notice_at is not None  # noqa: S101 (only noticed instances come here)
        arn = f"arn:aws:ec2:{instance.pool.zone}:instance/{instance.id}"
        event = {
            "Source": "aws.ec2",
            "DetailType": WARNING,
            "Detail": json.dumps({"instance-id": instance.id, "instance-action": "terminate"}),
            "Resources": [arn],
            "Time": instance.notice_at.timestamp(),
        }
        try:
            events_backends[ACCOUNT][self.region].put_events([event])
        except ServiceException as error:
            # a warning is best effort, on AWS too: the instance is interrupted all the same
            log.warning("%s: the interruption warning could not be put on the event bus: %s", instance.id, error)


def _version(wanted: Any) -> str:
    version = str(wanted) if wanted else "$Default"
    if version.lower() not in {"$default", "$latest"} and not version.isdigit():
        raise Ec2Error("InvalidParameterValue", f"Launch template version: got {version!r}, expected a number.")
    return version


def _user_data(encoded: Any) -> bytes | None:
    if not encoded:
        return None
    try:
        return base64.b64decode(str(encoded), validate=False)
    except (binascii.Error, ValueError) as error:
        raise Ec2Error("InvalidUserData.Malformed", f"UserData is not base64: {error}") from error


def tags_for(specifications: list[dict[str, Any]] | None, kind: str) -> dict[str, str]:
    """The tags for resources of `kind` in a TagSpecifications list."""
    found: dict[str, str] = {}
    for specification in specifications or []:
        if specification.get("ResourceType") == kind:
            found.update({tag["Key"]: tag.get("Value", "") for tag in specification.get("Tags") or []})
    return found
