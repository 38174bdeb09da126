"""Opens the rooms with Airflow's connections; nothing else in gpucost reads a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from gpucost import settings

if TYPE_CHECKING:
    from boto3.session import Session

    from gpucost.clock import SpecClock
    from gpucost.lifecycle.services import Services
    from gpucost.objects import Objects


class GpuCostHook(BaseHook):
    """Makes `Services` from connections.

    Args:
        db_conn_id: connection whose extra `url` is the SQLAlchemy URL of gpucost's database.
        aws_conn_id: AWS connection for buying (login, password, or none of both for the default chain; extra
            `region_name`, `endpoint_url`).
        store_conn_id: AWS connection for the object store (extra `bucket`, `prefix`, `endpoint_url`).
        mlflow_conn_id: HTTP connection to MLflow; None: nothing is tracked.
    """

    conn_name_attr = "db_conn_id"

    def __init__(
        self,
        db_conn_id: str = settings.DB_CONN_ID,
        aws_conn_id: str = settings.AWS_CONN_ID,
        store_conn_id: str = settings.STORE_CONN_ID,
        mlflow_conn_id: str | None = settings.MLFLOW_CONN_ID,
    ) -> None:
        super().__init__()
        self.db_conn_id = db_conn_id
        self.aws_conn_id = aws_conn_id
        self.store_conn_id = store_conn_id
        self.mlflow_conn_id = mlflow_conn_id

    def services(self) -> Services:
        """Open the rooms: the database is brought up to date, sites and clock are read.

        Raises:
            ValueError: a connection or setting is missing or wrong; the message names it.
        """
        from gpucost.bundle import pack_agent
        from gpucost.capacity.providers.ec2 import Ec2
        from gpucost.capacity.sites import load_sites
        from gpucost.db.engine import Database
        from gpucost.lifecycle.services import Services
        from gpucost.tracking.mlflow_tracker import Tracker

        clock = read_clock(settings.clock_url())
        database = Database(self._database_url())
        database.migrate()
        sites = load_sites(settings.sites_file())
        agent, _ = pack_agent()
        tracker = Tracker(self._mlflow_uri(), clock=clock) if self.mlflow_conn_id else None
        return Services(
            clock=clock,
            database=database,
            objects=self._objects(),
            provider=Ec2(self._ec2_client, sites, f"agents/{agent}.zip"),
            tracker=tracker,
        )

    def _database_url(self) -> str:
        url = self.get_connection(self.db_conn_id).extra_dejson.get("url")
        if not url:
            raise ValueError(
                f"connection {self.db_conn_id}: extra has no url, expected an SQLAlchemy URL such as "
                "postgresql+psycopg2://user:password@host/gpucost"
            )
        return str(url)

    def _mlflow_uri(self) -> str:
        connection = self.get_connection(str(self.mlflow_conn_id))
        host = connection.host or ""
        if "://" not in host:
            host = f"{connection.schema or 'http'}://{host}"
        return f"{host}:{connection.port}" if connection.port else host

    def _objects(self) -> Objects:
        from gpucost.objects import Objects

        connection = self.get_connection(self.store_conn_id)
        extra = connection.extra_dejson
        bucket = extra.get("bucket")
        if not bucket:
            raise ValueError(f"connection {self.store_conn_id}: extra has no bucket, expected the bucket's name")
        prefix = str(extra.get("prefix", "")).strip("/")
        return Objects.open(
            f"s3://{bucket}/{prefix}",
            endpoint=extra.get("endpoint_url"),
            region=extra.get("region_name"),
            session=_session(connection),
        )

    def _ec2_client(self, region: str) -> Any:
        from botocore.config import Config

        connection = self.get_connection(self.aws_conn_id)
        return _session(connection).client(
            "ec2",
            region_name=region,
            endpoint_url=connection.extra_dejson.get("endpoint_url"),
            config=Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 5}),
        )


def read_clock(url: str | None) -> SpecClock:
    """The rehearsal's clock when there is one, else real time.

    Raises:
        ValueError: the rehearsal does not answer; the message says where.
    """
    from gpucost.clock import ClockSpec, SpecClock

    if url is None:
        return SpecClock()
    import httpx

    try:
        answer = httpx.get(url, timeout=10, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError as away:
        raise ValueError(
            f"[gpucost] clock_url: {url} does not answer ({away}); start the rehearsal cloud, or unset it for real time"
        ) from away
    return SpecClock(ClockSpec.model_validate_json(answer.content))


def _session(connection: Any) -> Session:
    import boto3

    extra = connection.extra_dejson
    return boto3.Session(
        aws_access_key_id=connection.login or None,
        aws_secret_access_key=connection.password or None,
        region_name=extra.get("region_name"),
        profile_name=extra.get("profile_name"),
    )
