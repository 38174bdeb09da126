"""What does a recipe do to a model? Precision, recomputed activations, compilation: in place, its program untouched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from gpucost.recipe import Options
from gpucost.training.program.overriding import override
from gpucost.training.program.processes import bare

if TYPE_CHECKING:
    import torch


def apply(options: Options, model: torch.nn.Module) -> None:
    """Change the model as the recipe says.

    Args:
        options: precision, gradient_checkpointing, compile.
        model: as the program calls it, on its device.

    Raises:
        ValueError: an option cannot be applied to this model.
    """
    inner = bare(model)
    if options.gradient_checkpointing:
        _recompute(inner, options.gradient_checkpointing)
    if options.precision is not None:
        _set_precision(inner, options.precision)
    if options.compile:
        inner.compile(mode=None if options.compile is True else options.compile)


def _set_precision(model: torch.nn.Module, precision: str) -> None:
    import torch

    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None:
        return
    kind = next(model.parameters()).device.type

    def lower(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype):
            answer = forward(*args, **kwargs)
        return _full(answer)

    _around_forward(model, lower)


def _around_forward(module: torch.nn.Module, around: Callable[..., Any]) -> None:
    """Call `around(forward, ...)` in place of the module's own forward."""

    def forward(original: Callable[..., Any], inner: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, inner), *args, **kwargs)

    override(module, "forward", forward)


def _full(value: Any) -> Any:
    """In fp32, so that the program computes its loss as ever."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((name, _full(one)) for name, one in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_full, value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_full(one) for one in value)
    return value


def _recompute(model: torch.nn.Module, which: bool | tuple[str, ...]) -> None:
    chosen = list(_blocks(model) if which is True else _named(model, tuple(which or ())))
    if not chosen:
        known = ", ".join(name for name, _ in model.named_modules() if name and name.count(".") < 2)
        raise ValueError(
            f"recipe.gradient_checkpointing: got {which!r}, which no module of the model meets; "
            f"name modules, with * for any; the model has: {known}"
        )
    for name, block in chosen:
        if (norm := _batch_norm(block)) is not None:
            raise ValueError(
                f"recipe.gradient_checkpointing: {name} has batch normalization ({norm}), whose statistics would be "
                "counted twice; name other modules"
            )
        _around_forward(block, _recomputed)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _blocks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The members of the model's lists of blocks, the outermost ones; a plain Sequential counts, when it is one."""
    from torch import nn

    taken: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(_below(name, one) for one in taken):
            taken.append(name)
            for index, block in module.named_children():
                if any(True for _ in block.parameters()) and _batch_norm(block) is None:
                    yield f"{name}.{index}".lstrip("."), block


def _named(model: torch.nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if name and any(fnmatch(name, pattern) for pattern in patterns):
            yield name, module


def _below(name: str, other: str) -> bool:
    return other == "" or name == other or name.startswith(f"{other}.")


def _batch_norm(block: torch.nn.Module) -> str | None:
    from torch.nn.modules.batchnorm import _BatchNorm

    return next((type(one).__name__ for one in block.modules() if isinstance(one, _BatchNorm)), None)
