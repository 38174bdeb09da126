"""The documentation names what there is, and only that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpucost.db.tables import Base
from gpucost.job import TrainingJob
from gpucost.placement.policies.registry import make_policy

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
