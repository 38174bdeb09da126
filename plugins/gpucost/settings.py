"""Every setting that gpucost reads, in one place: Airflow's configuration, section `[gpucost]`.

Each can be given as an environment variable, `AIRFLOW__GPUCOST__<NAME>`. Secrets are not settings: they stay in
connections.
"""

from __future__ import annotations

from pathlib import Path

SECTION = "gpucost"

DB_CONN_ID = "gpucost_db"
AWS_CONN_ID = "gpucost_aws"
STORE_CONN_ID = "gpucost_store"
MLFLOW_CONN_ID = "gpucost_mlflow"


def sites_file() -> Path:
    """`sites_file`: the YAML file with the sites in which machines may be bought.

    Raises:
        ValueError: it is not set.
    """
    value = _get("sites_file")
    if not value:
        raise ValueError(
            "[gpucost] sites_file is not set, expected the path of the sites file; set AIRFLOW__GPUCOST__SITES_FILE"
        )
    return Path(value)


def clock_url() -> str | None:
    """`clock_url`: where a rehearsal publishes its clock; not set: real time."""
    return _get("clock_url") or None


def include_folder() -> Path:
    """`include_folder`: where relative code folders are looked for; by default `include` beside the plugins."""
    value = _get("include_folder")
    return Path(value) if value else Path(__file__).resolve().parents[2] / "include"


def _get(name: str) -> str:
    from airflow.sdk.configuration import conf

    return str(conf.get(SECTION, name, fallback=""))
