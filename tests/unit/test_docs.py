"""The documentation names what there is, and only that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
from pydantic import BaseModel
from typer.main import get_command

from gpucost import gpus
from gpucost.db.tables import Base
from gpucost.job import TrainingJob
from gpucost.placement.policies.registry import make_policy
from gpucost.recipe import Options, Recipe
from gpucost.rehearsal.api.actions import ACTIONS, REFUSED
from gpucost.rehearsal.control import Control
from gpucost.rehearsal.faults.control import FaultsControl
from gpucost.rehearsal.faults.credentials import Credentials, CredentialsChange
from gpucost.rehearsal.faults.injector import Injector
from gpucost.rehearsal.faults.rules import NEEDS, FaultRule, FaultSet, Kind
from gpucost.rehearsal.interruptions.fate import Habits
from gpucost.rehearsal.interruptions.script import InterruptionKind, Rule, RuleSet
from gpucost.rehearsal.market.file import MarketFile, PoolOffer
from gpucost.rehearsal.protocol import catalogue
from gpucost.rehearsal.services.app import OWN_ACTIONS
from gpucost.rehearsal.settings import Settings
from gpucost.rehearsal.terminal import app as terminal

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def requirements(name: str) -> set[str]:
    lines = (ROOT / name).read_text().splitlines()
    return {re.split(r"[\[=<>]", line)[0].lower() for line in lines if line and not line.startswith(("#", "-r"))}


def test_every_table_and_column_is_explained() -> None:
    page = (ROOT / "docs/reference/tables.md").read_text()
    for table in Base.metadata.sorted_tables:
        section = page.split(f"## {table.name}\n", 1)
        assert len(section) == 2, f"{table.name} has no section"
        named = set(re.findall(r"`(\w+)`", section[1].split("\n## ")[0]))
        assert {column.name for column in table.columns} <= named, table.name


def test_every_direct_dependency_has_its_reason() -> None:
    page = (ROOT / "docs/dependencies.md").read_text().lower()
    first_cells = {name.strip() for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for name in row.split(",")}
    assert requirements("requirements.txt") | requirements("requirements-dev.txt") <= first_cells


def test_every_direct_dependency_is_in_the_lock_with_the_same_version() -> None:
    lock = {line.lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if "==" in line:
                pinned = re.sub(r"\[.*\]", "", line).lower().replace("_", "-")
                assert pinned in {entry.replace("_", "-") for entry in lock}, pinned


def test_every_field_of_the_job_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    named = set(re.findall(r"`(\w+)`", page.split("## The job")[1]))
    assert set(TrainingJob.model_fields) <= named


RECIPE = "docs/reference/recipe.md"


def test_options_of_a_recipe() -> None:
    assert first_cells(section("Options", RECIPE)) == set(Recipe.model_fields)


def test_every_option_of_a_recipe_was_measured_or_says_why_not() -> None:
    measured = " ".join(first_cells(section("Measured", RECIPE)))
    assert set(Options.model_fields) == set(re.findall(r"(\w+):", measured))


def test_gpus_that_recipes_know() -> None:
    told = re.findall(r"^\| `(.+)` \| (.+) \| (.+) \|$", section("GPUs that are known", RECIPE), re.MULTILINE)
    known = [gpu for kind in gpus.KINDS if (gpu := gpus.find(kind))]
    assert told == [
        (
            gpu.kind,
            "{}.{}".format(*gpu.capability) if gpu.capability else "not for CUDA",
            ", ".join(f"{memory:g}" for memory in gpu.memory_gib),
        )
        for gpu in known
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_commands_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`|^\$ make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.MULTILINE), target
    for path in re.findall(r"`((?:docs|dags|include|plugins|tests|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_policy_that_the_reference_calls_the_first_one_is_there() -> None:
    assert make_policy("greedy").name == "greedy"


REHEARSAL = "docs/reference/rehearsal.md"


def section(title: str, page: str = REHEARSAL) -> str:
    """What stands below a heading, up to the next one."""
    parts = (ROOT / page).read_text().split(f"## {title}\n", 1)
    assert len(parts) == 2, f"{page} has no section {title!r}"
    return re.split(r"^## ", parts[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> set[str]:
    """Everything between backticks in the first column of tables."""
    rows = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def options(command: str | None = None) -> set[str]:
    group = get_command(terminal)
    found = group.commands[command] if command else group  # type: ignore[attr-defined]
    return {name for parameter in found.params for name in parameter.opts if name.startswith("--")} - {"--help"}


def test_the_rehearsals_options_are_the_terminals_and_the_other_settings_are_named() -> None:
    text = section("Options")
    assert first_cells(text) == options()
    as_options = {name.removeprefix("--").replace("-", "_") for name in options()}
    from_python = set(re.findall(r"`(\w+)`\s\(", text.split("From Python only")[1].split("\n\n")[0]))
    assert as_options | from_python == set(Settings.model_fields)
    assert not as_options & from_python


def test_defaults_of_the_rehearsals_options_are_the_settings_own() -> None:
    table = dict(re.findall(r"^\| `--([\w-]+)` \| .+ \| ([\d.]+) \|$", section("Options"), re.MULTILINE))
    for name, default in table.items():
        field = Settings.model_fields[name.replace("-", "_")]
        if field.default is not None:
            assert float(default) == field.default, name
    from_python = dict(re.findall(r"`(\w+)`\s\(([\d.]+)", section("Options").split("From Python only")[1]))
    assert {name: float(value) for name, value in from_python.items()} == {
        name: Settings.model_fields[name].default for name in from_python
    }


def test_the_rehearsals_commands_and_their_options() -> None:
    text = section("Commands")
    assert {name.split()[0] for name in first_cells(text)} == set(get_command(terminal).commands)  # type: ignore[attr-defined]
    told = set(re.findall(r"`(--[\w-]+)`", text))
    assert told == options("status") | options("interrupt") | options("invoice")
    assert set(get_args(InterruptionKind)) <= set(re.findall(r"`([\w-]+)`", text))


def test_the_rehearsals_endpoints() -> None:
    control = Control(*[Mock()] * 6, FaultsControl(Injector(), Credentials("1")))
    _, answer = control.answer("GET", "nowhere", b"")
    assert isinstance(answer, dict)
    known = set(answer["error"].split("expected one of ")[1].split(", "))
    assert first_cells(section("Endpoints")) == known


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("Script rules", Rule),
        ("Habits", Habits),
        ("Credentials", CredentialsChange),
    ],
)
def test_fields_of_the_rehearsals_files_and_bodies(title: str, model: type[BaseModel]) -> None:
    assert first_cells(section(title)) == set(model.model_fields)


def test_defaults_of_habits_are_those_of_the_code() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| .+ \| ([\d.]+) \|$", section("Habits"), re.MULTILINE))
    assert {name: float(value) for name, value in told.items()} == Habits().model_dump()


def test_fault_kinds_with_what_they_need_and_fields_of_fault_rules() -> None:
    kinds, fields = section("Fault rules").split("| field |")
    needed = dict(re.findall(r"^\| `([\w-]+)` \| .+ \| (?:`(\w+)` )?\|$", kinds, re.MULTILINE))
    assert needed == {kind: "".join(NEEDS.get(kind, ())) for kind in get_args(Kind)}
    assert first_cells(f"| field |{fields}") == set(FaultRule.model_fields)


def test_codes_of_faults_are_those_of_the_catalogue() -> None:
    codes = section("Fault rules").split("Codes, with")[1]
    assert re.findall(r"`([\w.]+)`", codes) == catalogue.codes()


def test_actions_that_are_rehearsed_and_refused() -> None:
    ours, of_moto = section("Actions of EC2 that are rehearsed").split("From moto's tables")
    assert first_cells(ours) == set(ACTIONS)
    assert set(re.findall(r"`(\w+)`", of_moto)) == set(OWN_ACTIONS)
    refused = section("Actions of EC2 that are refused").split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", refused)) - {"UnsupportedOperation"} == set(REFUSED)


def test_fields_of_a_market_file() -> None:
    named = first_cells(section("A market file", "docs/reference/rehearsal-market.md"))
    assert set(MarketFile.model_fields) <= named
    of_pools = {name.removeprefix("pools.") for name in named if name.startswith("pools.")}
    assert of_pools | {"zone", "instance_type"} == set(PoolOffer.model_fields)


HOW_TO = (ROOT / "docs/how-to/rehearse.md").read_text()


def test_commands_of_the_how_to_have_options_that_exist() -> None:
    commands = re.findall(r"python -m gpucost rehearsal(.*)$", HOW_TO, re.MULTILINE)
    assert len(commands) > 5
    known = options() | options("status") | options("interrupt") | options("invoice")
    for command in commands:
        assert set(re.findall(r"--[\w-]+", command.partition("#")[0])) <= known, command
    named = set(re.findall(r"`(--[\w-]+)[ `]", HOW_TO))
    assert named - {"--event"} <= known


def test_bodies_and_files_of_the_how_to_are_accepted() -> None:
    models = {"script": RuleSet, "faults": FaultSet, "credentials": CredentialsChange}
    bodies = re.findall(r"\$ post (\w+) '(.*?)'$", HOW_TO, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in bodies} == set(models)
    for name, body in bodies:
        models[name].model_validate_json(body)
    (habits,) = re.findall(r"```json\n(.*?)```", HOW_TO, re.DOTALL)
    Habits.model_validate_json(habits)
