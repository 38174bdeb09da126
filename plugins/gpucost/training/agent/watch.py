"""Who tells the agent? The control object, the fence and the cloud's notices, each asked every few seconds.

Every source runs in a thread of its own, so that a store that hangs never delays a notice; what they learn
becomes orders in one queue.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from datetime import datetime

from pydantic import ValidationError

from gpucost.clock import SpecClock
from gpucost.jobstore import Command, Control, FencedOut, JobStore
from gpucost.reasons import Reason
from gpucost.training.agent.notices import Action, Notices
from gpucost.training.agent.orders import Extend, Kill, Order, Reconfigure, Save, Stop
from gpucost.training.agent.say import say
from gpucost.training.outage import brief

PASSED_SECONDS = 10.0
"""Real seconds to save in when a notice's time has passed already: the machine is still there, so the clocks differ."""

Put = Callable[[Order], None]


class Repeat(threading.Thread):
    """Calls a function every `seconds` (real) until told to end; errors are said, and it is tried again.

    Args:
        name: of what is done, for the message.
        seconds: real seconds between two calls.
        function: what to do.
        errors: what it may raise while something outside is away, said in one line; anything else is said in full.
    """

    def __init__(self, name: str, seconds: float, function: Callable[[], None], errors: tuple[type[Exception], ...]):
        super().__init__(name=name, daemon=True)
        self._seconds = seconds
        self._function = function
        self._errors = errors
        self._end = threading.Event()
        self._wake = threading.Event()
        self._failing: type[Exception] | None = None

    def run(self) -> None:
        """Thread's work; use `start` and `end`."""
        while not self._end.is_set():
            self._wake.clear()
            self.once()
            self._wake.wait(self._seconds)

    def soon(self) -> None:
        """Do not wait for the next call's time."""
        self._wake.set()

    def once(self) -> None:
        """One call."""
        try:
            self._function()
        except Exception as error:  # noqa: BLE001
            # Whatever it is: without this thread the node would be deaf, or taken for dead, for the rest of its life.
            if type(error) is not self._failing:  # Once per outage: an hour without S3 is not worth 1,000 lines.
                what = brief(error) if isinstance(error, self._errors) else traceback.format_exc().strip()
                say(f"{self.name}: {what}; trying again every {self._seconds:g} s")
            self._failing = type(error)
        else:
            if self._failing:
                say(f"{self.name}: works again")
            self._failing = None

    def end(self, timeout: float) -> bool:
        """Tell it to end and wait; whether it ended in time."""
        self._end.set()
        self._wake.set()
        self.join(timeout)
        return not self.is_alive()


class ControlWatch:
    """Turns changes of the control object, and a moved fence, into orders.

    Args:
        store: the job's documents.
        attempt: this attempt's number.
        put: takes the orders.
    """

    def __init__(self, store: JobStore, attempt: int, put: Put) -> None:
        self._store = store
        self._attempt = attempt
        self._put = put
        self._sequence = 0
        self._expires_at: datetime | None = None

    def look(self) -> None:
        """Ask once."""
        try:
            self._store.check_fence(self._attempt)
        except FencedOut as fenced:
            self._put(Kill(Reason.FENCED, str(fenced)))
            return
        control = self._control()
        if control.expires_at and control.expires_at != self._expires_at:
            self._expires_at = control.expires_at
            self._put(Extend(control.expires_at))
        if control.sequence > self._sequence:
            self._sequence = control.sequence
            self._obey(control)

    def _control(self) -> Control:
        try:
            return self._store.control(self._attempt)
        except ValidationError as wrong:
            if {error["loc"] for error in wrong.errors()} != {("command",)}:
                raise
        # A newer release's command. What else it says, a later expiry above all, holds all the same.
        document = json.loads(self._store.objects.get(f"{self._store.attempt_root(self._attempt)}/control.json"))
        control = Control.model_validate({**document, "command": Command.RUN})
        if control.sequence > self._sequence:
            what = repr(document.get("command"))
            say(f"control {control.sequence} asks for {what}, which this version does not know; going on as before")
        return control

    def _obey(self, control: Control) -> None:
        why = control.why or f"control {control.sequence}: {control.command}"
        if control.command is Command.SAVE:
            self._put(Save(why))
        elif control.command is Command.SAVE_AND_STOP:
            self._put(Stop(Reason.STOPPED, why))
        elif control.command is Command.RECONFIGURE:
            self._put(Reconfigure(control.recipe, why))


class NoticeWatch:
    """Turns the cloud's notices into orders.

    Args:
        notices: of this machine.
        clock: the job's clock; the cloud tells its times on it.
        put: takes the orders.
    """

    def __init__(self, notices: Notices, clock: SpecClock, put: Put) -> None:
        self._notices = notices
        self._clock = clock
        self._put = put

    def look(self) -> None:
        """Ask once."""
        for notice in self._notices.new():
            if isinstance(notice, Action):
                left = (notice.at - self._clock.now()).total_seconds() / self._clock.spec.speed
                why = f"notice: {notice.what} at {notice.at.isoformat()}"
                say(f"{why}, {left:.1f} real seconds from now")
                self._put(Stop(Reason.INTERRUPTED, why, within=left if left > 0 else PASSED_SECONDS))
            else:
                say(f"rebalance recommendation of {notice.at.isoformat()}: saving, going on")
                self._put(Save("rebalance recommendation"))
