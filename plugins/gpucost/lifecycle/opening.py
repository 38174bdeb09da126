"""Opening the rooms: from addresses and credentials to `Services`, the same for Airflow, the terminal and tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gpucost.bundle import pack_agent
from gpucost.clock import ClockSpec, SpecClock
from gpucost.lifecycle.services import Services

if TYPE_CHECKING:
    from boto3.session import Session


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
    mlflow_uri: str | None = Field(default=None, description="None: nothing is tracked.")


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
    from gpucost.tracking.mlflow_tracker import Tracker

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
        provider=Ec2(lambda region: _ec2_client(connections.aws, region), sites, agent.key),
        agent=agent,
        tracker=Tracker(connections.mlflow_uri, clock=clock) if connections.mlflow_uri else None,
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


def _ec2_client(access: AwsAccess, region: str) -> Any:
    from botocore.config import Config

    return access.session().client(
        "ec2",
        region_name=region,
        endpoint_url=access.endpoint,
        config=Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 5}),
    )
