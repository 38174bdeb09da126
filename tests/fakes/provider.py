"""A provider of machines that does as scripted: refuses, loses answers, hides new ids, ends machines slowly."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Literal

from gpucost.capacity.providers.base import LaunchRequest, Machine, ProviderError
from gpucost.clock import Clock
from gpucost.market.pool import CapacityType, InstanceType, Pool
from gpucost.market.quote import PricePoint, Quote
from gpucost.money import InstanceHourPrice
from gpucost.reasons import Reason

REGION = "us-east-1"
T4 = InstanceType(name="g4dn.xlarge", gpu_kind="T4", gpu_count=1, gpu_memory_gib=16, vcpus=4, memory_gib=16)


def pool(zone: str = "a", capacity_type: CapacityType = CapacityType.SPOT, instance_type: str = T4.name) -> Pool:
    """A pool in zone `us-east-1<zone>`, whose id is `use1-az-<zone>`."""
    return Pool(
        provider="aws",
        region=REGION,
        zone=f"{REGION}{zone}",
        zone_id=f"use1-az-{zone}",
        instance_type=instance_type,
        capacity_type=capacity_type,
    )


def quote(of: Pool, price: str, as_of: datetime, *, currency: str = "USD", instance: InstanceType = T4) -> Quote:
    """A quote of `price` per instance-hour."""
    amount = InstanceHourPrice(amount=Decimal(price), currency=currency)
    return Quote(pool=of, instance=instance, price=amount, as_of=as_of, source="a test")


class FakeProvider:
    """Sells machines in three zones: spot at 0.30, 0.35 and 0.40, on demand at 1.00.

    Args:
        clock: tells the time.

    Attributes:
        spot: zone letter -> spot price; change or remove as needed.
        on_demand: on-demand price in every zone.
        refusals: pool key -> answers to the next launches there, one each.
        always: pool key -> answer to every launch there.
        lose: how many of the next launches are carried out, but answered with an error.
        invisible_for: how long a new machine is missing from `find` and `describe`.
        end_takes: from `terminate` until the machine is over; None: it never ends by asking.
        away: answered to every call while set.
        calls: what was called, in order.
    """

    name = "aws"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.spot = {"a": "0.30", "b": "0.35", "c": "0.40"}
        self.on_demand = "1.00"
        self.refusals: dict[str, deque[ProviderError]] = defaultdict(deque)
        self.always: dict[str, ProviderError] = {}
        self.lose = 0
        self.invisible_for = timedelta(0)
        self.end_takes: timedelta | None = timedelta(0)
        self.away: ProviderError | None = None
        self.calls: list[tuple[str, ...]] = []
        self.machines: dict[str, Machine] = {}
        self._since: dict[str, datetime] = {}
        self._ends: dict[str, datetime] = {}

    # What a test does.

    def refuse(self, of: Pool, reason: Reason, message: str = "no", *, times: int | None = None) -> None:
        """Answer launches in a pool with an error, always or `times` times."""
        error = ProviderError(reason, message, str(reason))
        if times is None:
            self.always[of.key] = error
        else:
            self.refusals[of.key].extend([error] * times)

    def refuse_all(self, reason: Reason, message: str = "no") -> None:
        """Answer launches anywhere with an error."""
        for zone in self.spot:
            for capacity_type in CapacityType:
                self.refuse(pool(zone, capacity_type), reason, message)

    def interrupt(self, instance_id: str) -> None:
        """The provider takes the machine back, now."""
        self._end(instance_id, "provider", "Server.SpotInstanceTermination")

    def shut_down(self, instance_id: str) -> None:
        """The machine ends itself, now."""
        self._end(instance_id, "self", "Client.InstanceInitiatedShutdown")

    def forget(self, instance_id: str) -> None:
        """The API no longer shows the machine, as EC2 does an hour after its end."""
        del self.machines[instance_id]

    def alive(self) -> list[Machine]:
        """Machines that cost money and that nobody asked to end, however the API hides them."""
        self._let_time_pass()
        return [m for m in self.machines.values() if m.state in ("pending", "running")]

    def named(self, name: str) -> list[tuple[str, ...]]:
        """The calls of one method."""
        return [call for call in self.calls if call[0] == name]

    # What gpucost calls.

    def regions(self) -> list[str]:
        """Where it may buy."""
        return [REGION]

    def quotes(self, at: datetime) -> list[Quote]:
        """Today's prices."""
        self._called("quotes")
        spot = [quote(pool(zone), price, at) for zone, price in self.spot.items()]
        zones = [pool(zone, CapacityType.ON_DEMAND) for zone in "abc"]
        return spot + [quote(zone, self.on_demand, at) for zone in zones]

    def instance_types(self, names: Sequence[str]) -> dict[str, InstanceType]:
        """One type is sold."""
        return dict.fromkeys(names, T4)

    def launch(self, request: LaunchRequest) -> Machine:
        """Sell one machine per token, or do as scripted."""
        self._called("launch", request.pool.key, request.client_token)
        known = next((m for m in self.machines.values() if m.client_token == request.client_token), None)
        if known is not None:
            return known
        if self.refusals[request.pool.key]:
            raise self.refusals[request.pool.key].popleft()
        if request.pool.key in self.always:
            raise self.always[request.pool.key]
        now = self._clock.now()
        machine = Machine(
            instance_id=f"i-{len(self._since) + 1:06d}",
            state="running",
            pool=request.pool,
            client_token=request.client_token,
            tags=request.tags,
            launched_at=now,
        )
        self.machines[machine.instance_id] = machine
        self._since[machine.instance_id] = now
        if self.lose:
            self.lose -= 1
            raise ProviderError(Reason.CLOUD_ERROR, "the answer was lost", "ReadTimeoutError")
        if self._hidden(machine):
            return machine.model_copy(update={"state": "pending", "launched_at": None})
        return machine

    def find(self, region: str, client_token: str) -> Machine | None:
        """The machine bought with this token, once it is visible."""
        self._called("find", region, client_token)
        found = [m for m in self.machines.values() if m.client_token == client_token and not self._hidden(m)]
        return found[0] if found else None

    def describe(self, region: str, instance_ids: Sequence[str]) -> dict[str, Machine]:
        """The visible ones among these."""
        self._called("describe", region, str(len(instance_ids)))
        found = [self.machines[i] for i in instance_ids if i in self.machines]
        return {m.instance_id: m for m in found if not self._hidden(m)}

    def owned(self, region: str) -> list[Machine]:
        """Those that are not over."""
        self._called("owned", region)
        return [m for m in self.machines.values() if not m.over and not self._hidden(m)]

    def terminate(self, region: str, instance_ids: Sequence[str]) -> None:
        """End them, in `end_takes`."""
        self._called("terminate", region, *instance_ids)
        for instance_id in instance_ids:
            machine = self.machines.get(instance_id)
            if machine is None or machine.over or self.end_takes is None:
                continue
            self._ends.setdefault(instance_id, self._clock.now() + self.end_takes)
            self.machines[instance_id] = machine.model_copy(update={"state": "shutting-down"})
        self._let_time_pass()

    def price_history(self, pool: Pool, start: datetime, end: datetime) -> list[PricePoint]:
        """One price for all times."""
        self._called("price_history", pool.key)
        price = self.on_demand if pool.capacity_type is CapacityType.ON_DEMAND else self.spot[pool.zone[-1]]
        return [PricePoint(since=start - timedelta(hours=1), price=InstanceHourPrice(amount=Decimal(price)))]

    def _called(self, *call: str) -> None:
        self.calls.append(call)
        if self.away is not None:
            raise self.away
        self._let_time_pass()

    def _hidden(self, machine: Machine) -> bool:
        return self._clock.now() < self._since[machine.instance_id] + self.invisible_for

    def _let_time_pass(self) -> None:
        for instance_id, moment in list(self._ends.items()):
            if moment <= self._clock.now() and instance_id in self.machines:
                self._end(instance_id, "us", "Client.UserInitiatedShutdown", moment)

    def _end(
        self, instance_id: str, by: Literal["provider", "us", "self"], code: str, at: datetime | None = None
    ) -> None:
        machine = self.machines[instance_id]
        if not machine.over:
            changes = {"state": "terminated", "ended_at": at or self._clock.now(), "ended_by": by, "end_code": code}
            self.machines[instance_id] = machine.model_copy(update=changes)
