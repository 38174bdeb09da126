"""Where a pool lies: zone and instance type, and the region that a zone belongs to."""

from __future__ import annotations

import re
from typing import NamedTuple

_ZONE = re.compile(r"([a-z]+(?:-[a-z]+)+-?\d+)-?([a-z])")


class PoolKey(NamedTuple):
    """One spot pool: a zone and an instance type."""

    zone: str
    instance_type: str

    def __str__(self) -> str:
        return f"{self.instance_type} in {self.zone}"

    @property
    def region(self) -> str:
        """The region that the pool's zone belongs to."""
        return region_of(self.zone)


def region_of(zone: str) -> str:
    """The region of a zone: `us-east-1` of `us-east-1a` (AWS), `us-central1` of `us-central1-a` (GCP).

    Raises:
        ValueError: the text is no zone's name.
    """
    match = _ZONE.fullmatch(zone)
    if match is None:
        raise ValueError(f"zone: got {zone!r}, expected a region with a letter, such as us-east-1a or us-central1-a")
    return match.group(1)
