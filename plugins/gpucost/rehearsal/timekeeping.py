"""Which clock does this state folder live by? Made by the first start, kept by every later one.

Nodes, leases, deadlines and the triggerer all hold the `ClockSpec` that they were given. A cloud that comes back
with another clock would make all of them wrong, so `clock.json` keeps it: a restart continues the same clock, also
through the time when no cloud ran. A start that asks for another speed or a later time makes a new clock, which
never shows an earlier time than the old one does at that moment; prices go on from where they were.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from gpucost.clock import ClockSpec, floor_second, require_utc
from gpucost.rehearsal.whole import write_whole
from gpucost.rehearsal.wording import in_one_line

FILE = "clock.json"


class KeptClock(BaseModel):
    """What `clock.json` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clock: ClockSpec = Field(description="The clock in use.")
    first_origin: AwareDatetime = Field(description="Origin of the folder's first clock; prices are made from it.")


def take_up(
    state_dir: Path, speed: float | None, origin: datetime | None, real_now: datetime, *, lived: bool = False
) -> KeptClock:
    """The clock to run by; a new one is on disk before this returns.

    Args:
        state_dir: the rehearsal's folder.
        speed: rehearsal seconds per real second; None for what it was, 1 for a new folder.
        origin: what a new clock shall show at `real_now`; None for whatever is right.
        real_now: the real time.
        lived: whether a cloud lived in the folder before, by its clock.

    Raises:
        ValueError: `clock.json` is not a clock, or is gone though a cloud lived by it; or `origin` lies before the
            time that the clock shows.
        OSError: the file can be neither read nor written.
    """
    path = state_dir / FILE
    old = _read(path)
    if old is None and lived:
        raise ValueError(
            f"state_dir: {path} is missing, expected the clock that the machines and the journal beside it live by; "
            "put it back, use another --state-dir, or `make clean` where make started it"
        )
    if speed is None:
        speed = old.clock.speed if old is not None else 1.0
    kept = _decide(old, speed, origin, require_utc(real_now, "real_now"), state_dir)
    if kept != old:
        write_whole(path, kept.model_dump_json(indent=2) + "\n")
    return kept


def _decide(
    old: KeptClock | None, speed: float, origin: datetime | None, real_now: datetime, state_dir: Path
) -> KeptClock:
    if old is None:
        start = floor_second(real_now) if origin is None else require_utc(origin, "origin")
        return KeptClock(clock=ClockSpec(origin_real=real_now, origin=start, speed=speed), first_origin=start)
    # the same command line again is a restart, also with an --origin in it
    if speed == old.clock.speed and origin in {None, old.clock.origin}:
        return old
    try:
        shows = old.clock.at(real_now)
    except OverflowError as error:
        raise ValueError(f"state_dir: the clock of {state_dir} is past the year 9999; use another folder") from error
    if origin is not None and origin < shows:
        raise ValueError(
            f"origin: got {origin.isoformat()}, expected {shows.isoformat()} or later, which the clock of {state_dir} "
            f"shows now: time does not run backwards for what lives by it; use another --state-dir"
        )
    clock = ClockSpec(origin_real=real_now, origin=origin or shows, speed=speed)
    return KeptClock(clock=clock, first_origin=old.first_origin)


def _read(path: Path) -> KeptClock | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return KeptClock.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(
            f"state_dir: {path} is not a rehearsal's clock: {in_one_line(error)}; use another --state-dir"
        ) from error
