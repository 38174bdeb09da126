"""What runs on the GPU node? The agent, and what a program uses to survive interruptions.

A program needs two names from here:

    from gpucost.training import checkpointed, prepare

They are loaded when first used: the agent is a small process and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucost.training.checkpoints.engine import weights_digest
    from gpucost.training.program.loop import Run, checkpointed
    from gpucost.training.program.randomness import prepare

__all__ = ["Run", "checkpointed", "prepare", "weights_digest"]

_HOMES = {
    "Run": "program.loop",
    "checkpointed": "program.loop",
    "prepare": "program.randomness",
    "weights_digest": "checkpoints.engine",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
