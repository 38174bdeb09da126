"""Who runs the machines? Starts each instance's user data as local processes, watches them, and ends them.

One thread looks at every machine each tick (real time): boots what is due, hears `shutdown` from inside, fires
the interruption script, carries out notices, and ends what must end until no process of it is left. The book
says what *should* be; the hypervisor makes it so and reports back.
"""

from __future__ import annotations

import functools
import logging
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from gpucost.clock import SpecClock
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import FROM_INSIDE, NO_CAPACITY, Instance
from gpucost.rehearsal.interruptions.script import JOB_TAG, ProgressReader, Script
from gpucost.rehearsal.machines import guard, processes
from gpucost.rehearsal.settings import Settings

log = logging.getLogger(__name__)

NO_USER_DATA = b"#!/bin/sh\n"


@dataclass
class _Machine:
    """What the hypervisor knows of one instance's processes; touched by its own thread only."""

    folder: Path
    program: subprocess.Popen[bytes] | None = None
    progress: ProgressReader = field(init=False)
    shutdown_due: datetime | None = None
    asked_to_end: bool = False
    kill_at_real: float = 0.0
    program_end_told: bool = False

    def __post_init__(self) -> None:
        self.progress = ProgressReader(self.folder)


class Hypervisor:
    """Runs the instances of one book.

    Args:
        book: what should run.
        clock: the rehearsal clock.
        settings: durations and folders.
        script: interruptions at a progress.
        cloud_id: marks every process of this cloud.
        imds_base: the metadata address of an instance id.
        warn: tells the outside (EventBridge) of an interruption notice.
    """

    def __init__(
        self,
        book: Book,
        clock: SpecClock,
        settings: Settings,
        script: Script,
        *,
        cloud_id: str,
        imds_base: Callable[[str], str],
        warn: Callable[[Instance], None],
    ) -> None:
        self._book = book
        self._clock = clock
        self._settings = settings
        self._script = script
        self._cloud_id = cloud_id
        self._imds_base = imds_base
        self._warn = warn
        self._machines: dict[str, _Machine] = {}
        self._faults: dict[str, str] = {}
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hypervisor", daemon=True)
        self._guard = guard.start(cloud_id)

    def start(self) -> None:
        """Start looking after machines."""
        self._thread.start()

    def wake(self) -> None:
        """Look now instead of at the next tick: somebody changed the book."""
        self._wake.set()

    def stop(self) -> None:
        """End every machine at once and the guard with them; returns when no process of an instance is left."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=30)
        if not guard.kill_all(self._cloud_id):
            log.error("processes of instances are still there after 10 s of SIGKILL; the guard goes on")
            return
        self._guard.kill()
        self._guard.wait()

    def folder(self, instance_id: str) -> Path:
        """The instance's disk."""
        return self._settings.state_dir / "instances" / instance_id

    def pid(self, instance_id: str) -> int | None:
        """The real process id of its user data, once started."""
        machine = self._machines.get(instance_id)
        return machine.program.pid if machine and machine.program else None

    def interrupt(self, instance_id: str, *, notice: bool) -> bool:
        """EC2 takes a spot instance back: with a notice, or at once. False when it is ending or noticed already."""
        if notice:
            return self._give_notice(instance_id)
        if self._book.begin_end(instance_id, NO_CAPACITY, abrupt=True) is None:
            return False
        log.info("%s interrupted by EC2 without notice", instance_id)
        self.wake()
        return True

    def _give_notice(self, instance_id: str) -> bool:
        floor_s = self._settings.notice_floor_real_s * self._clock.spec.speed
        ahead_s = max(self._settings.notice_s, floor_s)
        noticed = self._book.give_notice(instance_id, self._clock.now() + timedelta(seconds=ahead_s))
        if noticed is None or noticed.action_at is None:
            return False
        lasts = "as AWS gives"
        if floor_s > self._settings.notice_s:
            floor = f"{self._settings.notice_floor_real_s:g} real seconds"
            lasts = f"instead of {self._settings.notice_s:g} s: the floor of {floor} applied"
        log.info("%s interruption notice: terminate at %s, %.0f s ahead, %s",
                 instance_id, noticed.action_at.isoformat(), ahead_s, lasts)  # fmt: skip
        self._warn(noticed)
        return True

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._settings.tick_real_s)
            self._wake.clear()
            if not self._stopping.is_set():
                self.tick()

    def tick(self) -> None:
        """Look at every machine once."""
        if self._guard.poll() is not None:
            log.warning("the guard process ended with %s, starting another", self._guard.returncode)
            self._guard = guard.start(self._cloud_id)
        for instance in self._book.every():
            if instance.living:
                self._carefully(instance, self._look_after)
        ending = [one for one in self._book.every() if one.state in {"shutting-down", "stopping"}]
        if ending:
            table = processes.Table()
            for instance in ending:
                self._carefully(instance, functools.partial(self._end, table=table))

    def _carefully(self, instance: Instance, care: Callable[[Instance], None]) -> None:
        """A fault with one machine must not leave all others alone: say it once, and try again next tick."""
        try:
            care(instance)
        except Exception as error:
            if self._faults.get(instance.id) != str(error):
                self._faults[instance.id] = str(error)
                log.exception("%s: the hypervisor could not look after it; it keeps trying", instance.id)

    def _look_after(self, instance: Instance) -> None:
        now = self._clock.now()
        if instance.state == "pending":
            if now >= instance.launched + timedelta(seconds=self._settings.boot_s):
                self._boot(instance)
            return
        machine = self._machines[instance.id]
        self._tell_program_end(instance, machine)
        if instance.action_at is not None and now >= instance.action_at:
            if self._book.begin_end(instance.id, NO_CAPACITY):
                log.info("%s interrupted by EC2, as announced", instance.id)
        elif self._shutdown_is_due(machine, now):
            if self._book.begin_end(instance.id, FROM_INSIDE):
                log.info("%s shut down from inside: %s", instance.id, instance.spec.shutdown_behavior)
        elif instance.lifecycle == "spot":
            self._follow_script(instance, machine)

    def _boot(self, instance: Instance) -> None:
        folder = self.folder(instance.id)
        machine = self._machines.setdefault(instance.id, _Machine(folder))
        processes.prepare_folder(folder, instance.spec.user_data or NO_USER_DATA)
        if not self._book.mark_running(instance.id):
            return
        marker = processes.marker_value(self._cloud_id, instance.id)
        env = processes.environment(folder, self._settings.image_path, self._imds_base(instance.id), marker)
        try:
            machine.program = processes.start_user_data(folder, env)
        except OSError as error:
            # as on EC2, the machine is up and idle when its user data cannot run
            log.warning("%s user data cannot be run: %s; it must begin with #! and an interpreter", instance.id, error)
            with (folder / "console.log").open("a", encoding="utf-8") as console:
                console.write(f"user data cannot be run: {error}\n")
            return
        log.info("%s running: %s, %s, pid %s", instance.id, instance.pool, instance.lifecycle, machine.program.pid)

    def _tell_program_end(self, instance: Instance, machine: _Machine) -> None:
        if machine.program is None or machine.program_end_told or machine.program.poll() is None:
            return
        machine.program_end_told = True
        log.info("%s user data ended with %s; the machine stays up", instance.id, machine.program.returncode)

    def _shutdown_is_due(self, machine: _Machine, now: datetime) -> bool:
        request = machine.folder / processes.SHUTDOWN_REQUEST
        try:
            word = request.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            machine.shutdown_due = None
            return False
        if machine.shutdown_due is None:
            digits = word.removeprefix("+")
            machine.shutdown_due = now + timedelta(minutes=int(digits) if digits.isdigit() else 0)
        return now >= machine.shutdown_due

    def _follow_script(self, instance: Instance, machine: _Machine) -> None:
        job = instance.tags.get(JOB_TAG)
        if instance.action_at is not None or not self._script.concerns(job):
            return
        step = machine.progress.step()
        rule = self._script.fire(job, step) if step is not None else None
        if rule is not None:
            log.info("%s job %s is at step %s: the script interrupts it", instance.id, job, step)
            self.interrupt(instance.id, notice=rule.notice)

    def _end(self, instance: Instance, table: processes.Table) -> None:
        machine = self._machines.setdefault(instance.id, _Machine(self.folder(instance.id)))
        leader = machine.program.pid if machine.program else None
        alive = table.belonging(processes.marker_value(self._cloud_id, instance.id), leader)
        if not alive:
            if machine.program is not None:
                machine.program.wait()
            self._book.mark_ended(instance.id)
            shutil.rmtree(machine.folder / "tmp", ignore_errors=True)
            ended = self._book.get(instance.id)
            log.info("%s %s", instance.id, ended.state if ended else "gone")
        elif instance.abrupt:
            processes.send(alive, signal.SIGKILL)
            self._wake.set()
        elif not machine.asked_to_end:
            machine.asked_to_end = True
            machine.kill_at_real = time.monotonic() + self._settings.stop_grace_real_s
            processes.send(alive, signal.SIGTERM)
        elif time.monotonic() >= machine.kill_at_real:
            processes.send(alive, signal.SIGKILL)
