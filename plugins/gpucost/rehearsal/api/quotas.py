"""How much may one account run? Quotas in vCPUs, by region, lifecycle and family of instance types.

Source: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html. Spot and on-demand are counted
apart. What occupies a place counts, also while it is shutting down.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from gpucost.rehearsal.api.context import Reason
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.market.file import Quota
from gpucost.rehearsal.market.places import PoolKey

_LETTERS = re.compile(r"[a-z]+")
_FAMILIES = {"g": "g", "gr": "g", "vt": "g", "p": "p"} | dict.fromkeys(
    ("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), "standard"
)


def family(instance_type: str) -> str | None:
    """The family whose quota an instance type counts for; None for one that the market has no quotas for."""
    letters = _LETTERS.match(instance_type)
    return _FAMILIES.get(letters.group()) if letters else None


class Quotas:
    """What is left of an account's quotas at one moment.

    Args:
        quotas: the limits.
        holding: every instance that occupies a place.
        vcpus: how many an instance type has.
    """

    def __init__(self, quotas: Iterable[Quota], holding: Iterable[Instance], vcpus: Callable[[str], int]) -> None:
        self._limits: dict[tuple[str, str, str], int] = {
            (one.region, one.lifecycle, one.family): one.vcpus for one in quotas
        }
        self._vcpus = vcpus
        self._used: Counter[tuple[str, str, str]] = Counter()
        if self._limits:
            for one in holding:
                self.use(one.pool, one.lifecycle, 1)

    def room(self, pool: PoolKey, lifecycle: str) -> int | None:
        """How many more instances the quota allows; None without a limit."""
        key = (pool.region, lifecycle, family(pool.instance_type) or "")
        if key not in self._limits:
            return None
        return max(0, (self._limits[key] - self._used[key]) // self._vcpus(pool.instance_type))

    def use(self, pool: PoolKey, lifecycle: str, count: int) -> None:
        """Count instances that are launched now."""
        key = (pool.region, lifecycle, family(pool.instance_type) or "")
        if key in self._limits:
            self._used[key] += count * self._vcpus(pool.instance_type)

    def exceeded(self, pool: PoolKey, lifecycle: str) -> Reason:
        """The error of a launch that the quota does not allow."""
        if lifecycle == "spot":
            return "MaxSpotInstanceCountExceeded", "Max spot instance count exceeded"
        limit = self._limits[pool.region, lifecycle, family(pool.instance_type) or ""]
        message = (
            f"You have requested more vCPU capacity than your current vCPU limit of {limit} allows for the instance "
            "bucket that the specified instance type belongs to. Please visit "
            "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit."
        )
        return "VcpuLimitExceeded", message
