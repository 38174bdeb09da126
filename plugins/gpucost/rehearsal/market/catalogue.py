"""What do traces leave out? Zone ids, list prices and machines' figures: from us, or from a folder's own list."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpucost.rehearsal.market.file import DiskPrice, MarketError, TypeOffer
from gpucost.rehearsal.wording import in_one_line

LIST_PRICES = "list_prices.json"
"""The name of a folder's own list, beside its traces or above them."""

KNOWN = Path(__file__).with_name("known.json")
"""What we know: AWS's zone ids as the rehearsal's API shows them, and the types of public traces.

Machines' figures: p3.2xlarge from AWS's DescribeInstanceTypes, a3-highgpu-8g from skypilot-org/skypilot-catalog
(catalogs/v8/gcp/vms.csv), the retired g2.2xlarge as AWS described it: 8 vCPUs, 15 GiB, one GRID K520 with 4 GiB.
"""


class Catalogue(BaseModel):
    """Zone ids, instance types with their list prices, and the price of disks; each part may be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    zones: dict[str, str] = Field(default_factory=dict, description="Zone name -> zone id.")
    instance_types: list[TypeOffer] = Field(default_factory=list)
    disk: DiskPrice | None = None

    def zone_id(self, zone: str) -> str:
        """The id of a zone; its own name where it has none (GCP's zones are the same for everybody)."""
        return self.zones.get(zone, zone)

    def offer(self, instance_type: str) -> TypeOffer | None:
        """What is known of a type."""
        return next((offer for offer in self.instance_types if offer.name == instance_type), None)

    def under(self, other: Self) -> Self:
        """Both, where they differ the other's word."""
        named = {offer.name for offer in other.instance_types}
        return type(self)(
            zones={**self.zones, **other.zones},
            instance_types=[*other.instance_types, *(one for one in self.instance_types if one.name not in named)],
            disk=other.disk or self.disk,
        )


@cache
def known() -> Catalogue:
    """What ships with the package."""
    return Catalogue.model_validate_json(KNOWN.read_text(encoding="utf-8"))


def catalogue(lists: Iterable[Path]) -> Catalogue:
    """What ships with the package, and over it each list of a folder, in order.

    Raises:
        MarketError: a list is wrong; the message names the file and every field at fault.
    """
    whole = known()
    for path in lists:
        try:
            whole = whole.under(Catalogue.model_validate_json(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            raise MarketError(f"market: {path} is not a list of prices: {in_one_line(error)}") from error
    return whole
