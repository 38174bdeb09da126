"""`gpucost rehearsal` with answers that it did not hope for: a sentence, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from gpucost.cli import app as gpucost
from gpucost.rehearsal.terminal import app

MACHINE = {
    "instance_id": "i-1",
    "state": "running",
    "zone": "us-east-1a",
    "instance_type": "g4dn.xlarge",
    "lifecycle": "spot",
    "launched": "2026-11-30T16:00:00+00:00",
    "ended": None,
    "action_at": None,
    "reason": None,
    "tags": {"gpucost:job": "[/red] x [red]job[1]"},
}
STATUS = {"market": "made up", "now": "2026-11-30T16:00:00+00:00", "regions": ["us-east-1"], "instances": [MACHINE]}


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Response]:
    """What the cloud says next."""
    waiting: list[httpx.Response] = []
    monkeypatch.setattr(httpx, "request", lambda *_words, **_options: waiting.pop(0))
    return waiting


def said(result: Result, status: int) -> str:
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def test_a_job_s_name_is_shown_as_it_is(answers: list[httpx.Response]) -> None:
    answers.append(httpx.Response(200, json=STATUS))
    assert "[/red] x [red]job[1]" in said(run("status", "--url", "http://127.0.0.1:1"), 0)


@pytest.mark.parametrize("words", [["status"], ["invoice"], ["interrupt", "i-1"]])
@pytest.mark.parametrize("body", ["<html>", "[]", "{}", ""])
def test_another_server_is_told_from_a_cloud(answers: list[httpx.Response], words: list[str], body: str) -> None:
    answers.append(httpx.Response(200, text=body))
    assert "no rehearsal cloud" in said(run(*words, "--url", "http://127.0.0.1:1"), 1)


def test_what_the_cloud_refuses_is_said_in_its_words(answers: list[httpx.Response]) -> None:
    answers.append(httpx.Response(404, json={"error": "instance_id: i-2 does not exist"}))
    assert said(run("interrupt", "i-2", "--url", "http://127.0.0.1:1"), 1) == "error: instance_id: i-2 does not exist\n"


@pytest.mark.parametrize("url", ["http://[::1", "http://a\nb", "nothing"])
def test_an_address_that_is_none_is_a_sentence(url: str) -> None:
    assert "give --url" in said(run("status", "--url", url), 1)


@pytest.mark.parametrize("content", ["[]", '"x"', "{}", "\x00"])
def test_a_folder_without_a_cloud_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "endpoint.json").write_text(content)
    assert "no rehearsal cloud was started on" in said(run("status", "--state-dir", str(tmp_path)), 1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--market"),
        (["--market", "x", "--speed", "0"], "speed: got 0.0"),
        (["--market", "x", "--boot-s", "inf"], "boot_s: got inf"),
        (["--market", "x", "--origin", "0001-01-01T00:00:00+00:00"], "expected a year from 1970"),
        (["--market", "x", "--origin", "yesterday"], "origin: got 'yesterday'"),
    ],
)
def test_wrong_options_are_named(words: list[str], expected: str) -> None:
    assert expected in said(run(*words), 2)


def test_gpucost_has_the_same_commands() -> None:
    page = CliRunner().invoke(gpucost, ["rehearsal", "--help"])
    assert all(name in page.output for name in ("status", "interrupt", "invoice", "--market", "--speed"))


def test_json_is_whole(answers: list[httpx.Response]) -> None:
    answers.append(httpx.Response(200, json=STATUS))
    found: Any = json.loads(said(run("status", "--json", "--url", "http://127.0.0.1:1"), 0))
    assert found == STATUS
