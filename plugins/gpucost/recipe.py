"""How is it trained? Options that are applied to a program without touching it, for one GPU or another.

    precision: bf16
    accumulate: 4
    clip_norm: 1.0
    per_memory:
      - {at_least_gib: 40, accumulate: 1}    # GPUs that are sold with 40 GiB or more
    per_gpu:
      T4: {precision: fp16}                  # what a T4 takes instead; it wins over per_memory

Every option that is left out stays as the program has it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from gpucost import gpus

CPU = "cpu"
"""The section of `per_gpu` for a node without a GPU."""

_EXPECTED = {
    "precision": "fp32, tf32, bf16 or fp16",
    "batch": "samples per optimizer step, 1 or more",
    "accumulate": "parts per batch, 1 (none) or more",
    "clip_norm": "the most that the norm of all gradients may be, more than 0, such as 1.0",
    "gradient_checkpointing": "true, false, or names of modules such as ['layers.*']",
    "workers": "processes that load data, 0 (none) or more",
    "compile": "true, false, default, reduce-overhead or max-autotune",
    "checkpoint_every_steps": "optimizer steps, 1 or more",
    "checkpoint_min_seconds": "seconds, 0 or more",
    "checkpoint_max_seconds": "seconds, more than 0",
    "nccl_timeout_seconds": "seconds, more than 0",
    "at_least_gib": "GiB that a GPU is sold with, more than 0, such as 40",
    "per_gpu": "a mapping such as {T4: {precision: fp16}}",
    "per_memory": "a list such as [{at_least_gib: 40, accumulate: 1}]",
}

_CALLED_ELSEWHERE = {
    "activation_checkpointing": "gradient_checkpointing",
    "amp": "precision",
    "dtype": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "grad_accum": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
    "mixed_precision": "precision",
    "num_workers": "workers",
    "save_steps": "checkpoint_every_steps",
}
"""What other libraries call an option, where it is too far from ours to be taken for a slip of the pen."""

_IN_WORDS = "recipe"
"""Type of an error that has been put into words."""

_Problem = tuple[tuple[str | int, ...], Any, str]
"""Where, what was given, and in words what is wrong."""


class Options(BaseModel):
    """The options; None: as the program does.

    Raises:
        pydantic.ValidationError: naming each wrong option, its value and what was expected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
        return {name: value for name in Options.model_fields if (value := getattr(self, name)) is not None}

    @field_validator("gradient_checkpointing")
    @classmethod
    def _names_something(cls, which: bool | tuple[str, ...] | None) -> bool | tuple[str, ...] | None:
        if isinstance(which, tuple) and not all(name.strip() for name in which or ("",)):
            raise ValueError("no name")
        return which

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Let the error of an option say what was expected of it; a name that is not known gets the nearest one."""
        if isinstance(given, cls):
            return handler(given)
        if not isinstance(given, dict):
            words = f"got {given!r}, expected a mapping of options such as {{precision: bf16}}"
            raise ValidationError.from_exception_data(cls.__name__, [_detail((), given, words)])
        problems = list(_unknown(cls, given)) + list(_true_or_false(given))
        named = {where[0] for where, _, _ in problems}
        left = {name: value for name, value in given.items() if str(name) not in named}
        try:
            made = handler(left)
        except ValidationError as wrong:
            problems += _explained(wrong)
        else:
            problems += () if problems else made._contradictions()
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, [_detail(*problem) for problem in problems])
        return made

    def _contradictions(self) -> Iterator[_Problem]:
        """Options that do not go together."""
        least, most = self.checkpoint_min_seconds, self.checkpoint_max_seconds
        if least is not None and most is not None and least > most:
            words = f"got {most:g}, expected checkpoint_min_seconds ({least:g}) or more; change one of the two"
            yield ("checkpoint_max_seconds",), most, words
        if self.batch is not None and self.accumulate is not None and self.accumulate > self.batch:
            words = f"got {self.accumulate} parts of a batch of {self.batch}, expected {self.batch} or fewer"
            yield ("accumulate",), self.accumulate, words

    @model_serializer(mode="wrap")
    def _without_blanks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # An option that is not set is not written: it would read as one that somebody has set to nothing.
        return {name: value for name, value in handler(self).items() if value not in (None, {}, (), [])}


class MemoryRule(Options):
    """What GPUs with so much memory take instead."""

    at_least_gib: float = Field(gt=0, description="GiB that the GPU is sold with; what it shows may be a tenth less.")


class Recipe(Options):
    """Options for every GPU, and what some take instead."""

    per_memory: tuple[MemoryRule, ...] = Field(
        default=(), description="What GPUs with more memory take instead; of the rules that hold, the highest."
    )
    per_gpu: dict[str, Options] = Field(default={}, description="GPU kind, or cpu -> options that differ there.")

    def for_gpu(self, kind: str | None, memory_gib: float | None = None) -> Options:
        """What holds on one GPU.

        Args:
            kind: as the market or `gpus.kind_of` names it; None, or `cpu`: there is no GPU.
            memory_gib: what the GPU shows; None: what its kind is sold with, the least where there are several.
        """
        memory = memory_gib or next(iter(gpus.memories(kind)), None) if kind else None
        section = self._section(kind or CPU, memory)
        return Options.model_validate({**self._for_memory(memory), **(section.chosen() if section else {})})

    def changed(self, by: dict[str, Any]) -> Self:
        """The recipe with some options replaced, on every GPU; None takes an option back.

        Raises:
            pydantic.ValidationError: naming each wrong option.
        """
        now = self.model_dump()
        for section in (*now.get("per_gpu", {}).values(), *now.get("per_memory", ())):
            for name in by:
                section.pop(name, None)
        return type(self).model_validate({**now, **by})

    def _for_memory(self, memory_gib: float | None) -> dict[str, Any]:
        held = [rule for rule in self.per_memory if memory_gib and gpus.holds(memory_gib, rule.at_least_gib)]
        return {**self.chosen(), **(max(held, key=lambda rule: rule.at_least_gib).chosen() if held else {})}

    def _section(self, kind: str, memory_gib: float | None) -> Options | None:
        fitting = [name for name in self.per_gpu if gpus.means(name, kind, memory_gib)]
        return self.per_gpu[max(fitting, key=lambda name: gpus.sold_with(name) or 0)] if fitting else None

    def _contradictions(self) -> Iterator[_Problem]:
        yield from super()._contradictions()
        for index, rule in enumerate(self.per_memory):
            where: tuple[str | int, ...] = ("per_memory", index)
            if any(rule.at_least_gib == other.at_least_gib for other in self.per_memory[:index]):
                yield (*where, "at_least_gib"), rule.at_least_gib, f"got {rule.at_least_gib:g} twice, expected it once"
            yield from _merged(where, self.chosen(), rule.chosen())
        for name, section in self.per_gpu.items():
            where = ("per_gpu", name)
            if twin := next((one for one in self.per_gpu if one != name and gpus.alike(one, name)), None):
                yield where, name, f"got {name!r} and {twin!r}, which are one kind of GPU; expected one section for it"
                return
            for memory in gpus.memories(name) or (None,):
                yield from _merged(where, self._for_memory(memory), section.chosen())


def _merged(where: tuple[str | int, ...], base: dict[str, Any], special: dict[str, Any]) -> Iterator[_Problem]:
    """What a rule or section contradicts in the options that it is added to."""
    try:
        Options.model_validate({**base, **special})
    except ValidationError as wrong:
        for path, value, words in _explained(wrong):
            yield (*where, *path), value, f"{words} (together with the options for every GPU)"


def _unknown(model: type[Options], given: dict[Any, Any]) -> Iterator[_Problem]:
    for name, value in given.items():
        if name in model.model_fields:
            continue
        near = _CALLED_ELSEWHERE.get(str(name)) or next(
            iter(difflib.get_close_matches(str(name), model.model_fields, 1)), None
        )
        known = f"did you mean {near}?" if near else f"expected one of {', '.join(model.model_fields)}"
        yield (str(name),), value, f"there is no option {name!r}; {known}"


def _true_or_false(given: dict[Any, Any]) -> Iterator[_Problem]:
    # `batch: true` would count as 1.
    for name, value in given.items():
        if isinstance(value, bool) and name in _EXPECTED and name not in ("compile", "gradient_checkpointing"):
            yield (name,), value, f"got {value!r}, expected {_EXPECTED[name]}"


def _explained(wrong: ValidationError) -> Iterator[_Problem]:
    """One problem per option, in our words; those of sections have been put into words already."""
    seen: set[str | int] = set()
    for error in wrong.errors(include_url=False):
        where, value, words = error["loc"], error["input"], error["msg"]
        if error["type"] != _IN_WORDS and where and str(where[0]) in _EXPECTED:
            if where[0] in seen:
                continue
            seen.add(where[0])
            where = where[:1]
            got = "it is missing" if error["type"] == "missing" else f"got {value!r}"
            words = f"{got}, expected {_EXPECTED[str(where[0])]}"
        yield where, value, words


def _detail(where: tuple[str | int, ...], value: Any, words: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError(_IN_WORDS, "{words}", {"words": words}), loc=where, input=value)
