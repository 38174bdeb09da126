"""What can a GPU do? Facts by kind, as clouds name kinds, and which kind a device is.

Compute capability: NVIDIA, "CUDA GPU Compute Capability" (https://developer.nvidia.com/cuda-gpus) and "Legacy CUDA
GPU Compute Capability" (https://developer.nvidia.com/cuda-legacy-gpus), read on 2026-11-30. A10G and T4g, which these
leave out, are editions of A10 and T4. Memory: as sold, GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Capability = tuple[int, int]

TORCH_OLDEST: Capability = (5, 0)
"""The oldest GPU for which torch 2.13 has wheels: those for CUDA 12.6 begin with Maxwell; those for CUDA 13, which PyPI
has, with Turing (7.5). Source: "PyTorch CUDA Support Matrix" in RELEASE.md of pytorch/pytorch, read on 2026-11-30."""

SHOWN = 0.9
"""A device shows up to a tenth less memory than it is sold with (error correction, firmware): a T4 14.6 GiB of 16."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Args:
        kind: as in `gpu.kinds`.
        capability: NVIDIA's compute capability; None: not a GPU for CUDA.
        memory_gib: what it is sold with, GiB, smallest first.
    """

    kind: str
    capability: Capability | None
    memory_gib: tuple[float, ...]

    @property
    def tensor_cores(self) -> int:
        """Generation of its tensor cores; 0: none."""
        return tensor_cores(self.capability)


def tensor_cores(capability: Capability | None) -> int:
    """Generation of tensor cores that comes with a compute capability; 0: none.

    Volta brought the first, Turing the second, Ampere the third, Ada and Hopper the fourth, Blackwell the fifth.
    """
    newest_first = (((10, 0), 5), ((8, 9), 4), ((8, 0), 3), ((7, 5), 2), ((7, 0), 1))
    return next((generation for since, generation in newest_first if capability and capability >= since), 0)


_KINDS = (
    # Data centers
    Gpu("K80", (3, 7), (12,)),
    Gpu("M60", (5, 2), (8,)),
    Gpu("P100", (6, 0), (12, 16)),
    Gpu("P4", (6, 1), (8,)),
    Gpu("P40", (6, 1), (24,)),
    Gpu("V100", (7, 0), (16, 32)),
    Gpu("T4", (7, 5), (16,)),
    Gpu("T4g", (7, 5), (16,)),
    Gpu("A100", (8, 0), (40, 80)),
    Gpu("A30", (8, 0), (24,)),
    Gpu("A2", (8, 6), (16,)),
    Gpu("A10", (8, 6), (24,)),
    Gpu("A10G", (8, 6), (24,)),
    Gpu("A16", (8, 6), (16,)),
    Gpu("A40", (8, 6), (48,)),
    Gpu("L4", (8, 9), (24,)),
    Gpu("L40", (8, 9), (48,)),
    Gpu("L40S", (8, 9), (48,)),
    Gpu("H100", (9, 0), (80, 94)),
    Gpu("H200", (9, 0), (141,)),
    Gpu("GH200", (9, 0), (96, 144)),
    Gpu("B200", (10, 0), (180,)),
    Gpu("GB200", (10, 0), (186,)),
    Gpu("B300", (10, 3), (268,)),
    Gpu("GB300", (10, 3), (268,)),
    # Workstations
    Gpu("RTX6000", (7, 5), (24,)),
    Gpu("RTX8000", (7, 5), (48,)),
    Gpu("A4000", (8, 6), (16,)),
    Gpu("A5000", (8, 6), (24,)),
    Gpu("A6000", (8, 6), (48,)),
    Gpu("RTX4000-Ada", (8, 9), (20,)),
    Gpu("RTX5000-Ada", (8, 9), (32,)),
    Gpu("RTX-6000-Ada", (8, 9), (48,)),
    Gpu("RTX-PRO-6000", (12, 0), (96,)),
    # Consumers
    Gpu("GTX1080Ti", (6, 1), (11,)),
    Gpu("TITAN-V", (7, 0), (12,)),
    Gpu("TITAN-RTX", (7, 5), (24,)),
    Gpu("RTX2080", (7, 5), (8,)),
    Gpu("RTX2080Ti", (7, 5), (11,)),
    Gpu("RTX3080", (8, 6), (10, 12)),
    Gpu("RTX3090", (8, 6), (24,)),
    Gpu("RTX4080", (8, 9), (16,)),
    Gpu("RTX4090", (8, 9), (24,)),
    Gpu("RTX5080", (12, 0), (16,)),
    Gpu("RTX5090", (12, 0), (32,)),
    # Not for CUDA
    Gpu("Radeon Pro V520", None, (8,)),
    Gpu("Gaudi HL-205", None, (32,)),
)

_BRANDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "amd", "habana"})
_VARIANT = re.compile(
    r"sxm\d*|pcie|nvl|hbm\d\w*|\d+gb?|mig|ac|blackwell|generation|server|workstation|max|q|edition|\d+g\.\d+gb"
)
_SOLD_WITH = re.compile(r"(\d+)gb?", re.IGNORECASE)


def _words(name: str) -> Iterator[str]:
    return (word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word)


def _bare(name: str) -> str:
    """A name without maker, form, and memory: `NVIDIA A100-SXM4-80GB` and `A100-80GB` are both an `a100`."""
    kept = "".join(word for word in _words(name) if word not in _BRANDS and not _VARIANT.fullmatch(word))
    return kept.removeprefix("rtx") if re.fullmatch(r"rtxa\d000", kept) else kept or name.lower()


_BY_NAME = {_bare(gpu.kind): gpu for gpu in _KINDS}

KINDS = tuple(gpu.kind for gpu in _KINDS)
"""Every kind that is known."""


def find(name: str) -> Gpu | None:
    """The facts about a kind, however a cloud or torch writes it; None: not known.

    Args:
        name: such as `T4`, `A100-80GB`, `RTX 4090`, `NVIDIA H100 80GB HBM3`.
    """
    return _BY_NAME.get(_bare(name))


def kind_of(device_name: str) -> str | None:
    """The kind of a device; None: not known.

    Args:
        device_name: from `torch.cuda.get_device_name()`, such as `Tesla T4` or `NVIDIA GeForce RTX 4090`.
    """
    gpu = find(device_name)
    return gpu.kind if gpu else None


def alike(one: str, other: str) -> bool:
    """Whether two names mean one kind with the same memory."""
    return _bare(one) == _bare(other) and sold_with(one) == sold_with(other)


def means(name: str, kind: str, memory_gib: float | None) -> bool:
    """Whether a name means a GPU of `kind` that shows `memory_gib`; one that tells no memory means any.

    Args:
        name: such as `A100`, or `A100-80GB`.
        kind: the GPU's kind.
        memory_gib: None: not known.
    """
    told = sold_with(name)
    if _bare(name) != _bare(kind):
        return False
    return told is None or (memory_gib is not None and holds(memory_gib, told) and holds(told, memory_gib))


def memories(kind: str) -> tuple[float, ...]:
    """What a kind is sold with, GiB, smallest first; none: not known."""
    told, gpu = sold_with(kind), find(kind)
    if told is not None:
        return (told,)
    return gpu.memory_gib if gpu else ()


def sold_with(kind: str) -> float | None:
    """The memory that a kind's name tells, GiB: 80 of `A100-80GB`; None: it tells none."""
    told = [match[1] for word in _words(kind) if (match := _SOLD_WITH.fullmatch(word))]
    return float(told[0]) if told else None


def holds(memory_gib: float, at_least: float) -> bool:
    """Whether a GPU that shows `memory_gib` is sold with `at_least`, GiB both."""
    return memory_gib >= SHOWN * at_least
