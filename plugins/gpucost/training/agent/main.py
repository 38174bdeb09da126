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

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from gpucost.reasons import Reason
from gpucost.training.agent.attempt import Attempt, Pace
from gpucost.training.agent.identity import Unidentified, find_identity
from gpucost.training.agent.imds import Metadata
from gpucost.training.agent.say import say
from gpucost.training.agent.watchdog import VARIABLE, Watchdog
from gpucost.training.outage import brief, store_errors
from gpucost.training.surroundings import open_objects

EXIT_CODES = {
    Reason.COMPLETED: 0,
    Reason.BAD_PROGRAM: 1,
    Reason.OUT_OF_MEMORY: 2,
    Reason.BAD_REQUEST: 3,
    Reason.DISK_FULL: 4,
    Reason.HUNG: 5,
    Reason.NOT_AUTHORIZED: 6,
    Reason.CHECKPOINTS_TORN: 65,
    Reason.STORE_UNREACHABLE: 74,
    Reason.INTERRUPTED: 75,
    Reason.STOPPED: 75,
    Reason.EXPIRED: 75,
    Reason.FENCED: 76,
}
"""The agent's own exit code, for whoever sees nothing but that; the exit record says more."""
OTHER = 70
"""For any other reason (sysexits.h: EX_SOFTWARE)."""


def main() -> NoReturn:
    """Run the attempt that this node belongs to, and exit with the code of its reason."""
    code = run(os.environ)
    with contextlib.suppress(OSError):  # As in `say`.
        sys.stdout.flush()
        sys.stderr.flush()
    # At once: an orderly end of python would wait for, or stumble over, a thread that hangs in the object store.
    os._exit(code)


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
        objects = open_objects(environ)
    except (Unidentified, ValueError) as wrong:
        say(f"{Reason.BAD_REQUEST}: {wrong}")
        return EXIT_CODES[Reason.BAD_REQUEST]
    except store_errors() as away:
        say(f"{Reason.STORE_UNREACHABLE}: {environ.get('GPUCOST_STORE_URL')}: {brief(away)}")
        return EXIT_CODES[Reason.STORE_UNREACHABLE]
    return EXIT_CODES.get(Attempt(environ, identity, objects, metadata, watchdog, pace or Pace()).run(), OTHER)
