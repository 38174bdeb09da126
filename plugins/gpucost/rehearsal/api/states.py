"""TerminateInstances, StopInstances, StartInstances: all of the ids, or none.

Source: the pages of these actions, and https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpucost.rehearsal.api import views
from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.api.requests import not_rehearsed
from gpucost.rehearsal.api.stock import Stock
from gpucost.rehearsal.book.records import BY_USER, Instance
from gpucost.rehearsal.protocol.wire import Ec2Error


def terminate(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """TerminateInstances; what is terminated already stays so."""

    def end(one: Instance) -> None:
        if one.state in {"stopped", "stopping"}:
            context.book.terminate_stopped(one.id)
        else:
            context.book.begin_end(one.id, BY_USER)

    return {"TerminatingInstances": _change(context, request, region, lambda _every: None, end)}


def stop(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """StopInstances; on-demand only, since spot requests are one-time here."""
    if request.get("Hibernate"):
        raise not_rehearsed("Hibernate", "Stop without it.")

    def check(every: list[Instance]) -> None:
        for one in every:
            _refuse_one_time(one, "stop")
            if one.state == "pending":
                raise Ec2Error(
                    "IncorrectInstanceState",
                    f"Instance '{one.id}' cannot be stopped as it has never reached the 'running' state.",
                )
            if one.state in {"shutting-down", "terminated"}:
                raise _wrong_state(one, "stopped")

    return {
        "StoppingInstances": _change(
            context, request, region, check, lambda one: context.book.begin_stop(one.id, BY_USER)
        )
    }


def start(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """StartInstances: a stopped instance has no place; it needs a free one, and room in the quota."""

    def check(every: list[Instance]) -> None:
        stock = Stock(context, context.book.now())
        for one in every:
            _refuse_one_time(one, "start")
            if one.state in {"shutting-down", "terminated", "stopping"}:
                raise _wrong_state(one, "started")
            if one.state == "stopped":
                if stock.most(one.pool, one.lifecycle) < 1:
                    raise Ec2Error(*stock.lack(one.pool, one.lifecycle))
                refused = stock.refused(one.pool, one.lifecycle)
                if refused is not None:
                    raise Ec2Error(*refused)
                stock.take(one.pool, one.lifecycle, 1)

    return {"StartingInstances": _change(context, request, region, check, lambda one: context.book.start_again(one.id))}


def _refuse_one_time(one: Instance, verb: str) -> None:
    """Spot requests are one-time here; EC2's words: cloud-custodian/cloud-custodian#8003, of StopInstances."""
    if one.lifecycle == "spot":
        raise Ec2Error(
            "UnsupportedOperation",
            f"You can't {verb} the Spot Instance '{one.id}' because it is associated with a one-time Spot Instance "
            f"request. You can only {verb} Spot Instances associated with persistent Spot Instance requests.",
        )


def _wrong_state(one: Instance, to_be: str) -> Ec2Error:
    return Ec2Error(
        "IncorrectInstanceState", f"The instance '{one.id}' is not in a state from which it can be {to_be}."
    )


def _change(
    context: Context,
    request: Mapping[str, Any],
    region: str,
    check: Callable[[list[Instance]], None],
    change: Callable[[Instance], object],
) -> list[dict[str, Any]]:
    """Check all instances, then change each; the states before and after."""
    ids = request.get("InstanceIds")
    if not ids:
        raise Ec2Error("MissingParameter", "The request must contain the parameter InstanceIds")
    changes = []
    with context.book.locked:
        every = context.named(ids, region)
        check(every)
        for before in every:
            change(before)
            after = context.book.get(before.id) or before
            changes.append(
                {
                    "InstanceId": before.id,
                    "PreviousState": views.state(before.state),
                    "CurrentState": views.state(after.state),
                }
            )
    context.wake()
    return changes
