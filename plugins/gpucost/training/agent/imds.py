"""What does the machine's own cloud say about it? EC2's instance metadata, version 2 (IMDSv2).

Source: EC2 user guide, "Access instance metadata" and "Spot Instance interruption notices". A session token
is fetched by PUT and sent with every GET; a path that has nothing to say answers 404.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

DEFAULT_BASE = "http://169.254.169.254/"
TOKEN_SECONDS = 300
TIMEOUT_SECONDS = 2.0

Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, str]]
"""(method, url, headers) -> (status, body); raises OSError when there is no answer."""


def fetch(method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """One HTTP request, bounded in time; a 4xx or 5xx is an answer, not an error.

    Raises:
        OSError: no answer.
    """
    request = urllib.request.Request(url, method=method, headers=dict(headers))  # noqa: S310
    # Metadata is link-local: a proxy from the environment must not be asked for it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            return response.status, response.read(65536).decode()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, ""
    except http.client.HTTPException as broken:
        raise OSError(f"instance metadata: {url} answered no HTTP: {broken!r}") from broken


class Metadata:
    """The instance metadata service.

    Args:
        environ: `AWS_EC2_METADATA_SERVICE_ENDPOINT` may name another base, with a path prefix.
        fetch: makes one request.
        real: real seconds, monotonic.
    """

    def __init__(
        self, environ: Mapping[str, str], fetch: Fetch = fetch, real: Callable[[], float] = time.monotonic
    ) -> None:
        self.base = (environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or DEFAULT_BASE).rstrip("/")
        self._fetch = fetch
        self._real = real
        self._token = ""
        self._token_until = 0.0

    def get(self, path: str) -> str | None:
        """What the service says under `latest/meta-data/<path>`; None when it answers 404.

        Raises:
            OSError: no answer, or one that is neither 200 nor 404.
        """
        status, body = self._get(path)
        if status == 401:
            self._token = ""
            status, body = self._get(path)
        if status == 404:
            return None
        if status != 200:
            raise OSError(f"instance metadata: {self.base} answered {status} for {path}")
        return body

    def tag(self, key: str) -> str | None:
        """The instance's tag `key`; None without such a tag, or where tags in metadata are off."""
        return self.get(f"tags/instance/{key}")

    def _get(self, path: str) -> tuple[int, str]:
        url = f"{self.base}/latest/meta-data/{path}"
        return self._fetch("GET", url, {"X-aws-ec2-metadata-token": self._fresh_token()})

    def _fresh_token(self) -> str:
        if self._token and self._real() < self._token_until:
            return self._token
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        status, token = self._fetch("PUT", f"{self.base}/latest/api/token", headers)
        if status != 200:
            raise OSError(f"instance metadata: {self.base} answered {status} for a session token")
        self._token, self._token_until = token, self._real() + TOKEN_SECONDS / 2
        return token
