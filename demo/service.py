"""One service of a stack: how it is started, and the handle by which it is watched, killed and started again."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import processes
from .environment import ours
from .excerpt import excerpt
from .health import Check
from .records import ServiceRecord
from .settings import StackError


@dataclass(frozen=True)
class ServiceSpec:
    """How a service is started and known to be ready.

    A spec without `check` is a step: it runs to its end, and exit status 0 means done.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    check: Check | None = None
    address: str | None = None
    through: str | None = None
    """The service that its check asks: while that one is away, nothing is known of this one."""
    after: tuple[str, ...] = ()
    """Names of services and steps that must be ready before this one starts; unknown names are ignored."""
    prepare: Callable[[], None] | None = None
    """Runs right before the start."""
    leftovers: tuple[str, ...] = ()
    """Files that it leaves behind when it is killed, removed after its end."""
    survivors: Callable[[], Collection[int]] = tuple
    """Pids of what outlives its crash on purpose and waits for its next start: `up` leaves it alone, `down` ends it."""
    done: Callable[[], None] | None = None
    """Runs when it is ready for the first time."""
    code: str = ""
    """Digest of the source that a running process has loaded: another one means it must be restarted."""
    stop_grace: float = 5.0
    stop_signal: int = signal.SIGTERM
    """What its leading process is asked to end by; everything else it started gets SIGTERM."""
    stop_wave: int = 0
    """Services of a higher wave end after all of a lower one."""

    @property
    def is_step(self) -> bool:
        """Does it run to its end?"""
        return self.check is None

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints: the same process would be started, but for what comes from the user's shell."""
        text = json.dumps([self.command, sorted(ours(self.environment).items()), self.code])
        return hashlib.sha256(text.encode()).hexdigest()


class Service:
    """A service on this machine.

    Args:
        spec: how it is started.
        log: its log; the one of the start before is kept beside it as `.1`.
        stack_id: the mark that all its processes carry.
        table: the system's processes.
        folder: where it runs.
        remember: stores the record of a new start (None: it is gone) before anything else happens.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        log: Path,
        stack_id: str,
        table: processes.ProcessTable,
        folder: Path,
        remember: Callable[[str, ServiceRecord | None], None],
        record: ServiceRecord | None = None,
        secrets: tuple[str, ...] = (),
    ) -> None:
        self.spec = spec
        self.log = log
        self.record = record
        self._stack_id = stack_id
        self._table = table
        self._folder = folder
        self._remember = remember
        self._secrets = secrets
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Its name in tables, and of its log."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """The pid of the running leader of its processes."""
        return self.record.pid if self.record is not None and self.is_alive() else None

    def is_alive(self) -> bool:
        """Does its leading process live?"""
        self.exit_status()
        return self.record is not None and processes.is_alive(self._table, self.record.pid, self.record.started)

    def exit_status(self) -> int | None:
        """Exit status of a process that this handle started and that has ended; minus the signal's number if killed."""
        return self._child.poll() if self._child is not None else None

    def family(self) -> list[processes.ProcessInfo]:
        """Its living processes, the leader first."""
        if self.record is None:
            return []
        return processes.family(self._table, [(self.record.pid, self.record.started)])

    def start(self) -> None:
        """Start it; it is not ready yet (see `wait_healthy`).

        Raises:
            StackError: it runs already, or its program cannot be executed.
        """
        if self.is_alive():
            raise StackError(f"{self.name} runs already (pid {self.pid}): kill or stop it first")
        if self.spec.prepare is not None:
            self.spec.prepare()
        self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.log.exists():
            self.log.replace(self.log.with_name(self.log.name + ".1"))
        started_at = time.time()
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
            try:
                self._child = subprocess.Popen(
                    self.spec.command,
                    env={**self.spec.environment, processes.MARK: self._stack_id},
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C in the terminal must reach us only: we end the services in order.
                    start_new_session=True,
                    umask=0o077,
                )
            except OSError as error:
                raise StackError(f"{self.name}: {self.spec.command[0]} cannot be started: {error}") from error
        info = self._table.info(self._child.pid)
        self.record = None
        if info is not None:  # else it has ended already; exit_status() tells how
            self.record = ServiceRecord(
                pid=info.pid,
                started=info.started,
                started_at=started_at,
                fingerprint=self.spec.fingerprint,
                stop_grace=self.spec.stop_grace,
                stop_signal=self.spec.stop_signal,
                stop_wave=self.spec.stop_wave,
                leftovers=self.spec.leftovers,
            )
        self._remember(self.name, self.record)

    def waits_for(self) -> str | None:
        """None when it is ready, else in a few words what is missing.

        Raises:
            StackError: it has ended, and should not have; with exit status and the lines of its log that matter.
        """
        status = self.exit_status()
        if self.spec.is_step and status == 0:
            return None
        if not self.is_alive():
            how = "is not running" if status is None else f"ended with exit status {status}"
            raise StackError(self.failure(how))
        if self.spec.check is None or self.record is None:
            return "runs"
        return self.spec.check(self.record.started_at)

    def wait_healthy(self, timeout: float = 120.0) -> None:
        """Wait until it is ready.

        Raises:
            StackError: it ended, or was not ready within `timeout` seconds; with the lines of its log that matter.
        """
        deadline = time.monotonic() + timeout
        while (missing := self.waits_for()) is not None:
            if time.monotonic() >= deadline:
                raise StackError(self.failure(f"was not healthy within {timeout:.0f} s ({missing})"))
            time.sleep(0.2)

    def failure(self, how: str) -> str:
        """The message for a person when it failed: `how`, its log, and the lines of it that matter."""
        lines = "\n".join(f"    {line}" for line in excerpt(self.log, secrets=self._secrets))
        return f"{self.name} {how}; from {self.log}:\n{lines}"

    def kill(self) -> None:
        """SIGKILL it and everything it started, as a crash would."""
        self._end(grace=0.0)

    def stop(self) -> None:
        """Ask it to end, and SIGKILL what is left after its grace."""
        self._end(grace=self.spec.stop_grace)

    def restart(self, timeout: float = 120.0) -> None:
        """Stop, start, and wait until it is ready."""
        self.stop()
        self.start()
        self.wait_healthy(timeout)

    def _end(self, grace: float) -> None:
        asking = {} if self.record is None else {self.record.pid: self.record.stop_signal}
        processes.end(self._table, self.family, grace, asking=asking, reap=self.exit_status)
        self.forget()

    def forget(self) -> None:
        """Call when it has ended: removes its leftovers and its record."""
        for path in self.spec.leftovers:
            Path(path).unlink(missing_ok=True)
        self.record = None
        self._remember(self.name, None)
