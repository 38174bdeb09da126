"""Opens the rooms with Airflow's connections; nothing else in gpucost reads a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseHook

from gpucost import settings

if TYPE_CHECKING:
    from gpucost.lifecycle.opening import AwsAccess, Connections
    from gpucost.lifecycle.services import Services


class GpuCostHook(BaseHook):
    """Makes `Services` from connections.

    Args:
        db_conn_id: connection whose extra `url` is the SQLAlchemy URL of gpucost's database.
        aws_conn_id: AWS connection for buying (login, password, or none of both for the default chain; extra
            `region_name`, `endpoint_url`, `profile_name`).
        store_conn_id: AWS connection for the object store (extra `bucket`, `prefix`, and as above).
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
        """Open the rooms.

        Raises:
            ValueError: a connection or setting is missing or wrong; the message names it.
        """
        from gpucost.lifecycle.opening import open_services

        return open_services(self.connections())

    def connections(self) -> Connections:
        """What the connections and settings say, checked."""
        from pydantic import SecretStr

        from gpucost.lifecycle.opening import Connections

        return Connections(
            database_url=SecretStr(
                self._extra(self.db_conn_id, "url", "an SQLAlchemy URL such as postgresql+psycopg2://user@host/gpucost")
            ),
            sites_file=settings.sites_file(),
            clock_url=settings.clock_url(),
            aws=self._aws(self.aws_conn_id),
            store=self._aws(self.store_conn_id),
            store_url=self._store_url(),
            mlflow_uri=self._mlflow_uri(self.mlflow_conn_id) if self.mlflow_conn_id else None,
        )

    def _extra(self, conn_id: str, name: str, expected: str) -> str:
        value = self.get_connection(conn_id).extra_dejson.get(name)
        if not value:
            raise ValueError(
                f"connection {conn_id}: extra has no {name}, expected {expected}; add it to the connection"
            )
        return str(value)

    def _aws(self, conn_id: str) -> AwsAccess:
        from pydantic import SecretStr

        from gpucost.lifecycle.opening import AwsAccess

        connection = self.get_connection(conn_id)
        extra = connection.extra_dejson
        return AwsAccess(
            access_key=connection.login or None,
            secret_key=SecretStr(connection.password) if connection.password else None,
            session_token=SecretStr(extra["aws_session_token"]) if extra.get("aws_session_token") else None,
            region=extra.get("region_name"),
            endpoint=extra.get("endpoint_url"),
            profile=extra.get("profile_name"),
        )

    def _store_url(self) -> str:
        bucket = self._extra(self.store_conn_id, "bucket", "the bucket's name")
        prefix = str(self.get_connection(self.store_conn_id).extra_dejson.get("prefix", "")).strip("/")
        return f"s3://{bucket}/{prefix}".rstrip("/")

    def _mlflow_uri(self, conn_id: str) -> str:
        connection = self.get_connection(conn_id)
        host = connection.host or ""
        if "://" not in host:
            host = f"{connection.schema or 'http'}://{host}"
        return f"{host}:{connection.port}" if connection.port else host
