"""What Airflow sees: light DAG files with a form, and a plugin folder from which only `plugin.py` is executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "mlflow", "boto3", "botocore", "pandas", "moto", "numpy", "obstore", "pyarrow", "sklearn")

LOOK = """
import json, runpy, sys
from airflow.plugins_manager import _get_plugins
plugins, errors = _get_plugins()
executed = sorted(
    name for name, module in sys.modules.items()
    if "." not in name and str(getattr(module, "__file__", "")).startswith(PLUGINS + "/gpucost/")
)
from airflow.sdk import DAG
airflow_s_own = set(sys.modules)
dags = {}
for path in sys.argv[1:]:
    found = [value for value in runpy.run_path(path).values() if isinstance(value, DAG)]
    for dag in found:
        dags[dag.dag_id] = {
            "file": path,
            "schedule": str(dag.schedule),
            "params": {name: param.dump() if hasattr(param, "dump") else param for name, param in dag.params.items()},
            "schemas": {name: dag.params.get_param(name).schema for name in dag.params},
            "titles": {name: dag.params.get_param(name).schema.get("title") for name in dag.params},
            "tasks": {task.task_id: [type(task).__name__, task.retries] for task in dag.tasks},
            "doc": dag.doc_md,
        }
print("ANSWER" + json.dumps({
    "plugins": [plugin.name for plugin in plugins],
    "errors": {str(key): str(value) for key, value in errors.items()},
    "executed": executed,
    "by_dags": sorted(set(sys.modules) - airflow_s_own),
    "dags": dags,
}, default=str))
"""


@cache
def seen() -> dict[str, Any]:
    """What a fresh process of Airflow's sees; importing Airflow takes seconds, so that all tests here share one."""
    import tempfile

    home = tempfile.mkdtemp(prefix="airflow-home-")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")} | {
        "AIRFLOW_HOME": home,
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PYTHONPATH": str(ROOT / "plugins"),
    }
    files = sorted(str(path) for path in (ROOT / "dags").glob("*.py"))
    answer = subprocess.run(
        [sys.executable, "-c", f"PLUGINS = {str(ROOT / 'plugins')!r}{LOOK}", *files],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(answer.stdout.rsplit("ANSWER", 1)[1])  # type: ignore[no-any-return]


def test_the_plugin_loads_without_errors() -> None:
    assert seen()["plugins"].count("gpucost") == 1
    assert seen()["errors"] == {}


def test_the_loader_executes_no_module_of_the_package_but_the_plugin() -> None:
    # The loader puts what it executes into sys.modules by its bare name: a `types` or `clock` would shadow others.
    assert seen()["executed"] == ["plugin"]


def test_dag_files_import_nothing_heavy() -> None:
    roots = {name.split(".")[0] for name in seen()["by_dags"]}
    assert not roots & set(HEAVY)
    assert not [name for name in seen()["by_dags"] if name.startswith("gpucost.rehearsal")]
    assert not [name for name in seen()["by_dags"] if name.startswith(("gpucost.db", "gpucost.training"))]
    assert "gpucost.operators.training" in seen()["by_dags"], "otherwise this test would see nothing"


@pytest.mark.parametrize("path", sorted((ROOT / "dags").glob("*.py")), ids=lambda path: path.stem)
def test_every_dag_file_holds_a_dag_that_says_what_it_is_for(path: Path) -> None:
    mine = [dag for dag in seen()["dags"].values() if dag["file"] == str(path)]
    assert mine
    assert all(dag["doc"] for dag in mine)


def test_the_training_has_a_form() -> None:
    dag = seen()["dags"]["spot_training"]
    asked = {"name", "code", "arguments", "gpu_kinds", "work_hours", "deadline_hours", "budget_usd", "seed"}
    assert asked <= set(dag["params"])
    assert all(dag["titles"].values()), "every field has a title"
    assert {schema["type"] for schema in dag["schemas"].values()} <= {"string", "array", "number", "integer"}
    assert dag["schedule"] == "None"


def test_the_training_retries_what_a_retry_can_mend() -> None:
    assert seen()["dags"]["spot_training"]["tasks"] == {"train": ["SpotTrainingOperator", 3]}
