"""How is it trained? Options that are applied to a program without touching it, for one GPU or another.

    precision: bf16
    accumulate: 2
    clip_norm: 1.0
    per_gpu:
      T4: {precision: fp16, accumulate: 4}    # what a T4 takes instead

Every option that is left out stays as the program has it.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """The options; None: as the program does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = Field(
        default=None, description="Of matrix products: autocast for bf16 and fp16 (with loss scaling)."
    )
    batch: int | None = Field(default=None, ge=1, description="Samples per optimizer step, over all processes.")
    accumulate: int | None = Field(
        default=None, ge=1, description="Parts that a batch is computed in, one after the other; less memory."
    )
    clip_norm: float | None = Field(default=None, gt=0, description="Most that the norm of all gradients may be.")
    gradient_checkpointing: bool | tuple[str, ...] | None = Field(
        default=None,
        description="Compute activations again in the backward pass: true for the children of the model's lists "
        "of blocks, or the names of modules, with * for any.",
    )
    workers: int | None = Field(default=None, ge=0, description="Processes that load data, per training process.")
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] | None = Field(
        default=None, description="torch.compile, and its mode."
    )
    checkpoint_every_steps: int | None = Field(default=None, ge=1, description="Instead of the job's.")
    checkpoint_min_seconds: float | None = Field(
        default=None, ge=0, description="Real seconds between two checkpoints at least, whatever the steps."
    )
    checkpoint_max_seconds: float | None = Field(
        default=None, gt=0, description="Real seconds between two checkpoints at most, whatever the steps."
    )
    nccl_timeout_seconds: float | None = Field(
        default=None, gt=0, description="How long processes wait for each other before one is taken for dead."
    )

    def chosen(self) -> dict[str, Any]:
        """The options that are set."""
        return self.model_dump(exclude_none=True, exclude={"per_gpu"})


class Recipe(Options):
    """Options for every GPU, and what some kinds take instead."""

    per_gpu: dict[str, Options] = Field(default={}, description="GPU kind, or cpu -> options that differ there.")

    def for_gpu(self, kind: str | None) -> Options:
        """What holds on one kind of GPU; None: a CPU."""
        special = self.per_gpu.get(kind or "cpu", Options())
        return Options.model_validate({**self.chosen(), **special.chosen()})

    def changed(self, by: dict[str, Any]) -> Self:
        """The recipe with some options replaced; None takes an option back.

        Raises:
            pydantic.ValidationError: naming each wrong option.
        """
        return type(self).model_validate({**self.model_dump(exclude_none=True), **by})
