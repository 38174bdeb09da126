"""What runs first on a GPU node? The agent: it fetches the job, runs the program, reports, and ends.

`python3 agent.zip` starts it. It reaches nothing but the object store and the machine's own metadata:

    GPUCOST_STORE_URL, GPUCOST_STORE_ENDPOINT, GPUCOST_STORE_REGION     the store
    GPUCOST_JOB, GPUCOST_LEASE, GPUCOST_ATTEMPT                         who it is; else the instance's tags
    GPUCOST_WORKDIR                                                     a folder to work in; else a new one
    GPUCOST_SHUTDOWN                                                    what ends the machine; else nothing does

When it ends, whatever the reason, the machine's user data shuts the machine down; when it does not end, its
watchdog does.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pydantic import ValidationError

import gpucost
from gpucost import bundle
from gpucost.clock import SpecClock
from gpucost.jobstore import AttemptRecord, ExitRecord, FencedOut, JobSpec, JobStore, Live
from gpucost.objects import ObjectMissing
from gpucost.reasons import Reason
from gpucost.training.agent import process
from gpucost.training.agent.identity import Identity, Unidentified, find_identity
from gpucost.training.agent.imds import Metadata
from gpucost.training.agent.notices import POLL_SECONDS, Notices
from gpucost.training.agent.orders import Stop
from gpucost.training.agent.relay import Relay, read_end
from gpucost.training.agent.say import say
from gpucost.training.agent.supervisor import Supervisor
from gpucost.training.agent.verdict import Ending, verdict
from gpucost.training.agent.watch import ControlWatch, NoticeWatch, Repeat
from gpucost.training.agent.watchdog import VARIABLE, Watchdog
from gpucost.training.outage import brief, patiently, store_errors
from gpucost.training.surroundings import open_objects
from gpucost.training.workdir import Workdir

EXIT_CODES = {
    Reason.COMPLETED: 0,
    Reason.BAD_PROGRAM: 1,
    Reason.OUT_OF_MEMORY: 2,
    Reason.BAD_REQUEST: 3,
    Reason.STORE_UNREACHABLE: 74,
    Reason.INTERRUPTED: 75,
    Reason.STOPPED: 75,
    Reason.EXPIRED: 75,
    Reason.FENCED: 76,
}
"""The agent's own exit code, for whoever sees nothing but that; the exit record says more."""

LOG_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True)
class Pace:
    """How often the agent does what, in real seconds.

    Args:
        heartbeat: between two heartbeats, with which log and metrics are sent.
        control: between two looks at the control object and the fence.
        notices: between two looks at the cloud's notices.
        term_grace: from SIGTERM until the node must be gone; clouds give 30 s and more.
        last_words: for sending the rest and the exit record when no other time is stated.
        patience: for a store that is away at the start; None: as `outage` says.
    """

    heartbeat: float = 2.0
    control: float = 3.0
    notices: float = POLL_SECONDS
    term_grace: float = 25.0
    last_words: float = 60.0
    patience: float | None = None


class Refused(RuntimeError):
    """The attempt cannot begin."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def main() -> NoReturn:
    """Run the attempt that this node belongs to, and exit with the code of its reason."""
    sys.exit(run(os.environ))


def run(environ: Mapping[str, str], pace: Pace | None = None) -> int:
    """Run one attempt; returns the exit code, see `EXIT_CODES`.

    Args:
        environ: the environment variables.
        pace: how often it does what.
    """
    watchdog = Watchdog(environ.get(VARIABLE, ""))
    watchdog.arm_for_start()
    metadata = Metadata(environ)
    try:
        identity = find_identity(environ, metadata)
        store = JobStore(open_objects(environ), identity.job)
    except (Unidentified, ValueError) as wrong:
        say(f"{Reason.BAD_REQUEST}: {wrong}")
        return EXIT_CODES[Reason.BAD_REQUEST]
    except store_errors() as away:
        say(f"{Reason.STORE_UNREACHABLE}: {environ.get('GPUCOST_STORE_URL')}: {brief(away)}")
        return EXIT_CODES[Reason.STORE_UNREACHABLE]
    return EXIT_CODES[Attempt(environ, identity, store, metadata, watchdog, pace or Pace()).run()]


class Attempt:
    """One attempt on this node, from its record to its exit record."""

    def __init__(
        self,
        environ: Mapping[str, str],
        identity: Identity,
        store: JobStore,
        metadata: Metadata,
        watchdog: Watchdog,
        pace: Pace,
    ) -> None:
        self._environ = environ
        self._identity = identity
        self._store = store
        self._metadata = metadata
        self._watchdog = watchdog
        self._pace = pace
        path = environ.get("GPUCOST_WORKDIR") or tempfile.mkdtemp(prefix="gpucost-")
        self._workdir = Workdir(Path(path).absolute())
        self._workdir.clear()
        self._clock = SpecClock()
        self._relay = Relay(store, Live(store.objects), self._workdir, identity, self._clock)

    def run(self) -> Reason:
        """Run it to its end; returns why it ended."""
        try:
            spec, record = patiently(self._begin, say, patience=self._pace.patience)
        except FencedOut as fenced:
            return self._refuse(Reason.FENCED, str(fenced))
        except Refused as refused:
            return self._refuse(refused.reason, str(refused))
        except store_errors() as away:
            say(f"{Reason.STORE_UNREACHABLE}: {self._environ.get('GPUCOST_STORE_URL')}: {brief(away)}")
            return Reason.STORE_UNREACHABLE
        return self._train(spec, record)

    def _begin(self) -> tuple[JobSpec, AttemptRecord]:
        spec, record = self._read()
        self._clock = SpecClock(spec.clock)
        self._watchdog.arm(self._clock, record.expires_at)
        self._relay = Relay(self._store, Live(self._store.objects), self._workdir, self._identity, self._clock)
        self._relay.beat()
        self._store.claim(self._identity.attempt)
        self._fetch(spec)
        return spec, record

    def _read(self) -> tuple[JobSpec, AttemptRecord]:
        try:
            spec, record = self._store.spec(), self._store.attempt(self._identity.attempt)
        except ObjectMissing as missing:
            raise Refused(Reason.BAD_REQUEST, f"the store has no {missing}, expected it before the launch") from missing
        except ValidationError as wrong:
            raise Refused(Reason.BAD_REQUEST, f"the job's documents in the store are wrong: {wrong}") from wrong
        if self._identity.lease_id not in {member.lease_id for member in record.members}:
            raise Refused(Reason.BAD_REQUEST, f"lease {self._identity.lease_id} is no member of {record}")
        if spec.world_size > 1 or len(record.members) > 1:
            raise Refused(Reason.BAD_REQUEST, f"world_size: got {spec.world_size}; this version trains with 1 process")
        if spec.environment.wheels or spec.data:
            raise Refused(
                Reason.BAD_REQUEST, "wheels and data are not fetched by this version: use the image and the code folder"
            )
        return spec, record

    def _fetch(self, spec: JobSpec) -> None:
        try:
            code = self._store.code(spec.code_digest)
        except ObjectMissing as missing:
            raise Refused(Reason.BAD_REQUEST, f"the store has no {missing}") from missing
        if (digest := bundle.digest_of(code)) != spec.code_digest:
            raise Refused(Reason.BAD_REQUEST, f"code: got a zip with digest {digest}, expected {spec.code_digest}")
        bundle.unpack(code, self._workdir.code)
        self._workdir.write_job(spec)

    def _train(self, spec: JobSpec, record: AttemptRecord) -> Reason:
        kills_before = process.oom_kills()
        identity = self._identity
        own = {
            "GPUCOST_JOB": identity.job,
            "GPUCOST_LEASE": identity.lease_id,
            "GPUCOST_ATTEMPT": str(identity.attempt),
        }
        env = process.environment(spec, {**self._environ, **own}, self._workdir, package_root())
        program = process.Program(process.command(spec), self._workdir.code, env, self._workdir.log)
        supervisor = Supervisor(
            program, self._workdir, self._clock, record.expires_at, lambda later: self._watchdog.arm(self._clock, later)
        )
        self._listen_to_signals(supervisor)
        threads = self._start_threads(supervisor)
        code = supervisor.run()
        until = supervisor.gone_by or time.monotonic() + self._pace.last_words
        self._end_what_is_left(until)
        ending = Ending(
            exit_code=code,
            result=self._relay.result(),
            progress=self._relay.progress(),
            asked=supervisor.asked,
            killed=supervisor.killed,
            log_tail=read_end(self._workdir.log, LOG_TAIL_BYTES),
            oom_kills=process.oom_kills() - kills_before,
        )
        return self._leave(ending, threads, until)

    def _end_what_is_left(self, until: float) -> None:
        within = min(process.KILL_SECONDS, max(0.0, until - time.monotonic()) / 2)
        ended, left = process.end_descendants(os.getpid(), spare=self._watchdog.pids, within=within)
        if ended:
            say(f"{ended} processes outlived the program and were ended")
        if left:
            say(f"{left} processes were killed and have not ended")

    def _listen_to_signals(self, supervisor: Supervisor) -> None:
        def on_signal(number: int, _frame: FrameType | None) -> None:
            why = f"the machine got {signal.Signals(number).name}"
            supervisor.orders.put(Stop(Reason.INTERRUPTED, why, within=self._pace.term_grace))

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    def _start_threads(self, supervisor: Supervisor) -> list[Repeat]:
        def send() -> None:
            self._relay.beat()
            self._relay.forward()

        put = supervisor.orders.put
        control = ControlWatch(self._store, self._identity.attempt, put)
        notices = NoticeWatch(Notices(self._metadata), self._clock, put)
        threads = [
            Repeat("sending", self._pace.heartbeat, send, store_errors()),
            Repeat("control object", self._pace.control, control.look, store_errors()),
            Repeat("instance metadata", self._pace.notices, notices.look, (OSError, ValueError)),
        ]
        for thread in threads:
            thread.start()
        return threads

    def _leave(self, ending: Ending, threads: list[Repeat], until: float) -> Reason:
        reason, message = verdict(ending)
        say(f"{reason}: {message}" if message else str(reason))
        result = ending.result
        for thread in threads:
            if not thread.end(max(0.1, until - time.monotonic())) and thread.name == "sending":
                say("the object store hangs: leaving without an exit record")
                return Reason.STORE_UNREACHABLE
        record = ExitRecord(
            attempt=self._identity.attempt,
            reason=reason,
            message=message,
            exit_code=ending.exit_code,
            at=self._clock.now(),
            step=ending.step,
            saved_step=ending.saved_step,
            results=result.results if result else {},
            weights_digest=result.weights_digest if result else None,
        )
        return self._last_words(record, until)

    def _last_words(self, record: ExitRecord, until: float) -> Reason:
        def send() -> None:
            self._forward_the_rest()
            self._store.write_exit(record)
            self._relay.beat(exited=record.reason)

        try:
            patiently(send, say, patience=max(0.0, until - time.monotonic()))
        except store_errors() as away:
            say(f"{Reason.STORE_UNREACHABLE}: leaving without an exit record: {brief(away)}")
            return Reason.STORE_UNREACHABLE
        return record.reason

    def _forward_the_rest(self) -> None:
        try:
            self._relay.forward(final=True)
        except store_errors():
            raise
        except Exception:  # noqa: BLE001
            # Whatever it is that cannot be sent: why the attempt ended is worth more.
            say(f"the end of log or metrics is left out: {traceback.format_exc().strip()}")

    def _refuse(self, reason: Reason, message: str) -> Reason:
        say(f"{reason}: {message}")
        record = ExitRecord(attempt=self._identity.attempt, reason=reason, message=message, at=self._clock.now())
        return self._last_words(record, time.monotonic() + self._pace.last_words)


def package_root() -> Path:
    """The folder or zip that `import gpucost` comes from, for the program's PYTHONPATH."""
    return Path(gpucost.__file__).absolute().parent.parent
