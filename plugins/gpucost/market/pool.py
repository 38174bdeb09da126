"""A pool is what a cloud fills from one stock: one instance type in one zone, spot or on-demand."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from gpucost.job import GpuNeed


class CapacityType(StrEnum):
    """How a machine is bought."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"


class InstanceType(BaseModel):
    """What one machine of a pool has."""

    model_config = ConfigDict(frozen=True)

    name: str
    gpu_kind: str = Field(default="", description="Such as 'T4'; empty: no GPU.")
    gpu_count: int = Field(default=0, ge=0)
    gpu_memory_gib: float = Field(default=0, ge=0, description="GiB per GPU.")
    vcpus: int = Field(ge=1)
    memory_gib: float = Field(gt=0, description="GiB of the whole machine.")

    def misfit(self, need: GpuNeed) -> str | None:
        """Why this machine cannot serve `need`, or None when it can."""
        if self.gpu_count < need.count:
            return f"{self.name} has {self.gpu_count} GPU, the job needs {need.count}"
        if need.kinds and self.gpu_kind not in need.kinds:
            return f"{self.name} has {self.gpu_kind or 'no GPU'}, the job accepts {', '.join(need.kinds)}"
        if need.memory_gib and self.gpu_memory_gib < need.memory_gib:
            return f"{self.name} has {self.gpu_memory_gib:g} GiB per GPU, the job needs {need.memory_gib:g}"
        return None


class Pool(BaseModel):
    """One instance type in one zone, bought one way.

    Zone *names* differ from account to account; the zone *id* says which zone it really is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: str
    region: str
    zone: str = Field(description="The zone's name in this account, as API calls take it.")
    zone_id: str = Field(description="The zone's id, the same for everybody.")
    instance_type: str
    capacity_type: CapacityType

    @property
    def key(self) -> str:
        """One line that names the pool, and sorts by provider, place and type."""
        return f"{self.provider}/{self.zone_id}/{self.instance_type}/{self.capacity_type}"

    def on_demand(self) -> Self:
        """The same machine in the same zone, bought on demand."""
        return self.model_copy(update={"capacity_type": CapacityType.ON_DEMAND})
