"""What did an instance use? From the book's record to what the invoice bills."""

from __future__ import annotations

import hashlib
from datetime import datetime
from decimal import Decimal

from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.invoice.disks import Volume
from gpucost.rehearsal.invoice.rule import Period, Usage
from gpucost.rehearsal.market.market import Market


def usage_of(one: Instance, market: Market) -> Usage:
    """The usage of an instance at the prices of `market`.

    A life before a stop was never interrupted: here only owners stop, EC2 terminates.
    """
    on_demand = market.on_demand(one.pool)

    def listed(_moment: datetime) -> Decimal:
        return on_demand

    interrupted = one.ending is not None and one.ending.by_ec2
    return Usage(
        instance_id=one.id,
        instance_type=one.pool.instance_type,
        zone=one.pool.zone,
        lifecycle=one.lifecycle,
        periods=(*(Period(*life) for life in one.earlier), Period(one.launched, one.ended, interrupted)),
        price_at=market.prices(one.pool).at if one.lifecycle == "spot" else listed,
        on_demand=on_demand,
        volumes=_volumes(one, market),
        tags=one.tags,
    )


def _volumes(one: Instance, market: Market) -> tuple[Volume, ...]:
    """Every volume at the price of gp3, the one that the market sells."""
    return tuple(
        Volume(
            volume_id=volume_id(one.id, disk.device),
            gib=disk.gib,
            volume_type=disk.kind,
            created=one.created,
            # `gone` is also set while an instance is stopped: its disks are still there
            deleted=one.gone if one.state == "terminated" and disk.delete_on_termination else None,
            usd_per_gib_month=market.disk.usd_per_gib_month,
        )
        for disk in one.spec.disks
    )


def volume_id(instance_id: str, device: str) -> str:
    """The id of the volume that was made with an instance as `device`: always the same."""
    return f"vol-{hashlib.sha256(f'{instance_id}/{device}'.encode()).hexdigest()[:17]}"
