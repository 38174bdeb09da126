"""What is wrong with an option, a file or a request? The findings of pydantic in this project's words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FAULTS_TOLD = 8
"""Of one file; a trace has thousands of values."""

LONGEST_VALUE = 60
"""Characters of a value that are shown."""

_OWN_WORDS = frozenset({"value_error", "assertion_error"})
"""Errors that our validators raise: their sentences name the field and the value already."""

_EXPECTED = ("Input should be ", "Input should ", "String should ", "List should ")
"""How pydantic begins to say what it wants."""

Model = TypeVar("Model", bound=BaseModel)


def faults(error: ValidationError, whole: str = "file") -> list[str]:
    """One line for each field at fault, such as `speed: got 0.0, expected greater than 0`.

    Args:
        error: pydantic's.
        whole: what to call what was checked, where no field of it is at fault.
    """
    return [_fault(one, whole) for one in error.errors(include_url=False)]


def in_one_line(error: ValidationError, whole: str = "file") -> str:
    """The same, the first few of many."""
    found = faults(error, whole)
    more = [f"and {len(found) - FAULTS_TOLD} more"] if len(found) > FAULTS_TOLD else []
    return "; ".join(found[:FAULTS_TOLD] + more)


def read_model(path: Path, model: type[Model], name: str, expected: str = "") -> Model:
    """Read a JSON file.

    Args:
        path: the file.
        model: what it holds.
        name: of the option that gives it, for messages.
        expected: its outer form, for messages.

    Raises:
        ValueError: it cannot be read or is wrong; the message names the option, the file and the fields.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{name}: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        form = f" is not {expected}" if expected else ""
        raise ValueError(f"{name}: {path}{form}: {in_one_line(error)}") from error


def _fault(fault: ErrorDetails, whole: str) -> str:
    place = ".".join(str(part) for part in fault["loc"])
    kind, message = fault["type"], fault["msg"]
    if kind in _OWN_WORDS:
        sentence = message.partition(", ")[2]
        return f"{place}: {sentence}" if place else sentence
    where = place or whole
    if kind == "missing":
        return f"{where}: is missing"
    if kind == "extra_forbidden":
        return f"{where}: got {_shown(fault['input'])}, expected no such field"
    if kind == "json_invalid":
        return f"{where}: {message[:1].lower()}{message[1:]}"
    return f"{where}: got {_shown(fault['input'])}, {_wanted(message)}"


def _wanted(message: str) -> str:
    for opening in _EXPECTED:
        if message.startswith(opening):
            return f"expected {message.removeprefix(opening).removeprefix('have ')}"
    return f"{message[:1].lower()}{message[1:]}"


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (str, list, dict)) else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
