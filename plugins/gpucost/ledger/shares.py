"""Who pays which part of a lease? Pure: an amount is split so that the parts add up to it, to the micro."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from fractions import Fraction

from gpucost.capacity.lease import Allocation
from gpucost.money import MICRO, Money

_MICROSECOND = timedelta(microseconds=1)
_NOTHING = timedelta(0)


def weights(holder: str, start: datetime, end: datetime, allocations: Iterable[Allocation]) -> dict[str, Fraction]:
    """Job -> its part of a lease that ran from `start` to `end`; the parts add up to one.

    A job's part is its share times the time that it had it. What nobody used is carried by the `holder`, the job
    that the lease was bought for.

    Raises:
        ValueError: more was given away than there was.
    """
    whole = Fraction((end - start) // _MICROSECOND)
    if whole <= 0:
        return {holder: Fraction(1)}
    parts: dict[str, Fraction] = {}
    for allocation in allocations:
        begin, stop = max(allocation.start, start), min(allocation.end or end, end)
        held = Fraction(max(stop - begin, _NOTHING) // _MICROSECOND)
        if held:
            parts[allocation.job] = parts.get(allocation.job, Fraction(0)) + Fraction(allocation.share) * held / whole
    used = sum(parts.values(), Fraction(0))
    if used > 1:
        raise ValueError(
            f"allocations: {float(used):.4f} of the lease given to {', '.join(sorted(parts))}, expected 1 at most; "
            "end one allocation before the next begins"
        )
    parts[holder] = parts.get(holder, Fraction(0)) + 1 - used
    return {job: part for job, part in parts.items() if part}


def split(amount: Money, parts: Mapping[str, Fraction]) -> dict[str, Money]:
    """Job -> its money; the sum is exactly `amount`.

    Each gets whole micros downwards, the micros left over go to the largest remainders, ties by name.
    """
    micros = int(amount.amount / MICRO)
    exact = {job: micros * part for job, part in parts.items()}
    given = {job: int(value // 1) for job, value in exact.items()}
    left = micros - sum(given.values())
    for job in sorted(exact, key=lambda job: (given[job] - exact[job], job))[:left]:
        given[job] += 1
    return {job: Money(amount=MICRO * count, currency=amount.currency) for job, count in given.items()}
