"""CreateFleet, DescribeFleets, DescribeFleetInstances, DeleteFleets: fleets of type `instant`.

Source: the pages of these actions, and of FleetData, in https://docs.aws.amazon.com/AWSEC2/latest/APIReference/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpucost.rehearsal.api import fleet_request, requests, views
from gpucost.rehearsal.api.context import Context, check_fleet_id
from gpucost.rehearsal.api.fleet import Planner
from gpucost.rehearsal.book.records import BY_USER, Instance, Launch
from gpucost.rehearsal.protocol import filters, tag_rules
from gpucost.rehearsal.protocol.wire import Ec2Error

MOST_DELETIONS = 25
"""Instant fleets that one DeleteFleets may name."""


def create(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """CreateFleet."""
    moto = context.side(region)
    wanted = fleet_request.targets(request)
    pools = fleet_request.candidates(request, context.market, moto)
    tags = tag_rules.tags_for(request.get("TagSpecifications"), "fleet")
    planner = Planner(context, wanted, pools)
    made = requests.launch_once(context, "fleet", region, request, tags, planner.plan)
    context.wake()
    return {"FleetId": made.id, **made.answer}


def describe(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeFleets; an instant fleet is shown only to those who name it, as on EC2."""
    every = context.fleets(region)
    wanted = request.get("FleetIds") or []
    for fleet_id in wanted:
        _known(every, fleet_id)
    of_fleet: dict[str, list[Instance]] = {fleet_id: [] for fleet_id in wanted}
    for one in context.book.every():
        if one.launch_id in of_fleet:
            of_fleet[one.launch_id].append(one)
    known: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
        "activity-status": lambda one: [one["ActivityStatus"]],
        # the reference writes it with a hyphen, the field has an underscore
        "fleet-state": lambda one: [one["FleetState"], one["FleetState"].replace("_", "-")],
        "type": lambda one: [one["Type"]],
    }
    rows = [views.fleet(every[fleet_id], of_fleet[fleet_id]) for fleet_id in dict.fromkeys(wanted)]
    chosen = filters.select(rows, request.get("Filters"), known, views.tags_of)
    shown, token = filters.page(chosen, request, sizes=range(1, 1001))
    return {"Fleets": shown, "NextToken": token}


def describe_instances(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeFleetInstances: not for instant fleets; EC2's words: boto/boto3#4005."""
    fleet_id = request.get("FleetId") or ""
    _known(context.fleets(region), fleet_id)
    raise Ec2Error(
        "Unsupported",
        f"Fleet {fleet_id} is instant fleet. Describe fleet instances is not supported by this type of fleet",
    )


def delete(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DeleteFleets: an instant fleet ends with its instances; it cannot be deleted without.

    The reference says so and names no code for the attempt; InvalidParameterValue is ours.
    """
    ids = list(dict.fromkeys(request.get("FleetIds") or []))
    if not ids:
        raise Ec2Error("MissingParameter", "The request must contain the parameter FleetIds")
    if len(ids) > MOST_DELETIONS:
        raise Ec2Error(
            "InvalidParameterValue", f"FleetIds: got {len(ids)}, expected {MOST_DELETIONS} at most of type instant"
        )
    if request.get("TerminateInstances") is False:
        raise Ec2Error(
            "InvalidParameterValue", "TerminateInstances: must be true for fleets of type instant; no fleet is deleted."
        )
    deleted, failed = [], []
    with context.book.locked:
        every = context.fleets(region)
        for fleet_id in ids:
            failure = _undeletable(every.get(fleet_id), fleet_id)
            if failure is not None:
                failed.append({"FleetId": fleet_id, "Error": failure})
                continue
            _end(context, fleet_id)
            deleted.append(
                {"FleetId": fleet_id, "PreviousFleetState": "active", "CurrentFleetState": "deleted_terminating"}
            )
    context.wake()
    return {"SuccessfulFleetDeletions": deleted, "UnsuccessfulFleetDeletions": failed}


def _end(context: Context, fleet_id: str) -> None:
    context.book.delete_launch(fleet_id)
    for one in context.book.every():
        if one.launch_id == fleet_id:
            if one.state in {"stopped", "stopping"}:
                context.book.terminate_stopped(one.id)
            else:
                context.book.begin_end(one.id, BY_USER)


def _undeletable(fleet: Launch | None, fleet_id: str) -> dict[str, str] | None:
    try:
        check_fleet_id(fleet_id)
    except Ec2Error as error:
        return {"Code": "fleetIdMalformed", "Message": error.message}
    if fleet is None:
        return {"Code": "fleetIdDoesNotExist", "Message": f"The fleet ID '{fleet_id}' does not exist."}
    if fleet.deleted is not None:
        return {"Code": "fleetNotInDeletableState", "Message": f"The fleet '{fleet_id}' is deleted already."}
    return None


def _known(every: Mapping[str, Launch], fleet_id: str) -> None:
    check_fleet_id(fleet_id)
    if fleet_id not in every:
        raise Ec2Error("InvalidFleetId.NotFound", f"The fleet ID '{fleet_id}' does not exist.")
