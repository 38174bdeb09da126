"""What does DescribeInstanceTypes answer? From moto's tables, with pages, wildcards and filters as EC2 has them.

Moto answers all its types in one page and takes seconds for it; EC2 gives at most 100 a page.
Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypes.html and
API_DescribeInstanceTypeOfferings.html.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES, InstanceType

from gpucost.rehearsal.protocol import filters
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services import tables

TYPES_PAGE = range(5, 101)
OFFERINGS_PAGE = range(5, 1001)


def _types(request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """Every type that there is; whether it can be bought here is what the offerings tell."""
    names = request.get("InstanceTypes") or tables.types_of(region)
    unknown = [name for name in names if not tables.knows_type(region, name)]
    if unknown:
        raise Ec2Error(
            "InvalidInstanceType", f"The following supplied instance types do not exist: [{', '.join(unknown)}]"
        )
    every = [INSTANCE_TYPES[name] for name in dict.fromkeys(names)]
    chosen = filters.select(every, request.get("Filters"), _type_filters(), lambda _one: {})
    shown, token = filters.page(chosen, request, sizes=TYPES_PAGE)
    return {"InstanceTypes": shown, "NextToken": token}


def _offerings(request: Mapping[str, Any], region: str) -> dict[str, Any]:
    kind = request.get("LocationType") or "region"
    if kind not in INSTANCE_TYPE_OFFERINGS:
        raise Ec2Error("InvalidParameterValue", f"Invalid value '{kind}' for LocationType.")
    known: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
        "instance-type": lambda one: [one["InstanceType"]],
        "location": lambda one: [one["Location"]],
    }
    every = INSTANCE_TYPE_OFFERINGS[kind].get(region, [])
    chosen = filters.select(every, request.get("Filters"), known, lambda _one: {})
    shown, token = filters.page(chosen, request, sizes=OFFERINGS_PAGE)
    return {"InstanceTypeOfferings": shown, "NextToken": token}


@functools.cache
def _type_filters() -> dict[str, Callable[[dict[str, Any]], Iterable[str]]]:
    paths: dict[str, list[str]] = InstanceType._filter_attributes
    return {name: functools.partial(_values, path) for name, path in paths.items()}


def _values(path: list[str], document: Any) -> list[str]:
    """The values at a path; lists on the way mean all of their elements."""
    found = [document]
    for key in path:
        found = [one[key] for one in found if isinstance(one, dict) and one.get(key) is not None]
        found = [part for one in found for part in (one if isinstance(one, list) else [one])]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in found]


ACTIONS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "DescribeInstanceTypes": _types,
    "DescribeInstanceTypeOfferings": _offerings,
}
"""What these actions answer to a request of a region."""
