"""Connections and settings as Airflow keeps them; whatever is missing is named with its connection and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpucost.hooks.gpucost import GpuCostHook

AWS = {"conn_type": "aws", "login": "GPC1", "password": "s3cr3t", "extra": {"region_name": "us-east-1"}}
STORE = AWS | {"extra": {"bucket": "models", "prefix": "/team/a/", "endpoint_url": "http://127.0.0.1:8333"}}
GIVEN: dict[str, Any] = {
    "DB": {"conn_type": "generic", "extra": {"url": "sqlite:////data/gpucost.db"}},
    "AWS": AWS,
    "STORE": STORE,
    "MLFLOW": {"conn_type": "http", "host": "mlflow.example", "schema": "https", "port": 5000},
}


def give(patch: pytest.MonkeyPatch, **changes: Any) -> GpuCostHook:
    """The hook, with these connections in the environment; None: that one is missing."""
    for name, connection in (GIVEN | changes).items():
        variable = f"AIRFLOW_CONN_GPUCOST_{name}"
        patch.delenv(variable, raising=False)
        if connection is not None:
            patch.setenv(variable, json.dumps(connection))
    return GpuCostHook()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPUCOST__SITES_FILE", "/etc/gpucost/sites.yaml")
    monkeypatch.delenv("AIRFLOW__GPUCOST__CLOCK_URL", raising=False)


def test_connections_and_settings_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = give(monkeypatch).connections()
    assert found.database_url.get_secret_value() == "sqlite:////data/gpucost.db"
    assert found.sites_file == Path("/etc/gpucost/sites.yaml")
    assert found.clock_url is None
    assert (found.aws.access_key, found.aws.region, found.aws.endpoint) == ("GPC1", "us-east-1", None)
    assert found.aws.secret_key is not None
    assert found.aws.secret_key.get_secret_value() == "s3cr3t"
    assert found.store.endpoint == "http://127.0.0.1:8333"
    assert found.store_url == "s3://models/team/a"
    assert found.mlflow_uri == "https://mlflow.example:5000"
    assert "s3cr3t" not in repr(found)


@pytest.mark.parametrize(
    ("connection", "uri"),
    [
        ({"host": "http://127.0.0.1:5000"}, "http://127.0.0.1:5000"),
        ({"host": "mlflow.example"}, "http://mlflow.example"),
        ({"host": "https://mlflow.example", "port": 443}, "https://mlflow.example:443"),
    ],
)
def test_mlflow_s_address_in_every_form(monkeypatch: pytest.MonkeyPatch, connection: Any, uri: str) -> None:
    assert give(monkeypatch, MLFLOW={"conn_type": "http"} | connection).connections().mlflow_uri == uri


@pytest.mark.parametrize(
    ("connection", "login"),
    [
        ({"host": "mlflow.example", "login": "ann", "password": "s3cr3t"}, "ann"),
        ({"host": "mlflow.example", "password": "s3cr3t"}, None),
        ({"host": "http://ann:s3cr3t@mlflow.example"}, "ann"),
    ],
)
def test_mlflow_s_login_arrives_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, connection: Any, login: str | None
) -> None:
    found = give(monkeypatch, MLFLOW={"conn_type": "http"} | connection).connections()
    assert (found.mlflow_uri, found.mlflow_login) == ("http://mlflow.example", login)
    assert found.mlflow_password is not None
    assert found.mlflow_password.get_secret_value() == "s3cr3t"
    assert "s3cr3t" not in repr(found)


def test_without_mlflow_nothing_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, MLFLOW=None)
    assert GpuCostHook(mlflow_conn_id=None).connections().mlflow_uri is None


def test_without_keys_the_default_chain_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    role = {"conn_type": "aws", "extra": {"profile_name": "trainer", "aws_session_token": "s3cr3t"}}
    access = give(monkeypatch, AWS=role).connections().aws
    assert (access.access_key, access.secret_key, access.profile) == (None, None, "trainer")
    assert access.session_token is not None


def test_a_bucket_s_root_needs_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert give(monkeypatch, STORE=AWS | {"extra": {"bucket": "models"}}).connections().store_url == "s3://models"


def without(connection: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in connection.items() if name != field}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"DB": None}, "gpucost_db: there is none.*AIRFLOW_CONN_GPUCOST_DB"),
        ({"AWS": None}, "gpucost_aws: there is none"),
        ({"STORE": None}, "gpucost_store: there is none"),
        ({"MLFLOW": None}, "gpucost_mlflow: there is none"),
        ({"DB": {"conn_type": "generic"}}, "gpucost_db: extra has no url, expected an SQLAlchemy URL"),
        ({"STORE": AWS}, "gpucost_store: extra has no bucket"),
        ({"AWS": without(AWS, "password")}, "gpucost_aws: password is empty"),
        ({"AWS": without(AWS, "login")}, "gpucost_aws: login is empty"),
        ({"STORE": without(STORE, "password")}, "gpucost_store: password is empty"),
        ({"MLFLOW": {"conn_type": "http", "port": 5000}}, "gpucost_mlflow: host is empty"),
        ({"MLFLOW": {"conn_type": "http", "host": "m", "login": "ann"}}, "gpucost_mlflow: password is empty"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=f"connection {names}") as wrong:
        give(monkeypatch, **changes).connections()
    assert "s3cr3t" not in str(wrong.value)


def test_a_missing_sites_file_is_a_setting_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW__GPUCOST__SITES_FILE")
    with pytest.raises(ValueError, match=r"\[gpucost\] sites_file is not set.*AIRFLOW__GPUCOST__SITES_FILE"):
        give(monkeypatch).connections()
