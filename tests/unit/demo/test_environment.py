"""The environment of Airflow's processes and of commands."""

import json
import os
import stat
from pathlib import Path

import pytest

from demo.catalogue import catalogue, internal_ports, is_migrated, public_ports
from demo.credentials import SecretFiles
from demo.environment import airflow_environment, base_environment, gpucost_environment, mlflow_environment
from demo.settings import SERVICES, StackError, StackSettings

PORTS = {"airflow": 8080, "mlflow": 5000, "s3": 8333, "rehearsal": 5050}


@pytest.fixture
def settings(tmp_path):
    return StackSettings(home=tmp_path / "home", repository=tmp_path / "repository", python=Path("/venv/bin/python"))


@pytest.fixture
def credentials(settings):
    return SecretFiles(settings.home / "secrets").load()


def test_connections_are_json_that_airflow_understands(settings, credentials):
    environment = gpucost_environment(settings, PORTS, credentials)
    found = {key: json.loads(value) for key, value in environment.items() if key.startswith("AIRFLOW_CONN_")}
    assert found["AIRFLOW_CONN_GPUCOST_DB"] == {
        "conn_type": "generic",
        "extra": {"url": f"sqlite:///{settings.home}/gpucost.db"},
    }
    assert found["AIRFLOW_CONN_GPUCOST_AWS"]["extra"]["endpoint_url"] == "http://127.0.0.1:5050"
    store = found["AIRFLOW_CONN_GPUCOST_STORE"]
    assert (store["login"], store["password"]) == (credentials.store.access_key, credentials.store.secret_key)
    assert store["extra"] == {
        "region_name": "us-east-1",
        "endpoint_url": "http://127.0.0.1:8333",
        "bucket": "gpucost",
    }
    assert found["AIRFLOW_CONN_GPUCOST_MLFLOW"] == {"conn_type": "http", "host": "http://127.0.0.1:5000"}
    assert environment["AIRFLOW__GPUCOST__CLOCK_URL"] == "http://127.0.0.1:5050/rehearsal/clock"


def test_a_service_that_is_not_there_gets_no_connection(settings, credentials):
    environment = gpucost_environment(settings, {"s3": 8333}, credentials)
    assert "AIRFLOW_CONN_GPUCOST_STORE" in environment
    assert "AIRFLOW_CONN_GPUCOST_AWS" not in environment
    assert "AIRFLOW_CONN_GPUCOST_MLFLOW" not in environment


def test_nodes_have_a_key_of_their_own_that_airflow_does_not_know(settings, credentials):
    text = json.dumps(airflow_environment(settings, PORTS, credentials))
    assert credentials.node.secret_key not in text
    assert credentials.node.secret_key in SecretFiles(settings.home / "secrets").node.read_text()


def test_the_users_own_cloud_and_airflow_do_not_reach_the_services(settings):
    outer = {
        "AWS_PROFILE": "prod",
        "AWS_SECRET_ACCESS_KEY": "real",
        "AIRFLOW__CORE__FERNET_KEY": "real",
        "MLFLOW_TRACKING_URI": "https://real",
        "GPUCOST_S3_PORT": "1",
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin",
        "NO_PROXY": "intranet",
    }
    environment = base_environment(settings, outer)
    assert environment["LANG"] == "C.UTF-8"
    assert environment["PATH"] == "/venv/bin:/usr/bin"
    assert environment["NO_PROXY"] == "intranet,127.0.0.1,localhost,::1"
    assert "real" not in environment.values()
    assert "AWS_PROFILE" not in environment
    assert not Path(environment["AWS_SHARED_CREDENTIALS_FILE"]).exists()


def test_another_shell_is_no_reason_to_restart_a_service(settings, credentials, monkeypatch):
    ports = PORTS | dict.fromkeys(internal_ports(SERVICES), 20_001)
    shells = [{"PATH": "/usr/bin", "HOME": "/root", "TERM": "xterm", "LANG": "C"}]
    shells += [
        {"PATH": "/opt/bin:/bin", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "3", "no_proxy": "x", "SSH_TTY": "/dev/1"}
    ]
    seen = []
    for shell in shells:
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in shell.items():
            monkeypatch.setenv(name, value)
        seen.append({spec.name: spec.fingerprint for spec in catalogue(settings, ports, credentials)})
    assert seen[0] == seen[1]
    moved = {spec.name: spec.fingerprint for spec in catalogue(settings, ports | {"airflow": 8081}, credentials)}
    assert moved["scheduler"] != seen[0]["scheduler"]


def test_only_what_services_need_is_taken_from_the_shell(settings):
    outer = {"HTTPS_PROXY": "http://p", "LC_ALL": "C", "PYTHONPATH": "/mine", "PYTHONSTARTUP": "x", "DATABASE_URL": "y"}
    environment = base_environment(settings, outer)
    assert (environment["HTTPS_PROXY"], environment["LC_ALL"]) == ("http://p", "C")
    assert not {"PYTHONSTARTUP", "DATABASE_URL"} & set(environment)
    assert "/mine" not in environment["PYTHONPATH"]


def test_a_damaged_stamp_of_the_migration_means_to_migrate_again(settings):
    folder = settings.home / "airflow"
    folder.mkdir(parents=True)
    (folder / "airflow.db").touch()
    (folder / "migrated.json").write_bytes(b"\xff{")
    assert not is_migrated(settings)


def test_an_unknown_service_is_refused_with_the_known_ones():
    with pytest.raises(StackError, match=r"services: \['nonsense'\] is none of s3, rehearsal, mlflow"):
        StackSettings(services=("s3", "nonsense"))


def test_nobody_is_told_that_we_run(settings, credentials):
    ports = PORTS | dict.fromkeys(internal_ports(SERVICES), 20_001)
    store = next(spec for spec in catalogue(settings, ports, credentials) if spec.name == "s3")
    assert "-master.telemetry=false" in store.command
    assert mlflow_environment(PORTS, credentials)["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_options_of_the_settings_win(settings, credentials):
    from dataclasses import replace

    chosen = replace(settings, airflow_options={"AIRFLOW__CORE__DAGS_FOLDER": "/other"}, heartbeat_timeout=11)
    environment = airflow_environment(chosen, PORTS, credentials)
    assert environment["AIRFLOW__CORE__DAGS_FOLDER"] == "/other"
    assert environment["AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT"] == "11"


def test_no_secret_is_on_a_command_line_or_in_a_file_that_others_can_read(settings, credentials):
    ports = PORTS | dict.fromkeys(internal_ports(SERVICES), 20_001)
    for spec in catalogue(settings, ports, credentials):
        assert not any(secret in " ".join(spec.command) for secret in credentials.values()), spec.name
        assert not any(secret in repr(spec) for secret in credentials.values()), spec.name
    for path in (path for path in settings.home.rglob("*") if path.is_file()):
        if any(secret in path.read_text() for secret in credentials.values()):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_the_store_listens_on_the_loopback_and_on_no_fixed_port(settings, credentials):
    ports = PORTS | {name: 20_000 + number for number, name in enumerate(internal_ports(SERVICES))}
    store = next(spec for spec in catalogue(settings, ports, credentials) if spec.name == "s3")
    options = dict(part[1:].split("=", 1) for part in store.command if "=" in part)
    listening = {key: value for key, value in options.items() if ".port" in key}
    assert {value for value in listening.values() if value != "0"} == {"8333", *map(str, range(20_000, 20_007))}
    assert listening["s3.port.iceberg"] == listening["s3.port.lance"] == "0"
    assert options["ip"] == options["ip.bind"] == "127.0.0.1"


def test_only_the_ports_that_are_needed_are_asked_for():
    assert public_ports(("s3", "scheduler")) == ("s3", "airflow")
    assert public_ports(("mlflow",)) == ("mlflow",)
    assert internal_ports(("mlflow",)) == ()
