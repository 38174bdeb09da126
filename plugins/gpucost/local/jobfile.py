"""What does the job file say? YAML with the fields of a `TrainingJob`, completed for a run on this machine.

Fields that only matter when machines are bought may be left out; what is given is checked as in Airflow.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpucost.job import TrainingJob
from gpucost.recipe_file import load_recipe

INCLUDE_VARIABLE = "AIRFLOW__GPUCOST__INCLUDE_FOLDER"
LONGEST_VALUE = 60
"""Characters of a value that are shown."""
NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""ValueError: what looks like a date, or a number, and is none, such as 2026-13-45."""
_OWN_WORDS = "Value error, "
_EXPECTED = ("Input should be ", "Input should ", "String should ", "Tuple should ", "List should ")


class JobFileError(ValueError):
    """The job cannot be run as it is written.

    Args:
        faults: one line each.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class JobFile:
    """A job as its file says it.

    Args:
        path: of the file.
        job: what is wanted.
        code: the folder with the program, found.
    """

    path: Path
    job: TrainingJob
    code: Path


def include_folder(environ: Mapping[str, str]) -> Path:
    """Where relative code folders are looked for beside the job file's own; as Airflow's setting says."""
    named = environ.get(INCLUDE_VARIABLE)
    return Path(named) if named else Path(__file__).resolve().parents[3] / "include"


def read_job(path: Path, changes: Sequence[str], include: Path, now: datetime) -> JobFile:
    """Read a job file.

    Args:
        path: of the file.
        changes: `FIELD=VALUE`, with dots for fields within fields; they replace what the file says.
        include: the folder include/.
        now: the present moment; what the file leaves out about buying is filled in from it.

    Raises:
        JobFileError: naming each field, its value and what was expected.
    """
    fields = _mapping(path, "the job's fields, such as 'name: digits'")
    folders = (path.absolute().parent, include)
    for change in changes:
        _apply(fields, change, folders)
    if isinstance(fields.get("recipe"), str):
        fields["recipe"] = _recipe(fields["recipe"], folders)
    if isinstance(fields.get("data"), dict):
        fields["data"] = {name: _located(name, uri, folders[0]) for name, uri in fields["data"].items()}
    bought = {"work_hours": 1.0, "deadline": now + timedelta(days=365)}
    try:
        job = TrainingJob.model_validate(bought | fields)
    except ValidationError as wrong:
        raise JobFileError([_fault(one) for one in wrong.errors(include_url=False)]) from wrong
    return JobFile(path, job, _code(job, folders))


def _mapping(path: Path, holds: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as unreadable:
        why = unreadable.strerror if isinstance(unreadable, OSError) else "it is no UTF-8 text"
        raise JobFileError([f"cannot be read: {why}; expected a YAML file with {holds}"]) from unreadable
    except NO_YAML as broken:
        raise JobFileError([f"is no YAML: {' '.join(str(broken).split())}"]) from broken
    if not isinstance(content, dict):
        raise JobFileError([f"got {_shown(content)}, expected {holds}"])
    return content


def _apply(fields: dict[str, Any], change: str, folders: tuple[Path, Path]) -> None:
    name, equals, text = change.partition("=")
    *outer, last = name.strip().split(".")
    if not equals or not last or not all(outer):
        raise JobFileError([f"--set: got {change!r}, expected FIELD=VALUE such as seed=3 or recipe.batch=64"])
    if outer and outer[0] == "recipe" and isinstance(fields.get("recipe"), str):
        fields["recipe"] = _recipe(fields["recipe"], folders)
    place = fields
    for part in outer:
        inner = place.get(part)
        if inner is not None and not isinstance(inner, dict):
            raise JobFileError([f"--set {name}: {part} is {_shown(inner)}, expected one that has fields"])
        # A copy: YAML's aliases make one mapping appear in two places.
        place[part] = dict(inner or {})
        place = place[part]
    try:
        place[last] = yaml.safe_load(text)
    except NO_YAML as broken:
        raise JobFileError([f"--set {name}: got {text!r}, expected a YAML value such as 3 or [a, b]"]) from broken


def _recipe(name: str, folders: tuple[Path, Path]) -> dict[str, Any]:
    try:
        return load_recipe(name, *folders).model_dump(mode="json")
    except ValueError as wrong:
        raise JobFileError([str(wrong)]) from wrong


def _located(name: str, uri: Any, folder: Path) -> Any:
    """A path beside the job file as the URI that a node needs; anything else as it is."""
    if not isinstance(uri, str) or "://" in uri:
        return uri
    path = folder / uri
    if not path.exists():
        raise JobFileError([f"data.{name}: got {uri!r}, expected s3://, file:///, or a path that exists in {folder}"])
    return path.resolve().as_uri()


def _code(job: TrainingJob, folders: tuple[Path, Path]) -> Path:
    found = [place / job.code for place in folders if (place / job.code).is_dir()]
    if not found:
        looked = " or ".join(str(place) for place in folders)
        raise JobFileError([f"code: got {job.code!r}, expected a folder with the program, in {looked}"])
    if not (found[0] / job.program).is_file():
        raise JobFileError([f"program: {job.program!r} is not in {str(found[0])!r}, expected a file there"])
    return found[0].resolve()


def _fault(one: ErrorDetails) -> str:
    """One line for one finding of pydantic."""
    place = ".".join(str(part) for part in one["loc"])
    kind, message = one["type"], one["msg"]
    if kind == "missing":
        return f"{place}: is missing, expected it in the job file" + _described(one["loc"])
    if kind == "extra_forbidden":
        return f"{place}: got {_shown(one['input'])}, expected no such field{_meant(one['loc'])}"
    if message.startswith((_OWN_WORDS, "got ")):
        message = message.removeprefix(_OWN_WORDS)
        return f"{place}: {message}" if place else message
    for opening in _EXPECTED:
        if message.startswith(opening):
            message = f"expected {message.removeprefix(opening).removeprefix('have ')}"
    return f"{place}: got {_shown(one['input'])}, {message[:1].lower()}{message[1:]}"


def _described(loc: tuple[int | str, ...]) -> str:
    field = _model_at(loc[:-1]).model_fields.get(str(loc[-1]))
    return f": {field.description}" if field and field.description else ""


def _meant(loc: tuple[int | str, ...]) -> str:
    known = list(_model_at(loc[:-1]).model_fields)
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = TrainingJob
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(_models(field.annotation), model)
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
