"""What a stack is started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

SERVICES = ("s3", "rehearsal", "mlflow", "api-server", "scheduler", "dag-processor", "triggerer")
"""Everything `make up` starts; a stack may be asked for fewer."""

AIRFLOW_SERVICES = ("api-server", "scheduler", "dag-processor", "triggerer")

DEFAULT_PORTS: Mapping[str, int] = MappingProxyType({"airflow": 8080, "mlflow": 5000, "s3": 8333, "rehearsal": 5050})
PORT_VARIABLES: Mapping[str, str] = MappingProxyType({name: f"GPUCOST_{name.upper()}_PORT" for name in DEFAULT_PORTS})


FASTEST = 100_000.0
"""Rehearsal seconds per real second; the rehearsal cloud takes no more."""


class StackError(Exception):
    """A stack cannot do what was asked; the message says what was expected and what to do."""


@dataclass(frozen=True)
class StackSettings:
    """Where and how a stack runs. Every path is made absolute; durations are real seconds."""

    home: Path = Path(".gpucost")
    repository: Path = field(default_factory=lambda: Path(__file__).resolve().parent.parent)
    services: tuple[str, ...] = SERVICES
    fixed_ports: Mapping[str, int] = field(default_factory=dict)
    """Ports that the user insists on: busy is an error. Keys as in `DEFAULT_PORTS`."""
    any_ports: bool = False
    """Take free ports from the start instead of the defaults (tests)."""
    python: Path = field(default_factory=lambda: Path(sys.executable))
    market: Path | None = None
    """Market file of the rehearsal cloud; by default the three zones of `include/market`. Not a folder of traces: the
    sites file is made from its list prices."""
    speed: float = 120.0
    """Rehearsal seconds per real second, up to `FASTEST`."""
    rehearsal_arguments: tuple[str, ...] = ()
    """More arguments for the rehearsal cloud, e.g. `("--script", "…")`."""
    parallelism: int = 4
    """Tasks that Airflow runs at once; each is a forked worker."""
    heartbeat_timeout: int = 30
    """Seconds until Airflow counts a silent task, and a silent triggerer, as lost (its own default: 300)."""
    airflow_options: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for Airflow's processes, e.g. `AIRFLOW__SCHEDULER__…`; they win over ours."""
    start_deadline: float = 240.0
    """Seconds that one service may take until it is healthy, with everything else starting beside it."""
    patience: float = 15.0
    """Seconds that a running service gets to say that it is well, before it is restarted."""

    def __post_init__(self) -> None:
        for name in ("home", "repository"):
            object.__setattr__(self, name, Path(getattr(self, name)).absolute())
        if self.market is not None:
            object.__setattr__(self, "market", self.market.absolute())
            if not self.market.is_file():
                raise StackError(f"market: got {self.market}, expected a market file, see include/market/")
        if not 0 < self.speed <= FASTEST:
            raise StackError(f"speed: got {self.speed:g}, expected more than 0 and at most {FASTEST:g}")
        unknown = set(self.fixed_ports) - set(DEFAULT_PORTS)
        if unknown:
            raise StackError(f"fixed_ports: {sorted(unknown)} is none of {sorted(DEFAULT_PORTS)}")
        strange = [name for name in self.services if name not in SERVICES]
        if strange:
            raise StackError(f"services: {strange} is none of {', '.join(SERVICES)}")

    @property
    def market_file(self) -> Path:
        """The market that the rehearsal cloud plays."""
        return self.market or self.repository / "include" / "market" / "three_zones.json"

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of gpucost's own database."""
        return f"sqlite:///{self.home / 'gpucost.db'}"


def ports_from_environment(environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """The ports that the user set by `GPUCOST_<SERVICE>_PORT`.

    Raises:
        StackError: a value is no port number; the message names the variable.
    """
    environ = os.environ if environ is None else environ
    ports: dict[str, int] = {}
    for name, variable in PORT_VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) <= 5) or not 1 <= int(text) <= 65535:
            raise StackError(f"{variable}={text!r} is not a port: give a number from 1 to 65535, or unset it")
        ports[name] = int(text)
    return ports
