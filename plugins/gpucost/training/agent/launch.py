"""How are the processes of one training started on a node? With torchrun's own launcher; the first failure is told.

`python -m gpucost.training.agent.launch WORLD_SIZE train.py args` runs as many processes. It ends as the process did
that failed first: with its exit code, or by the same signal. What the others say when they are ended, or fail
because the first one is gone, follows from that and is not the reason.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from gpucost.training.workdir import Failure, Workdir

POLL_SECONDS = 0.1
FOLLOWS_SECONDS = 1.0
"""A process that a signal ended may be noticed so much later, real seconds, than the others' failures over it."""
_FATAL = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


def main() -> NoReturn:
    """Run the program that the command line names in so many processes; end as it did."""
    size, *command = sys.argv[1:]
    # Whoever stops a training asks its processes, or kills this one. A signal that all processes of a machine get
    # is for them to answer. Not SIG_IGN, which they would inherit.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    failure = launch(int(size), command, Workdir(Path(os.environ["GPUCOST_WORKDIR"])))
    if failure is None:
        sys.exit(0)
    end_as(failure.exit_code or 1)


def launch(size: int, command: list[str], workdir: Workdir) -> Failure | None:
    """Run `size` processes of `command` (a python file and its arguments) until all have ended.

    Returns:
        The failure that the others followed from; None when all ended with exit code 0.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its own account of a failure is a page that hides the program's.
    logging.disable(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # Any free port.
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        signals_to_handle="SIGQUIT",
    )
    first = FirstEnd()
    first.start()
    try:
        rank = ["-m", "gpucost.training.agent.rank", str(os.getpid())]
        elastic_launch(config, sys.executable)(*rank, *command)
    except ChildFailedError as failed:
        codes = {failure.local_rank: failure.exitcode for failure in failed.failures.values()}
        ended = {failure.pid: failure.local_rank for failure in failed.failures.values()}
        cause = root_cause(codes, workdir.rank_failures(), first.failure(ended))
    else:
        return None
    _tell(cause, size, workdir)
    return cause


def root_cause(codes: Mapping[int, int], said: list[Failure], first: Failure | None) -> Failure:
    """The failure that the others followed from.

    Args:
        codes: rank -> exit code, of those that did not end with 0.
        said: what failing processes have left, with the moment.
        first: the process that ended first of those that did not end with 0, if that was seen.
    """
    known = {failure.rank: failure for failure in said}
    if first is not None and first.rank not in known:
        fatal = first.exit_code is not None and -first.exit_code in _FATAL
        known[first.rank] = first.model_copy(update={"at": first.at - FOLLOWS_SECONDS}) if fatal else first
    if not known:
        rank = min(codes, key=lambda rank: (codes[rank] == -signal.SIGTERM, rank))
        return Failure(rank=rank, exit_code=codes[rank], at=time.time())
    return min(known.values(), key=lambda failure: failure.at)


class FirstEnd(threading.Thread):
    """Notes which child ends first with something else than 0, without taking its exit status away."""

    def __init__(self) -> None:
        super().__init__(name="first end", daemon=True)
        self._seen: tuple[int, int, float] | None = None

    def run(self) -> None:
        """Thread's work; use `start`."""
        while self._seen is None:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is not None and ended.si_status != 0:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._seen = (ended.si_pid, code, time.time())
            time.sleep(0.005)

    def failure(self, ranks: Mapping[int, int]) -> Failure | None:
        """What was seen; `ranks` tells pid -> rank."""
        if self._seen is None or self._seen[0] not in ranks:
            return None
        pid, code, at = self._seen
        return Failure(rank=ranks[pid], exit_code=code, at=at)


def end_as(code: int) -> NoReturn:
    """End with an exit code, or by a signal where `code` is minus its number."""
    if code < 0:
        faulthandler.disable()  # This process has no stack that anybody wants to see.
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(abs(code))


def _tell(cause: Failure, size: int, workdir: Workdir) -> None:
    code = cause.exit_code or 0
    how = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
    print(f"gpucost: rank {cause.rank} of {size}: {how}; all have ended", file=sys.stderr, flush=True)  # noqa: T201
    try:
        workdir.write_failure(cause)
    except OSError as error:
        print(f"gpucost: cannot leave word of it: {error}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
