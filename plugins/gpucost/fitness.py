"""Can a GPU do what a recipe asks of it? Said before anything is bought, where its kind is known by then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpucost import gpus
from gpucost.gpus import Capability
from gpucost.recipe import CPU, Options, Recipe

NEEDED: dict[str, tuple[Capability, str]] = {
    "bf16": ((8, 0), "Ampere"),
    "tf32": ((8, 0), "Ampere"),
    "fp16": ((5, 3), "late Maxwell"),
    "compile": ((7, 0), "Volta"),
}
"""Least compute capability, and the generation that it came with, for torch 2.13.

bf16, tf32: torch.cuda.is_bf16_supported without emulation, torch.cuda.is_tf32_supported. fp16: "Throughput of Native
Arithmetic Instructions" in the CUDA C++ Programming Guide. compile: torch._dynamo.device_interface asks for 7.0 before
it takes Triton.
"""


def refusal(options: Options, kind: str | None, capability: Capability | None = None) -> str | None:
    """Why a GPU cannot do these options; None: it can, or nothing is known of it.

    Args:
        options: what holds on this GPU, from `Recipe.for_gpu`.
        kind: as the market or `gpus.kind_of` names it, else the device's own name; None, or `cpu`: there is no GPU.
        capability: what the device itself says; None: what is known of its kind.
    """
    reasons = _on_cpu(options) if kind is None or kind == CPU else _on_gpu(options, kind, capability)
    return "; ".join(reasons) or None


def remarks(options: Options, kind: str | None, world_size: int = 1) -> list[str]:
    """What is allowed and does not do what one may hope for; for the log.

    Args:
        options: what holds on this GPU.
        kind: as for `refusal`.
        world_size: processes in all.
    """
    gpu = gpus.find(kind) if kind else None
    parts = (options.accumulate or 1) * world_size
    said = {
        "precision: bf16 on a CPU saves memory; it is slower than fp32 where the CPU has no AMX": (
            (kind is None or kind == CPU) and options.precision == "bf16"
        ),
        f"precision: {kind} has no fast fp16; it saves memory, not time": (
            gpu is not None and gpu.capability == (6, 1) and options.precision == "fp16"
        ),
        "nccl_timeout_seconds: one process trains alone and waits for nobody": (
            options.nccl_timeout_seconds is not None and world_size == 1
        ),
        f"batch: {options.batch} samples do not divide into {parts} equal parts (accumulate x world_size); unequal "
        "parts count by their samples where the program calls run.backward(loss), else all the same": (
            options.batch is not None and options.batch % parts != 0
        ),
    }
    return [words for words, holds in said.items() if holds]


def unfit(recipe: Recipe, kinds: Sequence[str], at_least_gib: float | None = None) -> dict[str, str]:
    """The kinds that cannot do what the recipe asks of them, each with the reason.

    Args:
        recipe: with its sections.
        kinds: GPU kinds, or `cpu`; one that is not known counts as fit.
        at_least_gib: memory that the GPUs must have, where a kind is sold with more than one.
    """
    found = {}
    for kind in kinds:
        wanted: list[float | None] = [one for one in gpus.memories(kind) if gpus.holds(one, at_least_gib or 0)]
        reasons = (refusal(recipe.for_gpu(kind, memory), kind) for memory in wanted or [None])
        if reason := next((one for one in reasons if one), None):
            found[kind] = reason
    return found


def strange_sections(recipe: Recipe, kinds: Sequence[str]) -> list[str]:
    """Sections of `per_gpu` for a GPU that neither is known nor accepted by the job: a slip of the pen, most likely."""
    return [
        name
        for name in recipe.per_gpu
        if name != CPU and gpus.find(name) is None and not any(gpus.alike(name, kind) for kind in kinds)
    ]


def _on_cpu(options: Options) -> Iterator[str]:
    if options.precision in ("tf32", "fp16"):
        yield f"precision: got {options.precision}, which a CPU cannot do; use bf16 or fp32"


def _on_gpu(options: Options, kind: str, capability: Capability | None) -> Iterator[str]:
    gpu = gpus.find(kind)
    capability = capability or (gpu.capability if gpu else None)
    if capability is None:
        if gpu and options.chosen():
            yield f"{kind} is no GPU for CUDA, for which recipes are; take it out of gpu.kinds, or leave the recipe out"
        return
    if capability < gpus.TORCH_OLDEST and options.chosen():
        has = f"{kind} has compute capability {_dotted(capability)}"
        yield f"{has}, and torch 2.13 has wheels from {_dotted(gpus.TORCH_OLDEST)} on; take it out of gpu.kinds"
        return
    if options.precision in NEEDED and capability < NEEDED[options.precision][0]:
        other = "fp16 or fp32" if capability >= NEEDED["fp16"][0] else "fp32"
        yield f"precision: got {options.precision}, {_lacks(options.precision, kind, capability)}; use {other}"
    if options.compile and capability < NEEDED["compile"][0]:
        yield f"compile: got {options.compile}, {_lacks('compile', kind, capability)}; use false"


def _lacks(what: str, kind: str, capability: Capability) -> str:
    least, generation = NEEDED[what]
    return (
        f"which needs compute capability {_dotted(least)} ({generation}) or newer, and {kind} has {_dotted(capability)}"
    )


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
