"""What is launched at one time? A plan's orders become instances, no more of them than are free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from gpucost.rehearsal.book.records import Instance, Launch, Lifecycle, Order
from gpucost.rehearsal.market.places import PoolKey


class TokenReused(ValueError):
    """A client token came again with other parameters."""


Plan = tuple[list[Order], Callable[[list[list[Instance]]], dict[str, Any]]]
"""Orders, and the function that makes the answer from the instances launched for each of them."""


def check(orders: Sequence[Order], free: Callable[[PoolKey, Lifecycle], int]) -> None:
    """See that all orders together fit.

    Raises:
        ValueError: they want more of a pool than is free; whoever made the plan counted wrong.
    """
    wanted = Counter[tuple[PoolKey, Lifecycle]]()
    for order in orders:
        wanted[order.pool, order.lifecycle] += order.count
    for (pool, lifecycle), count in wanted.items():
        if count > free(pool, lifecycle):
            raise ValueError(f"count: got {count} of {pool}, more than are free: the plan is wrong")


def instances_of(
    order: Order, launch: Launch, number: Callable[[], int], new_id: Callable[[str], str]
) -> list[Instance]:
    """The instances of one order, pending.

    Args:
        order: what and how many.
        launch: of what they are part; its time is theirs until they are switched on.
        number: gives each its number.
        new_id: makes ids from a prefix.
    """
    spot = order.lifecycle == "spot"
    fleet_tag = {"aws:ec2:fleet-id": launch.id} if launch.kind == "fleet" else {}
    return [
        Instance(
            id=new_id("i"),
            number=number(),
            launch_id=launch.id,
            client_token=launch.client_token,
            pool=order.pool,
            lifecycle=order.lifecycle,
            spec=order.spec,
            tags={**order.spec.tags, **fleet_tag},
            created=launch.created,
            launched=launch.created,
            spot_request_id=new_id("sir")[:12] if spot else None,
            max_price=order.max_price if spot else None,
            volume_tags={disk.device: order.spec.volume_tags for disk in order.spec.disks if order.spec.volume_tags},
        )
        for _ in range(order.count)
    ]
