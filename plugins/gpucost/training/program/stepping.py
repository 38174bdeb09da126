"""When does the optimizer really step? Once per batch, in however many micro-steps it is computed.

The program goes on calling `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()` and `scheduler.step()` in
every micro-step. Between two steps these calls do nothing but add up gradients; at the last micro-step the gradients
are made those of the whole batch and clipped, and the calls do what they say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from gpucost.recipe import Options
from gpucost.training.program.sampler import Share

if TYPE_CHECKING:
    import torch


class Stepping:
    """The steps of one optimizer.

    Args:
        model: as the program calls it.
        optimizer: its `step` and `zero_grad` are gated where an option needs it.
        scheduler: its `step` likewise; None: there is none.
        options: accumulate, clip_norm, precision.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, options: Options
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._clip_norm = options.clip_norm
        self._share: Share | None = None
        self._adding = False
        """Whether the gradients hold micro-steps of a batch that is not complete."""
        self._weighted = False
        """Whether these were weighted by `backward`."""
        self._inside = False
        self.scaler = _scaler(model) if options.precision == "fp16" else None
        """Scales the loss of fp16; None otherwise."""
        if (options.accumulate or 1) > 1 or options.clip_norm is not None or self.scaler is not None:
            self._gate(scheduler)

    @property
    def at_boundary(self) -> bool:
        """Whether the batch is complete: a step is done, rather than a micro-step."""
        return self._share is None or self._share.last

    def hand_out(self, share: Share) -> AbstractContextManager[Any]:
        """The program is about to compute a share; what is returned is held while it does."""
        self._share = share
        if share.micro == 0:
            self._adding = self._weighted = False
        if not share.last and hasattr(self._model, "no_sync"):
            # Gradients are averaged over the processes once per batch, at its last micro-step.
            return self._model.no_sync()  # type: ignore[no-any-return, operator]
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, weighted so that unequal shares count by their samples, and scaled for fp16."""
        self._weighted = True
        if self._share is not None and self._share.weight != 1.0:
            loss = loss * self._share.weight
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def capture(self) -> dict[str, Any]:
        """The gradients so far of a batch that is not complete, on this process; at a step boundary, nothing."""
        if self.at_boundary:
            return {}
        return {
            "gradients": [None if one.grad is None else one.grad.detach().cpu() for one in self._parameters()],
            "buffers": [one.detach().cpu().clone() for one in self._model.buffers()],
            "weighted": self._weighted,
        }

    def take(self, saved: dict[str, Any]) -> None:
        """Put back what `capture` gave."""
        if not saved:
            return
        import torch

        for parameter, gradient in zip(self._parameters(), saved["gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), saved["buffers"], strict=True):
                buffer.copy_(value)
        if hasattr(self._model, "require_forward_param_sync"):
            # Between micro-steps the processes' buffers differ; a new DistributedDataParallel would make them equal.
            self._model.require_forward_param_sync = False  # type: ignore[assignment]
        self._adding, self._weighted = True, bool(saved["weighted"])

    def _gate(self, scheduler: Any) -> None:
        self._step: Callable[..., Any] = self._optimizer.step
        self._zero_grad: Callable[..., None] = self._optimizer.zero_grad
        # A method that looks like the one in its place: schedules mark it, and look for their mark.
        gate = functools.wraps(self._step)(lambda _optimizer, *args, **kwargs: self._gated_step(*args, **kwargs))
        self._optimizer.step = MethodType(gate, self._optimizer)  # type: ignore[method-assign]
        self._optimizer.zero_grad = self._gated_zero_grad  # type: ignore[method-assign]
        if scheduler is not None:
            self._gate_schedule(scheduler)

    def _gate_schedule(self, scheduler: Any) -> None:
        # By a class of its own: an attribute would become part of the scheduler's state_dict.
        original = type(scheduler)

        @functools.wraps(original.step)
        def step(inner: Any, *args: Any, **kwargs: Any) -> None:
            if self.at_boundary:
                original.step(inner, *args, **kwargs)

        scheduler.__class__ = type(original.__name__, (original,), {"step": step, "__module__": original.__module__})

    def _gated_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return self._step(*args, **kwargs)
        if not self.at_boundary:
            self._adding = True
            return None
        self._complete_gradients()
        self._adding = False
        if self.scaler is None:
            return self._step(*args, **kwargs)
        self._inside = True
        try:
            done = self.scaler.step(self._optimizer, *args, **kwargs)
        finally:
            self._inside = False
        self.scaler.update()
        return done

    def _gated_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self._adding:
            self._zero_grad(*args, **kwargs)

    def _complete_gradients(self) -> None:
        import torch

        if self.scaler is not None:
            if not self._weighted:
                raise ValueError("recipe.precision: fp16 needs run.backward(loss) in place of loss.backward()")
            self.scaler.unscale_(self._optimizer)
        if self._share is not None and self._share.micros > 1 and not self._weighted:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._share.micros)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters(), self._clip_norm)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (one for group in self._optimizer.param_groups for one in group["params"])


def _scaler(model: torch.nn.Module) -> torch.amp.GradScaler:
    import torch

    return torch.amp.GradScaler(next(model.parameters()).device.type)
