"""A lease's cost is split so that the parts add up to it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.capacity.lease import Allocation
from gpucost.ledger.shares import split, weights
from gpucost.money import Money

START = datetime(2026, 11, 30, 12, tzinfo=UTC)
END = START + timedelta(hours=1)


def allocation(job: str, share: str = "1", begin: int = 0, end: int | None = None) -> Allocation:
    stop = None if end is None else START + timedelta(minutes=end)
    return Allocation(
        lease_id="l", job=job, attempt=1, share=Decimal(share), start=START + timedelta(minutes=begin), end=stop
    )


def amounts(parts: dict[str, Money]) -> dict[str, int]:
    return {job: int(money.amount * 10**6) for job, money in parts.items()}


def test_the_only_job_carries_all_even_when_it_came_late() -> None:
    assert weights("a", START, END, [allocation("a", begin=5)]) == {"a": 1}
    assert weights("a", START, END, []) == {"a": 1}
    assert weights("a", START, START, [allocation("a")]) == {"a": 1}


def test_a_part_is_share_times_time_and_the_holder_carries_the_rest() -> None:
    parts = weights("a", START, END, [allocation("a", "0.5"), allocation("b", "0.5", begin=-30, end=30)])
    assert parts == {"a": Fraction(3, 4), "b": Fraction(1, 4)}


def test_jobs_that_follow_each_other_share_a_whole_machine() -> None:
    parts = weights("a", START, END, [allocation("a", end=15), allocation("b", begin=15)])
    assert parts == {"a": Fraction(1, 4), "b": Fraction(3, 4)}


def test_more_than_the_machine_cannot_be_given_away() -> None:
    with pytest.raises(ValueError, match=r"1\.5000 of the lease given to a, b"):
        weights("a", START, END, [allocation("a"), allocation("b", "0.5")])


def test_the_micro_left_over_goes_to_the_largest_remainder() -> None:
    thirds = {job: Fraction(1, 3) for job in "abc"}
    assert amounts(split(Money.usd("0.000002"), thirds)) == {"a": 1, "b": 1, "c": 0}
    assert amounts(split(Money.usd("0.000011"), {"a": Fraction(1, 4), "b": Fraction(3, 4)})) == {"a": 3, "b": 8}


@given(st.integers(0, 10**10), st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_the_parts_add_up_to_the_whole_and_none_is_a_micro_off(micros: int, sizes: list[int]) -> None:
    whole = Money.usd(Decimal(micros).scaleb(-6))
    parts = {f"job{index}": Fraction(size, sum(sizes)) for index, size in enumerate(sizes)}
    given_out = split(whole, parts)
    assert sum((money.amount for money in given_out.values()), Decimal(0)) == whole.amount
    for job, money in given_out.items():
        assert abs(Fraction(money.amount) * 10**6 - micros * parts[job]) < 1
