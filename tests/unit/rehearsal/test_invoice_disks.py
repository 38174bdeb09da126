"""The bill of EBS volumes against AWS's example and sums done by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from gpucost.rehearsal.invoice.disks import Volume, bill_volume

START = datetime(2026, 11, 30, 16, 20, 0, tzinfo=UTC)


def volume(gib: int, seconds: int | None, price: str = "0.08") -> Volume:
    deleted = None if seconds is None else START + timedelta(seconds=seconds)
    return Volume("vol-1", gib, "gp3", START, deleted, Decimal(price))


@pytest.mark.parametrize(
    ("gib", "seconds", "amount"),
    [
        (2000, 43_200, "2.666667"),  # AWS's own example: 2.667
        (8, 86_400 * 30, "0.640000"),  # a month of the default root volume
        (8, 3600, "0.000889"),
        (1000, 59, "0.001852"),  # the minimum of 60 s: 80 / 43,200
        (1000, 60, "0.001852"),
        (1000, 61, "0.001883"),
    ],
)
def test_storage_is_charged_by_the_second_with_a_minimum(gib: int, seconds: int, amount: str) -> None:
    assert str(bill_volume(volume(gib, seconds), START + timedelta(days=99)).amount) == amount


def test_a_volume_that_exists_is_charged_until_now() -> None:
    line = bill_volume(volume(8, None), START + timedelta(days=3))
    assert (line.seconds, line.amount) == (3 * 86_400, Decimal("0.064000"))


def test_a_deletion_before_the_creation_and_no_size_are_refused() -> None:
    with pytest.raises(ValueError, match="vol-1, before its start"):
        bill_volume(volume(8, -1), START)
    with pytest.raises(ValueError, match="gib: got 0"):
        volume(0, 60)
