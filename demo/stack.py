"""All services of a demo or a test, started together, ended together."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from . import locks, processes
from .catalogue import catalogue, internal_ports, public_ports
from .credentials import Credentials, SecretFiles
from .environment import address, base_environment, gpucost_environment
from .ports import PortChooser
from .processes import LinuxProcesses, ProcessInfo, ProcessTable
from .progress import ENDED, FAILED, READY, RUNNING, STARTING, WAITING, Progress, Silent
from .records import RecordFile, ServiceRecord, StackRecord
from .service import Service, ServiceSpec
from .settings import DEFAULT_PORTS, StackError, StackSettings
from .sites import write_sites

SpecMaker = Callable[[StackSettings, Mapping[str, int], Credentials], list[ServiceSpec]]


class Stack:
    """The services of one home folder.

    Args:
        settings: where and how.
        progress: shows what happens.
        specs: makes the list of services (tests put cheap ones here).
        table: the system's processes.
        chooser: hands out ports.
    """

    def __init__(
        self,
        settings: StackSettings,
        progress: Progress | None = None,
        *,
        specs: SpecMaker = catalogue,
        table: ProcessTable | None = None,
        chooser: PortChooser | None = None,
    ) -> None:
        self.settings = settings
        self.progress: Progress = progress or Silent()
        self._specs = specs
        self._table = table or LinuxProcesses()
        self._chooser = chooser or PortChooser()
        self._file = RecordFile(settings.home / "services.json")
        self._record = StackRecord()
        self._services: dict[str, Service] = {}

    def up(self) -> None:
        """Start what does not run yet and wait until everything is ready.

        What runs already, is ready and has loaded the present code is left alone; leftovers of a start that was
        killed are ended first. When anything goes wrong, also Ctrl-C, all that this call started is ended again.

        Raises:
            StackError: a port set by the user is busy, or a service failed; says which, and why.
        """
        with self._lock(), self.progress:
            self._load()
            started: list[Service] = []
            try:
                unsure = self._settle(list(self._services.values()), started)
                if unsure:  # now their api-server answers
                    self._settle(unsure, started)
            except BaseException:
                self.progress.say("ending what was started")
                self._end(started)
                raise

    def down(self) -> int:
        """End every process that was recorded, with its children, and nothing else.

        Returns:
            How many processes there were to end.
        """
        if not self._file.path.exists():
            return 0
        with self._lock(), self.progress:
            self._record = self._file.read()
            count = len(self._family())
            waves = sorted({record.stop_wave for record in self._record.services.values()} | {0})
            for wave in waves:
                names = [name for name, record in self._record.services.items() if record.stop_wave == wave]
                self._end_wave(names, self._family if wave == waves[-1] else None)
            for record in self._record.services.values():
                for path in record.leftovers:
                    Path(path).unlink(missing_ok=True)
            self._record.services = {}
            self._file.write(self._record)
            self._services = {}
            return count

    def attach(self) -> None:
        """Get the handles of a stack that another process has started; nothing is started.

        Raises:
            StackError: nothing was ever started in this home folder.
        """
        if not self._file.path.exists():
            raise StackError(f"{self._file.path} is not there: start the services with `up` first")
        self._record = self._file.read()
        settings = replace(self.settings, services=self._record.chosen)
        self._make_services(settings, self.credentials())

    def service(self, name: str) -> Service:
        """The handle of one service, to kill it, start it again, and wait for it."""
        try:
            return self._services[name]
        except KeyError:
            raise StackError(f"no service {name!r}; there are {sorted(self._services)}") from None

    @property
    def stack_id(self) -> str:
        """The mark of all its processes."""
        return self._record.stack_id

    def demo(self) -> AbstractContextManager[None]:
        """Hold this while a demo runs: there is one at a time, and what it started itself is not in the way of `up`.

        Raises:
            StackError: another demo runs.
        """
        home = self.settings.home
        complaint = f"another demo runs in {home} at this moment: wait for its end, or end it there with Ctrl-C"
        return locks.alone_by_name(home / "demo.lock", complaint, self._table)

    def lives(self) -> bool:
        """Does any process of this stack run?"""
        if self._file.path.exists():
            self._record = self._file.read()
        return bool(self._family())

    def addresses(self) -> dict[str, str]:
        """URL per service: some of `airflow`, `mlflow`, `s3`, `rehearsal`."""
        return {name: address(port) for name, port in self._ports().items() if name in DEFAULT_PORTS}

    def credentials(self) -> Credentials:
        """The stack's secrets, among them the passwords of Airflow's users `admin` and `viewer`."""
        return SecretFiles(self.settings.home / "secrets").load()

    def environment(self) -> dict[str, str]:
        """The environment in which a `gpucost` command finds this stack's database, store, cloud and clock."""
        return base_environment(self.settings) | gpucost_environment(self.settings, self._ports(), self.credentials())

    def status(self) -> dict[str, str]:
        """State per service: `ready`, `not running`, or what it waits for."""
        if not self._file.path.exists():
            return dict.fromkeys(self.settings.services, "not running")
        self.attach()
        states = {}
        for service in self._services.values():
            if service.spec.is_step:
                continue
            states[service.name] = (service.waits_for() or READY) if service.is_alive() else "not running"
        return states

    def _ports(self) -> dict[str, int]:
        return self._record.ports or self._file.read().ports

    def _load(self) -> None:
        """Read the record, choose the ports, make the handles."""
        home = self.settings.home
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._record = self._file.read()
        # Before anything starts: a process whose record could not be written any more is found by this mark.
        self._file.write(self._record)
        credentials = SecretFiles(home / "secrets").load()
        self._choose_ports()
        self._record.chosen = self.settings.services
        self._file.write(self._record)
        if "s3" in self.addresses():
            write_sites(home, self.addresses(), self.settings.market_file)
        self._make_services(self.settings, credentials)

    def _make_services(self, settings: StackSettings, credentials: Credentials) -> None:
        self._services = {}
        for spec in self._specs(settings, self._record.ports, credentials):
            self._services[spec.name] = Service(
                spec,
                log=settings.home / "logs" / f"{spec.name}.log",
                stack_id=self._record.stack_id,
                table=self._table,
                folder=settings.home,
                remember=self._remember,
                record=self._record.services.get(spec.name),
                secrets=tuple(credentials.values()),
            )

    def _choose_ports(self) -> None:
        settings, remembered, chooser = self.settings, self._record.ports, self._chooser

        def ask() -> set[int]:
            return chooser.held({info.pid for info in self._family()})

        held = ask()
        names = public_ports(settings.services)
        if settings.any_ports:
            free = [name for name in names if name not in settings.fixed_ports]
            fixed = [name for name in names if name not in free]
            ports = chooser.public(fixed, settings.fixed_ports, remembered, held, ask)
            ports |= {name: chooser.internal(remembered.get(name), remembered.get(name) in held) for name in free}
        else:
            ports = chooser.public(names, settings.fixed_ports, remembered, held, ask)
        for name in internal_ports(settings.services):
            ports[name] = chooser.internal(remembered.get(name), remembered.get(name) in held)
        for sentence in chooser.moved:
            self.progress.say(sentence)
        chooser.moved.clear()
        chooser.taken.clear()
        self._record.ports = ports

    def _remember(self, name: str, record: ServiceRecord | None) -> None:
        self._record.services.pop(name, None)
        if record is not None:
            self._record.services[name] = record
        self._file.write(self._record)

    def _settle(self, services: list[Service], started: list[Service]) -> list[Service]:
        """Have all of `services` ready; return those that were left alone unasked, since nobody could ask them."""
        fit, unsure = self._judge(services)
        unfit = [service for service in services if service not in fit and service not in unsure]
        kept = [service for service in self._services.values() if service not in unfit]
        waiting = {pid for service in unfit for pid in service.spec.survivors()}
        processes.end(self._table, lambda: self._strays(kept, waiting), grace=5.0, asking=self._stop_signals())
        for name in set(self._record.services) - {service.name for service in kept}:
            self._remember(name, None)
        self._sweep()
        for service in fit:
            self.progress.update(service.name, RUNNING, note=service.spec.address or "")
        for service in unsure:
            self.progress.update(service.name, WAITING, note=f"runs; {service.spec.through} must answer for it")
        self._start_all(unfit, started)
        return unsure

    def _judge(self, services: list[Service]) -> tuple[list[Service], list[Service]]:
        """Which are ready and may stay, and of which cannot it be known?

        Each is asked until it is ready or its patience is over: a machine whose cores all train answers late, and a
        restart would cost it the training.
        """
        hopeful = [service for service in services if self._runs_as_wanted(service)]
        away = {service.name for service in services if service not in hopeful}
        fit: list[Service] = []
        deadline = time.monotonic() + self.settings.patience
        while True:
            asked = [service for service in hopeful if service not in fit and service.spec.through not in away]
            fit += [service for service in asked if self._runs_as_wanted(service) and service.waits_for() is None]
            if all(service in fit for service in asked) or time.monotonic() >= deadline:
                break
            time.sleep(0.5)
        away |= {service.name for service in hopeful if service not in fit}
        return fit, [one for one in hopeful if one not in fit and one.spec.through in away]

    def _runs_as_wanted(self, service: Service) -> bool:
        if service.spec.is_step or service.record is None or not service.is_alive():
            return False
        return service.record.fingerprint == service.spec.fingerprint

    def _strays(self, kept: Iterable[Service], waiting: Iterable[int] = ()) -> list[ProcessInfo]:
        """What is this stack's, but neither of these services, nor `waiting`, nor of a demo that runs beside us."""
        theirs = {info.pid for service in kept for info in service.family()} | set(waiting)
        demo = locks.holder(self.settings.home / "demo.lock", self._table)
        if demo is not None:
            theirs |= processes.descendants(self._table, demo)
        return [info for info in self._family() if info.pid not in theirs]

    def _sweep(self) -> None:
        """Remove what a demo that was killed left behind."""
        if locks.holder(self.settings.home / "demo.lock", self._table) is None:
            for folder in self.settings.home.glob("reference-*"):
                shutil.rmtree(folder)

    def _start_all(self, services: list[Service], started: list[Service]) -> None:
        """Start `services` as their order allows and wait for all; `started` grows as they start."""
        waiting = list(services)
        for service in waiting:
            self.progress.update(service.name, WAITING, note=", ".join(f"after {name}" for name in service.spec.after))
        pending: dict[str, Service] = {service.name: service for service in services}
        begun: dict[str, float] = {}
        while pending:
            for service in [s for s in waiting if not set(s.spec.after) & set(pending)]:
                waiting.remove(service)
                started.append(service)
                begun[service.name] = time.monotonic()
                service.start()
            for service in [s for s in pending.values() if s.name in begun]:
                if self._is_ready(service, time.monotonic() - begun[service.name]):
                    del pending[service.name]
            if pending:
                # The services need the cores more than our questions do, and only the small ones are quick.
                time.sleep(0.1 if time.monotonic() - min(begun.values()) < 5 else 0.6)

    def _is_ready(self, service: Service, seconds: float) -> bool:
        try:
            missing = service.waits_for()
        except StackError:
            self.progress.update(service.name, FAILED, seconds, str(service.log))
            raise
        if missing is not None and seconds > self.settings.start_deadline:
            self.progress.update(service.name, FAILED, seconds, str(service.log))
            raise StackError(service.failure(f"was not healthy within {seconds:.0f} s ({missing})"))
        if missing is not None:
            self.progress.update(service.name, STARTING, seconds, missing)
            return False
        if service.spec.done is not None:
            service.spec.done()
        if service.spec.is_step:
            service.forget()
        self.progress.update(service.name, READY, seconds, service.spec.address or "")
        return True

    def _family(self) -> list[ProcessInfo]:
        roots = [(record.pid, record.started) for record in self._record.services.values()]
        return processes.family(self._table, roots, self._record.stack_id)

    def _stop_signals(self) -> dict[int, int]:
        return {record.pid: record.stop_signal for record in self._record.services.values()}

    def _end(self, services: list[Service]) -> None:
        """End these services and all that is not another one's, those that others write to last."""
        others = [service for service in self._services.values() if service not in services]

        waves = sorted({service.spec.stop_wave for service in services})
        for wave in waves:
            names = [service.name for service in services if service.spec.stop_wave == wave]
            self._end_wave(names, (lambda: self._strays(others)) if wave == waves[-1] else None)
        for service in services:
            service.forget()

    def _end_wave(self, names: list[str], find: Callable[[], list[ProcessInfo]] | None) -> None:
        """End what `find` lists, or else just these services."""
        records = {name: self._record.services[name] for name in names if name in self._record.services}
        roots = [(record.pid, record.started) for record in records.values()]

        def reap() -> None:
            for service in self._services.values():
                service.exit_status()

        grace = max((record.stop_grace for record in records.values()), default=1.0)
        find = find or (lambda: processes.family(self._table, roots))
        processes.end(self._table, find, grace, asking=self._stop_signals(), reap=reap)
        for name in records:
            self.progress.update(name, ENDED)

    def _lock(self) -> AbstractContextManager[None]:
        """One `up` or `down` of a home folder at a time."""
        home = self.settings.home
        return locks.alone(home / "stack.lock", f"another up or down works in {home} at this moment: wait for its end")
