"""Why did the program end? Its exit code, its last word, the end of its log, and what was asked of it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from gpucost.reasons import Reason
from gpucost.training.agent.hang import Hung
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

LOG_LINES = 20
STACK_LINES = 150
"""Of a program that hung: the stacks of all its threads, in all its processes."""
MOST_CHARACTERS = 16_000
"""Of a message in all."""
_OUT_OF_MEMORY = re.compile(
    r"^(?:torch\.(?:cuda\.)?OutOfMemoryError\b|MemoryError\b|numpy\.[\w.]*_ArrayMemoryError\b"
    r"|RuntimeError: .*(?:can't allocate memory|CUDA out of memory))",
    re.MULTILINE,
)
# Not torch's shared memory (</torch_123>), which is full when /dev/shm is small.
_DISK_FULL = re.compile(
    r"^[\w.]*(?:Error|Exception)\b(?!.*</torch_).*(?:No space left on device|Disk quota exceeded)", re.MULTILINE
)


_SAID_BY_EXIT_CODE: dict[int | None, tuple[Reason, str]] = {
    EXIT_STORE: (Reason.STORE_UNREACHABLE, "the program could not reach the object store"),
    EXIT_TORN: (Reason.CHECKPOINTS_TORN, "the job has checkpoints, and none of them is whole"),
    EXIT_REFUSED: (Reason.BAD_REQUEST, "the recipe cannot be done by this model or GPU"),
}


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
        failure: of several processes, the one that failed first.
        hung: that it hung, and was ended; `log_tail` then holds its stacks.
        disk_full: the node's disk is full.
        folder_saved: whether what it saved last has reached the store; None: it does not save by itself.
    """

    exit_code: int | None
    result: Result | None
    progress: Progress | None
    asked: Asked | None = None
    killed: bool = False
    log_tail: str = ""
    oom_kills: int = 0
    failure: Failure | None = None
    hung: Hung | None = None
    disk_full: bool = False
    folder_saved: bool | None = None

    @property
    def saves_itself(self) -> bool:
        """Whether it is a program that saves by itself, and says that it is done with exit code 0."""
        return self.folder_saved is not None

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
    reason, message = _verdict(ending)
    if ending.result and ending.result.note:
        message = f"{message}; {ending.result.note}" if message else ending.result.note
    return reason, message[:MOST_CHARACTERS]


def _verdict(ending: Ending) -> tuple[Reason, str]:
    code, asked = ending.exit_code, ending.asked
    if _is_complete(ending):
        if ending.folder_saved is False:
            return Reason.STORE_UNREACHABLE, "the program is done, but what it saved last has not reached the store"
        return Reason.COMPLETED, ""
    if _says(ending, EXIT_FENCED, "fenced") or (asked and asked.reason is Reason.FENCED):
        return Reason.FENCED, asked.why if asked else "a newer attempt owns the job"
    if asked:
        return asked.reason, f"{asked.why}; {_how_it_stopped(ending)}"
    if ending.hung:
        return Reason.HUNG, _with_log(str(ending.hung), ending)
    if code == -signal.SIGTERM or _says(ending, EXIT_STOPPED, "stopped"):
        return Reason.INTERRUPTED, f"the program got SIGTERM; {_how_it_stopped(ending)}"
    if code in _SAID_BY_EXIT_CODE:
        reason, words = _SAID_BY_EXIT_CODE[code]
        return reason, _with_log(f"exit code {code}: {words}", ending)
    return _failed(ending)


def _says(ending: Ending, code: int, status: str) -> bool:
    # Machines are bought again for it, without limit: the code alone, which any program may use, is not enough.
    return ending.exit_code == code and ending.result is not None and ending.result.status == status


def _is_complete(ending: Ending) -> bool:
    if ending.exit_code != 0:
        return False
    if ending.saves_itself:
        return ending.asked is None
    return ending.result is not None and ending.result.status == "finished"


def _failed(ending: Ending) -> tuple[Reason, str]:
    code, words = ending.exit_code, _last_words(ending)
    if code == -signal.SIGKILL and ending.oom_kills > 0:
        return Reason.OUT_OF_MEMORY, _with_log(f"the kernel ended {_who(ending)} for lack of memory", ending)
    if code != 0 and _OUT_OF_MEMORY.search(words):
        return Reason.OUT_OF_MEMORY, _with_log(f"{_who(ending)} ran out of memory", ending)
    if ending.disk_full or (code != 0 and _DISK_FULL.search(words)):
        return Reason.DISK_FULL, _with_log(f"the disk is full: {_exit(code)} at step {ending.step}", ending)
    return Reason.BAD_PROGRAM, _with_log(_what_was_wrong(ending), ending)


def _how_it_stopped(ending: Ending) -> str:
    where = f"stopped at step {ending.step}, {_saved(ending)}"
    if ending.exit_code is None:
        return f"{where}; the program was killed and has not ended, as happens when a disk or a GPU does not answer"
    if ending.hung:
        return f"{where}; {ending.hung}, and was killed"
    if ending.killed and (ending.saves_itself or ending.saved_step == ending.step):
        return f"{where}; the program did not end in time and was killed"
    if ending.killed:
        return f"{where}; the program reached no step boundary in time and was killed"
    if ending.exit_code not in (0, EXIT_STOPPED) and not ending.saves_itself:
        return f"{where}; the program ended by itself meanwhile ({_exit(ending.exit_code)})"
    return where


def _saved(ending: Ending) -> str:
    if ending.saves_itself:
        return "what it saved is kept" if ending.folder_saved else "what it saved last has not reached the store"
    return "nothing was saved" if ending.saved_step is None else f"saved at step {ending.saved_step}"


def _what_was_wrong(ending: Ending) -> str:
    if ending.exit_code != 0:
        return f"{_who(ending)} failed: {_exit(ending.exit_code)} at step {ending.step}"
    total = ending.progress.total_steps if ending.progress else None
    where = f"step {ending.step}" + (f" of {total}" if total else "")
    return f"the program ended with exit code 0 at {where} without calling run.finish(...)"


def _who(ending: Ending) -> str:
    return f"the program (rank {ending.failure.rank})" if ending.failure else "the program"


def _exit(code: int | None) -> str:
    if code is None:
        return "it has not ended"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _last_words(ending: Ending) -> str:
    # Of several processes, the end of the log is what others said when the first one had failed.
    if ending.failure and ending.failure.traceback:
        return ending.failure.traceback
    lines = ending.log_tail.splitlines()
    return "\n".join(lines[:STACK_LINES] if ending.hung else lines[-LOG_LINES:])


def _with_log(message: str, ending: Ending) -> str:
    words = _last_words(ending)
    if not words.strip():
        return f"{message}; it logged nothing"
    what = "its stacks" if ending.hung else "its traceback" if words.startswith("Traceback") else "end of its log"
    return f"{message}; {what}:\n{words.rstrip()}"
