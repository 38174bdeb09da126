"""How do the agent and the program talk? Through files in one folder, each replaced as a whole.

    job.json        agent -> program   the job's specification
    request.json    agent -> program   save, or save and stop, at the next step boundary
    progress.json   program -> agent   how far it is (a rehearsal cloud watches it, too)
    metrics.jsonl   program -> agent   one `MetricPoint` a line, appended
    result.json     program -> agent   its last word
    failure.json    launcher -> agent  which process of several failed first, and how
    program.log     program -> agent   what it wrote to stdout and stderr
    code/           the program's folder
    data/<name>     the job's data, as files
    site/           packages from the job's wheels

Files need no library, no port and no thread in the program, and outlive either side.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpucost.jobstore import Command, JobSpec, MetricPoint, Phase

EXIT_STORE = 74
"""The program could not reach the object store when it started (sysexits.h: EX_IOERR)."""
EXIT_STOPPED = 75
"""The program saved and stopped because it was asked to (EX_TEMPFAIL: start it again to go on)."""
EXIT_FENCED = 76
"""A newer attempt owns the job; the program stopped without saving."""
EXIT_TORN = 65
"""The job has checkpoints, and none of them is whole (EX_DATAERR)."""
EXIT_REFUSED = 78
"""The recipe cannot be done by this model or GPU (EX_CONFIG)."""


class _File(BaseModel):
    # A diverged loss is NaN or infinite; written as null it could not be read back.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Progress(_File):
    """How far the program is. Times and rates are those of the job's clock."""

    step: int = Field(ge=0, description="Optimizer steps done.")
    epoch: int = Field(default=0, ge=0)
    at: AwareDatetime
    phase: Phase = Phase.TRAINING
    total_steps: int | None = None
    loss: float | None = None
    steps_per_second: float | None = Field(default=None, description="Per second of the job's clock.")
    resumed_step: int | None = Field(default=None, description="The step it went on from; 0: from nothing.")
    saved_step: int | None = Field(default=None, description="The newest committed checkpoint's step.")
    save_seconds: float | None = Field(default=None, description="Real seconds that the newest save took.")


class Request(_File):
    """What the agent asks for; `sequence` grows with every request."""

    sequence: int = Field(ge=1)
    command: Literal[Command.SAVE, Command.SAVE_AND_STOP]
    why: str = ""
    gone_by: AwareDatetime | None = Field(
        default=None, description="Real time at which the program is ended if it has not ended by then; None: never."
    )


class Result(_File):
    """The program's last word."""

    status: Literal["finished", "stopped", "fenced"]
    step: int
    saved_step: int | None = None
    results: dict[str, float] = {}
    weights_digest: str | None = None
    note: str = Field(default="", description="For a person, e.g. why nothing was saved; told in the exit record.")


class Failure(_File):
    """How one of several processes of a training failed."""

    rank: int = Field(ge=0)
    exit_code: int | None = Field(default=None, description="Minus the signal's number when a signal ended it.")
    at: float = Field(description="Real time, seconds since 1970.")
    traceback: str = ""


Content = TypeVar("Content", bound=BaseModel)


class Workdir:
    """The folder that agent and program share.

    Args:
        path: the folder; made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.code = path / "code"
        self.data = path / "data"
        self.site = path / "site"
        self.log = path / "program.log"
        self.metrics = path / "metrics.jsonl"
        self._job = path / "job.json"
        self._request = path / "request.json"
        self._progress = path / "progress.json"
        self._result = path / "result.json"
        self._failure = path / "failure.json"

    def clear(self) -> None:
        """Remove what an earlier attempt left, so that its words are not taken for this one's."""
        self.begin_again()
        for file in (self.log, self.metrics, self._job, self._progress):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.code, ignore_errors=True)

    def begin_again(self) -> None:
        """Remove what was asked of a program that has ended, and its last words, before it is started again."""
        for file in (self._request, self._result, self._failure, *self.path.glob("failure-*.json")):
            file.unlink(missing_ok=True)

    def write_job(self, spec: JobSpec) -> None:
        """Hand the specification to the program."""
        _replace(self._job, spec)

    def job(self) -> JobSpec:
        """The specification of the job that this node runs."""
        return JobSpec.model_validate_json(self._job.read_bytes())

    def ask(self, request: Request) -> None:
        """Ask something of the program."""
        _replace(self._request, request)

    def request_mark(self) -> int:
        """A number that changes with every request, 0 before the first; cheap enough for every step."""
        try:
            # The inode, too: two requests within one tick of the file system's clock are two.
            status = os.stat(self._request)  # noqa: PTH116
        except FileNotFoundError:
            return 0
        return hash((status.st_mtime_ns, status.st_ino)) or 1

    def request(self) -> Request | None:
        """What the agent asks for, or None."""
        return _load(Request, self._request)

    def write_progress(self, progress: Progress) -> None:
        """Tell how far the program is."""
        _replace(self._progress, progress)

    def progress(self) -> Progress | None:
        """How far the program is, or None before its first word."""
        return _load(Progress, self._progress)

    def add_metrics(self, point: MetricPoint) -> None:
        """Append one step's metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(point.model_dump_json() + "\n")

    def write_result(self, result: Result) -> None:
        """Leave the program's last word."""
        _replace(self._result, result)

    def result(self) -> Result | None:
        """The program's last word, or None."""
        return _load(Result, self._result)

    def write_rank_failure(self, failure: Failure) -> None:
        """Leave word of how one of several processes failed, for the launcher."""
        _replace(self.path / f"failure-{failure.rank}.json", failure)

    def rank_failures(self) -> list[Failure]:
        """What failing processes have left."""
        found = (_load(Failure, path) for path in sorted(self.path.glob("failure-*.json")))
        return [failure for failure in found if failure is not None]

    def write_failure(self, failure: Failure) -> None:
        """Leave word of the failure that the others followed from, for the agent."""
        _replace(self._failure, failure)

    def failure(self) -> Failure | None:
        """The failure that the others followed from; None when there was none, or one process only."""
        return _load(Failure, self._failure)


def _replace(path: Path, content: BaseModel) -> None:
    # A reader sees the old file or the new one, never half of one, whenever the writer is killed.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(content.model_dump_json(), encoding="utf-8")
    temporary.replace(path)


def _load(kind: type[Content], path: Path) -> Content | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
