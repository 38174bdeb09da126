"""Opens the rooms with Airflow's connections; nothing else in gpucost reads a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from airflow.sdk import BaseHook

from gpucost import settings

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from gpucost.lifecycle.opening import AwsAccess, Connections
    from gpucost.lifecycle.services import Services


class GpuCostHook(BaseHook):
    """Makes `Services` from connections.

    Args:
        db_conn_id: connection whose extra `url` is the SQLAlchemy URL of gpucost's database.
        aws_conn_id: AWS connection for buying (login, password, or none of both for the default chain; extra
            `region_name`, `endpoint_url`, `profile_name`).
        store_conn_id: AWS connection for the object store (extra `bucket`, `prefix`, and as above).
        mlflow_conn_id: HTTP connection to MLflow (login and password for basic authentication, a password alone as
            bearer token); None: nothing is tracked.
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
            **(self._mlflow(self.mlflow_conn_id) if self.mlflow_conn_id else {}),
        )

    def _connection(self, conn_id: str) -> Connection:
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            return self.get_connection(conn_id)
        except AirflowNotFoundException as missing:
            raise ValueError(
                f"connection {conn_id}: there is none; add it, or set AIRFLOW_CONN_{conn_id.upper()}"
            ) from missing

    def _extra(self, conn_id: str, name: str, expected: str) -> str:
        value = self._connection(conn_id).extra_dejson.get(name)
        if not value:
            raise ValueError(
                f"connection {conn_id}: extra has no {name}, expected {expected}; add it to the connection"
            )
        return str(value)

    def _aws(self, conn_id: str) -> AwsAccess:
        from pydantic import SecretStr

        from gpucost.lifecycle.opening import AwsAccess

        connection = self._connection(conn_id)
        extra = connection.extra_dejson
        if bool(connection.login) != bool(connection.password):
            missing, given = ("password", "login") if connection.login else ("login", "password")
            raise ValueError(
                f"connection {conn_id}: {missing} is empty, expected one with its {given}; "
                "give both (access key and secret key), or none for the default chain"
            )
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
        prefix = str(self._connection(self.store_conn_id).extra_dejson.get("prefix", "")).strip("/")
        return f"s3://{bucket}/{prefix}".rstrip("/")

    def _mlflow(self, conn_id: str) -> dict[str, Any]:
        from pydantic import SecretStr

        connection = self._connection(conn_id)
        host = connection.host or ""
        if not host:
            raise ValueError(
                f"connection {conn_id}: host is empty, expected MLflow's address such as http://mlflow.example:5000; "
                "fill it in"
            )
        if "://" not in host:
            host = f"{connection.schema or 'http'}://{host}"
        parts = urlsplit(host)
        # A login may also be written into the address, where it would be shown.
        plain = parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1]).geturl()
        login = connection.login or unquote(parts.username or "") or None
        password = connection.password or unquote(parts.password or "")
        if login and not password:
            raise ValueError(
                f"connection {conn_id}: password is empty, expected one with its login; "
                "give both, a password alone as bearer token, or none where MLflow asks for none"
            )
        return {
            "mlflow_uri": f"{plain}:{connection.port}" if connection.port else plain,
            "mlflow_login": login,
            "mlflow_password": SecretStr(password) if password else None,
        }
