"""Which recipe is meant by a name? A YAML file below include/, read where the job is planned, not on nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from gpucost.recipe import Recipe

RECIPES = "recipes"
"""The folder below the include folder where recipes are looked for, too."""


def load_recipe(name: str, *folders: Path) -> Recipe:
    """Read a recipe.

    Args:
        name: the file's path below a folder or below its `recipes`, with or without `.yaml`: `small_memory`.
        folders: where it may be, the first one first: the include folder, for example.

    Raises:
        ValueError: the file is missing, lies elsewhere, or is wrong; the message names it, each option, and what was
            expected.
    """
    import yaml

    path = next((one for folder in folders for one in _places(name, folder) if one.is_file()), None)
    if path is None:
        there = ", ".join(sorted(one.stem for folder in folders for one in (folder / RECIPES).glob("*.yaml"))) or "none"
        below = " or ".join(map(str, folders))
        raise ValueError(f"recipe: got {name!r}, expected the name of a YAML file below {below}; there are: {there}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as broken:  # ValueError: no UTF-8, or a date that is none.
        raise ValueError(f"recipe: {path} is not YAML: {' '.join(str(broken).split())}") from broken
    try:
        return Recipe.model_validate({} if content is None else content)
    except ValidationError as wrong:
        faults = (".".join(map(str, error["loc"])) + f": {error['msg']}" for error in wrong.errors())
        raise ValueError(f"recipe: {path}: {'; '.join(fault.removeprefix(': ') for fault in faults)}") from wrong


def _places(name: str, folder: Path) -> Iterator[Path]:
    for place in (folder / name, folder / f"{name}.yaml", folder / RECIPES / name, folder / RECIPES / f"{name}.yaml"):
        if place.resolve().is_relative_to(folder.resolve()):
            yield place
