"""How does one attempt go on this node? From its record to its exit record: prepare, train, leave."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import gpucost
from gpucost.clock import SpecClock
from gpucost.jobstore import AttemptRecord, FencedOut, JobSpec, JobStore, Live, TornHead
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.recipe import Recipe
from gpucost.training.agent import fetch, launching, opening, process
from gpucost.training.agent.asking import ByRequest
from gpucost.training.agent.foldering import FolderKeeper
from gpucost.training.agent.foldersync import FolderSync
from gpucost.training.agent.hang import Hang
from gpucost.training.agent.identity import Identity
from gpucost.training.agent.imds import Metadata
from gpucost.training.agent.leaving import SENDING, Leaving
from gpucost.training.agent.notices import POLL_SECONDS, Notices
from gpucost.training.agent.orders import Stop
from gpucost.training.agent.relay import Relay, read_end, read_range
from gpucost.training.agent.say import say
from gpucost.training.agent.supervisor import Supervisor
from gpucost.training.agent.telemetry import Sampler
from gpucost.training.agent.verdict import Ending
from gpucost.training.agent.watch import ControlWatch, NoticeWatch, Repeat
from gpucost.training.agent.watchdog import Watchdog
from gpucost.training.outage import brief, patiently, store_errors
from gpucost.training.workdir import EXIT_STOPPED, Workdir

LOG_TAIL_BYTES = 16 * 1024
STACKS_BYTES = 64 * 1024
LAST_WORDS_SECONDS = 2.0
"""Real seconds of the time that is left which the exit record keeps, when files are uploaded before it."""


@dataclass(frozen=True)
class Pace:
    """How often the agent does what, in real seconds.

    Args:
        heartbeat: between two heartbeats, with which log and metrics are sent.
        control: between two looks at the control object and the fence.
        notices: between two looks at the cloud's notices.
        trim: between two looks at how much disk the log takes.
        term_grace: from SIGTERM until the node must be gone; clouds give 30 s and more.
        last_words: for sending the rest and the exit record when no other time is stated.
        patience: for a store that is away at the start; None: as `outage` says.
    """

    heartbeat: float = 2.0
    control: float = 3.0
    notices: float = POLL_SECONDS
    trim: float = 0.5
    term_grace: float = 25.0
    last_words: float = 60.0
    patience: float | None = None


class Attempt:
    """One attempt on this node.

    Args:
        environ: the agent's environment variables.
        identity: of this node.
        objects: the store.
        metadata: the instance metadata service.
        watchdog: armed for the start.
        pace: how often it does what.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        identity: Identity,
        objects: Objects,
        metadata: Metadata,
        watchdog: Watchdog,
        pace: Pace,
    ) -> None:
        self._identity = identity
        self._store = JobStore(objects, identity.job)
        self._metadata = metadata
        self._watchdog = watchdog
        self._pace = pace
        self._clock = SpecClock()
        path = environ.get("GPUCOST_WORKDIR") or tempfile.mkdtemp(prefix="gpucost-")
        self._workdir = Workdir(Path(path).absolute())
        self._workdir.clear()
        self._environ = {
            **environ,
            "GPUCOST_JOB": identity.job,
            "GPUCOST_LEASE": identity.lease_id,
            "GPUCOST_ATTEMPT": str(identity.attempt),
            "GPUCOST_WORKDIR": str(self._workdir.path),
        }
        self._begun = False
        self._threads: list[Repeat] = []
        self._relay = self._new_relay()
        self._trim = Repeat("log", pace.trim, lambda: self._relay.trim(), (OSError,))
        self._kills_before = process.oom_kills()

    def run(self) -> Reason:
        """Run it to its end; returns why it ended."""
        try:
            return self._train(*patiently(self._begin, say, patience=self._pace.patience))
        except FencedOut as fenced:
            return self._refuse(Reason.FENCED, str(fenced))
        except opening.Refused as refused:
            return self._refuse(refused.reason, str(refused))
        except TornHead as torn:
            return self._refuse(Reason.CHECKPOINTS_TORN, str(torn))
        except Exception as error:  # noqa: BLE001
            if not self._begun and isinstance(error, store_errors()):
                say(f"{Reason.STORE_UNREACHABLE}: {self._environ.get('GPUCOST_STORE_URL')}: {brief(error)}")
                return Reason.STORE_UNREACHABLE
            # Without a record, whoever waits for this node would only see that it is gone.
            say(traceback.format_exc())
            self._end_what_is_left(time.monotonic() + self._pace.last_words)
            return self._refuse(Reason.SELF_ENDED, f"the agent failed: {error!r}; see the machine's console")

    def _new_relay(self) -> Relay:
        live = Live(self._store.objects)
        sample = Sampler(self._environ).sample
        return Relay(self._store, live, self._workdir, self._identity, self._clock, sample=sample)

    def _begin(self) -> tuple[JobSpec, AttemptRecord]:
        spec, record = opening.read(self._store, self._identity)
        self._clock = SpecClock(spec.clock)
        self._watchdog.arm(self._clock, record.expires_at)
        self._relay = self._new_relay()
        self._store.claim(self._identity.attempt)
        self._relay.beat()
        self._begun = True
        return spec, record

    def _train(self, spec: JobSpec, record: AttemptRecord) -> Reason:
        folder = self._folder_keeper(spec)
        supervisor = Supervisor(
            asking=folder or ByRequest(self._workdir),
            progress=self._relay.progress,
            hang=Hang(spec.hang, reports=folder is None),
            recipe=spec.recipe,
            clock=self._clock,
            expires_at=record.expires_at,
            extended=lambda later: self._watchdog.arm(self._clock, later),
        )
        self._listen_to_signals(supervisor)
        self._start_threads(supervisor)
        preparing = opening.Preparing(lambda: self._prepare(spec, folder), self._pace.patience)
        supervisor.run(preparing, training=False)
        if preparing.refused and supervisor.asked is None:
            raise preparing.refused
        if supervisor.asked:
            self._end_what_is_left(self._until(supervisor))
            ending = Ending(EXIT_STOPPED, None, None, asked=supervisor.asked)
            return self._leaving().leave(ending, {}, self._threads, self._until(supervisor))
        return self._leave(self._run_programs(spec, supervisor, folder), supervisor, folder)

    def _folder_keeper(self, spec: JobSpec) -> FolderKeeper | None:
        if spec.folder_sync is None:
            return None
        # Relative to where the program runs, as it would name the folder itself.
        folder = self._workdir.code / spec.folder_sync.folder
        sync = FolderSync(self._store, self._identity.attempt, self._clock, folder, keep=spec.checkpoint.keep, warn=say)
        return FolderKeeper(sync, folder, spec.folder_sync.every_seconds)

    def _prepare(self, spec: JobSpec, folder: FolderKeeper | None) -> None:
        opening.prepare(self._store, spec, self._workdir, self._environ)
        if folder:
            folder.restore()

    def _run_programs(self, spec: JobSpec, supervisor: Supervisor, folder: FolderKeeper | None) -> int | None:
        if folder:
            self._start_thread(folder.thread)
        recipe: Recipe | None = supervisor.recipe
        while recipe is not None:
            spec = spec.model_copy(update={"recipe": recipe})
            try:
                program = self._start(spec, folder)
            except (OSError, ValueError) as error:  # ValueError: an argument holds a NUL.
                full = isinstance(error, OSError) and opening.is_full(error)
                reason = Reason.DISK_FULL if full else Reason.BAD_REQUEST
                raise opening.Refused(reason, f"the program cannot be started: {error}") from error
            code = supervisor.run(program)
            self._end_what_is_left(self._until(supervisor))
            recipe = supervisor.recipe_to_start_with(code)
        return code

    def _start(self, spec: JobSpec, folder: FolderKeeper | None) -> process.Program:
        self._workdir.begin_again()
        self._workdir.write_job(spec)
        own = {"GPUCOST_FOLDER": str(folder.folder)} if folder else {}
        told = {**self._environ, **fetch.variables(spec, self._workdir), **own}
        env = launching.environment(spec, told, self._workdir, package_root(), process.free_port())
        command = launching.command(spec, fetch.arguments(spec, self._workdir))
        return process.Program(command, self._workdir.code, env, self._workdir.log, launched=spec.world_size > 1)

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

    def _start_threads(self, supervisor: Supervisor) -> None:
        def send() -> None:
            self._relay.beat()
            self._relay.forward()

        put, pace = supervisor.orders.put, self._pace
        control = ControlWatch(self._store, self._identity.attempt, put)
        notices = NoticeWatch(Notices(self._metadata), self._clock, put)
        self._start_thread(Repeat(SENDING, pace.heartbeat, send, store_errors()))
        self._start_thread(Repeat("control object", pace.control, control.look, store_errors()))
        self._start_thread(Repeat("instance metadata", pace.notices, notices.look, (OSError, ValueError)))
        self._start_thread(self._trim)

    def _start_thread(self, thread: Repeat) -> None:
        self._threads.append(thread)
        thread.start()

    def _leave(self, code: int | None, supervisor: Supervisor, folder: FolderKeeper | None) -> Reason:
        self._trim.once()
        fenced = supervisor.asked is not None and supervisor.asked.reason is Reason.FENCED
        ending = Ending(
            exit_code=code,
            result=self._relay.result(),
            progress=self._relay.progress(),
            asked=supervisor.asked,
            killed=supervisor.killed,
            log_tail=self._log_tail(supervisor),
            oom_kills=process.oom_kills() - self._kills_before,
            failure=self._relay.failure(),
            hung=supervisor.hung,
            disk_full=opening.has_no_room(self._workdir.path),
        )
        if folder is not None:
            saved = not fenced and self._keep(folder, supervisor)
            # What came during the last save did not end the program; it is told where it kept the save from its end.
            ending = replace(ending, folder_saved=saved, asked=ending.asked if saved else supervisor.asked)
        results = folder.results() if folder else {}
        return self._leaving().leave(ending, results, self._threads, self._until(supervisor))

    def _keep(self, folder: FolderKeeper, supervisor: Supervisor) -> bool:
        """Keep what the program has saved last: before the stated time, or for as long as it takes."""
        if supervisor.gone_by is None:
            last = folder.last_save(self._pace.patience)
            supervisor.follow_up(last)
        else:
            last = folder.last_save(max(0.0, supervisor.gone_by - LAST_WORDS_SECONDS - time.monotonic()))
        if supervisor.gone_by is not None:
            last.join(max(0.0, supervisor.gone_by - LAST_WORDS_SECONDS - time.monotonic()))
        return last.done

    def _log_tail(self, supervisor: Supervisor) -> str:
        if supervisor.stacks_from is None:
            return read_end(self._workdir.log, LOG_TAIL_BYTES)
        return read_range(self._workdir.log, supervisor.stacks_from, STACKS_BYTES).decode(errors="replace")

    def _until(self, supervisor: Supervisor) -> float:
        return supervisor.gone_by or time.monotonic() + self._pace.last_words

    def _leaving(self) -> Leaving:
        return Leaving(self._store, self._relay, self._identity.attempt, self._clock)

    def _refuse(self, reason: Reason, message: str) -> Reason:
        return self._leaving().refuse(reason, message, self._threads, time.monotonic() + self._pace.last_words)


def package_root() -> Path:
    """The folder or zip that `import gpucost` comes from, for the program's PYTHONPATH."""
    return Path(gpucost.__file__).absolute().parent.parent
