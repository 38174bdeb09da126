"""Why a program ended is told from its exit code, last word, log, and what was asked of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpucost.jobstore import Phase
from gpucost.reasons import Reason
from gpucost.training.agent.hang import Hung
from gpucost.training.agent.verdict import Asked, Ending, verdict
from gpucost.training.workdir import (
    EXIT_FENCED,
    EXIT_REFUSED,
    EXIT_STOPPED,
    EXIT_STORE,
    EXIT_TORN,
    Failure,
    Progress,
    Result,
)

NOW = datetime(2026, 11, 30, tzinfo=UTC)
AT_90 = Progress(step=90, at=NOW, total_steps=100, saved_step=80)
FINISHED = Result(status="finished", step=100, saved_step=100)
STOPPED = Result(status="stopped", step=90, saved_step=90)
FENCED = Result(status="fenced", step=90, saved_step=80)
NOTICE = Asked(Reason.INTERRUPTED, "notice: terminate at noon")
CUDA = (
    "Traceback (most recent call last):\n  ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
)
FULL = "Traceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left on device: 'cache'\n"
SHARED_MEMORY = "RuntimeError: unable to write to file </torch_12_3>: No space left on device (28)\n"
HUNG = Hung(90, 700, Phase.TRAINING, 2.0)
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
        (
            Ending(-9, STOPPED, AT_90, asked=NOTICE, killed=True),
            Reason.INTERRUPTED,
            "step 90; the program did not end in",
        ),
        (Ending(None, None, AT_90, asked=NOTICE, killed=True), Reason.INTERRUPTED, "was killed and has not ended"),
        (Ending(1, None, AT_90, asked=NOTICE), Reason.INTERRUPTED, "ended by itself meanwhile (exit code 1)"),
        (Ending(EXIT_STOPPED, STOPPED, AT_90, asked=Asked(Reason.EXPIRED, "passed")), Reason.EXPIRED, "passed"),
        (Ending(EXIT_STOPPED, STOPPED, AT_90), Reason.INTERRUPTED, "got SIGTERM"),
        (Ending(-15, None, None), Reason.INTERRUPTED, "nothing was saved"),
        (Ending(EXIT_FENCED, FENCED, AT_90), Reason.FENCED, "newer attempt"),
        (Ending(EXIT_FENCED, None, AT_90), Reason.BAD_PROGRAM, "exit code 76"),
        (Ending(EXIT_STOPPED, None, AT_90), Reason.BAD_PROGRAM, "exit code 75"),
        (Ending(EXIT_STOPPED, None, None, folder_saved=True), Reason.BAD_PROGRAM, "exit code 75"),
        (Ending(EXIT_TORN, None, None, log_tail="a, b\n"), Reason.CHECKPOINTS_TORN, "exit code 65: the job has"),
        (
            Ending(EXIT_REFUSED, None, None, log_tail="gpucost: recipe: no bf16\n"),
            Reason.BAD_REQUEST,
            "recipe: no bf16",
        ),
        (
            Ending(-9, None, AT_90, asked=Asked(Reason.FENCED, "attempt 2 owns"), killed=True),
            Reason.FENCED,
            "attempt 2",
        ),
        (
            Ending(1, None, AT_90, failure=Failure(rank=3, at=0, exit_code=1, traceback=CUDA), log_tail="rank 0: gone"),
            Reason.OUT_OF_MEMORY,
            "the program (rank 3) ran out of memory; its traceback:\nTraceback",
        ),
        (
            Ending(-9, None, AT_90, oom_kills=1, failure=Failure(rank=1, at=0, exit_code=-9)),
            Reason.OUT_OF_MEMORY,
            "the kernel ended the program (rank 1)",
        ),
        (Ending(1, None, AT_90, log_tail=FULL), Reason.DISK_FULL, "the disk is full: exit code 1 at step 90"),
        (Ending(1, None, AT_90, disk_full=True), Reason.DISK_FULL, "the disk is full"),
        (Ending(1, None, AT_90, log_tail=SHARED_MEMORY), Reason.BAD_PROGRAM, "No space left"),
        (Ending(0, FINISHED, AT_90, disk_full=True), Reason.COMPLETED, ""),
        (
            Ending(-9, None, AT_90, hung=HUNG, killed=True, log_tail="[stacks]\n" + "  File\n" * 40 + "  last"),
            Reason.HUNG,
            "hung at step 90 (training): nothing for 700 s, a step usually takes 2 s; its stacks:\n[stacks]",
        ),
        (Ending(-9, None, AT_90, hung=HUNG, killed=True, asked=NOTICE), Reason.INTERRUPTED, "and was killed"),
        (Ending(0, None, None, folder_saved=True), Reason.COMPLETED, ""),
        (Ending(0, None, None, folder_saved=False), Reason.STORE_UNREACHABLE, "has not reached the store"),
        (Ending(0, None, None, folder_saved=True, asked=NOTICE), Reason.INTERRUPTED, "what it saved is kept"),
        (Ending(1, None, None, folder_saved=False, asked=NOTICE), Reason.INTERRUPTED, "has not reached the store"),
        (Ending(3, None, None, folder_saved=True), Reason.BAD_PROGRAM, "exit code 3"),
        (
            Ending(EXIT_STOPPED, STOPPED.model_copy(update={"note": "no save was begun"}), AT_90, asked=NOTICE),
            Reason.INTERRUPTED,
            "saved at step 90; no save was begun",
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


def test_the_stacks_of_a_program_that_hung_are_told_from_the_first() -> None:
    stacks = "".join(f"frame {number}\n" for number in range(1000))
    message = verdict(Ending(-9, None, None, hung=HUNG, killed=True, log_tail=stacks))[1]
    assert "frame 0\nframe 1\n" in message
    assert "frame 149" in message
    assert "frame 150" not in message
