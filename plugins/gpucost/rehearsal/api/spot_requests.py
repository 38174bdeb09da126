"""DescribeSpotInstanceRequests, CancelSpotInstanceRequests: the request behind every spot instance.

Source: the pages of these actions, and
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpucost.rehearsal.api import views
from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.protocol import filters, tag_rules
from gpucost.rehearsal.protocol.wire import Ec2Error


def describe(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeSpotInstanceRequests."""
    ids = request.get("SpotInstanceRequestIds")
    spot = _requests(context, region)
    found = _named(spot, ids) if ids else list(spot.values())
    zone_ids = context.market.zone_ids(region)
    tags = _launch_tags(context, region)
    rows = [context.request_views.of(one, zone_ids, tags.get(one.launch_id, {})) for one in found]
    chosen = filters.select(rows, request.get("Filters"), _FILTERS, views.tags_of)
    numbers = {one.id: one.number for one in found}
    order = None if ids else (lambda row: numbers[row["InstanceId"]])
    shown, token = filters.page(chosen, request, number=order)
    return {"SpotInstanceRequests": shown, "NextToken": token}


def cancel(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """CancelSpotInstanceRequests: the instances run on."""
    ids = request.get("SpotInstanceRequestIds")
    if not ids:
        raise Ec2Error("MissingParameter", "The request must contain the parameter SpotInstanceRequestIds")
    cancelled = []
    with context.book.locked:
        for one in _named(_requests(context, region), ids):
            context.book.cancel_spot_request(one.id)
            after = context.book.get(one.id) or one
            cancelled.append({"SpotInstanceRequestId": one.spot_request_id, "State": views.spot_state(after)})
    return {"CancelledSpotInstanceRequests": cancelled}


def _requests(context: Context, region: str) -> dict[str, Instance]:
    """Request id -> the instance that it launched, of those that the API shows."""
    return {
        one.spot_request_id: one
        for one in context.book.shown(region)
        if one.spot_request_id and context.visibility.sees(one.spot_request_id)
    }


def _named(spot: Mapping[str, Instance], ids: Sequence[str]) -> list[Instance]:
    for request_id in ids:
        if request_id not in spot:
            raise Ec2Error(
                "InvalidSpotInstanceRequestID.NotFound", f"The spot instance request ID '{request_id}' does not exist"
            )
    return [spot[request_id] for request_id in dict.fromkeys(ids)]


def _launch_tags(context: Context, region: str) -> dict[str, dict[str, str]]:
    """Launch id -> tags for its spot requests: only RunInstances can give some."""
    return {
        one.id: tag_rules.tags_for(one.request.get("TagSpecifications"), "spot-instances-request")
        for one in context.book.launches("reservation", region)
        if one.request.get("TagSpecifications")
    }


_FILTERS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "create-time": lambda row: [views.filter_time(row["CreateTime"])],
    "instance-id": lambda row: [row["InstanceId"]],
    "launch.image-id": lambda row: [row["LaunchSpecification"]["ImageId"]],
    "launch.instance-type": lambda row: [row["LaunchSpecification"]["InstanceType"]],
    "launched-availability-zone": lambda row: [row["LaunchedAvailabilityZone"]],
    "launched-availability-zone-id": lambda row: [row["LaunchedAvailabilityZoneId"]],
    "product-description": lambda row: [row["ProductDescription"]],
    "spot-instance-request-id": lambda row: [row["SpotInstanceRequestId"]],
    "spot-price": lambda row: [row["SpotPrice"]],
    "state": lambda row: [row["State"]],
    "status-code": lambda row: [row["Status"]["Code"]],
    "type": lambda row: [row["Type"]],
}
