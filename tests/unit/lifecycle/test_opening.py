"""Opening the rooms: secrets stay unseen, and what cannot be opened says where it was looked for."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import SecretStr, ValidationError

from gpucost.clock import ClockSpec
from gpucost.lifecycle.opening import AwsAccess, Connections, Ec2Clients, open_services, read_clock
from tests.fakes.rooms import START

KEYS = AwsAccess(
    access_key="GPC1", secret_key=SecretStr("s3cr3t-key"), session_token=SecretStr("s3cr3t-token"), region="us-east-1"
)
SITE = {
    "region": "eu-west-1",
    "image": "ami-1",
    "zones": ["eu-west-1a"],
    "instance_types": {"g4dn.xlarge": {"price": "0.5 USD", "source": "a test", "as_of": START.isoformat()}},
    "store": {"url": "s3://bucket"},
}
URL = "http://127.0.0.1:5050/rehearsal/clock"


def connections(folder: Path, **changes: Any) -> Connections:
    fields: dict[str, Any] = {
        "database_url": SecretStr(f"sqlite:///{folder / 'gpucost.db'}"),
        "sites_file": folder / "sites.yaml",
        "aws": KEYS,
        "store": KEYS,
        "store_url": (folder / "store").as_uri(),
    }
    return Connections(**(fields | changes))


@pytest.mark.parametrize("shown", [repr, str, lambda model: model.model_dump_json(), lambda model: f"{model!r:.5000}"])
def test_no_secret_is_shown(tmp_path: Path, shown: Callable[[Any], str]) -> None:
    url = SecretStr("postgresql+psycopg2://gpucost:s3cr3t-db@db/gpucost")
    for model in (KEYS, connections(tmp_path, database_url=url)):
        assert "s3cr3t" not in shown(model)
        assert "us-east-1" in shown(model)


def test_a_wrong_field_is_refused_by_name_without_its_neighbours_secrets(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="bucket") as refused:
        connections(tmp_path, bucket="gpucost")
    assert "s3cr3t" not in str(refused.value)


def test_the_keys_reach_the_session() -> None:
    found = KEYS.session().get_credentials()
    assert (found.access_key, found.secret_key, found.token) == ("GPC1", "s3cr3t-key", "s3cr3t-token")
    assert KEYS.session().region_name == "us-east-1"


def test_without_keys_the_default_chain_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-outside")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert AwsAccess().session().get_credentials().access_key == "from-outside"


def test_the_rooms_open_with_a_database_that_is_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "sites.yaml").write_text(yaml.safe_dump({"sites": [SITE]}))
    services = open_services(connections(tmp_path))
    assert services.provider.regions() == ["eu-west-1"]
    assert services.leases.open() == []
    services.objects.put("a/b", b"x")
    assert services.objects.get("a/b") == b"x"
    assert services.tracker is None
    assert services.clock.spec == ClockSpec.real()
    services.database.close()


def test_a_region_s_client_is_made_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Session:
        def client(self, service: str, *, region_name: str, **_: Any) -> object:
            made.append(region_name)
            return object()

    monkeypatch.setattr(AwsAccess, "session", lambda access: Session())
    clients = Ec2Clients(KEYS)
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: clients("us-east-1"), range(40)))
    assert len(found) == 1
    assert clients("eu-west-1") not in found
    assert made == ["us-east-1", "eu-west-1"]


def test_a_region_s_client_goes_to_that_region_with_the_keys() -> None:
    client = Ec2Clients(KEYS)("eu-west-1")
    assert client.meta.region_name == "eu-west-1"
    assert client.meta.endpoint_url == "https://ec2.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    ("login", "header"), [("ann", "Basic " + b64encode(b"ann:s3cr3t-mlflow").decode()), (None, "Bearer s3cr3t-mlflow")]
)
def test_mlflow_is_told_who_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str | None, header: str
) -> None:
    (tmp_path / "sites.yaml").write_text(yaml.safe_dump({"sites": [SITE]}))
    sent: list[str | None] = []

    def send(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    signed = connections(
        tmp_path, mlflow_uri="http://mlflow", mlflow_login=login, mlflow_password=SecretStr("s3cr3t-mlflow")
    )
    assert "s3cr3t" not in repr(signed)
    services = open_services(signed)
    assert services.tracker is not None
    services.tracker.set_tags("run", {"gpucost.pool": "a"})
    assert sent == [header]
    services.database.close()


def test_a_missing_sites_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"sites_file: got '.*sites\.yaml', expected a YAML file; set AIRFLOW__GPUCOST"
    ):
        open_services(connections(tmp_path))


def answer(monkeypatch: pytest.MonkeyPatch, reply: Callable[[httpx.Request], httpx.Response]) -> None:
    def get(url: str, *, timeout: float, trust_env: bool) -> httpx.Response:
        with httpx.Client(transport=httpx.MockTransport(reply), timeout=timeout, trust_env=trust_env) as client:
            return client.get(url)

    monkeypatch.setattr(httpx, "get", get)


def test_without_a_rehearsal_time_is_real() -> None:
    assert read_clock(None).spec == ClockSpec.real()


def test_a_rehearsal_s_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClockSpec(origin_real=START, origin=START + timedelta(days=1), speed=120)

    def reply(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == URL
        return httpx.Response(200, content=spec.model_dump_json())

    answer(monkeypatch, reply)
    assert read_clock(URL).spec == spec


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


@pytest.mark.parametrize("reply", [refuse, lambda request: httpx.Response(503)])
def test_a_rehearsal_that_does_not_answer_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, reply: Callable[[httpx.Request], httpx.Response]
) -> None:
    answer(monkeypatch, reply)
    with pytest.raises(ConnectionError, match=f"(?s)clock_url: {URL} does not answer .*start the rehearsal cloud"):
        read_clock(URL)


def test_something_else_at_the_clock_s_address_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, lambda request: httpx.Response(200, text="<html>It works!</html>"))
    with pytest.raises(ValueError, match="ClockSpec"):
        read_clock(URL)
