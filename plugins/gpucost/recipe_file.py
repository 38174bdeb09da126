"""Which recipe is meant by a name? A YAML file below include/, read where the job is planned, not on nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from gpucost.recipe import Recipe

RECIPES = "recipes"
"""The folder below the include folder where recipes are looked for, too."""


def load_recipe(name: str, include: Path) -> Recipe:
    """Read a recipe.

    Args:
        name: the file's path below `include` or below its `recipes`, with or without `.yaml`: `small_memory`.
        include: the include folder.

    Raises:
        ValueError: the file is missing, lies elsewhere, or is wrong; the message names it, each option, and what was
            expected.
    """
    import yaml

    path = next((one for one in _places(name, include) if one.is_file()), None)
    if path is None:
        there = ", ".join(sorted(one.stem for one in (include / RECIPES).glob("*.yaml"))) or "none"
        raise ValueError(f"recipe: got {name!r}, expected the name of a YAML file below {include}; there are: {there}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as broken:
        raise ValueError(f"recipe: {path} is not YAML: {' '.join(str(broken).split())}") from broken
    try:
        return Recipe.model_validate({} if content is None else content)
    except ValidationError as wrong:
        faults = (".".join(map(str, error["loc"])) + f": {error['msg']}" for error in wrong.errors())
        raise ValueError(f"recipe: {path}: {'; '.join(fault.removeprefix(': ') for fault in faults)}") from wrong


def _places(name: str, include: Path) -> Iterator[Path]:
    for place in (
        include / name,
        include / f"{name}.yaml",
        include / RECIPES / name,
        include / RECIPES / f"{name}.yaml",
    ):
        if place.resolve().is_relative_to(include.resolve()):
            yield place
