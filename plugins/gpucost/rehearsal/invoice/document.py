"""How is the invoice shown as JSON? Amounts and prices are strings, times ISO 8601."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from fractions import Fraction
from typing import Any

from gpucost.rehearsal.invoice.disks import DiskLine
from gpucost.rehearsal.invoice.measure import rounded
from gpucost.rehearsal.invoice.rule import BilledPeriod, Line


def as_json(lines: Sequence[Line], now: datetime) -> dict[str, Any]:
    """The invoice: `lines` by instance; `total` is `compute_total` + `disk_total`, each a sum of rounded amounts."""
    compute = sum((line.amount for line in lines), rounded(Fraction(0)))
    disk = sum((line.disk_amount for line in lines), rounded(Fraction(0)))
    return {
        "currency": "USD",
        "as_of": now.isoformat(),
        "lines": [_line(line) for line in lines],
        "compute_total": str(compute),
        "disk_total": str(disk),
        "total": str(compute + disk),
    }


def _line(line: Line) -> dict[str, Any]:
    """`amount` is compute alone; `launched` is the first start, `ended` and `interrupted_by_ec2` are of the last."""
    usage, last = line.usage, line.usage.periods[-1]
    return {
        "instance_id": usage.instance_id,
        "instance_type": usage.instance_type,
        "zone": usage.zone,
        "lifecycle": usage.lifecycle,
        "launched": usage.periods[0].launched.isoformat(),
        "ended": _moment(last.ended),
        "interrupted_by_ec2": last.interrupted,
        "seconds": line.seconds,
        "billed_seconds": line.billed_seconds,
        "free_first_hour": line.free,
        "periods": [_period(one) for one in line.periods],
        "segments": [
            {"start": part.start.isoformat(), "seconds": part.seconds, "usd_per_hour": str(part.price)}
            for part in line.segments
        ],
        "amount": str(line.amount),
        "disks": [_disk(disk) for disk in line.disks],
        "disk_amount": str(line.disk_amount),
    }


def _period(one: BilledPeriod) -> dict[str, Any]:
    return {
        "launched": one.period.launched.isoformat(),
        "ended": _moment(one.period.ended),
        "interrupted_by_ec2": one.period.interrupted,
        "seconds": one.seconds,
        "billed_seconds": one.billed_seconds,
        "free_first_hour": one.free,
    }


def _disk(disk: DiskLine) -> dict[str, Any]:
    volume = disk.volume
    return {
        "volume_id": volume.volume_id,
        "gib": volume.gib,
        "volume_type": volume.volume_type,
        "created": volume.created.isoformat(),
        "deleted": _moment(volume.deleted),
        "seconds": disk.seconds,
        "billed_seconds": disk.billed_seconds,
        "usd_per_gib_month": str(volume.usd_per_gib_month),
        "amount": str(disk.amount),
    }


def _moment(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None
