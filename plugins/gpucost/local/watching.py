"""What happens while it runs, and how is its end told? One attempt, from the agent's start to its last word."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from gpucost.jobstore import ExitRecord, Heartbeat, JobStore, Live
from gpucost.local.node import Node, environment
from gpucost.local.place import Place
from gpucost.local.screen import Follower, Screen, status_line
from gpucost.local.stand import saved_step
from gpucost.reasons import Reason, rule_for
from gpucost.training.agent.relay import read_end
from gpucost.training.outage import store_errors
from gpucost.training.workdir import Progress, Workdir

TICK_SECONDS = 0.1
BEAT_SECONDS = 2.0
AGENT_END_BYTES = 4096
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Prepared:
    """An attempt that is written down and can be started.

    Args:
        store: the job's documents.
        place: the run's folder.
        number: the attempt's.
        lease: stands for this machine.
    """

    store: JobStore
    place: Place
    number: int
    lease: str


class Attempt:
    """The attempt on this machine.

    Args:
        prepared: what is started.
        screen: where everything is shown.
    """

    def __init__(self, prepared: Prepared, screen: Screen) -> None:
        self._prepared = prepared
        self._screen = screen
        self._workdir = Workdir(prepared.place.work)
        self._workdir.clear()
        prepared.place.agent_log.unlink(missing_ok=True)
        self._program = Follower(self._workdir.log, screen.program)
        self._agent = Follower(prepared.place.agent_log, screen.agent)
        self._beats = _Beats(Live(prepared.store.objects), prepared.lease)
        self._signals = 0
        self._obeyed = 0
        self._began = time.monotonic()

    def run(self, lock: int) -> int:
        """Start it and stay until it has ended, with all that it started; returns the exit code.

        Args:
            lock: descriptor that the agent holds as long as it lives.
        """
        mine = self._prepared
        environ = environment(os.environ, mine.place, mine.store.key, mine.lease, mine.number)
        with self._counting_signals():
            node = Node(mine.place, environ, lock)
            try:
                code = self._watch(node)
            finally:
                node.end()
        return self._tell_the_end(code)

    def _watch(self, node: Node) -> int:
        self._beats.start()
        with self._screen:
            while (code := node.exit_code()) is None:
                self._obey(node)
                self._show()
                time.sleep(TICK_SECONDS)
        self._agent.follow(final=True)
        self._program.follow(final=True)
        return code

    def _show(self) -> None:
        self._agent.follow()
        self._program.follow()
        self._screen.status(status_line(self._progress(), self._beats.newest, time.monotonic() - self._began))

    def _progress(self) -> Progress | None:
        try:
            return self._workdir.progress()
        except ValueError:
            return None  # The program may write what it likes; the agent says so.

    @contextmanager
    def _counting_signals(self) -> Iterator[None]:
        def count(_number: int, _frame: FrameType | None) -> None:
            self._signals += 1

        # Under nohup a closed terminal ends nothing.
        heeded = [one for one in ENDING if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, count) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _obey(self, node: Node) -> None:
        """Ctrl-C: save and stop. Once more: at once."""
        asked, self._obeyed = self._obeyed, self._signals
        if asked == self._signals:
            return
        # What is said may fail, with the terminal gone: first what must be done.
        if asked == 0 and self._signals == 1:
            node.stop()
            self._screen.say("saving and stopping; Ctrl-C again ends it at once, and loses what is not saved")
        else:
            node.kill()
            self._screen.say("ended at once")

    def _tell_the_end(self, code: int) -> int:
        mine, say = self._prepared, self._screen.say
        seconds = time.monotonic() - self._began
        try:
            record = mine.store.exit_record(mine.number)
            saved = saved_step(mine.store, mine.store.head())
        except store_errors():
            record, saved = None, None
            say("the object store does not answer; what is known is this:")
        if record is None:
            self._tell_without_record(code, seconds)
        else:
            self._tell(record, seconds)
        if saved is not None:
            say(f"checkpoints: {mine.place.store_url}/{mine.store.root}/checkpoints (newest: step {saved})")
        if code != 0:
            say("run it again to go on" + ("" if saved is None else f" from step {saved}"))
        return code

    def _tell(self, record: ExitRecord, seconds: float) -> None:
        # The log has been shown already.
        message = record.message.split("; end of its log:", 1)[0]
        where = f"{record.reason} at step {record.step} after {seconds:.1f} s"
        self._screen.say(f"{where}: {message}" if message else where)
        advice = rule_for(record.reason).advice
        if advice and record.reason is not Reason.INTERRUPTED:
            self._screen.say(f"what to do: {advice}")
        if record.results:
            self._screen.results(record.results)

    def _tell_without_record(self, code: int, seconds: float) -> None:
        self._screen.say(f"the agent ended after {seconds:.1f} s without an exit record (exit code {code})")
        if not self._signals:
            self._screen.say(f"the end of {self._prepared.place.agent_log}:")
            self._screen.program(read_end(self._prepared.place.agent_log, AGENT_END_BYTES))


class _Beats(threading.Thread):
    """Reads the agent's heartbeats; a store that hangs must not keep Ctrl-C waiting."""

    def __init__(self, live: Live, lease: str) -> None:
        super().__init__(daemon=True)
        self.newest: Heartbeat | None = None
        self._live = live
        self._lease = lease

    def run(self) -> None:
        while True:
            try:
                self.newest = self._live.read(self._lease)
            except store_errors():
                self.newest = None  # Nothing but a part of the status line is missing; the agent says what is wrong.
            time.sleep(BEAT_SECONDS)
