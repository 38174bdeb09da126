"""What runs on the GPU node? The agent, and what a program uses to survive interruptions.

A program needs two names from here:

    from gpucost.training import checkpointed, prepare

They are loaded when first used: the agent is a small process and must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucost.training.checkpoint import weights_digest
    from gpucost.training.loop import Run, checkpointed, prepare

__all__ = ["Run", "checkpointed", "prepare", "weights_digest"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "checkpointed", "prepare"):
        from gpucost.training import loop

        return getattr(loop, name)
    if name == "weights_digest":
        from gpucost.training import checkpoint

        return checkpoint.weights_digest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
