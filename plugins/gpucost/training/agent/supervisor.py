"""When is the program asked, and when is it ended? The agent's decisions, apart from where orders come from."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from pydantic import ValidationError

from gpucost.clock import Clock
from gpucost.jobstore import Command
from gpucost.reasons import Reason
from gpucost.recipe import Recipe
from gpucost.training.agent.hang import Hang, Hung
from gpucost.training.agent.orders import Extend, Kill, Order, Reconfigure, Save, Stop
from gpucost.training.agent.say import say
from gpucost.training.agent.verdict import Asked
from gpucost.training.workdir import EXIT_REFUSED, EXIT_STOPPED, Progress

MARGIN_SECONDS = 5.0
"""Real seconds before the stated time at which the program is ended, to send the exit record; a quarter of
what is left when that is shorter."""
EXPIRY_GRACE_SECONDS = 30.0
"""Real seconds that an expired node may take to save."""
GIVE_UP_SECONDS = 20.0
"""Real seconds after SIGKILL for which its end is waited for; half of what is left when that is shorter. A process
in the kernel's hands (a disk or a GPU that does not answer) may never end, and the node must."""
TICK_SECONDS = 0.1
LOOK_SECONDS = 0.5
"""Real seconds between two looks at the program's progress."""


class Running(Protocol):
    """The part of `Program` that is used here."""

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def ask_to_end(self) -> None:
        """Send SIGTERM to the training's processes."""
        ...

    def dump_stacks(self) -> int:
        """Let it write its stacks to its log and end; the log's size before."""
        ...


class Asking(Protocol):
    """How something is asked of the program; see `asking`."""

    @property
    def takes_recipe(self) -> bool:
        """Whether a recipe means anything to it."""
        ...

    def ask(self, program: Running, command: Command, why: str, gone_by: datetime | None, /) -> None:
        """Ask the program to save, or to save and stop."""
        ...

    def reserve(self) -> float:
        """Real seconds that are needed after the program's end, to keep what it has saved."""
        ...


class Supervisor:
    """Watches over an attempt's programs, one after the other.

    Args:
        asking: how something is asked of the program.
        progress: the program's newest.
        hang: when it counts as hung.
        recipe: that it is started with.
        clock: the job's clock.
        expires_at: when this node ends itself.
        extended: called with a later expiry; an OSError of it leaves the expiry as it is.
        real: real seconds, monotonic.
        real_now: the real time.
    """

    def __init__(
        self,
        *,
        asking: Asking,
        progress: Callable[[], Progress | None],
        hang: Hang,
        recipe: Recipe,
        clock: Clock,
        expires_at: datetime,
        extended: Callable[[datetime], None] = lambda _: None,
        real: Callable[[], float] = time.monotonic,
        real_now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.asked: Asked | None = None
        self.killed = False
        self.hung: Hung | None = None
        self.stacks_from: int | None = None
        """Where in the log the stacks of a program that hung begin, bytes."""
        self.recipe = recipe
        """What the program is started with; orders may have changed it."""
        self.gone_by: float | None = None
        """Real monotonic time at which the node must be gone, or None."""
        self._asking = asking
        self._progress = progress
        self._hang = hang
        self._next_recipe: Recipe | None = None
        self._recipe_before: Recipe | None = None
        self._clock = clock
        self._expires_at = expires_at
        self._expired = False
        self._extended = extended
        self._real = real
        self._real_now = real_now
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._looked = 0.0
        self._program: Running | None = None
        self._training = False

    def run(self, program: Running, *, training: bool = True) -> int | None:
        """Wait for the program's end; returns its exit code, or None when it was killed and has not ended.

        Args:
            program: it runs already.
            training: else it is what comes before the training, which has nothing to save and reports no steps.
        """
        self.begin(program, training=training)
        while (code := program.exit_code()) is None and not self._gives_up():
            self.tick()
            try:
                self.obey(self.orders.get(timeout=TICK_SECONDS))
            except queue.Empty:
                continue
        # A signal may have reached program and agent together: what is still in the queue says why.
        while not self.orders.empty():
            self.obey(self.orders.get())
        return code

    def follow_up(self, work: Running) -> None:
        """After the program's end, where no time is stated: see to what it left, as long as it takes or orders leave.

        Args:
            work: it runs already.
        """
        self.killed, self._give_up_at = False, None
        self.run(work, training=False)

    def begin(self, program: Running, *, training: bool = True) -> None:
        """From now on, this one is watched over."""
        self._program = program
        self._training = training
        self._looked = self._real()
        self._hang.begin(self._progress(), self._looked)

    def recipe_to_start_with(self, code: int | None) -> Recipe | None:
        """After a program's end: the recipe that it is to be started again with; None: it is not.

        Args:
            code: the program's exit code.
        """
        recipe, self._next_recipe = self._next_recipe, None
        before, self._recipe_before = self._recipe_before, None
        if self.asked or self.killed:
            return None
        if recipe is not None and code == EXIT_STOPPED:
            self._recipe_before, self.recipe = self.recipe, recipe
            return recipe
        if before is not None and code == EXIT_REFUSED:
            say(f"the program cannot do the recipe {self.recipe.chosen()}; going on with the one before")
            self.recipe = before
            return before
        return None

    def tick(self) -> None:
        """Look at the clocks, and whether the program gets anywhere."""
        now = self._real()
        if not self._expired and self._clock.now() >= self._expires_at:
            # Asked already or not: until now, a program that never meets a request was given all the time it took.
            self._expired = True
            why = f"the node's expiry {self._expires_at.isoformat()} has passed"
            self.obey(Stop(Reason.EXPIRED, why, within=EXPIRY_GRACE_SECONDS))
        if self._kill_at is not None and now >= self._kill_at and not self.killed:
            say("time is up: ending the program")
            self._kill()
        # Where a time is stated, stacks are not worth what is left of it.
        if self._training and self._kill_at is None and now >= self._looked + LOOK_SECONDS and not self.killed:
            self._looked = now
            if hung := self._hang.look(self._progress(), now):
                self._end_hung(hung)

    def obey(self, order: Order) -> None:
        """Do what one order asks."""
        if isinstance(order, Extend):
            self._extend(order.expires_at)
        elif isinstance(order, Save):
            if self.asked is None and self._next_recipe is None:
                self._ask(Command.SAVE, order.why)
        elif isinstance(order, Reconfigure):
            self._reconfigure(order)
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
        except (OSError, OverflowError) as error:
            say(f"expiry stays {self._expires_at.isoformat()}: {error}")
        else:
            self._expires_at = expires_at
            say(f"expiry is now {expires_at.isoformat()}")

    def _reconfigure(self, order: Reconfigure) -> None:
        if self.asked is not None:
            return
        if not self._asking.takes_recipe:
            say(f"{order.why}: a program that saves by itself takes no recipe; going on as before")
            return
        try:
            recipe = (self._next_recipe or self.recipe).changed(dict(order.options))
        except ValidationError as wrong:
            say(f"{order.why}: the recipe is refused, going on as before: {' '.join(str(wrong).split())}")
            return
        if recipe == self.recipe and self._next_recipe is None:
            say(f"{order.why}: the recipe is this one already")
            return
        if not self._training:
            self.recipe = recipe
            return
        say(f"{order.why}: saving, and starting the program again with the recipe {recipe.chosen()}")
        self._next_recipe = recipe
        self._ask(Command.SAVE_AND_STOP, order.why)

    def _end_hung(self, hung: Hung) -> None:
        say(f"{hung}; its stacks go to its log, then it is ended")
        self.hung = hung
        if self._program is not None:
            self.stacks_from = self._program.dump_stacks()
        self._kill()

    def _kill(self) -> None:
        self.killed = True
        if self._program is not None:
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
        nearer = order.within is not None and self._end_within(order.within)
        if self.asked is None:
            say(f"{order.reason}: {order.why}; saving and stopping")
            self.asked = Asked(order.reason, order.why)
        elif not nearer:
            return
        self._ask(Command.SAVE_AND_STOP, order.why)

    def _end_within(self, seconds: float) -> bool:
        now = self._real()
        margin = min(seconds / 2, min(MARGIN_SECONDS, seconds / 4) + self._asking.reserve())
        before = self._kill_at
        self.gone_by = min(self.gone_by or float("inf"), now + seconds)
        self._kill_at = min(before or float("inf"), now + seconds - margin)
        return before is None or self._kill_at < before

    def _ask(self, command: Command, why: str) -> None:
        if self._program is None:
            return
        if not self._training:
            if command is Command.SAVE_AND_STOP:
                self._program.ask_to_end()
            return
        left = None if self._kill_at is None else timedelta(seconds=self._kill_at - self._real())
        gone_by = None if left is None else self._real_now() + left
        self._asking.ask(self._program, command, why, gone_by)
