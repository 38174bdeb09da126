"""How does this machine play the node? The agent's zip as a real process, which ends when the command does.

Linux only, as the nodes are. The agent gets SIGTERM when the command dies, however it dies (PR_SET_PDEATHSIG), saves
and ends all that is below it; what outlives a killed agent is handed to the command (PR_SET_CHILD_SUBREAPER), which
ends it; see prctl(2).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from gpucost.local.place import Place
from gpucost.training.agent import process

STORE = ("GPUCOST_STORE_ENDPOINT", "GPUCOST_STORE_REGION")
"""Variables of the caller that say how the store is reached; no other of gpucost or Airflow concerns the program."""
NOT_ON_A_NODE = ("GPUCOST_", "PYTHON", "AIRFLOW_")
METADATA = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
NO_METADATA = "http://127.0.0.1:9/"
"""Refuses at once, where the real address would let every question wait; whoever sets the variable keeps theirs."""
END_SECONDS = 40.0
"""Real seconds that an agent has to save and end; more than it gives its program."""

# Runs between fork and the agent: SIGTERM when the command dies, and no start when it is dead already. Not a
# preexec_fn, which is unsafe in a process with threads.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def environment(base: Mapping[str, str], place: Place, job: str, lease: str, attempt: int) -> dict[str, str]:
    """What a node's agent finds in its environment.

    Args:
        base: the caller's.
        place: the run's folder.
        job: the job's key.
        lease: stands for the machine.
        attempt: the fencing number.
    """
    kept = {name: value for name, value in base.items() if name in STORE or not name.startswith(NOT_ON_A_NODE)}
    return {
        METADATA: NO_METADATA,
        **kept,
        "GPUCOST_STORE_URL": place.store_url,
        "GPUCOST_JOB": job,
        "GPUCOST_LEASE": lease,
        "GPUCOST_ATTEMPT": str(attempt),
        "GPUCOST_WORKDIR": str(place.work),
    }


class Node:
    """The running agent. Its command must be started from the main thread, and have no other children.

    Args:
        place: the run's folder, with the agent's zip in it.
        environ: the agent's environment, whole.
        lock: descriptor that the agent inherits.
    """

    def __init__(self, place: Place, environ: Mapping[str, str], lock: int) -> None:
        process.become_subreaper()
        agent = [sys.executable, str(place.agent_zip)]
        # A file, not a pipe: the agent must be able to speak when the command is gone.
        with place.agent_log.open("wb") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *agent],
                cwd=place.folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # The terminal's Ctrl-C is for the command, which passes it on.
                pass_fds=(lock,),
            )

    def exit_code(self) -> int | None:
        """None while it runs; as a shell says it, 128 and the signal's number when a signal ended it."""
        code = self._agent.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self) -> None:
        """Ask it to save and end."""
        if self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, and everything below it."""
        self._agent.kill()
        self._agent.wait()
        process.end_descendants(os.getpid())

    def end(self) -> None:
        """Leave nothing behind: ask it to save and end, and kill it when it takes too long."""
        self.stop()
        try:
            self._agent.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        process.end_descendants(os.getpid())
