"""How does a job run on this machine? From the job file to the last line: prepare, start, watch, tell how it ended.

The second run of a job goes on from the newest checkpoint, whatever was edited meanwhile, and says what was. Two at
once are refused: fencing the first one out, as the cloud's side does, would throw away what it has not saved.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from gpucost.bundle import pack_agent, pack_code
from gpucost.clock import SpecClock
from gpucost.job import JobId
from gpucost.jobstore import FencedOut, JobSpec, TornHead
from gpucost.local import stand
from gpucost.local.jobfile import JobFile, JobFileError, include_folder, read_job
from gpucost.local.place import Busy, NoPlace, Place
from gpucost.local.screen import Screen
from gpucost.local.watching import Attempt, Prepared
from gpucost.reasons import Reason
from gpucost.training.outage import brief, store_errors
from gpucost.training.surroundings import open_objects
from gpucost.training.workdir import EXIT_STORE

EXIT_WRONG = 2
"""The job file, an option or the store is not as expected, or another run has the job."""


class NotRun(RuntimeError):
    """Nothing was started; the message is for people.

    Args:
        code: exit code.
    """

    def __init__(self, message: str, code: int = EXIT_WRONG) -> None:
        super().__init__(message)
        self.code = code


def run(path: Path, changes: Sequence[str], console: Console, *, fresh: bool = False, store_url: str = "") -> int:
    """Run the job of a file to its end; the exit code is 0 when it is completed, else the agent's.

    To be called once, from the main thread of a process that has no other children.

    Args:
        path: the job file.
        changes: `FIELD=VALUE`, which replace what the file says.
        console: where everything is shown.
        fresh: start anew, from nothing.
        store_url: where the job's documents and checkpoints are; empty: beside the file.

    Raises:
        JobFileError: the job cannot be run as it is written.
        NotRun: for another reason nothing was started.
    """
    clock = SpecClock()
    job = read_job(path, changes, include_folder(os.environ), clock.now())
    screen = Screen(console)
    try:
        place = Place.beside(path, job.job.name, store_url)
        with place.held() as lock:
            with _in_words(place.store_url):
                prepared = _prepare(job, place, screen, clock, fresh)
            return Attempt(prepared, screen).run(lock)
    except (Busy, NoPlace) as refused:
        raise NotRun(str(refused)) from refused


@contextmanager
def _in_words(store_url: str) -> Iterator[None]:
    """Say what stands in the way of a start in one line."""
    try:
        yield
    except (FencedOut, TornHead) as in_the_way:
        raise NotRun(str(in_the_way)) from in_the_way
    except ValidationError as unreadable:
        what = " ".join(str(unreadable).split())
        raise NotRun(f"{store_url}: holds documents of another version: {what}") from unreadable
    except store_errors() as away:
        raise NotRun(f"{store_url}: {brief(away)}", code=EXIT_STORE) from away


def _prepare(file: JobFile, place: Place, screen: Screen, clock: SpecClock, fresh: bool) -> Prepared:
    """Pack the code and the agent, see where the job stands, and write the next attempt down."""
    try:
        digest, code = pack_code(file.code)
        objects = open_objects({**os.environ, "GPUCOST_STORE_URL": place.store_url})
    except ValueError as wrong:
        raise JobFileError([str(wrong)]) from wrong
    job_id = JobId(dag_id="local", run_id=_user(), task_id=file.job.name)
    before = stand.newest(objects, job_id)
    if fresh and before.spec is not None:
        before = stand.look(objects, before.job_id.next_generation())
    spec = stand.spec_of(before.job_id, file.job, digest)
    _tell_what_is_there(before, spec, code, screen)
    # The store may be shared by many jobs; heartbeats of all of them lie under one prefix.
    lease = f"local-{before.number}-{before.store.key}"
    agent = pack_agent()
    agent.publish(objects)
    place.agent_zip.write_bytes(agent.data)
    number = stand.begin(before, spec, code, lease, clock.now())
    return Prepared(before.store, place, number, lease)


def _tell_what_is_there(before: stand.Stand, spec: JobSpec, code: bytes, screen: Screen) -> None:
    changed = stand.changes(before, spec, code)
    ending = before.ending
    if ending is not None and ending.reason is Reason.COMPLETED:
        done = f"{spec.name} is completed, at step {ending.step}; --fresh starts it anew"
        if not changed:
            raise NotRun(done, code=0)
        raise NotRun("\n".join([f"{done}. Changed since then:", *(f"  {line}" for line in changed)]))
    where = "starts from nothing" if before.saved_step is None else f"goes on from step {before.saved_step}"
    screen.say(f"{spec.name}: attempt {before.number}, {where}")
    for line in changed:
        screen.say(f"changed since attempt {before.head.fence}: {line}")


def _user() -> str:
    # People who share a store must not meet in one job because both called it "test".
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"
