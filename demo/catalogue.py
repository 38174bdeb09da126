"""The services of gpucost's stack: their commands, what each waits for, and how long it may take to leave."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from gpucost.rehearsal.machines.guard import guards

from . import health
from .credentials import Credentials, SecretFiles
from .environment import address, airflow_environment, base_environment, gpucost_environment, mlflow_environment
from .records import write_private
from .service import ServiceSpec
from .settings import AIRFLOW_SERVICES, StackSettings

STORE_PORTS = ("s3-grpc", "master", "master-grpc", "volume", "volume-grpc", "filer", "filer-grpc")
STORE_SOCKETS = ("s3", "s3-grpc", "master-grpc", "volume-grpc", "filer", "filer-grpc")
MIGRATE_AIRFLOW = "airflow-migrate"
MIGRATE_GPUCOST = "gpucost-migrate"


def public_ports(services: tuple[str, ...]) -> tuple[str, ...]:
    """The ports with a well-known default that these services need."""
    names = [name for name in ("s3", "rehearsal", "mlflow") if name in services]
    return (*names, "airflow") if set(AIRFLOW_SERVICES) & set(services) else tuple(names)


def internal_ports(services: tuple[str, ...]) -> tuple[str, ...]:
    """The ports that only the services themselves use."""
    return STORE_PORTS if "s3" in services else ()


def catalogue(settings: StackSettings, ports: Mapping[str, int], credentials: Credentials) -> list[ServiceSpec]:
    """The specs of the services that `settings` asks for, and of the steps they need, in the order of the table."""
    base = base_environment(settings)
    makers = {"s3": _store, "rehearsal": _rehearsal, "mlflow": _mlflow}
    specs = [maker(settings, ports, credentials, base) for name, maker in makers.items() if name in settings.services]
    if set(AIRFLOW_SERVICES) & set(settings.services):
        specs += _airflow(settings, ports, credentials, base)
    return specs


def _store(
    settings: StackSettings, ports: Mapping[str, int], credentials: Credentials, base: Mapping[str, str]
) -> ServiceSpec:
    """SeaweedFS on the loopback.

    Its data survive `down` and `up`. Two things were measured (seaweedfs 4.48): with the master's own raft state of an
    earlier start it takes 17-20 s until it serves, without it 3.5 s, and every object is there all the same, for the
    master learns the volumes from the volume server. So that state is removed before a start. And on SIGTERM it takes
    15-25 s to leave, while a SIGKILL lost no object that it had confirmed: it gets 1 s, after everybody else has gone.
    """
    data = settings.home / "s3"
    files = SecretFiles(settings.home / "secrets")

    def prepare() -> None:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        for raft in data.glob("m[0-9]*"):
            shutil.rmtree(raft)

    options = {
        "dir": str(data),
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": ports["master"],
        "master.port.grpc": ports["master-grpc"],
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,
        "volume.port": ports["volume"],
        "volume.port.grpc": ports["volume-grpc"],
        "volume.max": 100,
        "volume.preStopSeconds": 0,
        "filer": "true",
        "filer.port": ports["filer"],
        "filer.port.grpc": ports["filer-grpc"],
        "s3": "true",
        "s3.port": ports["s3"],
        "s3.port.grpc": ports["s3-grpc"],
        # Fixed listeners that nobody uses; a second stack on this machine would die of them.
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": str(files.store_config),
    }
    arguments = tuple(f"-{key}={value}" for key, value in options.items())
    url = address(ports["s3"])
    return ServiceSpec(
        name="s3",
        command=(str(settings.python.parent / "weed"), "-logtostderr=true", "server", *arguments),
        environment=base,
        check=health.object_store(url, credentials.store),
        address=url,
        prepare=prepare,
        # Its sockets' names are fixed (TMPDIR changes nothing).
        leftovers=tuple(f"/tmp/seaweedfs-{kind}-{ports[kind]}.sock" for kind in STORE_SOCKETS),  # noqa: S108
        stop_grace=1.0,
        stop_wave=1,
    )


def _rehearsal(
    settings: StackSettings, ports: Mapping[str, int], _credentials: Credentials, base: Mapping[str, str]
) -> ServiceSpec:
    url = address(ports["rehearsal"])
    arguments = {
        "--port": ports["rehearsal"],
        "--state-dir": settings.home / "rehearsal",
        "--market": settings.market_file,
        "--speed": settings.speed,
        "--role-credentials": SecretFiles(settings.home / "secrets").node,
        "--image-path": settings.python.parent,
        # on a busy machine `up` takes longer than the usual 30 s to have a killed cloud back
        "--keep-machines-real-s": 90,
    }
    flat = [str(part) for pair in arguments.items() for part in pair]
    return ServiceSpec(
        name="rehearsal",
        command=(str(settings.python), "-m", "gpucost.rehearsal", *flat, *settings.rehearsal_arguments),
        environment=base,
        check=health.http_ok(f"{url}/rehearsal/health"),
        address=url,
        code=source_digest(settings.repository / "plugins"),
        # When it is killed, its machines go on for a while: `up` within it goes on with them.
        survivors=lambda: guards(settings.home / "rehearsal"),
        # On SIGTERM it would leave its machines running for another start; this ends all of them.
        stop_signal=signal.SIGINT,
        stop_grace=10.0,
    )


def _mlflow(
    settings: StackSettings, ports: Mapping[str, int], credentials: Credentials, base: Mapping[str, str]
) -> ServiceSpec:
    url = address(ports["mlflow"])
    folder = settings.home / "mlflow"
    command = [str(settings.python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(ports["mlflow"])]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", "s3://gpucost/mlflow"]
    return ServiceSpec(
        name="mlflow",
        command=tuple(command),
        environment={**base, **mlflow_environment(ports, credentials)},
        check=health.http_ok(f"{url}/health"),
        address=url,
        # It touches the store only when an artifact comes: starting beside it saves its 10 s.
        prepare=lambda: folder.mkdir(parents=True, exist_ok=True, mode=0o700),
    )


def _airflow(
    settings: StackSettings, ports: Mapping[str, int], credentials: Credentials, base: Mapping[str, str]
) -> list[ServiceSpec]:
    url = address(ports["airflow"])
    environment = {**base, **airflow_environment(settings, ports, credentials)}
    program = (str(settings.python), "-m", "airflow")
    checks = {
        "api-server": health.http_ok(f"{url}/api/v2/monitor/health"),
        "scheduler": health.airflow_component(url, "scheduler"),
        "dag-processor": health.airflow_component(url, "dag_processor"),
        "triggerer": health.airflow_component(url, "triggerer"),
    }
    code = source_digest(settings.repository / "plugins")
    arguments = {"scheduler": ("--skip-serve-logs",), "triggerer": ("--skip-serve-logs",)}
    steps = _migrations(settings, ports, credentials, base)
    return steps + [
        ServiceSpec(
            name=name,
            command=(*program, name, *arguments.get(name, ())),
            environment=environment,
            check=checks[name],
            address=url if name == "api-server" else None,
            through=None if name == "api-server" else "api-server",
            after=tuple(step.name for step in steps),
            code=code,
        )
        for name in AIRFLOW_SERVICES
        if name in settings.services
    ]


def _migrations(
    settings: StackSettings, ports: Mapping[str, int], credentials: Credentials, base: Mapping[str, str]
) -> list[ServiceSpec]:
    """Steps that bring both databases to their present schema; Airflow's takes 10 s and is left out when done."""
    steps = []
    environment = {**base, **airflow_environment(settings, ports, credentials)}
    if not is_migrated(settings):
        home = settings.home / "airflow"
        steps.append(
            ServiceSpec(
                name=MIGRATE_AIRFLOW,
                command=(str(settings.python), "-m", "airflow", "db", "migrate"),
                environment=environment,
                prepare=lambda: home.mkdir(parents=True, exist_ok=True, mode=0o700),
                done=lambda: remember_migrated(settings),
            )
        )
    steps.append(
        ServiceSpec(
            name=MIGRATE_GPUCOST,
            command=(str(settings.python), "-m", "demo.migrate", settings.database_url),
            environment={**base, **gpucost_environment(settings, ports, credentials)},
        )
    )
    return steps


def is_migrated(settings: StackSettings) -> bool:
    """Has this version of Airflow migrated this database already?"""
    stamp = settings.home / "airflow" / "migrated.json"
    if not stamp.exists() or not (settings.home / "airflow" / "airflow.db").exists():
        return False
    try:
        return bool(json.loads(stamp.read_bytes()) == _airflow_version())
    except ValueError:  # a damaged stamp: the migration is done once more
        return False


def remember_migrated(settings: StackSettings) -> None:
    """Call when `airflow db migrate` has succeeded."""
    write_private(settings.home / "airflow" / "migrated.json", json.dumps(_airflow_version()))


def _airflow_version() -> dict[str, str]:
    return {"apache-airflow-core": version("apache-airflow-core")}


def source_digest(folder: Path) -> str:
    """Digest of the Python files below a folder: Airflow's forked workers keep the code that the scheduler loaded."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
