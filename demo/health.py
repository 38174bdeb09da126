"""Is a service ready? Each check returns None when it is, or in a few words what it still waits for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

import httpx

from .credentials import KeyPair
from .environment import BUCKET, REGION

Check = Callable[[float], str | None]
"""Takes the moment (seconds since the epoch) at which the service was started."""

_WAIT = 6.0
"""Seconds; on a machine whose cores all train, a service takes more than 3 s to answer."""


def http_ok(url: str) -> Check:
    """Ready when `url` answers 200."""

    def check(_started_at: float) -> str | None:
        return _get(url)[1]

    return check


def airflow_component(url: str, component: str) -> Check:
    """Ready when Airflow's api-server at `url` reports a heartbeat of `component` since its start.

    A heartbeat from before the start does not count: right after a restart Airflow still shows the dead one as healthy.
    """

    def check(started_at: float) -> str | None:
        response, problem = _get(f"{url}/api/v2/monitor/health")
        if response is None:
            return f"api-server: {problem}"
        try:
            state = response.json().get(component) or {}
        except ValueError:
            return "api-server: answers no JSON"
        beat = next((value for key, value in state.items() if key.startswith("latest_") and value), None)
        if state.get("status") != "healthy" or beat is None:
            return f"status {state.get('status')}"
        if datetime.fromisoformat(beat).timestamp() < started_at:
            return "no heartbeat yet"
        return None

    return check


def object_store(url: str, keys: KeyPair) -> Check:
    """Ready when the bucket is there (made here at the first start) and takes an object."""
    client: Any = None

    def check(_started_at: float) -> str | None:
        nonlocal client
        from botocore.exceptions import BotoCoreError, ClientError

        client = client or s3_client(url, keys, timeout=_WAIT)
        try:
            _make_bucket(client)
            client.put_object(Bucket=BUCKET, Key="health/probe", Body=b"ok")
            client.delete_object(Bucket=BUCKET, Key="health/probe")
        except (BotoCoreError, ClientError) as error:
            return str(error)[:120]
        return None

    return check


def s3_client(url: str, keys: KeyPair, timeout: float = 30.0) -> Any:
    """A boto3 client for the stack's object store; it does not retry, its callers do."""
    import boto3
    from botocore.config import Config

    config = Config(retries={"max_attempts": 0}, connect_timeout=timeout, read_timeout=timeout, proxies={})
    return boto3.session.Session().client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        region_name=REGION,
        config=config,
    )


def _make_bucket(client: Any) -> None:
    if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=BUCKET)


@cache
def _client() -> httpx.Client:
    # One for all checks: making one costs 50 ms, and the cores are busy while services start.
    return httpx.Client(timeout=_WAIT, trust_env=False)


def _get(url: str) -> tuple[httpx.Response | None, str | None]:
    try:
        response = _client().get(url)
    except httpx.ConnectError:
        return None, "does not listen yet"
    except httpx.HTTPError as error:
        return None, f"{type(error).__name__}: {error}"
    if response.status_code != httpx.codes.OK:
        return None, f"answers {response.status_code}"
    return response, None
