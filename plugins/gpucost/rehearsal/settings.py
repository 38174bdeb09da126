"""What a rehearsal is started with."""

from __future__ import annotations

import stat
from datetime import datetime
from pathlib import Path
from typing import Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator, model_validator


class Settings(BaseModel):
    """Everything a rehearsal cloud is started with; durations say in their name which clock they are told by.

    Rehearsal seconds pass `speed` times as fast as real ones. Real seconds are used for what real programs and
    people need: time to stop, time to poll.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path = Field(description="Instances' folders and the journal; made when missing.")
    market: Path = Field(description="A market file, or a folder of traces.")
    offset_hours: float | None = Field(default=None, ge=0, description="Traces: how far into them it begins.")
    spot_capacity: int | None = Field(default=None, ge=0, description="Traces: spot instances of one pool.")
    on_demand_capacity: int | None = Field(default=None, ge=0, description="Traces: on-demand instances of one pool.")
    port: int = Field(default=0, ge=0, le=65535, description="On 127.0.0.1; 0 = any free one.")
    speed: float | None = Field(
        default=None, gt=0, le=100_000, description="Rehearsal seconds per real second; default: as before, at first 1."
    )
    origin: AwareDatetime | None = Field(default=None, description="What a new clock shows; default: see timekeeping.")
    role_credentials: Path | None = Field(
        default=None, description='Mode-600 JSON {"access_key", "secret_key"} served to instances with a role.'
    )
    image_path: tuple[Path, ...] = Field(default=(), description="Folders that the machine image puts on PATH.")
    script: Path | None = Field(default=None, description='JSON {"rules": [...]}: interruptions at a progress.')
    habits: Path | None = Field(default=None, description="JSON: how often the cloud warns, and warns for nothing.")
    faults: Path | None = Field(default=None, description='JSON {"rules": [...]}: faults from the start on.')
    seed: int = Field(default=0, description="Of the faults' random numbers: the same seed, the same faults.")
    memory_mib: int | None = Field(default=None, ge=64, description="No machine may use more, whatever its type has.")
    consistency_lag_real_s: float = Field(
        default=1.5, ge=0, le=30, description="How long at most a new instance is not shown yet, real seconds."
    )
    keep_machines_real_s: float = Field(
        default=30.0, ge=0, le=3600, description="How long machines go on without a cloud, real seconds."
    )
    boot_s: float = Field(default=30.0, ge=0, le=86_400, description="pending -> running, rehearsal seconds.")
    stop_grace_real_s: float = Field(default=3.0, ge=0, le=600, description="SIGTERM -> SIGKILL, real seconds.")
    notice_s: float = Field(
        default=120.0, gt=0, le=86_400, description="Interruption notice, rehearsal seconds (AWS: 2 minutes)."
    )
    notice_floor_real_s: float = Field(
        default=10.0, ge=0, le=600, description="A notice never lasts less, real seconds."
    )
    tick_real_s: float = Field(default=0.1, gt=0, le=10, description="How often machines are looked at.")
    terminated_visible_s: float = Field(
        default=3600.0, ge=3600.0, description="How long the API still shows a terminated instance, rehearsal seconds."
    )

    @field_validator("origin")
    @classmethod
    def _within_reach(cls, origin: datetime | None) -> datetime | None:
        # histories reach years back, and rehearsals run centuries ahead within hours
        if origin is not None and not 1970 <= origin.year <= 2200:
            raise ValueError(f"got {origin.isoformat()}, expected a year from 1970 to 2200")
        return origin

    @model_validator(mode="after")
    def _private_credentials(self) -> Self:
        if self.role_credentials is not None:
            check_private(self.role_credentials)
        return self


def check_private(path: Path) -> None:
    """Refuse a credentials file that others can read.

    Raises:
        ValueError: the file is away, or its mode allows group or others; the message says what to do.
    """
    if not path.is_file():
        raise ValueError(f"role_credentials: {path} is not a file; write the role's access_key and secret_key there")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"role_credentials: {path} has mode {mode:o}, expected 600: run chmod 600 on it")
