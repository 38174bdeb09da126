"""How are seconds and micro-dollars counted? What the bills of instances and of disks have in common."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from fractions import Fraction

HOUR_S = 3600
MINIMUM_S = 60
"""Of one running period, and of one volume."""

MICRO_PLACES = 6
"""Amounts are rounded to the millionth of a dollar."""


def elapsed(start: datetime, end: datetime, what: str) -> int:
    """The whole seconds from `start` to `end`; `what` is the instance or volume, for the message.

    Raises:
        ValueError: a time with fractions of a second, or an end before the start.
    """
    for moment in (start, end):
        if moment.microsecond:
            raise ValueError(f"time: got {moment.isoformat()} of {what}, expected whole seconds")
    if end < start:
        raise ValueError(f"end: got {end.isoformat()} of {what}, before its start at {start.isoformat()}")
    return int((end - start).total_seconds())


def rounded(exact: Fraction, places: int = MICRO_PLACES) -> Decimal:
    """To `places` decimals, half to even; exact where a Decimal quotient would already have been rounded."""
    return Decimal(round(exact * 10**places)).scaleb(-places)
