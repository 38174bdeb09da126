"""Opening the rooms: from addresses and credentials to `Services`, the same for Airflow, the terminal and tests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gpucost.bundle import pack_agent
from gpucost.clock import ClockSpec, SpecClock
from gpucost.lifecycle.services import Services

if TYPE_CHECKING:
    from boto3.session import Session

    from gpucost.tracking.mlflow_tracker import Tracker


class AwsAccess(BaseModel):
    """How to reach an AWS service, or one that speaks its language."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    access_key: str | None = Field(default=None, description="None: boto3's default chain.")
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    region: str | None = None
    endpoint: str | None = Field(default=None, description="None: AWS.")
    profile: str | None = None

    def session(self) -> Session:
        """A boto3 session with these credentials."""
        import boto3

        return boto3.Session(
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key.get_secret_value() if self.secret_key else None,
            aws_session_token=self.session_token.get_secret_value() if self.session_token else None,
            region_name=self.region,
            profile_name=self.profile,
        )


class Connections(BaseModel):
    """Everything that has an address; secrets are not shown when it is printed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    database_url: SecretStr = Field(description="SQLAlchemy URL of gpucost's own database.")
    sites_file: Path
    clock_url: str | None = Field(default=None, description="Where a rehearsal publishes its clock; None: real time.")
    aws: AwsAccess
    store: AwsAccess
    store_url: str = Field(description="s3://bucket/prefix")
    mlflow_uri: str | None = Field(default=None, description="Without a login; None: nothing is tracked.")
    mlflow_login: str | None = None
    mlflow_password: SecretStr | None = Field(default=None, description="The login's; without one, a bearer token.")


def open_services(connections: Connections) -> Services:
    """Open the rooms; the database is brought up to date.

    Raises:
        ValueError: the sites file cannot be read; the message says what to do.
        ConnectionError: the rehearsal's clock does not answer.
    """
    from gpucost.capacity.providers.ec2 import Ec2
    from gpucost.capacity.sites import load_sites
    from gpucost.db.engine import Database
    from gpucost.objects import Objects

    clock = read_clock(connections.clock_url)
    database = Database(connections.database_url.get_secret_value())
    database.migrate()
    agent = pack_agent()
    sites = load_sites(connections.sites_file)
    store = connections.store
    return Services(
        clock=clock,
        database=database,
        objects=Objects.open(
            connections.store_url, endpoint=store.endpoint, region=store.region, session=store.session()
        ),
        provider=Ec2(Ec2Clients(connections.aws), sites, agent.key),
        agent=agent,
        tracker=_tracker(connections, clock),
    )


def read_clock(url: str | None) -> SpecClock:
    """The rehearsal's clock when there is one, else real time.

    Raises:
        ConnectionError: the rehearsal does not answer; the message says where.
    """
    if url is None:
        return SpecClock()
    import httpx

    try:
        answer = httpx.get(url, timeout=10, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError as away:
        raise ConnectionError(
            f"[gpucost] clock_url: {url} does not answer ({away}); start the rehearsal cloud, or unset it for real time"
        ) from away
    return SpecClock(ClockSpec.model_validate_json(answer.content))


class Ec2Clients:
    """One EC2 client per region, made at first use; for any thread.

    A client costs half a second of CPU to make, and is safe to share; making one is not.

    Args:
        access: whom the clients sign as.
    """

    def __init__(self, access: AwsAccess) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._made: dict[str, Any] = {}

    def __call__(self, region: str) -> Any:
        """The client of `region`."""
        with self._lock:
            if region not in self._made:
                self._made[region] = self._make(region)
            return self._made[region]

    def _make(self, region: str) -> Any:
        from botocore.config import Config

        self._session = self._session or self._access.session()
        return self._session.client(
            "ec2",
            region_name=region,
            endpoint_url=self._access.endpoint,
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "total_max_attempts": 5},
                max_pool_connections=50,  # All threads of a triggerer use the one client.
            ),
        )


def _tracker(connections: Connections, clock: SpecClock) -> Tracker | None:
    from gpucost.tracking.mlflow_tracker import Tracker

    if connections.mlflow_uri is None:
        return None
    secret = connections.mlflow_password.get_secret_value() if connections.mlflow_password else None
    if connections.mlflow_login is None:
        return Tracker(connections.mlflow_uri, clock=clock, token=secret)
    return Tracker(connections.mlflow_uri, clock=clock, login=(connections.mlflow_login, secret or ""))
