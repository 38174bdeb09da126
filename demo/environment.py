"""The environment variables of every process of a stack; also for commands and tests that talk to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from .credentials import Credentials, KeyPair, SecretFiles
from .settings import StackSettings

BUCKET = "gpucost"
REGION = "us-east-1"
LOOPBACK = "127.0.0.1,localhost,::1"

PASSED_ON = frozenset(
    ["HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"]
    + ["SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]
    + [name for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (upper, upper.lower())]
)
PASSED_ON_PREFIXES = ("LC_", "OMP_", "OPENBLAS_", "MKL_")
"""Variables of the user's shell that our services see. Any other could change what they do, or hand them real cloud
credentials."""

MIXED = frozenset(["PATH", "NO_PROXY", "no_proxy"])
"""Variables that begin or end with something of ours, and hold the user's besides."""


def address(port: int) -> str:
    """The URL of a service on the loopback."""
    return f"http://127.0.0.1:{port}"


def base_environment(settings: StackSettings, outer: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every service gets: a little of the user's environment, and the virtual environment's programs first."""
    outer = os.environ if outer is None else outer
    environment = {key: value for key, value in outer.items() if is_passed_on(key)}
    no_proxy = outer.get("NO_PROXY") or outer.get("no_proxy") or ""
    no_proxy = ",".join(filter(None, [no_proxy, LOOPBACK]))
    nowhere = str(settings.home / "no-aws-config")
    return environment | {
        "PATH": f"{settings.python.parent}{os.pathsep}{outer.get('PATH', os.defpath)}",
        "PYTHONPATH": os.pathsep.join([str(settings.repository / "plugins"), str(settings.repository)]),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "DO_NOT_TRACK": "true",
        "NO_COLOR": "1",
        # A rehearsal must not find the user's own cloud account, whatever goes wrong.
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
    }


def is_passed_on(name: str) -> bool:
    """Is this a variable that services take over from the user's shell?"""
    return name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)


def ours(environment: Mapping[str, str]) -> dict[str, str]:
    """What of a service's environment does not come from the user's shell.

    A running service is left alone when `up` comes from another shell (over ssh, of an editor, of cron): a restart
    would take the machines of a running training away, and no variable of the shell is worth that.
    """
    return {key: value for key, value in environment.items() if not is_passed_on(key) and key not in MIXED}


def gpucost_environment(settings: StackSettings, ports: Mapping[str, int], credentials: Credentials) -> dict[str, str]:
    """gpucost's connections and options, for Airflow's processes and for `gpucost` on the command line.

    Args:
        settings: the stack's settings.
        ports: the chosen ports, by the names of `settings.DEFAULT_PORTS`; a service without a port gets no connection.
        credentials: the stack's secrets; they are in the returned values.
    """
    environment = {
        "AIRFLOW_CONN_GPUCOST_DB": _connection("generic", extra={"url": settings.database_url}),
        "AIRFLOW__GPUCOST__SITES_FILE": str(settings.home / "sites.yaml"),
    }
    if "rehearsal" in ports:
        cloud = address(ports["rehearsal"])
        environment["AIRFLOW_CONN_GPUCOST_AWS"] = _aws(credentials.cloud, endpoint_url=cloud)
        environment["AIRFLOW__GPUCOST__CLOCK_URL"] = f"{cloud}/rehearsal/clock"
    if "s3" in ports:
        store = _aws(credentials.store, endpoint_url=address(ports["s3"]), bucket=BUCKET)
        environment["AIRFLOW_CONN_GPUCOST_STORE"] = store
    if "mlflow" in ports:
        environment["AIRFLOW_CONN_GPUCOST_MLFLOW"] = _connection("http", host=address(ports["mlflow"]))
    return environment


def airflow_environment(settings: StackSettings, ports: Mapping[str, int], credentials: Credentials) -> dict[str, str]:
    """Airflow's own options, and gpucost's."""
    home = settings.home / "airflow"
    url = address(ports["airflow"])
    beat = str(settings.heartbeat_timeout)
    options = {
        "CORE__DAGS_FOLDER": str(settings.repository / "dags"),
        "CORE__PLUGINS_FOLDER": str(settings.repository / "plugins"),
        "CORE__EXECUTOR": "LocalExecutor",
        "CORE__PARALLELISM": str(settings.parallelism),
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__FERNET_KEY": credentials.fernet_key,
        "CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
        "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(SecretFiles(settings.home / "secrets").passwords),
        "CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}",
        "DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
        "API__HOST": "127.0.0.1",
        "API__PORT": str(ports["airflow"]),
        "API__BASE_URL": url,
        "API__WORKERS": "1",
        "API__SECRET_KEY": credentials.api_secret,
        "API_AUTH__JWT_SECRET": credentials.jwt_secret,
        "LOGGING__COLORED_CONSOLE_LOG": "False",
        # No log servers: they would listen on every network of this machine, and the api-server reads the same files.
        # It asks them all the same while a task runs; at port 1 nobody else can answer.
        "LOGGING__WORKER_LOG_SERVER_PORT": "1",
        "LOGGING__TRIGGER_LOG_SERVER_PORT": "1",
        # A new DAG is seen within seconds; a known one is parsed again only now and then, to spare the cores.
        "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "DAG_PROCESSOR__BUNDLE_REFRESH_CHECK_INTERVAL": "2",
        "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
        "DAG_PROCESSOR__PARSING_PROCESSES": "1",
        "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": beat,
        "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": beat,
        "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": beat,
    }
    environment = {f"AIRFLOW__{name}": value for name, value in options.items()}
    environment |= {"AIRFLOW_HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}
    return environment | gpucost_environment(settings, ports, credentials) | dict(settings.airflow_options)


def mlflow_environment(ports: Mapping[str, int], credentials: Credentials) -> dict[str, str]:
    """The MLflow server's options: its artifacts are in the object store, and it starts no job runners."""
    return {
        "AWS_ACCESS_KEY_ID": credentials.store.access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.store.secret_key,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "MLFLOW_S3_ENDPOINT_URL": address(ports["s3"]),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Job runners serve GenAI evaluation; they would take 600 MB.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _connection(kind: str, **fields: object) -> str:
    return json.dumps({"conn_type": kind, **fields})


def _aws(pair: KeyPair, **extra: str) -> str:
    return _connection("aws", login=pair.access_key, password=pair.secret_key, extra={"region_name": REGION, **extra})
