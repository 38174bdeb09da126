"""CreateTags, DeleteTags, DescribeTags: on instances, volumes and fleets, and on what belongs to moto, in one request.

Source: the pages of these actions in https://docs.aws.amazon.com/AWSEC2/latest/APIReference/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpucost.rehearsal.api import volumes
from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.protocol import filters, tag_rules
from gpucost.rehearsal.protocol.wire import Ec2Error

TYPES = {"i-": "instance", "fleet-": "fleet", "vol-": "volume"}
"""How ids of ours begin, and what they are."""


def create(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """CreateTags: on all of the resources, or on none."""
    tags = tag_rules.read(request.get("Tags"))
    if not tags:
        raise Ec2Error("MissingParameter", "The request must contain the parameter Tags")
    with context.book.locked:
        ours, others = _resources(context, request, region)
        for kept in ours.values():
            tag_rules.check_number({**kept, **tags})
        if others:
            context.side(region).add_tags(others, tags)
        context.book.add_tags([one for one in ours if _type_of(one) != "volume"], tags)
        for resource, kept in ours.items():
            if _type_of(resource) == "volume":
                _tag_volume(context, region, resource, {**kept, **tags})
    return {}


def delete(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DeleteTags: by key, by key and value, or without Tags all that are not AWS's own."""
    asked: dict[str, str | None] = {tag.get("Key") or "": tag.get("Value") for tag in request.get("Tags") or []}
    for key in asked:
        if key.startswith(tag_rules.RESERVED):
            raise Ec2Error("InvalidParameterValue", f"Tag keys starting with 'aws:' cannot be deleted: {key}")
    with context.book.locked:
        ours, others = _resources(context, request, region)
        if others:
            _delete_others(context, region, others, asked)
        for resource, kept in ours.items():
            every: dict[str, str | None] = {key: None for key in kept if not key.startswith(tag_rules.RESERVED)}
            if _type_of(resource) == "volume":
                gone = {key for key, value in (asked or every).items() if value in {None, kept.get(key)}}
                _tag_volume(context, region, resource, {key: kept[key] for key in kept if key not in gone})
            else:
                context.book.remove_tags([resource], asked or every)
    return {}


def _tag_volume(context: Context, region: str, resource: str, tags: dict[str, str]) -> None:
    found = volumes.named(context, region, resource)
    context.book.tag_volume(found.instance.id, found.disk.device, tags)


def describe(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeTags: every tag of every resource that the API shows."""
    rows = [
        {"ResourceId": resource, "ResourceType": _type_of(resource), "Key": key, "Value": value}
        for resource, tags in _ours(context, region).items()
        for key, value in sorted(tags.items())
    ]
    if region in context.market.regions:
        rows += context.side(region).tags()
    known: dict[str, Callable[[Mapping[str, str]], list[str]]] = {
        "key": lambda row: [row["Key"]],
        "resource-id": lambda row: [row["ResourceId"]],
        "resource-type": lambda row: [row["ResourceType"]],
        "value": lambda row: [row["Value"]],
    }
    chosen = filters.select(rows, request.get("Filters"), known, lambda row: {row["Key"]: row["Value"]})
    shown, token = filters.page(chosen, request)
    return {"Tags": shown, "NextToken": token}


def _ours(context: Context, region: str) -> dict[str, Mapping[str, str]]:
    """Every resource of ours that the API shows, with its tags."""
    fleets = {fleet_id: fleet.tags for fleet_id, fleet in context.fleets(region).items()}
    of_volumes = {volume_id: found.tags for volume_id, found in volumes.existing(context, region).items()}
    return {**{one.id: one.tags for one in context.instances(region)}, **fleets, **of_volumes}


def _resources(
    context: Context, request: Mapping[str, Any], region: str
) -> tuple[dict[str, Mapping[str, str]], list[str]]:
    """The resources of a request: ours with their tags, and the ids of the others."""
    ids = list(dict.fromkeys(request.get("Resources") or []))
    if not ids:
        raise Ec2Error("MissingParameter", "The request must contain the parameter ResourceIds")
    if any(one.startswith("sir-") for one in ids):
        raise not_rehearsed("Tagging a spot request after its launch", "Use TagSpecifications of RunInstances.")
    context.named([one for one in ids if one.startswith("i-")], region)
    known = _ours(context, region)
    mine = [one for one in ids if _type_of(one)]
    for one in mine:
        if _type_of(one) == "volume":
            volumes.named(context, region, one)
        elif one not in known:
            raise Ec2Error("InvalidFleetId.NotFound", f"The fleet ID '{one}' does not exist.")
    return {one: known[one] for one in mine}, [one for one in ids if not _type_of(one)]


def _delete_others(context: Context, region: str, ids: list[str], asked: Mapping[str, str | None]) -> None:
    side = context.side(region)
    every = side.tags()
    for resource in ids:
        kept: dict[str, str | None] = {row["Key"]: None for row in every if row["ResourceId"] == resource}
        side.remove_tags([resource], dict(asked) or kept)


def _type_of(resource: str) -> str:
    return next((kind for begin, kind in TYPES.items() if resource.startswith(begin)), "")
