"""What if the agent itself hangs or dies? A process of its own, which switches the machine off some time after expiry.

It depends on nothing but this machine: not on the agent, on the store, nor on the program. It is armed where
`GPUCOST_SHUTDOWN` holds the command that ends the machine, which a node's start script sets: somebody who runs
the agent by hand keeps their machine.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from gpucost.clock import SpecClock
from gpucost.training.agent.say import say

VARIABLE = "GPUCOST_SHUTDOWN"
STARTING = timedelta(minutes=15)
"""Real time from the agent's start until it must know its expiry."""
MARGIN = timedelta(minutes=5)
"""Real time from the expiry until the machine is switched off; several times what an orderly end takes."""

# Told the moment rather than the seconds until it: a machine's clock may be set right after the boot.
_WAIT = (
    "import os, sys, time\n"
    "while (left := float(sys.argv[1]) - time.time()) > 0: time.sleep(min(left, 10))\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


class Watchdog:
    """Switches the machine off at the last moment it was armed for.

    Args:
        command: what ends the machine; empty: nothing does, and arming does nothing.
        real_now: the real time.
    """

    def __init__(self, command: str, real_now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._command = shlex.split(command)
        self._real_now = real_now
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Its process, which is to outlive all others of the agent."""
        return frozenset() if self._process is None else frozenset({self._process.pid})

    def arm_for_start(self) -> None:
        """Until the expiry is known.

        Raises:
            OSError: no process can be started.
        """
        self._arm(self._real_now() + STARTING)

    def arm(self, clock: SpecClock, expires_at: datetime) -> None:
        """Switch off `MARGIN` after the expiry, and not within `MARGIN` from now.

        Args:
            clock: the job's; a rehearsal's is faster than real time.
            expires_at: on that clock.

        Raises:
            OSError: no process can be started; what was armed before stands.
        """
        try:
            at = max(clock.spec.real_at(expires_at), self._real_now()) + MARGIN
        except OverflowError:  # "Never", told as the last moment of the calendar.
            at = datetime.max.replace(microsecond=0, tzinfo=UTC)
        self._arm(at)

    def _arm(self, at: datetime) -> None:
        if not self._command:
            return
        before = self._process
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAIT, str(at.timestamp()), *self._command],
            cwd="/",
            stdin=subprocess.DEVNULL,
            # Whoever reads the agent's output must not wait for this one's end.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # A signal to the agent's group is not meant for it.
        )
        say(f"this machine is switched off at {at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, real time, at the latest")
        if before is not None:
            before.kill()
            before.wait()
