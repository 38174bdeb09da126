"""Why did the program end? Its exit code, its last word, the end of its log, and what was asked of it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from gpucost.reasons import Reason
from gpucost.training.workdir import EXIT_FENCED, EXIT_STOPPED, EXIT_STORE, Progress, Result

LOG_LINES = 20
_OUT_OF_MEMORY = re.compile(
    r"^(?:torch\.(?:cuda\.)?OutOfMemoryError\b|MemoryError\b|numpy\.[\w.]*_ArrayMemoryError\b"
    r"|RuntimeError: .*(?:can't allocate memory|CUDA out of memory))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Asked:
    """That the program was asked to stop, and why."""

    reason: Reason
    why: str


@dataclass(frozen=True)
class Ending:
    """What is known when the program has ended.

    Args:
        exit_code: minus the signal's number when a signal ended it; None: it was killed and has not ended.
        result: its last word.
        progress: how far it was.
        asked: whether it had been asked to stop.
        killed: whether the agent ended it, being out of time.
        log_tail: the end of its log.
        oom_kills: processes that the kernel ended for lack of memory while it ran.
    """

    exit_code: int | None
    result: Result | None
    progress: Progress | None
    asked: Asked | None = None
    killed: bool = False
    log_tail: str = ""
    oom_kills: int = 0

    @property
    def step(self) -> int:
        """Steps done, as far as the program said."""
        return max([0, *(said.step for said in (self.result, self.progress) if said)])

    @property
    def saved_step(self) -> int | None:
        """The newest committed checkpoint's step."""
        return max(
            (said.saved_step for said in (self.result, self.progress) if said and said.saved_step is not None),
            default=None,
        )


def verdict(ending: Ending) -> tuple[Reason, str]:
    """The reason, and a message for a person."""
    code, result, asked = ending.exit_code, ending.result, ending.asked
    if result and result.status == "finished" and code == 0:
        return Reason.COMPLETED, ""
    if code == EXIT_FENCED or (asked and asked.reason is Reason.FENCED):
        return Reason.FENCED, asked.why if asked else "a newer attempt owns the job"
    if asked:
        return asked.reason, f"{asked.why}; {_how_it_stopped(ending)}"
    if code in (EXIT_STOPPED, -signal.SIGTERM):
        return Reason.INTERRUPTED, f"the program got SIGTERM; {_how_it_stopped(ending)}"
    if code == EXIT_STORE:
        return Reason.STORE_UNREACHABLE, _with_log("the program could not reach the object store", ending)
    if _OUT_OF_MEMORY.search(_last_lines(ending.log_tail)) and code != 0:
        return Reason.OUT_OF_MEMORY, _with_log("the program ran out of memory", ending)
    if code == -signal.SIGKILL and ending.oom_kills > 0:
        return Reason.OUT_OF_MEMORY, _with_log("the kernel ended the program for lack of memory", ending)
    return Reason.BAD_PROGRAM, _with_log(_what_was_wrong(ending), ending)


def _how_it_stopped(ending: Ending) -> str:
    saved = "nothing was saved" if ending.saved_step is None else f"saved at step {ending.saved_step}"
    where = f"stopped at step {ending.step}, {saved}"
    if ending.exit_code is None:
        return f"{where}; the program was killed and has not ended, as happens when a disk or a GPU does not answer"
    if ending.killed:
        return f"{where}; the program reached no step boundary in time and was killed"
    if ending.exit_code not in (0, EXIT_STOPPED):
        return f"{where}; the program ended by itself meanwhile ({_exit(ending.exit_code)})"
    return where


def _what_was_wrong(ending: Ending) -> str:
    if ending.exit_code != 0:
        return f"the program failed: {_exit(ending.exit_code)} at step {ending.step}"
    total = ending.progress.total_steps if ending.progress else None
    where = f"step {ending.step}" + (f" of {total}" if total else "")
    return f"the program ended with exit code 0 at {where} without calling run.finish(...)"


def _exit(code: int | None) -> str:
    if code is None:
        return "it has not ended"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _last_lines(log_tail: str) -> str:
    return "\n".join(log_tail.splitlines()[-LOG_LINES:])


def _with_log(message: str, ending: Ending) -> str:
    tail = _last_lines(ending.log_tail)
    return f"{message}; end of its log:\n{tail}" if tail.strip() else f"{message}; it logged nothing"
