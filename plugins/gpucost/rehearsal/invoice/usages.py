"""What did an instance use? From the book's record to what the invoice bills."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.book.volumes import deleted_at, volume_id
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
        periods=(*(Period(*life) for life in one.earlier), Period(one.launched, one.billed_until, interrupted)),
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
            deleted=deleted_at(one, disk),
            usd_per_gib_month=market.disk.usd_per_gib_month,
            tags=one.volume_tags.get(disk.device, {}),
        )
        for disk in one.spec.disks
    )
