"""Who may use the cloud: programs of this machine, and no web page."""

from __future__ import annotations

from typing import Any

import pytest
from werkzeug.test import EnvironBuilder

from gpucost.rehearsal import callers


def environ(host: str = "127.0.0.1:8080", method: str = "POST", kind: str = "", **headers: str) -> dict[str, Any]:
    made = EnvironBuilder("/", method=method, headers={"Host": host, **headers}).get_environ()
    return {**made, "CONTENT_TYPE": kind}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost:8080", "LocalHost", "[::1]", "[::1]:8080"])
def test_programs_of_this_machine_are_answered(host: str) -> None:
    assert callers.refusal(environ(host)) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", "127.0.0.1:80:80", ""]
)
def test_who_asks_for_another_name_is_refused(host: str) -> None:
    assert f"Host: got {host!r}, expected 127.0.0.1" in str(callers.refusal(environ(host)))


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"Origin": "https://evil.example"}, "Origin: got 'https://evil.example'"),
        ({"Origin": "null"}, "Origin: got 'null'"),
        ({"Sec-Fetch-Site": "cross-site"}, "Sec-Fetch-Site: got 'cross-site'"),
        ({"Sec-Fetch-Site": "same-site"}, "Sec-Fetch-Site: got 'same-site'"),
        ({"Sec-Fetch-Site": "none"}, "None"),
        ({"Sec-Fetch-Site": "same-origin"}, "None"),
    ],
)
def test_web_pages_are_refused(headers: dict[str, str], refused: str) -> None:
    assert str(callers.refusal(environ(**headers))).startswith(refused)


def test_bodies_must_say_that_they_are_json() -> None:
    assert callers.no_json(environ(kind="application/json; charset=utf-8")) is None
    assert callers.no_json(environ(method="GET")) is None
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert f"Content-Type: got {kind!r}, expected application/json" in str(callers.no_json(environ(kind=kind)))
