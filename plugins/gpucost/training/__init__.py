"""What runs on the GPU node? The agent, and what a program uses to survive interruptions.

A program needs two names from here:

    from gpucost.training import checkpointed, prepare

They are loaded when first used: the agent is a small process and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucost.training.checkpoint import weights_digest
    from gpucost.training.loop import Run, checkpointed
    from gpucost.training.randomness import prepare

__all__ = ["Run", "checkpointed", "prepare", "weights_digest"]

_HOMES = {"Run": "loop", "checkpointed": "loop", "prepare": "randomness", "weights_digest": "checkpoint"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
