"""Column types that keep money exact and time in UTC on every database."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import BigInteger, DateTime, String
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from gpucost.clock import require_utc
from gpucost.money import MICRO


class UtcDateTime(TypeDecorator[datetime]):
    """An aware moment; stored in UTC, refused when naive."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC, without the zone where the database has no type for it."""
        if value is None:
            return None
        moment = require_utc(value, "datetime")
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Back to an aware moment in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Micros(TypeDecorator[Decimal]):
    """An amount as whole millionths, so that sums are exact and quick on every database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> int | None:  # noqa: ARG002
        """To millionths.

        Raises:
            ValueError: the amount has a finer part than a millionth; round it where the rule says how.
        """
        if value is None:
            return None
        scaled = value / MICRO
        if scaled != scaled.to_integral_value():
            raise ValueError(f"amount: got {value}, expected a multiple of {MICRO}; round it by the billing rule first")
        return int(scaled)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> Decimal | None:  # noqa: ARG002
        """Back to an amount."""
        return None if value is None else (Decimal(int(value)) * MICRO)


class ExactText(TypeDecorator[Decimal]):
    """A decimal as text, every digit kept; for prices and rates, which are never summed."""

    impl = String(40)
    cache_ok = True

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """To text."""
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Decimal | None:  # noqa: ARG002
        """Back to a decimal."""
        return None if value is None else Decimal(value)
