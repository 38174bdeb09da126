"""The command line: what goes wrong is one message."""

import subprocess

import httpx
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from demo import __main__ as command
from demo.airflow_api import AirflowError
from demo.catalogue import catalogue, internal_ports, public_ports
from demo.settings import SERVICES, StackError
from demo.stack import Stack

PORTS = dict.fromkeys((*public_ports(SERVICES), *internal_ports(SERVICES)), 1)


class Secret(BaseModel):
    password: int


def refused():
    try:
        Secret.model_validate({"password": "hunter2"})
    except ValueError as error:
        return error


REQUEST = httpx.Request("GET", "http://127.0.0.1:1/x")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StackError("no"), "error: no\n"),
        (AirflowError("GET /x: 500"), "error: GET /x: 500\n"),
        (OSError(28, "No space left on device"), "error: [Errno 28] No space left on device\n"),
        (RuntimeError("did not finish"), "error: did not finish\n"),
        (httpx.ReadTimeout("", request=REQUEST), "error: GET http://127.0.0.1:1/x: ReadTimeout\n"),
        (httpx.ReadTimeout("late"), "error: late\n"),
        (subprocess.TimeoutExpired("weed", 3), "error: Command 'weed' timed out after 3 seconds\n"),
        (refused(), "error: Secret is not as expected: password: Input should be a valid integer"),
    ],
)
def test_what_goes_wrong_is_one_line_without_values(error, text, tmp_path, monkeypatch):
    def up(_self):
        raise error

    monkeypatch.setattr(Stack, "up", up)
    result = CliRunner().invoke(command.app, ["up", "--home", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(text)
    assert len(result.stderr.splitlines()) == 1
    assert "hunter2" not in result.output


def test_services_that_stay_up_are_mentioned(tmp_path, monkeypatch):
    monkeypatch.setattr(Stack, "up", lambda _self: (_ for _ in ()).throw(StackError("no")))
    monkeypatch.setattr(Stack, "lives", lambda _self: True)
    result = CliRunner().invoke(command.app, ["up", "--home", str(tmp_path)])
    assert result.stderr.splitlines() == ["error: no", "services are still running; `make down` ends them"]


def test_a_wrong_port_stops_a_start_only(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCOST_AIRFLOW_PORT", "abc")
    run = CliRunner().invoke
    assert "GPUCOST_AIRFLOW_PORT='abc' is not a port" in run(command.app, ["up", "--home", str(tmp_path)]).stderr
    down = run(command.app, ["down", "--home", str(tmp_path)])
    assert (down.exit_code, down.stdout) == (0, "down: nothing was running\n")


def test_an_unknown_service_is_an_error_that_names_the_known_ones(tmp_path):
    result = CliRunner().invoke(command.app, ["up", "--services", "nonsense", "--home", str(tmp_path)])
    assert result.exit_code == 1
    assert "services: ['nonsense'] is none of s3, rehearsal, mlflow, api-server" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speed", "0"], "error: speed: got 0, expected more than 0"),
        (["--market", "nowhere.json"], "nowhere.json, expected a market file, see include/market/"),
        (["--market", "."], "expected a market file, see include/market/"),
    ],
)
def test_a_market_or_speed_that_is_none_is_refused_before_anything_starts(words, said, tmp_path):
    result = CliRunner().invoke(command.app, ["up", "--home", str(tmp_path / "home"), *words])
    assert result.exit_code == 1
    assert said in result.stderr
    assert not (tmp_path / "home").exists()


def test_the_rehearsal_cloud_plays_the_market_and_speed_that_were_asked_for(tmp_path):
    market = tmp_path / "market.json"
    market.write_text("{}")
    stack = command.open_stack(tmp_path, market=market, speed=60)
    rehearsal = next(
        one for one in catalogue(stack.settings, PORTS, stack.credentials()) if one.name == "rehearsal"
    ).command
    assert rehearsal[rehearsal.index("--market") + 1] == str(market)
    assert float(rehearsal[rehearsal.index("--speed") + 1]) == 60
