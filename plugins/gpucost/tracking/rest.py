"""The part of MLflow's REST API that the tracker needs, bounded in time.

Why not MLflow's own client: docs/decisions/0003-mlflow-client.md. The API: https://mlflow.org/docs/latest/rest-api.html
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

import httpx

API = "api/2.0/mlflow"
ARTIFACTS = "api/2.0/mlflow-artifacts/artifacts"


class TrackingAway(RuntimeError):
    """MLflow could not be told now; tell it later. Training goes on.

    `status` is the HTTP status of a refusal and `code` MLflow's error code; both are None when nobody answered.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class MlflowRest:
    """Calls an MLflow server; one try per call, as the caller comes back anyway.

    Args:
        uri: the server's address, e.g. `http://127.0.0.1:5000`; a user and password in it are used.
        login: user and password, where the server wants them.
        token: a bearer token, where the server wants one.
        timeout: seconds that a call may wait for the server's answer.
        transport: stands in for the network, for tests.

    Raises:
        ValueError: `uri` is not an http(s) address.
    """

    def __init__(
        self,
        uri: str,
        *,
        login: tuple[str, str] | None = None,
        token: str | None = None,
        timeout: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not uri.startswith(("http://", "https://")):
            raise ValueError(
                f"uri: got {uri.split('://')[0]!r} as scheme, expected the http(s) address of an MLflow server such as "
                "'http://127.0.0.1:5000'; file stores are not shared between machines"
            )
        # httpx logs the address of each request: a password must not be part of it.
        self.uri, in_uri = _without_login(uri.rstrip("/"))
        login = login or in_uri
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            auth=httpx.BasicAuth(*login) if login else None,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 3.0)),
            transport=transport,
        )

    def get(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """GET one of MLflow's methods, e.g. `runs/get`.

        Raises:
            TrackingAway: no answer in time, or a refusal.
        """
        return self._json(self._send("GET", f"{API}/{path}", params=dict(query)))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST one of MLflow's methods, e.g. `runs/create`.

        Raises:
            TrackingAway: no answer in time, or a refusal.
        """
        return self._json(self._send("POST", f"{API}/{path}", json=dict(body)))

    def put_artifact(self, path: str, data: bytes) -> None:
        """Store an artifact through the server.

        Raises:
            TrackingAway: no answer in time, or a refusal.
        """
        self._send("PUT", f"{ARTIFACTS}/{quote(path.lstrip('/'))}", content=data)

    def close(self) -> None:
        """Give back the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, f"{self.uri}/{path}", **content)
        except httpx.HTTPError as error:
            raise TrackingAway(f"MLflow did not answer {method} {path}: {type(error).__name__}: {error}") from error
        if not answer.is_success:
            code, message = _refusal(answer)
            raise TrackingAway(
                f"MLflow refused {method} {path}: {answer.status_code} {code or ''} {message}",
                status=answer.status_code,
                code=code,
            )
        return answer

    @staticmethod
    def _json(answer: httpx.Response) -> dict[str, Any]:
        try:
            body = answer.json()
        except ValueError as error:
            raise TrackingAway(f"MLflow's answer is no JSON: {answer.text[:200]!r}; check the address") from error
        if not isinstance(body, dict):
            raise TrackingAway(f"MLflow's answer is no JSON object: {answer.text[:200]!r}; check the address")
        return body


def _without_login(uri: str) -> tuple[str, tuple[str, str] | None]:
    parts = urlsplit(uri)
    if parts.username is None:
        return uri, None
    plain = parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]).geturl()
    return plain, (unquote(parts.username), unquote(parts.password or ""))


def _refusal(answer: httpx.Response) -> tuple[str | None, str]:
    """MLflow's error code and message, or the start of whatever answered in its place."""
    try:
        body = answer.json()
        return str(body["error_code"]), str(body.get("message", ""))[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, answer.text[:200]
