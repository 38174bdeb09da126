"""Everything that moto does well, in this process: instance types, launch templates, networks, STS, SQS, EventBridge.

The other rooms ask this module for plain values; what belongs to moto is touched here and in the modules beside it:
`app` (its HTTP side), `memory` (its state over restarts), `tables` (regions, zones, types), `instance_types`
(what is answered of types), `event_targets` (what rules deliver), `queues` (how often), `templates` (what a machine is
started with).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.events.models import events_backends

from gpucost.rehearsal.book.records import LaunchSpec
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services import event_targets, queues, tables
from gpucost.rehearsal.services.app import MotoApp
from gpucost.rehearsal.services.lock import LOCK
from gpucost.rehearsal.services.memory import Memory, ec2_backend
from gpucost.rehearsal.services.templates import launch_spec

ACCOUNT: str = str(DEFAULT_ACCOUNT_ID)
"""The account that everything belongs to."""

FOLDER = "moto"


class MotoSide:
    """What the rehearsal needs from moto, for every region of its market.

    Args:
        market: what is sold.
        state_dir: the cloud's folder, where moto's state is kept; None keeps nothing.
        copies: asked for each message on its way into a queue: how many of it arrive, 1 when all is well.

    Raises:
        MarketError: the market contradicts moto's zones, or names a type that nobody describes.
        ValueError: the state of an earlier life cannot be taken up; the message says what to do.
    """

    def __init__(self, market: Market, state_dir: Path | None = None, *, copies: Callable[[], int] = lambda: 1) -> None:
        tables.add_market(market)
        event_targets.deliver_as_aws_does()
        queues.put_copies(copies)
        memory = Memory(state_dir / FOLDER if state_dir is not None else None)
        with LOCK:
            for name in market.regions:
                ec2_backend(name)
            memory.take_up()
        self.wsgi = MotoApp(memory, market.regions[0])
        self._regions = {name: RegionSide(name, memory) for name in market.regions}

    def region(self, name: str) -> RegionSide:
        """One region of the market."""
        return self._regions[name]

    def vcpus_of(self, instance_type: str) -> int:
        """How many vCPUs an instance type has, also one without GPUs; KeyError for an unknown one."""
        return tables.vcpus_of(instance_type)

    def memory_mib_of(self, instance_type: str) -> int:
        """How much memory an instance type has, MiB; KeyError for an unknown one."""
        return tables.memory_mib_of(instance_type)

    def put_event(self, region: str, event: dict[str, Any]) -> None:
        """Put an event, in EventBridge's envelope, on the default bus of a region: rules bring it to their targets.

        Raises:
            Whatever moto raises; a target that is away raises nothing.
        """
        self._regions[region].put_event(event)


class RegionSide:
    """What one region of moto knows.

    Args:
        name: the region's.
        memory: where changes are kept.
    """

    def __init__(self, name: str, memory: Memory) -> None:
        self.name = name
        self._memory = memory
        self._ec2 = ec2_backend(name)
        with LOCK:
            # the market of this start may have zones that an earlier one had not
            for zone in set(self.zone_names()) - set(self._ec2.get_default_subnets()):
                self._ec2.create_default_subnet(zone)

    def knows_type(self, instance_type: str) -> bool:
        """Whether the instance type exists in the region at all."""
        return tables.knows_type(self.name, instance_type)

    def has_key_pair(self, name: str) -> bool:
        """Whether there is a key pair of this name."""
        with LOCK:
            return name in self._ec2.key_pairs

    def has_group(self, group_id: str) -> bool:
        """Whether there is a security group with this id."""
        with LOCK:
            return self._ec2.get_security_group_from_id(group_id) is not None

    def zone_names(self) -> list[str]:
        """Every zone of the region."""
        return [zone.name for zone in self._ec2.describe_availability_zones()]

    def zone_of_subnet(self, subnet_id: str) -> str:
        """The zone of a subnet; moto's InvalidSubnetID.NotFound when there is none."""
        with LOCK:
            return str(self._ec2.get_subnet(subnet_id).availability_zone)

    def subnet_of(self, subnet_id: str | None, zone: str) -> tuple[str | None, str | None]:
        """Subnet and VPC for an instance: the one asked for, or the zone's default."""
        with LOCK:
            subnet = self._ec2.get_subnet(subnet_id) if subnet_id else self._ec2.get_default_subnets().get(zone)
            return (None, None) if subnet is None else (str(subnet.id), str(subnet.vpc_id))

    def launch_template(self, wanted: dict[str, Any]) -> tuple[dict[str, Any], LaunchSpec]:
        """A launch template's data and what an instance is started with, from LaunchTemplateSpecification.

        Raises:
            ServiceException, Ec2Error: in EC2's words: no such template, no such version, bad user data.
        """
        with LOCK:
            if wanted.get("LaunchTemplateId"):
                template = self._ec2.get_launch_template(wanted["LaunchTemplateId"])
            elif wanted.get("LaunchTemplateName"):
                template = self._ec2.get_launch_template_by_name(wanted["LaunchTemplateName"])
            else:
                raise Ec2Error("MissingParameter", "LaunchTemplateSpecification needs LaunchTemplateId or -Name.")
            version = template.get_version(_version(wanted.get("Version")))
        data: dict[str, Any] = version.data
        return data, launch_spec(data, template.id, str(version.number))

    def tags(self) -> list[dict[str, str]]:
        """The tags of moto's own resources, as DescribeTags lists them."""
        names = {"resource_id": "ResourceId", "resource_type": "ResourceType", "key": "Key", "value": "Value"}
        with LOCK:
            return [{names[name]: value for name, value in tag.items()} for tag in self._ec2.describe_tags()]

    def add_tags(self, ids: list[str], tags: dict[str, str]) -> None:
        """Tag moto's own resources; moto's error when one of them does not exist, and then none is tagged."""
        with LOCK:
            self._ec2.do_resources_exist(ids)
            self._ec2.create_tags(ids, tags)
            self._memory.keep("ec2", self.name)

    def remove_tags(self, ids: list[str], tags: dict[str, str | None]) -> None:
        """Remove tags of moto's own resources: by key, or by key and value when the value is not None."""
        with LOCK:
            self._ec2.delete_tags(ids, tags)
            self._memory.keep("ec2", self.name)

    def put_event(self, event: dict[str, Any]) -> None:
        """Put an event, in EventBridge's envelope, on the default bus: see `MotoSide.put_event`."""
        with LOCK:
            bus = events_backends[ACCOUNT][self.name].describe_event_bus("default")
            received = {**event, "ingestion-time": time.time()}
            delivered = [event_targets.deliver(rule, received) for rule in list(bus.rules.values())]
            if any(delivered):
                # a rule's queue may be in another region
                self._memory.keep("sqs", None)
                LOCK.notify_all()


_NUMBER = re.compile("[1-9][0-9]{0,17}")


def _version(wanted: Any) -> str:
    version = str(wanted) if wanted else "$Default"
    if version.lower() not in {"$default", "$latest"} and not _NUMBER.fullmatch(version):
        raise Ec2Error("InvalidParameterValue", f"Launch template version: got {version!r}, expected a number.")
    return version
