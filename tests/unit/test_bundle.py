"""What is shipped to a node: the same files have the same digest, and the agent needs no Airflow."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpucost.bundle import MAX_CODE_BYTES, digest_of, pack_agent, pack_code, unpack
from gpucost.objects import Objects

FOREIGN = ("airflow", "mlflow", "sqlalchemy", "pandas", "moto", "alembic")


def program(folder: Path, **files: str) -> Path:
    for name, text in ({"train.py": "print(1)\n", "lib/model.py": "x = 1\n"} | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_same_files_have_the_same_digest_whoever_packs_them_and_when(tmp_path: Path) -> None:
    one, two = program(tmp_path / "one"), tmp_path / "two"
    program(two)
    os.utime(two / "train.py", (1, 1))
    (two / "train.py").chmod(0o755)
    assert pack_code(one) == pack_code(two)
    digest, data = pack_code(one)
    assert digest == digest_of(data)


def test_another_byte_or_name_is_another_digest(tmp_path: Path) -> None:
    base = pack_code(program(tmp_path / "one"))[0]
    assert pack_code(program(tmp_path / "two", **{"train.py": "print(2)\n"}))[0] != base
    renamed = program(tmp_path / "three")
    (renamed / "lib" / "model.py").rename(renamed / "lib" / "net.py")
    assert pack_code(renamed)[0] != base


def test_caches_and_repositories_stay_at_home(tmp_path: Path) -> None:
    folder = program(tmp_path, **{"__pycache__/x.pyc": "", ".git/config": "secret", "lib/.venv/bin/python": ""})
    with zipfile.ZipFile(io.BytesIO(pack_code(folder)[1])) as archive:
        assert archive.namelist() == ["lib/model.py", "train.py"]


def test_what_was_packed_is_unpacked(tmp_path: Path) -> None:
    unpack(pack_code(program(tmp_path / "one"))[1], tmp_path / "two")
    assert (tmp_path / "two" / "lib" / "model.py").read_text() == "x = 1\n"


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped-absolute", "lib/../../escaped"])
def test_a_member_outside_the_folder_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("first.py", "x")
        archive.writestr(name, "x")
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ValueError, match="lies outside the target folder; refused"):
        unpack(buffer.getvalue(), target)
    assert list(tmp_path.rglob("*")) == [target]


def test_a_folder_without_a_program_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"code: got .*missing.*expected a folder that holds the program"):
        pack_code(tmp_path / "missing")
    with pytest.raises(ValueError, match="is empty, expected the program's files"):
        pack_code(tmp_path)


def test_data_in_the_code_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with (program(tmp_path) / "data.bin").open("wb") as sparse:
        sparse.truncate(MAX_CODE_BYTES + 1)
    with pytest.raises(ValueError, match=r"holds 200 MiB.*keep data out of the code folder and name it in `data`"):
        pack_code(tmp_path)


def test_the_agent_finds_every_module_of_ours_in_its_zip_and_nothing_foreign() -> None:
    with zipfile.ZipFile(io.BytesIO(pack_agent().data)) as archive:
        sources = {name: archive.read(name).decode() for name in archive.namelist()}
    wanted: set[str] = set()
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source, name)):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: a relative import"
                wanted.add(str(node.module))
    assert not {module for module in wanted if module.split(".")[0] in FOREIGN}
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sources}
    assert {module for module in wanted if module.split(".")[0] == "gpucost"} <= modules


def test_the_agent_starts_from_its_zip_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.zip").write_bytes(pack_agent().data)
    check = (
        "import sys; sys.path.insert(0, 'agent.zip'); import gpucost.training.agent.main as agent;"
        "assert 'agent.zip' in agent.__file__; print(sorted(m for m in sys.modules if m.split('.')[0] in"
        f" {FOREIGN!r}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (answer.stdout.strip(), answer.returncode) == ("[]", 0), answer.stderr


def test_the_agent_s_digest_is_the_same_every_time() -> None:
    assert pack_agent() == pack_agent()
    assert pack_agent().digest == digest_of(pack_agent().data)


def test_publishing_the_agent_again_changes_nothing() -> None:
    objects, agent = Objects.in_memory(), pack_agent()
    agent.publish(objects)
    agent.publish(objects)
    assert [stat.key for stat in objects.scan("agents")] == [agent.key]
    assert objects.get(agent.key) == agent.data


def test_checkpoints_of_a_local_run_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('training')\n")
    before = pack_code(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "head.json").write_text("{}")
    assert pack_code(tmp_path) == before
