"""The EC2 actions that are ours: everything about spot prices, fleets and instances."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from gpucost.rehearsal.api import filters, fleet, views, wire
from gpucost.rehearsal.api.moto_side import ACCOUNT, MotoSide, tags_for
from gpucost.rehearsal.api.wire import Ec2Error
from gpucost.rehearsal.book.book import Book, TokenReused
from gpucost.rehearsal.book.records import BY_USER, Instance
from gpucost.rehearsal.market.market import Market, PoolKey, PricePoint

REFUSED = frozenset(
    {
        "CancelSpotFleetRequests",
        "CancelSpotInstanceRequests",
        "DeleteFleets",
        "DescribeInstanceAttribute",
        "DescribeInstanceStatus",
        "ModifyFleet",
        "ModifyInstanceAttribute",
        "RebootInstances",
        "RequestSpotFleet",
        "RequestSpotInstances",
        "RunInstances",
        "StartInstances",
        "StopInstances",
    }
)
"""Actions on instances that are not rehearsed: refused, as moto would answer them from instances of its own."""

OWN_IDS = ("i-", "fleet-")
PRICE_PAGE = 1000
PRICE_HISTORY = timedelta(days=90)
PRODUCTS = frozenset({views.PRODUCT, f"{views.PRODUCT} (Amazon VPC)"})


class Ec2Api:
    """Answers our actions from the book and the market.

    Args:
        market, book, moto: what is sold, who owns it, everything else.
        wake: tells the hypervisor that the book changed.
    """

    def __init__(self, market: Market, book: Book, moto: MotoSide, wake: Callable[[], None]) -> None:
        self._market = market
        self._book = book
        self._moto = moto
        self._wake = wake
        self._actions: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
            "CreateFleet": self._create_fleet,
            "CreateTags": self._create_tags,
            "DescribeFleets": self._describe_fleets,
            "DescribeInstances": self._describe_instances,
            "DescribeSpotInstanceRequests": self._describe_spot_requests,
            "DescribeSpotPriceHistory": self._describe_prices,
            "TerminateInstances": self._terminate,
        }

    def owns(self, action: str, form: Mapping[str, str]) -> bool:
        """Whether the action is ours; tags are, when the first resource is an instance or a fleet."""
        if action == "CreateTags":
            return form.get("ResourceId.1", "").startswith(OWN_IDS)
        return action in self._actions or action in REFUSED

    def answer(self, action: str, form: Mapping[str, str], region: str) -> dict[str, Any]:
        """The result of an action of ours.

        Raises:
            Ec2Error, moto's ServiceException: in EC2's words.
        """
        if action in REFUSED:
            raise Ec2Error(
                "UnsupportedOperation",
                f"{action} is not rehearsed. Buy with CreateFleet (Type=instant), end with TerminateInstances.",
            )
        request = wire.parse(action, form)
        if request.get("DryRun"):
            raise Ec2Error("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
        return self._actions[action](request, region)

    def _create_fleet(self, request: dict[str, Any], region: str) -> dict[str, Any]:
        if region != self._market.region:
            raise Ec2Error("UnsupportedOperation", f"This rehearsal cloud sells in {self._market.region} only.")
        wanted = fleet.targets(request)
        pools = fleet.candidates(request, self._market, self._moto)
        planner = fleet.Planner(wanted, pools, self._market, self._book)
        token = request.get("ClientToken", "")
        digest = hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()
        fleet_tags = tags_for(request.get("TagSpecifications"), "fleet")
        try:
            made = self._book.create_fleet(token, digest, request, fleet_tags, planner.plan)
        except TokenReused as error:
            raise Ec2Error(
                "IdempotentParameterMismatch",
                f"The client token '{token}' was used with other parameters before.",
            ) from error
        self._wake()
        return {"FleetId": made.id, **made.answer}

    def _create_tags(self, request: dict[str, Any], _region: str) -> dict[str, Any]:
        tags = {tag["Key"]: tag.get("Value", "") for tag in request.get("Tags") or []}
        for key in tags:
            if key.startswith("aws:"):
                raise Ec2Error("InvalidParameterValue", f"Tag keys starting with 'aws:' are reserved: {key}")
        unknown = self._book.add_tags(request.get("Resources") or [], tags)
        if unknown:
            raise Ec2Error("InvalidID", f"The ID '{unknown[0]}' is not valid")
        return {}

    def _describe_fleets(self, request: dict[str, Any], region: str) -> dict[str, Any]:
        every = {one.id: one for one in self._book.fleets()} if region == self._market.region else {}
        wanted = request.get("FleetIds") or list(every)
        for fleet_id in wanted:
            if fleet_id not in every:
                raise Ec2Error("InvalidFleetId.NotFound", f"The fleet ID '{fleet_id}' does not exist.")
        of_fleet: dict[str, list[Instance]] = {}
        for one in self._book.every():
            of_fleet.setdefault(one.fleet_id, []).append(one)
        shown, token = filters.page([every[fleet_id] for fleet_id in wanted], request)
        return {"Fleets": [views.fleet(one, of_fleet.get(one.id, [])) for one in shown], "NextToken": token}

    def _known(self, ids: list[str] | None, region: str) -> list[Instance]:
        shown = self._book.shown() if region == self._market.region else []
        if not ids:
            return shown
        by_id = {one.id: one for one in shown}
        unknown = [one for one in ids if one not in by_id]
        if unknown:
            many = "IDs" if len(unknown) > 1 else "ID"
            raise Ec2Error(
                "InvalidInstanceID.NotFound",
                f"The instance {many} '{', '.join(unknown)}' do{'' if len(unknown) > 1 else 'es'} not exist",
            )
        return [by_id[one] for one in dict.fromkeys(ids)]

    def _describe_instances(self, request: dict[str, Any], region: str) -> dict[str, Any]:
        if request.get("InstanceIds") and request.get("MaxResults"):
            raise Ec2Error(
                "InvalidParameterCombination", "The parameter instancesSet cannot be used with the parameter maxResults"
            )
        known = self._known(request.get("InstanceIds"), region)
        zone_ids = self._market.zones
        chosen = filters.select(known, request.get("Filters"), _instance_filters(zone_ids), lambda one: one.tags)
        shown, token = filters.page(chosen, request)
        reservations = [
            {
                "ReservationId": f"r-{one.id.removeprefix('i-')}",
                "OwnerId": ACCOUNT,
                "Groups": [],
                "Instances": [views.instance(one, zone_ids, ACCOUNT)],
            }
            for one in shown
        ]
        return {"Reservations": reservations, "NextToken": token}

    def _describe_spot_requests(self, request: dict[str, Any], region: str) -> dict[str, Any]:
        spot = [one for one in self._known(None, region) if one.spot_request_id]
        ids = request.get("SpotInstanceRequestIds")
        if ids:
            by_id = {one.spot_request_id: one for one in spot}
            for request_id in ids:
                if request_id not in by_id:
                    raise Ec2Error(
                        "InvalidSpotInstanceRequestID.NotFound",
                        f"The spot instance request ID '{request_id}' does not exist",
                    )
            spot = [by_id[request_id] for request_id in ids]
        zone_ids = self._market.zones
        known: dict[str, Callable[[Instance], list[str]]] = {
            "instance-id": lambda one: [one.id],
            "spot-instance-request-id": lambda one: [one.spot_request_id or ""],
            "state": lambda one: [views.spot_request(one, zone_ids)["State"]],
            "status-code": lambda one: [views.spot_request(one, zone_ids)["Status"]["Code"]],
            "launched-availability-zone": lambda one: [one.pool.zone],
        }
        chosen = filters.select(spot, request.get("Filters"), known, lambda _one: {})
        shown, token = filters.page(chosen, request)
        return {"SpotInstanceRequests": [views.spot_request(one, zone_ids) for one in shown], "NextToken": token}

    def _terminate(self, request: dict[str, Any], region: str) -> dict[str, Any]:
        if not request.get("InstanceIds"):
            raise Ec2Error("MissingParameter", "The request must contain the parameter InstanceIds")
        changes = []
        for before in self._known(request["InstanceIds"], region):
            if before.state == "stopped":
                self._book.terminate_stopped(before.id)
            else:
                self._book.begin_end(before.id, BY_USER)
            after = self._book.get(before.id) or before
            changes.append(
                {
                    "InstanceId": before.id,
                    "PreviousState": views.state(before.state),
                    "CurrentState": views.state(after.state),
                }
            )
        self._wake()
        return {"TerminatingInstances": changes}

    def _describe_prices(self, request: dict[str, Any], region: str) -> dict[str, Any]:
        offset, pinned = filters.decode_token(request.get("NextToken"))
        # later pages end where the first one did: new changes must not shift what is already counted
        now = datetime.fromisoformat(pinned) if pinned else self._book.now()
        last = min(request.get("EndTime") or now, now)
        first = request.get("StartTime") or now - PRICE_HISTORY
        rows = [
            (pool, point)
            for pool in self._priced_pools(request, region)
            for point in self._market.prices(pool).between(min(first, last), last)
        ]
        rows.sort(key=lambda row: (-row[1].at.timestamp(), row[0]))
        size = min(request.get("MaxResults") or PRICE_PAGE, PRICE_PAGE)
        token = filters.encode_token(offset + size, now.isoformat()) if offset + size < len(rows) else ""
        page = rows[offset : offset + size]
        return {"SpotPriceHistory": [self._price(pool, point) for pool, point in page], "NextToken": token}

    def _priced_pools(self, request: dict[str, Any], region: str) -> list[PoolKey]:
        if region != self._market.region:
            return []
        products = set(request.get("ProductDescriptions") or PRODUCTS)
        types = request.get("InstanceTypes")
        zone_ids = self._market.zones
        pools = [
            pool
            for pool in self._market.pools
            if products & PRODUCTS
            and (not types or pool.instance_type in types)
            and request.get("AvailabilityZone") in (None, "", pool.zone)
            and request.get("AvailabilityZoneId") in (None, "", zone_ids[pool.zone])
        ]
        known: dict[str, Callable[[PoolKey], list[str]]] = {
            "availability-zone": lambda pool: [pool.zone],
            "availability-zone-id": lambda pool: [zone_ids[pool.zone]],
            "instance-type": lambda pool: [pool.instance_type],
            "product-description": lambda _pool: sorted(PRODUCTS),
        }
        return filters.select(pools, request.get("Filters"), known, lambda _pool: {})

    def _price(self, pool: PoolKey, point: PricePoint) -> dict[str, Any]:
        return {
            "AvailabilityZone": pool.zone,
            "AvailabilityZoneId": self._market.zones[pool.zone],
            "InstanceType": pool.instance_type,
            "ProductDescription": views.PRODUCT,
            "SpotPrice": f"{point.price:.6f}",
            "Timestamp": point.at,
        }


def _instance_filters(zone_ids: Mapping[str, str]) -> dict[str, Callable[[Instance], list[str]]]:
    return {
        "availability-zone": lambda one: [one.pool.zone],
        "availability-zone-id": lambda one: [zone_ids[one.pool.zone]],
        "client-token": lambda one: [one.client_token],
        "image-id": lambda one: [one.spec.image_id or ""],
        "instance-id": lambda one: [one.id],
        # on-demand instances have no lifecycle in the API, so no value of this filter finds them
        "instance-lifecycle": lambda one: ["spot"] if one.lifecycle == "spot" else [],
        "instance-state-code": lambda one: [str(views.STATE_CODES[one.state])],
        "instance-state-name": lambda one: [one.state],
        "instance-type": lambda one: [one.pool.instance_type],
        "spot-instance-request-id": lambda one: [one.spot_request_id] if one.spot_request_id else [],
        "state-reason-code": lambda one: [one.ending.code] if one.ending else [],
        "subnet-id": lambda one: [one.spec.subnet_id or ""],
        "vpc-id": lambda one: [one.spec.vpc_id or ""],
    }
