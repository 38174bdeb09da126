"""The invoice against another one, made second by second, for any usage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpucost.rehearsal.invoice.disks import Volume
from gpucost.rehearsal.invoice.document import as_json
from gpucost.rehearsal.invoice.rule import Period, Usage, bill

START = datetime(2026, 12, 31, 20, 0, 0, tzinfo=UTC)
NOW = START + timedelta(days=3)
HALF_MICRO = Fraction(1, 2_000_000)

prices = st.decimals(Decimal("0.0001"), Decimal("20"), places=4)


def jumps(changes: Sequence[tuple[int, Decimal]]) -> Callable[[datetime], Decimal]:
    """A price that is 0.3 and then what each (second after START, price) says, as the wild prices of 2015."""

    def price_at(moment: datetime) -> Decimal:
        passed = [(second, price) for second, price in changes if START + timedelta(seconds=second) <= moment]
        return max(passed, key=lambda change: change[0])[1] if passed else Decimal("0.3")

    return price_at


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    """Any instance of up to three lives, with jumping prices and up to two disks."""
    second, periods = draw(st.integers(0, 7200)), []
    for _ in range(draw(st.integers(1, 3))):
        end = second + draw(st.one_of(st.integers(0, 90), st.integers(3550, 3650), st.integers(0, 9000)))
        started, ended = (START + timedelta(seconds=moment) for moment in (second, end))
        periods.append(Period(started, ended, draw(st.booleans())))
        second = end + draw(st.integers(0, 4000))
    deleted = START + timedelta(seconds=second)
    volumes = tuple(
        Volume(f"vol-{index}", gib, "gp3", periods[0].launched, draw(st.sampled_from([deleted, None])), Decimal("0.08"))
        for index, gib in enumerate(draw(st.lists(st.integers(1, 2000), max_size=2)))
    )
    changes = draw(st.lists(st.tuples(st.integers(0, 30_000), prices), max_size=6))
    spot = draw(st.booleans())
    return Usage(
        "i-1",
        "g2.2xlarge",
        "us-east-1a",
        "spot" if spot else "on-demand",
        tuple(periods),
        jumps(changes) if spot else jumps([]),
        Decimal("0.65"),
        volumes,
    )


def free(usage: Usage, period: Period) -> bool:
    """Whether EC2 took a spot instance back before a full hour."""
    assert period.ended is not None
    return usage.lifecycle == "spot" and period.interrupted and period.ended - period.launched < timedelta(hours=1)


def second_by_second(usage: Usage) -> Fraction:
    """What compute costs: every second looks up its own instance-hour's price."""
    total = Fraction(0)
    for period in usage.periods:
        assert period.ended is not None
        ran = round((period.ended - period.launched) / timedelta(seconds=1))
        if free(usage, period):
            continue
        known: dict[int, Fraction] = {}
        for second in range(ran if ran > 60 else 60):
            hour = second // 3600
            if hour not in known:
                known[hour] = Fraction(usage.price_at(period.launched + timedelta(hours=hour)))
            total += known[hour]
    return total / 3600


@settings(max_examples=60)
@given(usage=usages())
def test_compute_equals_a_sum_over_every_second(usage: Usage) -> None:
    assert abs(Fraction(bill(usage, NOW).amount) - second_by_second(usage)) <= HALF_MICRO


@settings(max_examples=60)
@given(usage=usages())
def test_each_disk_equals_its_share_of_a_month(usage: Usage) -> None:
    for disk in bill(usage, NOW).disks:
        days = Fraction(((disk.volume.deleted or NOW) - disk.volume.created) / timedelta(seconds=1)) / 86_400
        exact = max(days, Fraction(1, 1440)) / 30 * disk.volume.gib * Fraction(8, 100)
        assert abs(Fraction(disk.amount) - exact) <= HALF_MICRO


@given(usage=usages())
def test_no_charge_is_negative_and_what_is_not_free_costs_a_minute_at_least(usage: Usage) -> None:
    line = bill(usage, NOW)
    charged = [period for period in usage.periods if not free(usage, period)]
    floor = sum((Fraction(usage.price_at(period.launched)) / 60 for period in charged), Fraction(0))
    assert Fraction(line.amount) >= max(Fraction(0), floor - HALF_MICRO)
    assert line.free == (not charged)
    for disk in line.disks:
        assert Fraction(disk.amount) >= Fraction(disk.volume.gib) * Fraction(8, 100) / 43_200 - HALF_MICRO


@given(some=st.lists(usages(), max_size=3), others=st.lists(usages(), max_size=3))
def test_the_bill_of_all_is_the_sum_of_the_bills(some: list[Usage], others: list[Usage]) -> None:
    def totals(wanted: list[Usage]) -> list[Decimal]:
        document = as_json([bill(usage, NOW) for usage in wanted], NOW)
        return [Decimal(document[name]) for name in ("compute_total", "disk_total", "total")]

    together = totals(some + others)
    assert together == [one + other for one, other in zip(totals(some), totals(others), strict=True)]
    assert together[2] == together[0] + together[1]


@given(usage=usages(), longer=st.integers(0, 4000))
def test_running_longer_never_costs_less(usage: Usage, longer: int) -> None:
    last = usage.periods[-1]
    assert last.ended is not None
    assume(not last.interrupted)
    stretched = Period(last.launched, last.ended + timedelta(seconds=longer))
    more = Usage(
        usage.instance_id,
        usage.instance_type,
        usage.zone,
        usage.lifecycle,
        (*usage.periods[:-1], stretched),
        usage.price_at,
    )
    assert bill(more, NOW).amount >= bill(usage, NOW).amount
