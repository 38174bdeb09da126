"""On which device does this process train, and with whom?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from gpucost.training import ranks
from gpucost.training.program.reporting import say
from gpucost.training.surroundings import Surroundings
from gpucost.training.workdir import EXIT_REFUSED

if TYPE_CHECKING:
    import torch

Model = TypeVar("Model", bound="torch.nn.Module")


def device() -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))


def replicated(model: Model) -> Model:
    """The model, trained by all processes together: each gets a part of every batch, gradients are averaged.

    Wraps it in torch's DistributedDataParallel, or returns it as it is where one process trains alone.

    Args:
        model: on its device already.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not (dist.is_available() and dist.is_initialized()):
        return model
    # Of its own: torch.cuda.current_device() is one for all processes until it is set.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    return DistributedDataParallel(model, device_ids=devices)  # type: ignore[return-value]


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model without what `replicated` has put around it: what is saved is the same for any number of processes."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


def buffers_differ(model: torch.nn.Module) -> bool:
    """Whether the next forward pass takes each process's own buffers, rather than rank 0's.

    DistributedDataParallel makes them equal before a forward pass, unless the one before was without gradients or
    between micro-steps (`require_forward_param_sync`), or the program does not want it.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return False
    return not (model.require_forward_param_sync and model.broadcast_buffers)


def join(around: Surroundings) -> None:
    """Meet the other processes that torchrun has started; nothing where this one is alone or has met them already."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    if ranks.world_size(around.environ) > 1 and not dist.is_initialized():
        with refused_recipe_ends():
            seconds = around.options.nccl_timeout_seconds
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            timeout=None if seconds is None else timedelta(seconds=seconds),
            device_id=device() if torch.cuda.is_available() else None,
        )
    # Now, while all are here: who asks first later may ask alone.
    ranks.ranks()


@contextmanager
def refused_recipe_ends() -> Iterator[None]:
    """A recipe that this model or GPU cannot do ends the program in a way of its own: no retry would help."""
    try:
        yield
    except ValueError as refused:
        say(str(refused))
        raise SystemExit(EXIT_REFUSED) from refused
