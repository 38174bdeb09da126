"""What runs on the GPU node? The agent, and what a program uses to survive interruptions.

A program needs a few names from here:

    from gpucost.training import checkpointed, device, prepare, replicated

They are loaded when first used: the agent is a small process and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucost.training.checkpoints.engine import weights_digest
    from gpucost.training.program.loop import Run, checkpointed, steps_per_epoch
    from gpucost.training.program.processes import device, replicated
    from gpucost.training.program.randomness import prepare
    from gpucost.training.program.sampler import generator

__all__ = [
    "Run",
    "checkpointed",
    "device",
    "generator",
    "prepare",
    "replicated",
    "steps_per_epoch",
    "weights_digest",
]

_HOMES = {
    "Run": "program.loop",
    "checkpointed": "program.loop",
    "device": "program.processes",
    "generator": "program.sampler",
    "prepare": "program.randomness",
    "replicated": "program.processes",
    "steps_per_epoch": "program.loop",
    "weights_digest": "checkpoints.engine",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
