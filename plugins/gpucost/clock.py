"""What time is it? One injected answer, in UTC, for planner, leases, deadlines, expiry and billing.

In production the answer is the system's clock. In a rehearsal, hours pass in seconds: the rehearsal
cloud publishes one `ClockSpec` (an origin and a speed) and everybody reads the time through it, so
that a deadline, a price history and a bill are all told by the same clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field


class Clock(Protocol):
    """Tells the time and waits; the only way for gpucost's code to do either."""

    def now(self) -> datetime:
        """The present moment: aware, UTC."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of *this clock's* time (at speed 60, sixty of them last one real second)."""
        ...


class ClockSpec(BaseModel):
    """How to compute this clock's time from real time; travels as JSON to every process and node.

    `origin` is what the clock showed at the real moment `origin_real`; since then it has run `speed`
    times as fast as real time. `speed=1` with equal origins is the system clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin_real: AwareDatetime = Field(description="A real moment, UTC.")
    origin: AwareDatetime = Field(description="What this clock showed at that moment, UTC.")
    speed: float = Field(default=1.0, gt=0, le=100_000, description="Clock seconds per real second.")

    @classmethod
    def real(cls) -> ClockSpec:
        """The system clock."""
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        return cls(origin_real=epoch, origin=epoch, speed=1.0)

    def at(self, real: datetime) -> datetime:
        """What this clock shows at the real moment `real`."""
        return (self.origin + (real - self.origin_real) * self.speed).astimezone(UTC)

    def real_at(self, moment: datetime) -> datetime:
        """The real moment at which this clock shows `moment`; the inverse of `at`."""
        return (self.origin_real + (moment - self.origin) / self.speed).astimezone(UTC)


class SpecClock:
    """A running clock that follows a `ClockSpec`.

    Args:
        spec: origin and speed; the system clock when left out.
        real_now: the source of real time, for tests.
        real_sleep: waits real seconds, for tests.
    """

    def __init__(
        self,
        spec: ClockSpec | None = None,
        *,
        real_now: Callable[[], datetime] = lambda: datetime.now(UTC),
        real_sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec or ClockSpec.real()
        self._real_now = real_now
        self._real_sleep = real_sleep

    def now(self) -> datetime:
        """The present moment on this clock: aware, UTC."""
        return self.spec.at(self._real_now())

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of this clock's time."""
        self._real_sleep(max(0.0, seconds) / self.spec.speed)


class ManualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, start: datetime) -> None:
        self._now = require_utc(start, "start")

    def now(self) -> datetime:
        """The moment it was last set to."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds` at once."""
        self.advance(timedelta(seconds=seconds))

    def advance(self, by: timedelta) -> None:
        """Move forward by `by`.

        Raises:
            ValueError: if `by` is negative: time does not run backwards here.
        """
        if by < timedelta(0):
            raise ValueError(f"by: got {by}, expected a duration of zero or more")
        self._now += by


def require_utc(moment: datetime, field: str) -> datetime:
    """`moment` in UTC.

    Raises:
        ValueError: if it is naive, naming `field`; a naive time is a guess about somebody's time zone.
    """
    if moment.tzinfo is None:
        raise ValueError(
            f"{field}: got {moment.isoformat()} without a time zone, expected an aware time such as "
            f"{moment.isoformat()}+00:00"
        )
    return moment.astimezone(UTC)


def floor_second(moment: datetime) -> datetime:
    """`moment` cut to whole seconds, the resolution at which cloud APIs show time."""
    return moment.replace(microsecond=0)
