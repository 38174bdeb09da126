"""EC2: machines by CreateFleet of type `instant`, one answer for one request, idempotent by client token.

Only the API is used that every account has; everything works the same against the rehearsal cloud. All nodes
of a site and agent share one launch template: the start script is the same for all, and what differs (lease,
job, attempt) is in the instance's tags, which the node reads from its metadata service.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from gpucost.capacity.access import NodeAccess, RoleAccess
from gpucost.capacity.providers.base import LaunchRequest, Machine, ProviderError
from gpucost.capacity.providers.ec2_errors import call_ec2, provider_error
from gpucost.capacity.providers.ec2_shapes import (
    TAG_INSTALLATION,
    TAG_TOKEN,
    as_machine,
    fleet_request,
    installation,
    template_data,
)
from gpucost.capacity.sites import Site, Sites
from gpucost.market.pool import CapacityType, InstanceType, Pool
from gpucost.market.quote import PricePoint, Quote
from gpucost.market.sources import aws as prices
from gpucost.reasons import Reason

log = logging.getLogger(__name__)

Client = Callable[[str], Any]
"""Region -> boto3 EC2 client; boto3 makes its clients at run time, so that they have no type of their own."""


class Ec2:
    """Buys from EC2 in the configured sites.

    Args:
        client: region -> boto3 EC2 client.
        sites: where and with what settings.
        agent_key: key of the agent's zip in the object store.
        access: how nodes come to credentials.
    """

    name = "aws"

    def __init__(self, client: Client, sites: Sites, agent_key: str, access: NodeAccess | None = None) -> None:
        self._client = client
        self._sites = sites
        self._agent_key = agent_key
        self._access = access or RoleAccess()
        self._zone_ids: dict[str, dict[str, str]] = {}
        self._types: dict[str, InstanceType] = {}
        self._templates: dict[str, str] = {}

    def regions(self) -> list[str]:
        """The regions of the configured sites."""
        return [site.region for site in self._sites.of(self.name)]

    def instance_types(self, names: Sequence[str]) -> dict[str, InstanceType]:
        """What machines of these types have, from DescribeInstanceTypes; kept, since it does not change."""
        missing = [name for name in names if name not in self._types]
        if missing:
            region = self._sites.of(self.name)[0].region
            self._types.update(call_ec2(lambda: prices.instance_types(self._client(region), missing)))
        return {name: self._types[name] for name in names}

    def quotes(self, at: datetime) -> list[Quote]:
        """Spot prices in force at `at` and the sites' on-demand list prices."""
        found: list[Quote] = []
        for site in self._sites.of(self.name):
            types = self.instance_types(tuple(site.instance_types))
            pools = self._pools(site, CapacityType.SPOT)
            found += call_ec2(lambda: prices.spot_quotes(self._client(site.region), pools, types, at))  # noqa: B023
            for pool in self._pools(site, CapacityType.ON_DEMAND):
                listed = site.instance_types[pool.instance_type]
                found.append(
                    Quote(
                        pool=pool,
                        instance=types[pool.instance_type],
                        price=listed.price,
                        as_of=listed.as_of,
                        source=listed.source,
                    )
                )
        return found

    def price_history(self, pool: Pool, start: datetime, end: datetime) -> list[PricePoint]:
        """The pool's spot prices from the one in force at `start` until `end`; one list price if on demand."""
        if pool.capacity_type is CapacityType.ON_DEMAND:
            site = self._sites.site(self.name, pool.region)
            return [PricePoint(since=start, price=site.instance_types[pool.instance_type].price)]
        return call_ec2(lambda: prices.spot_history(self._client(pool.region), pool, start, end))

    def launch(self, request: LaunchRequest) -> Machine:
        """Buy one machine.

        Raises:
            ProviderError: with the reason; after a lost answer ask `find` before asking again.
        """
        site = self._sites.site(self.name, request.pool.region)
        template = self._template(site)
        answer = call_ec2(lambda: self._client(site.region).create_fleet(**fleet_request(request, site, template)))
        ids = [i for group in answer.get("Instances", []) for i in group.get("InstanceIds", [])]
        if not ids:
            errors = answer.get("Errors", [])
            first: dict[str, Any] = dict(errors[0]) if errors else {}
            raise provider_error(
                first.get("ErrorCode", "InsufficientInstanceCapacity"),
                f"{request.pool.key}: {first.get('ErrorMessage', 'the fleet came back empty')}",
            )
        # Just after a create the new id may not be visible yet, or EC2 not answer; the order itself is beyond doubt.
        try:
            machine = self.describe(site.region, ids).get(ids[0])
        except ProviderError as unseen:
            log.warning("%s is bought, but could not be looked at yet: %s", ids[0], unseen)
            machine = None
        return machine or Machine(
            instance_id=ids[0],
            state="pending",
            pool=request.pool,
            client_token=request.client_token,
            tags=request.tags,
        )

    def find(self, region: str, client_token: str) -> Machine | None:
        """The machine that carries this order's token in its tags, if any; a living one before an ended one."""
        found = self._describe(region, [{"Name": f"tag:{TAG_TOKEN}", "Values": [client_token]}])
        return min(found, key=lambda machine: machine.over, default=None)

    def describe(self, region: str, instance_ids: Sequence[str]) -> dict[str, Machine]:
        """The machines by id; ids that EC2 does not know (yet) are missing from the answer."""
        if not instance_ids:
            return {}
        # A filter, unlike InstanceIds, does not fail the whole call because of one id that is not visible yet.
        found = self._describe(region, [{"Name": "instance-id", "Values": list(instance_ids)}])
        return {machine.instance_id: machine for machine in found}

    def owned(self, region: str) -> list[Machine]:
        """Every machine of this installation that is not over, whoever bought it."""
        ours = installation(self._sites.site(self.name, region))
        return [
            m for m in self._describe(region, [{"Name": f"tag:{TAG_INSTALLATION}", "Values": [ours]}]) if not m.over
        ]

    def terminate(self, region: str, instance_ids: Sequence[str]) -> None:
        """Ask for their end, one by one, so that an id that is gone does not keep the others alive."""
        for instance_id in instance_ids:
            try:
                call_ec2(lambda: self._client(region).terminate_instances(InstanceIds=[instance_id]))  # noqa: B023
            except ProviderError as error:
                if error.code != "InvalidInstanceID.NotFound":
                    raise

    def _pools(self, site: Site, capacity_type: CapacityType) -> list[Pool]:
        ids = self._zone_ids.get(site.region)
        if ids is None:
            ids = call_ec2(lambda: prices.zone_ids(self._client(site.region)))
            self._zone_ids[site.region] = ids
        unknown = [zone for zone in site.zones if zone not in ids]
        if unknown:
            raise ProviderError(
                Reason.BAD_REQUEST, f"zones: {unknown} are not in {site.region}, which has {sorted(ids)}; mend the site"
            )
        return [
            Pool(
                provider=self.name,
                region=site.region,
                zone=zone,
                zone_id=ids[zone],
                instance_type=instance_type,
                capacity_type=capacity_type,
            )
            for zone in site.zones
            for instance_type in site.instance_types
        ]

    def _template(self, site: Site) -> str:
        """The launch template of this site and agent, made when it is not there."""
        data = template_data(site, self._access.start_script(site, self._agent_key))
        digest = hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()[:12]
        name = f"gpucost-{site.region}-{digest}"
        if name not in self._templates:
            try:
                call_ec2(
                    lambda: self._client(site.region).create_launch_template(
                        LaunchTemplateName=name, LaunchTemplateData=data, ClientToken=digest
                    )
                )
            except ProviderError as error:
                if error.code != "InvalidLaunchTemplateName.AlreadyExistsException":
                    raise
            self._templates[name] = name
        return name

    def _describe(self, region: str, filters: list[Any]) -> list[Machine]:
        pages = call_ec2(
            lambda: list(self._client(region).get_paginator("describe_instances").paginate(Filters=filters))
        )
        ids = self._zone_ids.get(region) or call_ec2(lambda: prices.zone_ids(self._client(region)))
        self._zone_ids[region] = ids
        return [
            as_machine(dict(instance), region, ids)
            for page in pages
            for reservation in page.get("Reservations", [])
            for instance in reservation.get("Instances", [])
        ]
