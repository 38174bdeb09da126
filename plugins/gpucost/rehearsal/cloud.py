"""How do the rooms make one cloud? Its making, its start, its end."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from gpucost.clock import SpecClock
from gpucost.rehearsal import timekeeping
from gpucost.rehearsal.api.actions import Ec2Api
from gpucost.rehearsal.api.visibility import Visibility, longest_real_s
from gpucost.rehearsal.book.book import Book, visible_s
from gpucost.rehearsal.book.journal import FileJournal, JournalError
from gpucost.rehearsal.control import Control
from gpucost.rehearsal.faults.control import FaultsControl
from gpucost.rehearsal.faults.credentials import Credentials
from gpucost.rehearsal.faults.gate import Gate
from gpucost.rehearsal.faults.injector import Injector
from gpucost.rehearsal.faults.rules import load_faults
from gpucost.rehearsal.folder import StateFolder
from gpucost.rehearsal.interruptions.events import Announcer
from gpucost.rehearsal.interruptions.fate import load_habits
from gpucost.rehearsal.interruptions.interrupter import Interrupter, NoticeLength
from gpucost.rehearsal.interruptions.script import Script, load_rules
from gpucost.rehearsal.machines.disk import CONSOLE
from gpucost.rehearsal.machines.hypervisor import Hypervisor
from gpucost.rehearsal.machines.imds import Imds
from gpucost.rehearsal.machines.memory import MemoryLimit
from gpucost.rehearsal.machines.power import LocalPower
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.opening import open_market
from gpucost.rehearsal.server import Router, listen, serving
from gpucost.rehearsal.services.moto_side import ACCOUNT, MotoSide
from gpucost.rehearsal.settings import Settings

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"

HEARS_SIGNALS_REAL_S = 0.2
"""How late a signal is heard at most."""


class RehearsalCloud:
    """An EC2 stand-in. `RehearsalCloud(settings).serve()` runs until `request_stop()`.

    Raises:
        MarketError, ValueError: at construction, when a file it is started with is wrong.
        OSError: the port is taken.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = StateFolder(settings.state_dir)
        self._settings = settings.model_copy(update={"state_dir": self._folder.path})
        # the port before the slow part: when it is taken, say so at once
        with listen(settings.port, self._folder.earlier_port()) as listening:
            kept = timekeeping.take_up(
                self._folder.path,
                settings.speed,
                settings.origin,
                datetime.now(UTC),
                lived=(self._folder.path / JOURNAL).exists(),
            )
            self.clock = SpecClock(kept.clock)
            self.market = _market(settings, kept.first_origin)
            self._assemble(listening)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)
        self._stop_asked = False
        self._machines_go_on = False

    def _assemble(self, listening: socket.socket) -> None:
        settings = self._settings
        folder = settings.state_dir
        rules = load_faults(settings.faults) if settings.faults else []
        injector = Injector(settings.seed, rules, kept_in=folder / "faults.json")
        credentials = Credentials(ACCOUNT, kept_in=folder / "credentials.json")
        moto = MotoSide(self.market, folder, copies=injector.copies)
        self._announcer = Announcer(moto, self.clock.now, ACCOUNT)
        self._take_up_book()
        url = f"http://{listening.getsockname()[0]}:{listening.getsockname()[1]}"
        self._hypervisor = Hypervisor(
            self.book,
            self.clock,
            settings,
            LocalPower(
                settings.state_dir,
                self._folder.cloud_id,
                image_path=settings.image_path,
                imds_base=lambda instance_id: f"{url}/imds/{instance_id}/",
                keep_real_s=settings.keep_machines_real_s,
                at=self.clock.spec.at,
            ),
            memory=MemoryLimit(moto.memory_mib_of, settings.memory_mib),
            on_tick=lambda: interrupter.tick(),
        )
        script = Script(
            load_rules(settings.script) if settings.script else [], kept_in=settings.state_dir / "script.json"
        )
        interrupter = self._interrupter(script)
        imds = Imds(
            self.book,
            zone_ids=self.market.zone_ids(),
            account=ACCOUNT,
            role_credentials=settings.role_credentials,
            skew=lambda instance_id: timedelta(seconds=injector.imds_skew(instance_id)),
        )
        api = Ec2Api(
            self.market,
            self.book,
            moto,
            self._hypervisor.wake,
            refusal=injector.refusal,
            console_of=lambda instance_id: self._hypervisor.folder(instance_id) / CONSOLE,
            visibility=Visibility(
                longest_real_s(settings.consistency_lag_real_s, self.clock.spec.speed), settings.seed
            ),
        )
        faults = FaultsControl(injector, credentials)
        control = Control(self.market, self.book, self._hypervisor, interrupter, script, self.clock, faults)
        self._control = control
        region = self.market.regions[0]
        router = Router(control, Gate(injector, credentials, region=region), imds, api, moto, region)
        self._server = serving(listening, router)
        self.url = url

    def _take_up_book(self) -> None:
        self._journal = FileJournal(self._folder.path / JOURNAL)
        self._journal.write("start", clock=self.clock.spec.model_dump(mode="json"), pid=os.getpid())
        self.book = Book(
            self.market,
            self.clock,
            self._journal,
            visible_s=visible_s(self._settings.terminated_visible_s, self.clock.spec.speed),
            on_change=self._announcer.changed,
        )
        try:
            self.book.restore(self._journal.events())
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise JournalError(
                f"journal: {self._folder.path / JOURNAL} is not one that this version wrote ({type(error).__name__}: "
                f"{error}); use another --state-dir, or `make clean` where make started it"
            ) from error
        self._folder.settle_market(self.market.fingerprint, self.market.label, used=bool(self.book.every()))

    def _interrupter(self, script: Script) -> Interrupter:
        settings = self._settings
        return Interrupter(
            self.book,
            self.market,
            self.clock,
            self._announcer,
            script,
            self._hypervisor.folder,
            habits=load_habits(settings.habits) if settings.habits else None,
            length=NoticeLength(settings.notice_s, settings.notice_floor_real_s),
            wake=self._hypervisor.wake,
        )

    def start(self) -> None:
        """Answer requests and run machines, in threads of this process."""
        self._hypervisor.start()
        # what is there now stays: a collection that looks at all of moto again and again takes a third of a second
        gc.collect()
        gc.freeze()
        self._thread.start()
        self._folder.write_endpoint(self.url)
        log.info("rehearsal cloud at %s: %s; clock %s, %g times as fast as real time",
                 self.url, self.market.label, self.clock.now().isoformat(timespec="seconds"),
                 self.clock.spec.speed)  # fmt: skip

    def serve(self) -> None:
        """Start, and return after `request_stop`, when everything has ended."""
        self.start()
        try:
            # No threading.Event: its wait may never hear of a signal that the kernel gave to another thread (seen once,
            # of a SIGTERM while machines were started), and its set() in a handler may meet the lock that wait() holds.
            while not self._stop_asked:
                time.sleep(HEARS_SIGNALS_REAL_S)
        finally:
            self.stop(machines_go_on=self._machines_go_on)

    def request_stop(self, *, machines_go_on: bool = False) -> None:
        """Let `serve` return; may be called from a signal handler.

        Args:
            machines_go_on: a successor on the same folder takes the machines up; see `Settings.keep_machines_real_s`.
        """
        self._machines_go_on = machines_go_on and self._settings.keep_machines_real_s > 0
        self._stop_asked = True

    def stop(self, *, machines_go_on: bool = False) -> None:
        """End the server, and every instance with every process, or leave those to a successor."""
        if machines_go_on:
            keep_s = self._settings.keep_machines_real_s
            log.info("ending: instances go on for %g s and wait for another start", keep_s)
        else:
            total = self._control.invoice()["total"]
            log.info("ending: every instance is killed; the invoice so far: %s USD", total)
        self._server.shutdown()
        if machines_go_on:
            self._hypervisor.leave()
        else:
            self._hypervisor.stop()
        self._announcer.stop()
        self._server.server_close()
        self._journal.write("stop", at=self.clock.now())
        self._journal.close()
        self._folder.release()
        log.info("ended")


def _market(settings: Settings, origin: datetime) -> Market:
    return open_market(
        settings.market,
        origin,
        offset=timedelta(hours=settings.offset_hours or 0),
        spot_capacity=settings.spot_capacity,
        on_demand_capacity=settings.on_demand_capacity,
    )
