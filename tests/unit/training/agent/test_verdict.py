"""Why a program ended is told from its exit code, last word, log, and what was asked of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpucost.reasons import Reason
from gpucost.training.agent.verdict import Asked, Ending, verdict
from gpucost.training.workdir import EXIT_FENCED, EXIT_STOPPED, EXIT_STORE, Progress, Result

NOW = datetime(2026, 11, 30, tzinfo=UTC)
AT_90 = Progress(step=90, at=NOW, total_steps=100, saved_step=80)
FINISHED = Result(status="finished", step=100, saved_step=100)
STOPPED = Result(status="stopped", step=90, saved_step=90)
NOTICE = Asked(Reason.INTERRUPTED, "notice: terminate at noon")
CUDA = (
    "Traceback (most recent call last):\n  ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
)
CPU = "RuntimeError: [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to\n"


@pytest.mark.parametrize(
    ("ending", "reason", "said"),
    [
        (Ending(0, FINISHED, AT_90), Reason.COMPLETED, ""),
        (Ending(0, FINISHED, AT_90, asked=NOTICE), Reason.COMPLETED, ""),
        (Ending(0, None, AT_90), Reason.BAD_PROGRAM, "exit code 0 at step 90 of 100 without calling run.finish"),
        (Ending(0, None, None), Reason.BAD_PROGRAM, "it logged nothing"),
        (Ending(1, FINISHED, AT_90), Reason.BAD_PROGRAM, "exit code 1"),
        (Ending(2, None, AT_90, log_tail="usage: train.py\n"), Reason.BAD_PROGRAM, "usage: train.py"),
        (Ending(-11, None, AT_90), Reason.BAD_PROGRAM, "ended by SIGSEGV at step 90"),
        (Ending(-9, None, AT_90), Reason.BAD_PROGRAM, "ended by SIGKILL"),
        (Ending(-9, None, AT_90, oom_kills=1), Reason.OUT_OF_MEMORY, "the kernel ended the program"),
        (Ending(1, None, AT_90, log_tail=CUDA), Reason.OUT_OF_MEMORY, "Tried to allocate 2 GiB"),
        (Ending(1, None, AT_90, log_tail=CPU), Reason.OUT_OF_MEMORY, "can't allocate memory"),
        (Ending(1, None, AT_90, log_tail="MemoryError\n"), Reason.OUT_OF_MEMORY, "ran out of memory"),
        (Ending(1, None, None, log_tail="we catch MemoryError here\n"), Reason.BAD_PROGRAM, "exit code 1"),
        (Ending(1, None, None, log_tail=CUDA + "more\n" * 50), Reason.BAD_PROGRAM, "exit code 1"),
        (
            Ending(EXIT_STOPPED, STOPPED, AT_90, asked=NOTICE),
            Reason.INTERRUPTED,
            "stopped at step 90, saved at step 90",
        ),
        (Ending(-9, None, AT_90, asked=NOTICE, killed=True), Reason.INTERRUPTED, "no step boundary in time"),
        (Ending(None, None, AT_90, asked=NOTICE, killed=True), Reason.INTERRUPTED, "was killed and has not ended"),
        (Ending(1, None, AT_90, asked=NOTICE), Reason.INTERRUPTED, "ended by itself meanwhile (exit code 1)"),
        (Ending(EXIT_STOPPED, STOPPED, AT_90, asked=Asked(Reason.EXPIRED, "passed")), Reason.EXPIRED, "passed"),
        (Ending(EXIT_STOPPED, STOPPED, AT_90), Reason.INTERRUPTED, "got SIGTERM"),
        (Ending(-15, None, None), Reason.INTERRUPTED, "nothing was saved"),
        (Ending(EXIT_FENCED, None, AT_90), Reason.FENCED, "newer attempt"),
        (
            Ending(-9, None, AT_90, asked=Asked(Reason.FENCED, "attempt 2 owns"), killed=True),
            Reason.FENCED,
            "attempt 2",
        ),
        (Ending(EXIT_STORE, None, None), Reason.STORE_UNREACHABLE, "object store"),
    ],
)
def test_each_ending_has_its_reason(ending: Ending, reason: Reason, said: str) -> None:
    told, message = verdict(ending)
    assert told is reason, message
    assert said in message


def test_only_the_end_of_the_log_is_told() -> None:
    log = "".join(f"line {number}\n" for number in range(100))
    message = verdict(Ending(1, None, None, log_tail=log))[1]
    assert "line 99" in message
    assert "line 80" in message
    assert "line 79" not in message
