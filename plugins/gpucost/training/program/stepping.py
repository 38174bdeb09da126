"""When does the optimizer really step? Once per batch, in however many micro-steps it is computed.

The program goes on calling `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()` and `scheduler.step()` in
every micro-step. Between two steps these calls do nothing but add up gradients; at the last micro-step the gradients
are made those of the whole batch and clipped, and the calls do what they say. `model.zero_grad()` counts, too.

What cannot be done so is refused: a closure for the optimizer, which computes gradients inside its step, and a program
that changes gradients itself before the step (clips them, say) while they are not those of the whole batch yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from gpucost.recipe import Options
from gpucost.training.program import processes
from gpucost.training.program.overriding import override
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
        self._step: Callable[..., Any] = optimizer.step
        self._zero_grad: Callable[..., None] = optimizer.zero_grad
        self._clip_norm = options.clip_norm
        self._share: Share | None = None
        self._adding = False
        """Whether the gradients hold micro-steps of a batch that is not complete."""
        self._weighted = False
        """Whether these were weighted by `backward`."""
        self._inside = False
        self._mark: tuple[int, int] | None = None
        """The first parameter's gradient as the backward pass left it; None: not known."""
        self._first = next((one for one in self._parameters() if one.requires_grad), None)
        self.scaler = _scaler(model) if options.precision == "fp16" else None
        """Scales the loss of fp16; None otherwise."""
        if (options.accumulate or 1) > 1 or options.clip_norm is not None or self.scaler is not None:
            self._gate(scheduler)
        if (options.accumulate or 1) > 1 and self._first is not None:
            self._first.register_post_accumulate_grad_hook(self._remember)  # type: ignore[no-untyped-call]

    @property
    def at_boundary(self) -> bool:
        """Whether the batch is complete: a step is done, rather than a micro-step."""
        return self._share is None or self._share.last

    def hand_out(self, share: Share) -> AbstractContextManager[Any]:
        """The program is about to compute a share; what is returned is held while it does."""
        self._share = share
        if share.micro == 0:
            self.forget()
        if not share.last and hasattr(self._model, "no_sync"):
            # Gradients are averaged over the processes once per batch, at its last micro-step.
            return self._model.no_sync()  # type: ignore[no-any-return, operator]
        return nullcontext()

    def end_batches(self) -> None:
        """There is no batch after the present one, which may be incomplete: the program has left the loop."""
        self.forget()
        self._share = None

    def forget(self) -> None:
        """Drop what was added up of a batch that is not complete."""
        if self._adding:
            self._zero_grad()
        self._adding = self._weighted = False
        self._mark = None

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, weighted so that unequal shares count by their samples, and scaled for fp16."""
        self._weighted = True
        if self._share is not None and self._share.weight != 1.0:
            loss = loss * self._share.weight
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._remember(self._first)

    def scaler_state(self) -> dict[str, Any] | None:
        """The scaler's state; None: there is none."""
        return None if self.scaler is None else self.scaler.state_dict()

    def take_scaler(self, saved: dict[str, Any] | None) -> None:
        """Put back what `scaler_state` gave, where this GPU and that one both need a scaler."""
        if self.scaler is not None and saved:
            self.scaler.load_state_dict(saved)

    def capture(self) -> dict[str, Any]:
        """What this process has of its own: gradients of a batch that is not complete, buffers that differ."""
        own: dict[str, Any] = {}
        if not self.at_boundary:
            gradients = [None if one.grad is None else one.grad.detach().cpu() for one in self._parameters()]
            own |= {"gradients": gradients, "weighted": self._weighted}
        if processes.buffers_differ(self._model):
            buffers = [one.detach().cpu().clone() for one in self._model.buffers()]
            own |= {"buffers": buffers, "synchronized": self._model.require_forward_param_sync}
        return own

    def take(self, saved: dict[str, Any]) -> None:
        """Put back what `capture` gave."""
        import torch

        if "gradients" in saved:
            for parameter, gradient in zip(self._parameters(), saved["gradients"], strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            self._adding, self._weighted = True, bool(saved["weighted"])
        if "buffers" in saved:
            with torch.no_grad():
                for buffer, value in zip(self._model.buffers(), saved["buffers"], strict=True):
                    buffer.copy_(value)
            # A new DistributedDataParallel would make them equal.
            self._model.require_forward_param_sync = saved["synchronized"]

    def _gate(self, scheduler: Any) -> None:
        # A method that looks like the one in its place: schedules mark it, and look for their mark.
        gate = functools.wraps(self._step)(lambda _optimizer, *args, **kwargs: self._gated_step(*args, **kwargs))
        self._optimizer.step = MethodType(gate, self._optimizer)  # type: ignore[method-assign]
        self._optimizer.zero_grad = self._gated_zero_grad  # type: ignore[method-assign]
        for module in {id(one): one for one in (self._model, processes.bare(self._model))}.values():
            override(module, "zero_grad", self._gated_model_zero_grad)
        if scheduler is not None:
            override(scheduler, "step", self._gated_schedule)

    def _gated_schedule(self, step: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if self.at_boundary:
            step(scheduler, *args, **kwargs)

    def _gated_model_zero_grad(self, zero_grad: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
        mine = module is self._model or module is processes.bare(self._model)  # rather than a copy of it
        if not (mine and self._adding):
            zero_grad(module, *args, **kwargs)

    def _gated_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return self._step(*args, **kwargs)
        with processes.refused_recipe_ends():
            self._check(args, kwargs)
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

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError where the options would do something else than they say."""
        if any(callable(one) for one in (*args, *kwargs.values())):
            raise ValueError(
                "recipe: accumulate, clip_norm and fp16 cannot be applied to a program that passes a closure to "
                "optimizer.step(); take them out"
            )
        if self.scaler is not None and not self._weighted:
            raise ValueError("recipe.precision: fp16 needs run.backward(loss) in place of loss.backward()")
        # At the last micro-step they may have been averaged over the processes since; but it is not the first one.
        partial = not self.at_boundary or self.scaler is not None
        if partial and self._mark is not None and self._mark != _mark(self._first):
            raise ValueError(
                "recipe: accumulate and fp16 cannot be applied to a program that changes gradients before "
                "optimizer.step(), which are not those of the whole batch yet; in place of clipping them there, set "
                "clip_norm in the recipe"
            )

    def _remember(self, first: torch.Tensor | None) -> None:
        self._mark = _mark(first)

    def _complete_gradients(self) -> None:
        import torch

        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)
        if self._share is not None and self._share.micros > 1 and not self._weighted:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._share.micros)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters(), self._clip_norm)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (one for group in self._optimizer.param_groups for one in group["params"])


def _mark(parameter: torch.Tensor | None) -> tuple[int, int] | None:
    """What changes whenever the gradient does; None: there is no gradient."""
    gradient = None if parameter is None else parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _scaler(model: torch.nn.Module) -> torch.amp.GradScaler:
    import torch

    return torch.amp.GradScaler(next(model.parameters()).device.type)
