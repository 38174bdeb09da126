"""What a machine can serve, and what makes a pool a pool."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpucost.job import GpuNeed
from gpucost.market.pool import CapacityType, InstanceType
from gpucost.market.quote import Quote
from tests.fakes.provider import T4, pool, quote
from tests.fakes.rooms import START

CPU = InstanceType(name="m5.large", vcpus=2, memory_gib=8)


@pytest.mark.parametrize(
    ("machine", "need", "why"),
    [
        (T4, GpuNeed(), None),
        (T4, GpuNeed(kinds=("A10G", "T4"), memory_gib=16), None),
        (CPU, GpuNeed(count=0), None),
        (CPU, GpuNeed(), "m5.large has 0 GPU, the job needs 1"),
        (T4, GpuNeed(count=4), "g4dn.xlarge has 1 GPU, the job needs 4"),
        (T4, GpuNeed(kinds=("A10G", "H100")), "g4dn.xlarge has T4, the job accepts A10G, H100"),
        (CPU, GpuNeed(count=0, kinds=("T4",)), "m5.large has no GPU, the job accepts T4"),
        (T4, GpuNeed(memory_gib=24), "g4dn.xlarge has 16 GiB per GPU, the job needs 24"),
    ],
)
def test_a_machine_that_does_not_fit_says_why(machine: InstanceType, need: GpuNeed, why: str | None) -> None:
    assert machine.misfit(need) == why


def test_spot_and_on_demand_are_two_pools() -> None:
    spot = pool("a")
    assert spot.key == "aws/use1-az-a/g4dn.xlarge/spot"
    assert spot.on_demand().key == "aws/use1-az-a/g4dn.xlarge/on-demand"
    assert spot.on_demand() == pool("a", CapacityType.ON_DEMAND)


def test_a_free_quote_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        quote(pool(), "0.00", START)


def test_a_quote_says_since_when_and_who_said_so() -> None:
    fields = quote(pool(), "0.3", START).model_dump()
    with pytest.raises(ValidationError, match="source"):
        Quote.model_validate(fields | {"source": ""})
    with pytest.raises(ValidationError, match="as_of"):
        Quote.model_validate(fields | {"as_of": START.replace(tzinfo=None)})
