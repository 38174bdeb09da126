"""When is the program asked, and when is it ended? The agent's decisions, apart from where orders come from."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from gpucost.clock import Clock
from gpucost.jobstore import Command
from gpucost.reasons import Reason
from gpucost.training.agent.orders import Extend, Kill, Order, Save, Stop
from gpucost.training.agent.say import say
from gpucost.training.agent.verdict import Asked
from gpucost.training.workdir import Request, Workdir

MARGIN_SECONDS = 5.0
"""Real seconds before the stated time at which the program is ended, to send the exit record; a quarter of
what is left when that is shorter."""
EXPIRY_GRACE_SECONDS = 30.0
"""Real seconds that an expired node may take to save."""
GIVE_UP_SECONDS = 20.0
"""Real seconds after SIGKILL for which its end is waited for; half of what is left when that is shorter. A process
in the kernel's hands (a disk or a GPU that does not answer) may never end, and the node must."""
TICK_SECONDS = 0.1


class Running(Protocol):
    """The part of `Program` that is used here."""

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Supervisor:
    """Watches over one program until it has ended.

    Args:
        program: it runs already.
        workdir: where requests are left.
        clock: the job's clock.
        expires_at: when this node ends itself.
        extended: called with a later expiry; an OSError of it leaves the expiry as it is.
        real: real seconds, monotonic.
    """

    def __init__(
        self,
        program: Running,
        workdir: Workdir,
        clock: Clock,
        expires_at: datetime,
        extended: Callable[[datetime], None] = lambda _: None,
        real: Callable[[], float] = time.monotonic,
    ) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.asked: Asked | None = None
        self.killed = False
        self.gone_by: float | None = None
        """Real monotonic time at which the node must be gone, or None."""
        self._program = program
        self._workdir = workdir
        self._clock = clock
        self._expires_at = expires_at
        self._expired = False
        self._extended = extended
        self._real = real
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._sequence = 0

    def run(self) -> int | None:
        """Wait for the program's end; returns its exit code, or None when it was killed and has not ended."""
        while (code := self._program.exit_code()) is None and not self._gives_up():
            self.tick()
            try:
                self.obey(self.orders.get(timeout=TICK_SECONDS))
            except queue.Empty:
                continue
        # A signal may have reached program and agent together: what is still in the queue says why.
        while not self.orders.empty():
            self.obey(self.orders.get())
        return code

    def tick(self) -> None:
        """Look at the clocks."""
        if not self._expired and self._clock.now() >= self._expires_at:
            # Asked already or not: until now, a program that never meets a request was given all the time it took.
            self._expired = True
            why = f"the node's expiry {self._expires_at.isoformat()} has passed"
            self.obey(Stop(Reason.EXPIRED, why, within=EXPIRY_GRACE_SECONDS))
        if self._kill_at is not None and self._real() >= self._kill_at and not self.killed:
            say("time is up: ending the program")
            self._kill()

    def obey(self, order: Order) -> None:
        """Do what one order asks."""
        if isinstance(order, Extend):
            self._extend(order.expires_at)
        elif isinstance(order, Save):
            if self.asked is None:
                self._ask(Command.SAVE, order.why)
        elif isinstance(order, Kill):
            say(order.why)
            self.asked = Asked(order.reason, order.why)
            self._kill()
        else:
            self._stop(order)

    def _extend(self, expires_at: datetime) -> None:
        if expires_at <= self._expires_at:
            return
        try:
            self._extended(expires_at)
        except OSError as error:
            say(f"expiry stays {self._expires_at.isoformat()}: {error}")
        else:
            self._expires_at = expires_at
            say(f"expiry is now {expires_at.isoformat()}")

    def _kill(self) -> None:
        self.killed = True
        self._program.kill()
        if self._give_up_at is None:
            now = self._real()
            left = GIVE_UP_SECONDS if self.gone_by is None else max(0.0, self.gone_by - now) / 2
            self._give_up_at = now + min(GIVE_UP_SECONDS, left)

    def _gives_up(self) -> bool:
        if self._give_up_at is None or self._real() < self._give_up_at:
            return False
        say("the program was killed and has not ended; leaving without it")
        return True

    def _stop(self, order: Stop) -> None:
        # The first reason stands; a second one may only bring the end nearer.
        if self.asked is None:
            say(f"{order.reason}: {order.why}; saving and stopping")
            self.asked = Asked(order.reason, order.why)
            self._ask(Command.SAVE_AND_STOP, order.why)
        if order.within is not None:
            now = self._real()
            margin = min(MARGIN_SECONDS, order.within / 4)
            self.gone_by = min(self.gone_by or float("inf"), now + order.within)
            self._kill_at = min(self._kill_at or float("inf"), now + order.within - margin)

    def _ask(self, command: Command, why: str) -> None:
        self._sequence += 1
        self._workdir.ask(Request.model_validate({"sequence": self._sequence, "command": command, "why": why}))
