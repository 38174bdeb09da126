"""How are thousands of programs started when one import of torch takes four seconds? They are forked.

This process has imported what programs import, and has run none of it: no thread, no client, no random number. For
every request (a line of JSON on stdin) it forks one process per rank, in a process group of their own, and each runs
its program as `python program.py` would. What it tells on stdout, in lines of JSON: `{"started": [pid, ...]}`, the
first one being the group's leader, and `{"ended": pid, "code": ...}` for each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.survival_recorder import record

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def warm_up() -> None:
    """Import, and nothing more."""
    import boto3  # noqa: F401
    import numpy as np  # noqa: F401
    import obstore.store  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._inductor  # imported by torch.use_deterministic_algorithms, in two seconds
    import torch.distributed
    import torch.utils.data  # noqa: F401

    from gpucost.training import Run, checkpointed, prepare, weights_digest  # noqa: F401


def serve() -> dict[str, Any] | None:
    """Fork as asked until stdin ends (None). In a forked process: what it is to become."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(wake, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    tell({"ready": os.getpid()})
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if wake in ready:
            os.read(wake, 4096)
            bury()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return None
            if (mine := fork(json.loads(line))) is not None:
                selector.close()
                os.close(wake)
                os.close(woken)
                return mine


def fork(request: dict[str, Any]) -> dict[str, Any] | None:
    """One process per rank. In each of them: what it is to become; here: None."""
    pids: list[int] = []
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, pids[0] if pids else 0)
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["world_size"])}
            return {**request, "environ": request["environ"] | ranks}
        # On both sides: whoever comes first, the group is there before it is needed.
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    tell({"started": pids})
    return None


def bury() -> None:
    """Tell of everybody who has ended; orphans of the programs among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def tell(what: dict[str, Any]) -> None:
    """One line on stdout."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def become(request: dict[str, Any]) -> None:
    """Be `python program.py arguments...` with the request's environment, log and folder; may end by SystemExit."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.update(request["environ"])
    program = Path(request["program"])
    os.chdir(request["folder"])
    sys.argv = [str(program), *request["arguments"]]
    sys.path[0] = str(program.parent)
    record()
    runpy.run_path(str(program), run_name="__main__")


def main() -> None:
    """Be the zygote, and in its children the programs."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warm_up()
    gc.freeze()  # A collection in a child would copy every page of it.
    request = serve()
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
