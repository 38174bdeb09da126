"""What did the disks cost? The bill of EBS volumes by AWS's published rule.

THE RULE, to be implemented from this text by anybody who checks the bill:

1. A volume is paid for from its creation (at the launch of its instance) until it is deleted: with
   DeleteOnTermination when its instance is `terminated`, which is later than the end of compute (see `rule`).
   While the instance is `stopped`, and when the volume outlives it, it is paid for on and on. For a volume that
   exists `end` is now. Nothing is free, whoever ended the instance.
2. billed = max(end - created, 60) in whole seconds: per second, with a minimum of 60 seconds.
3. amount = GiB * price per GiB-month * billed / (86,400 * 30), in exact arithmetic, then rounded once for each
   volume to 0.000001, half to even. A month always has 30 days here, whatever the calendar says.

Only the storage is on the bill: gp3 includes 3,000 IOPS and 125 MiB/s, and there are no snapshots.

Sources: Amazon EBS pricing (https://aws.amazon.com/ebs/pricing/), example 1, General Purpose SSD (gp3): charged
until you release the storage, per second with a 60-second minimum, and the formula of 3. for a 30-day month (2.,
3.); EC2 User Guide, "Billing for interrupted Spot Instances" and the API's StartInstances: stopped instances are
charged for their volumes (1.).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from gpucost.rehearsal.invoice.measure import MINIMUM_S, elapsed, rounded

MONTH_S = 86_400 * 30
"""The seconds of a GiB-month in AWS's example."""


@dataclass(frozen=True)
class Volume:
    """One EBS volume, as the invoice sees it.

    `gib` is its size, `volume_type` the API's VolumeType such as "gp3", `created` and `deleted` (None while it
    exists) whole seconds, `usd_per_gib_month` the list price. `tags` are its own, not those of the instance.
    """

    volume_id: str
    gib: int
    volume_type: str
    created: datetime
    deleted: datetime | None
    usd_per_gib_month: Decimal
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gib < 1:
            raise ValueError(f"gib: got {self.gib} of {self.volume_id}, expected 1 or more")


@dataclass(frozen=True)
class DiskLine:
    """One volume on the invoice; `amount` is in US dollars, to the micro-dollar."""

    volume: Volume
    end: datetime
    seconds: int
    billed_seconds: int
    amount: Decimal


def bill_volume(volume: Volume, now: datetime) -> DiskLine:
    """The line of one volume, up to its deletion or to `now`; the rule is in this module's docstring.

    Raises:
        ValueError: a time with fractions of a second, or a deletion before the creation.
    """
    end = volume.deleted or now
    seconds = elapsed(volume.created, end, volume.volume_id)
    billed = max(seconds, MINIMUM_S)
    exact = gib_months(volume, billed) * Fraction(volume.usd_per_gib_month)
    return DiskLine(volume, end, seconds, billed, rounded(exact))


def gib_months(volume: Volume, seconds: int) -> Fraction:
    """How many GiB-months `seconds` of this volume are."""
    return Fraction(volume.gib * seconds, MONTH_S)
