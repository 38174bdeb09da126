"""What can be had at this second? Capacity, price, quota and faults of every pool, while one launch is planned."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from decimal import Decimal

from gpucost.rehearsal.api.context import Context, Reason
from gpucost.rehearsal.api.quotas import Quotas
from gpucost.rehearsal.book.records import Lifecycle
from gpucost.rehearsal.market.places import PoolKey

NO_SPOT: Reason = ("InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request.")


class Stock:
    """What is in stock at one moment; lives inside the book's lock, as long as one launch is planned.

    Args:
        context: what is sold and who holds it.
        now: the moment.
    """

    def __init__(self, context: Context, now: datetime) -> None:
        self._context = context
        self._market = context.market
        self._now = now
        holding = context.book.holding()
        self._held = Counter((one.pool, one.lifecycle) for one in holding)
        self._quotas = Quotas(context.market.quotas, holding, context.moto.vcpus_of)

    def price(self, pool: PoolKey, lifecycle: Lifecycle) -> Decimal:
        """What one instance costs now, US dollars per hour."""
        return self._market.prices(pool).at(self._now) if lifecycle == "spot" else self._market.on_demand(pool)

    def free(self, pool: PoolKey, lifecycle: Lifecycle) -> int:
        """How many more instances the pool holds."""
        return max(0, self._market.capacity(pool, lifecycle, self._now) - self._held[pool, lifecycle])

    def cap(self, pool: PoolKey, asked: Decimal | None) -> Decimal:
        """The price cap in force: the one asked for, or the on-demand price."""
        return self._market.on_demand(pool) if asked is None else asked

    def unsellable(self, pool: PoolKey, lifecycle: Lifecycle, cap: Decimal | None) -> Reason | None:
        """Why the pool cannot be bought from at all: it is not sold, or costs more than the cap."""
        if not self._market.sells(pool):
            zones = sorted(
                key.zone for key in self._market.keys(pool.region) if key.instance_type == pool.instance_type
            )
            retry = (
                f" Please retry your request by not specifying an Availability Zone or choosing {', '.join(zones)}."
                if zones
                else ""
            )
            message = (
                f"Your requested instance type ({pool.instance_type}) is not supported in your requested "
                f"Availability Zone ({pool.zone}).{retry}"
            )
            return "Unsupported", message
        if lifecycle == "spot" and self.cap(pool, cap) < self.price(pool, lifecycle):
            message = (
                f"Your Spot request price of {self.cap(pool, cap)} is lower than the minimum required Spot request "
                f"fulfillment price of {self.price(pool, lifecycle)}."
            )
            return "SpotMaxPriceTooLow", message
        return None

    def refused(self, pool: PoolKey, lifecycle: Lifecycle) -> Reason | None:
        """A fault that refuses the pool. Ask once, and only before buying: faults count how often they were met."""
        return self._context.refusal(pool, lifecycle)

    def most(self, pool: PoolKey, lifecycle: Lifecycle) -> int:
        """How many instances capacity and quota allow."""
        room = self._quotas.room(pool, lifecycle)
        free = self.free(pool, lifecycle)
        return free if room is None else min(free, room)

    def lack(self, pool: PoolKey, lifecycle: Lifecycle) -> Reason:
        """Why there are no more than `most`: the quota or the capacity, whichever is less."""
        room = self._quotas.room(pool, lifecycle)
        if room is not None and room < self.free(pool, lifecycle):
            return self._quotas.exceeded(pool, lifecycle)
        if lifecycle == "spot":
            return NO_SPOT
        others = [
            key.zone
            for key in self._market.keys(pool.region)
            if key.instance_type == pool.instance_type and key != pool and self.free(key, lifecycle)
        ]
        elsewhere = (
            f" You can currently get {pool.instance_type} capacity by not specifying an Availability Zone in your "
            f"request or choosing {', '.join(others)}."
            if others
            else ""
        )
        message = (
            f"We currently do not have sufficient {pool.instance_type} capacity in the Availability Zone you requested "
            f"({pool.zone}). Our system will be working on provisioning additional capacity.{elsewhere}"
        )
        return "InsufficientInstanceCapacity", message

    def take(self, pool: PoolKey, lifecycle: Lifecycle, count: int) -> None:
        """Count instances that this launch takes."""
        self._held[pool, lifecycle] += count
        self._quotas.use(pool, lifecycle, count)
