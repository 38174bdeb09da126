"""Which EC2 actions are ours, and where are they answered? Everything about spot prices, fleets and instances."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpucost.rehearsal.api import console, fleets, instances, prices, run, scores, spot_requests, states, tags, volumes
from gpucost.rehearsal.api.context import Context, Refusal, no_console
from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.api.visibility import Visibility
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.protocol import wire
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.moto_side import MotoSide

Action = Callable[[Context, Mapping[str, Any], str], dict[str, Any]]

ACTIONS: Mapping[str, Action] = {
    "CancelSpotInstanceRequests": spot_requests.cancel,
    "CreateFleet": fleets.create,
    "CreateTags": tags.create,
    "DeleteFleets": fleets.delete,
    "DeleteTags": tags.delete,
    "DeleteVolume": volumes.delete,
    "DescribeFleetInstances": fleets.describe_instances,
    "DescribeFleets": fleets.describe,
    "DescribeInstanceAttribute": instances.describe_attribute,
    "DescribeInstanceStatus": instances.describe_status,
    "DescribeInstances": instances.describe,
    "DescribeSpotInstanceRequests": spot_requests.describe,
    "DescribeSpotPriceHistory": prices.describe,
    "DescribeTags": tags.describe,
    "DescribeVolumes": volumes.describe,
    "GetConsoleOutput": console.get,
    "GetSpotPlacementScores": scores.get,
    "ModifyInstanceAttribute": instances.modify_attribute,
    "RunInstances": run.run,
    "StartInstances": states.start,
    "StopInstances": states.stop,
    "TerminateInstances": states.terminate,
}

_BUY = "Buy with CreateFleet (Type=instant) or RunInstances."

_WITH_MACHINE = "Volumes are made with instances: say which in BlockDeviceMappings."

REFUSED: Mapping[str, str] = {
    "CancelSpotFleetRequests": _BUY,
    "CopyVolumes": _WITH_MACHINE,
    "CreateCapacityReservation": _BUY,
    "CreateVolume": _WITH_MACHINE,
    "ModifyFleet": "An instant fleet does not change; make another.",
    "ModifySpotFleetRequest": _BUY,
    "MonitorInstances": "Leave monitoring basic.",
    "PurchaseCapacityBlock": _BUY,
    "PurchaseHostReservation": _BUY,
    "RebootInstances": "Stop the instance and start it again, or reboot nothing.",
    "RequestSpotFleet": _BUY,
    "RequestSpotInstances": _BUY,
    "ResetInstanceAttribute": "Use ModifyInstanceAttribute for the shutdown behaviour.",
    "RunScheduledInstances": _BUY,
    "UnmonitorInstances": "Monitoring is basic.",
}
"""Actions that are not rehearsed, and what to do: moto would answer them from instances of its own."""

_LISTS = frozenset({"InstanceIds", "VolumeIds"})
_NAMES_ONE = re.compile(r"(?:^|\.)(InstanceId|VolumeId)(\.\d+)?$")


def refusal_of(action: str, form: Mapping[str, str]) -> str | None:
    """What to do instead of an action that is not rehearsed; None for one that is, or that moto may answer.

    Besides those that are named here, every further action on instances or volumes: moto has none of either.
    """
    if action in ACTIONS:
        return None
    if action in REFUSED:
        return REFUSED[action]
    if wire.parameters(action) & _LISTS or any(value and _NAMES_ONE.search(name) for name, value in form.items()):
        return "Of instances and volumes, only what this cloud documents can be asked and changed."
    return None


class Ec2Api:
    """Answers our actions from the book and the market.

    Args:
        market, book, moto: what is sold, who owns it, everything else.
        wake: tells the hypervisor that the book changed.
        refusal: faults that refuse a pool; asked before a pool is bought from.
        visibility: what the API does not show yet; left out: it shows everything at once.
        console_of: where what a machine prints is written.
    """

    def __init__(
        self,
        market: Market,
        book: Book,
        moto: MotoSide,
        wake: Callable[[], None],
        *,
        refusal: Refusal = lambda _pool, _lifecycle: None,
        visibility: Visibility | None = None,
        console_of: Callable[[str], Path] = no_console,
    ) -> None:
        self._context = Context(market, book, moto, wake, visibility or Visibility(), refusal, console_of)

    def owns(self, action: str, form: Mapping[str, str]) -> bool:
        """Whether the action is ours; tags are changed here when one of the resources is ours."""
        if action in {"CreateTags", "DeleteTags"}:
            ours = (*tags.TYPES, "sir-")
            return any(name.startswith("ResourceId.") and value.startswith(ours) for name, value in form.items())
        return action in ACTIONS or refusal_of(action, form) is not None

    def answer(self, action: str, form: Mapping[str, str], region: str) -> dict[str, Any]:
        """The result of an action of ours.

        Raises:
            Ec2Error, moto's ServiceException: in EC2's words.
        """
        instead = refusal_of(action, form)
        if instead is not None:
            raise not_rehearsed(action, instead)
        request = wire.parse(action, form)
        if request.get("DryRun"):
            raise Ec2Error("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
        return ACTIONS[action](self._context, request, region)
