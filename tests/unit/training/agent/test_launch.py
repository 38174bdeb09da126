"""Of several processes, the one that failed first is the reason; what follows from it is not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from gpucost.training.agent.attempt import package_root
from gpucost.training.agent.launch import FirstEnd, root_cause
from gpucost.training.workdir import Failure


def raised(rank: int, at: float, code: int = 1) -> Failure:
    return Failure(rank=rank, exit_code=code, at=at, traceback="Traceback ..." if code == 1 else "")


def seen(rank: int, at: float, code: int) -> Failure:
    return Failure(rank=rank, exit_code=code, at=at)


@pytest.mark.parametrize(
    ("codes", "said", "first", "rank", "code"),
    [
        ({0: 1, 1: 1}, [raised(0, 10.2), raised(1, 10.1)], seen(0, 10.5, 1), 1, 1),
        ({0: -15, 1: 1}, [raised(1, 10.1)], seen(1, 10.5, 1), 1, 1),
        # Killed, and noticed only when the other had failed over it.
        ({0: 1, 1: -9}, [raised(0, 10.0)], seen(1, 10.3, -9), 1, -9),
        # Killed much later: because the first one had failed.
        ({0: 1, 1: -9}, [raised(0, 10.0)], seen(1, 40.0, -9), 0, 1),
        ({0: -15, 1: 3}, [], seen(1, 10.0, 3), 1, 3),
        ({0: 75, 1: -15}, [raised(0, 10.0, 75)], seen(0, 10.2, 75), 0, 75),
        ({0: 75, 1: 75}, [raised(0, 10.1, 75), raised(1, 10.0, 75)], None, 1, 75),
        ({0: -15, 1: -11}, [], None, 1, -11),
        ({0: -15, 1: -15}, [], seen(1, 10.0, -15), 1, -15),
    ],
)
def test_the_first_failure_is_the_cause(
    codes: dict[int, int], said: list[Failure], first: Failure | None, rank: int, code: int
) -> None:
    cause = root_cause(codes, said, first)
    assert (cause.rank, cause.exit_code) == (rank, code)


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
def test_the_first_end_is_seen_and_its_status_is_left(ending: str, code: int) -> None:
    quiet = subprocess.Popen([sys.executable, "-c", "pass"])
    failing = subprocess.Popen([sys.executable, "-c", f"import os, sys, time; time.sleep(0.3); {ending}"])
    watch = FirstEnd()
    watch.start()
    assert quiet.wait(30) == 0
    watch.join(30)
    assert failing.wait(30) == code
    failure = watch.failure({quiet.pid: 0, failing.pid: 1})
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (1, code)


@pytest.mark.parametrize("code", [0, 1, 75, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_it_ends_as_the_first_did(code: int) -> None:
    source = (
        f"import faulthandler; faulthandler.enable(); from gpucost.training.agent.launch import end_as; end_as({code})"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env={"PYTHONPATH": str(package_root())}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, b"")
