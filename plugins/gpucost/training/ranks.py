"""Who else trains this job? The processes of one training, and how they agree.

Agreement goes over a group of its own on the CPU (gloo), so that it neither waits for the GPU nor is mixed with the
program's own collectives. Everything here is called by all processes in the same order, or they wait for each other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

TIMEOUT = timedelta(minutes=30)
"""How long one process waits for another; as long as the slowest save may take."""


class Ranks(Protocol):
    """The processes of one training.

    Attributes:
        rank: this process, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Everybody's small value, in the order of ranks, on every process."""
        ...

    def broadcast(self, value: Any) -> Any:
        """What rank 0 passed, on every process."""
        ...

    def highest(self, number: int) -> int:
        """The highest of everybody's numbers."""
        ...


class Alone:
    """A training of one process."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Its own."""
        return value

    def highest(self, number: int) -> int:
        """Its own."""
        return number


class Group:
    """The processes that torchrun started; torch.distributed is initialized when one is made.

    Args:
        timeout: how long one process waits for another.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's small value, in the order of ranks, on every process."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """What rank 0 passed, on every process."""
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def highest(self, number: int) -> int:
        """The highest of everybody's numbers."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return int(tensor.item())


def world_size(environ: Mapping[str, str] | None = None) -> int:
    """How many processes torchrun, or the agent, has started."""
    return int((os.environ if environ is None else environ).get("WORLD_SIZE") or 1)


def ranks() -> Ranks:
    """The processes of this training; the same object whenever it is asked for.

    Raises:
        RuntimeError: there are several, and they have not met.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return _group()
    if (several := world_size()) > 1:
        # Each would take itself for the only one, and write over the others' checkpoints.
        raise RuntimeError(
            f"WORLD_SIZE is {several}, but the processes have not met: call prepare() before anything else of gpucost"
        )
    return Alone()


@functools.cache
def _group() -> Group:
    return Group()
