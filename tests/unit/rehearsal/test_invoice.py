"""The invoice against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from gpucost.rehearsal.invoice.disks import Volume
from gpucost.rehearsal.invoice.document import as_json
from gpucost.rehearsal.invoice.rule import Period, Usage, bill

START = datetime(2026, 11, 30, 16, 20, 0, tzinfo=UTC)


def flat(price: str) -> Callable[[datetime], Decimal]:
    return lambda _moment: Decimal(price)


def used(
    seconds: int | None,
    price_at: Callable[[datetime], Decimal],
    *,
    lifecycle: str = "spot",
    interrupted: bool = False,
) -> Usage:
    ended = None if seconds is None else START + timedelta(seconds=seconds)
    return Usage("i-1", "g4dn.xlarge", "us-east-1a", lifecycle, (Period(START, ended, interrupted),), price_at)


@pytest.mark.parametrize(
    ("seconds", "interrupted", "amount"),
    [
        (1800, False, "0.105000"),  # half an hour at 0.21
        (59, False, "0.003500"),  # the minimum of 60 s: 0.21 / 60
        (0, False, "0.003500"),
        (60, False, "0.003500"),
        (61, False, "0.003558"),  # 0.21 * 61 / 3600 = 0.00355833...
        (3599, True, "0.000000"),  # EC2 took it back within the first hour
        (3600, True, "0.210000"),  # after a full hour it is charged
        (5400, True, "0.315000"),
    ],
)
def test_seconds_minimum_and_the_free_first_hour(seconds: int, interrupted: bool, amount: str) -> None:
    line = bill(used(seconds, flat("0.21"), interrupted=interrupted), START + timedelta(days=1))
    assert str(line.amount) == amount


def test_on_demand_has_no_free_first_hour() -> None:
    line = bill(used(600, flat("0.526"), lifecycle="on-demand"), START)
    assert line.amount == Decimal("0.087667")  # 0.526 / 6 = 0.0876666...


def test_each_instance_hour_costs_the_price_in_force_when_it_begins() -> None:
    def price_at(moment: datetime) -> Decimal:
        # moves at 16:50 (inside the first instance-hour) and at 18:20 (as the third begins)
        if moment < START + timedelta(minutes=30):
            return Decimal("0.2000")
        return Decimal("0.3000") if moment < START + timedelta(hours=2) else Decimal("0.1000")

    line = bill(used(2 * 3600 + 900, price_at), START)
    # hour 1 at .2, hour 2 at .3, a quarter of hour 3 at .1
    assert [(part.seconds, str(part.price)) for part in line.segments] == [
        (3600, "0.2000"),
        (3600, "0.3000"),
        (900, "0.1000"),
    ]
    assert line.amount == Decimal("0.525000")


def test_rounding_is_half_to_even_once_for_each_instance() -> None:
    # price * 60 / 3600 = price / 60; .00003 / 60 = .0000005, exactly between 0 and .000001
    assert bill(used(60, flat("0.00003")), START).amount == Decimal("0.000000")
    assert bill(used(60, flat("0.00009")), START).amount == Decimal("0.000002")


def test_a_living_instance_is_billed_until_now_and_the_total_adds_rounded_lines() -> None:
    now = START + timedelta(seconds=61)
    lines = [bill(used(None, flat("0.21")), now) for _ in range(3)]
    document = as_json(lines, now)
    assert document["lines"][0]["ended"] is None
    assert document["lines"][0]["amount"] == "0.003558"
    assert document["compute_total"] == document["total"] == "0.010674"
    assert document["disk_total"] == "0.000000"


def test_an_end_before_the_launch_and_fractions_of_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="of i-1, before its start"):
        bill(used(-1, flat("0.21")), START)
    with pytest.raises(ValueError, match=r"expected whole seconds"):
        bill(used(None, flat("0.21")), START + timedelta(microseconds=1))


def lives(*spans: tuple[int, int | None], interrupted: bool = False) -> Usage:
    """An on-demand or spot instance that ran from minute to minute, `interrupted` in its last life."""
    moments = [[minute if minute is None else START + timedelta(minutes=minute) for minute in span] for span in spans]
    periods = [Period(start or START, end) for start, end in moments]
    periods[-1] = Period(periods[-1].launched, periods[-1].ended, interrupted)
    return Usage("i-1", "g4dn.xlarge", "us-east-1a", "spot", tuple(periods), flat("0.36"))


def test_each_start_has_its_own_minimum_and_what_is_stopped_costs_nothing() -> None:
    line = bill(lives((0, 0), (90, 90), (200, 230)), START)
    # a minute, a minute, half an hour, at 0.36 an hour
    assert line.amount == Decimal("0.006") + Decimal("0.006") + Decimal("0.18")
    assert (line.seconds, line.billed_seconds) == (1800, 1920)


def test_a_start_begins_a_new_instance_hour_at_the_price_of_that_moment() -> None:
    def price_at(moment: datetime) -> Decimal:
        return Decimal("0.36") if moment < START + timedelta(minutes=40) else Decimal("3.6")

    usage = lives((0, 30), (45, 60))
    line = bill(Usage("i-1", "g4dn.xlarge", "us-east-1a", "spot", usage.periods, price_at), START)
    assert line.amount == Decimal("0.18") + Decimal("0.9")


def test_an_interruption_in_the_first_hour_of_a_later_life_frees_that_life_alone() -> None:
    line = bill(lives((0, 30), (60, 100), interrupted=True), START)
    assert line.amount == Decimal("0.18")
    assert not line.free
    (told,) = as_json([line], START)["lines"]
    assert [life["free_first_hour"] for life in told["periods"]] == [False, True]
    assert (told["launched"], told["ended"]) == ("2026-11-30T16:20:00+00:00", "2026-11-30T18:00:00+00:00")


def test_periods_out_of_order_and_an_open_one_before_the_last_are_refused() -> None:
    with pytest.raises(ValueError, match="before it ended"):
        lives((0, 30), (20, 40))
    with pytest.raises(ValueError, match="only the last one open"):
        lives((0, None), (20, 40))
    with pytest.raises(ValueError, match="expected at least its launch"):
        Usage("i-1", "g4dn.xlarge", "us-east-1a", "spot", (), flat("0.36"))


def test_disks_are_paid_for_also_when_compute_is_free_and_totals_hold_both() -> None:
    volume = Volume("vol-1", 100, "gp3", START, START + timedelta(minutes=31), Decimal("0.08"))
    ended = START + timedelta(minutes=30)
    free_hour = (Period(START, ended, interrupted=True),)
    both = Usage("i-1", "g4dn.xlarge", "us-east-1a", "spot", free_hour, flat("0.21"), volumes=(volume, volume))
    document = as_json([bill(both, START), bill(used(1800, flat("0.21")), START)], START)
    free, paid = document["lines"]
    # 100 GiB * 0.08 * 1860 s / 2,592,000 s = 0.005740740...
    assert (free["amount"], free["disk_amount"], paid["disk_amount"]) == ("0.000000", "0.011482", "0.000000")
    assert [disk["amount"] for disk in free["disks"]] == ["0.005741", "0.005741"]
    assert (document["compute_total"], document["disk_total"], document["total"]) == (
        "0.105000",
        "0.011482",
        "0.116482",
    )
