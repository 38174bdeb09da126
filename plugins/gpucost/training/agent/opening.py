"""What must be there before the program can start? The job's documents, its code, its data and its packages."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from gpucost import bundle
from gpucost.jobstore import AttemptRecord, FencedOut, JobSpec, JobStore, TornHead
from gpucost.objects import ObjectMissing
from gpucost.reasons import Reason
from gpucost.training.agent import fetch
from gpucost.training.agent.identity import Identity
from gpucost.training.agent.say import say
from gpucost.training.checkpoints.agreement import TornCheckpoint
from gpucost.training.outage import brief, patiently, store_errors
from gpucost.training.workdir import Workdir

LEAST_FREE_BYTES = 1024 * 1024
"""A disk with less counts as full: whoever writes there next fails."""


class Refused(RuntimeError):
    """The attempt cannot begin."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read(store: JobStore, identity: Identity) -> tuple[JobSpec, AttemptRecord]:
    """The documents of the job and of this node's attempt.

    Raises:
        Refused: they are not there, are wrong, or ask for what this version cannot do.
    """
    try:
        spec, record = store.spec(), store.attempt(identity.attempt)
    except ObjectMissing as missing:
        raise Refused(Reason.BAD_REQUEST, f"the store has no {missing}, expected it before the launch") from missing
    except ValidationError as wrong:
        raise Refused(Reason.BAD_REQUEST, f"the job's documents in the store are wrong: {wrong}") from wrong
    if identity.lease_id not in {member.lease_id for member in record.members}:
        raise Refused(Reason.BAD_REQUEST, f"lease {identity.lease_id} is no member of {record}")
    if len(record.members) > 1:
        raise Refused(
            Reason.BAD_REQUEST,
            f"members: got {len(record.members)} leases; this version trains on one node, with as many processes "
            "as world_size says",
        )
    return spec, record


def prepare(store: JobStore, spec: JobSpec, workdir: Workdir, environ: Mapping[str, str]) -> None:
    """Fetch code, data and packages.

    Raises:
        Refused: something is missing or wrong, or the disk is full.
        FencedOut: a newer attempt owns the job.
        one of `store_errors()`: the store was away for too long.
    """
    try:
        _fetch_code(store, spec, workdir)
        fetch.fetch_data(spec.data, workdir.data, environ, say)
        fetch.install_wheels(spec.environment.wheels, workdir.site, environ, say)
    except fetch.CannotFetch as cannot:
        raise Refused(cannot.reason, str(cannot)) from cannot
    except OSError as error:
        if not is_full(error):
            raise
        free = shutil.disk_usage(workdir.path).free >> 20
        raise Refused(Reason.DISK_FULL, f"the node's disk is full, {free} MiB are free: {error}") from error


def _fetch_code(store: JobStore, spec: JobSpec, workdir: Workdir) -> None:
    try:
        code = store.code(spec.code_digest)
    except ObjectMissing as missing:
        raise Refused(Reason.BAD_REQUEST, f"the store has no {missing}") from missing
    if (digest := bundle.digest_of(code)) != spec.code_digest:
        raise Refused(Reason.BAD_REQUEST, f"code: got a zip with digest {digest}, expected {spec.code_digest}")
    bundle.unpack(code, workdir.code)


class Preparing(threading.Thread):
    """Prepares the node in a thread of its own, so that a download of hours delays no notice.

    It is watched over as a program is, and left alone when it is ended.

    Args:
        work: what to do.
        patience: real seconds to wait for a store that is away; None: as `outage` says.
    """

    def __init__(self, work: Callable[[], None], patience: float | None) -> None:
        super().__init__(name="preparing", daemon=True)
        self.refused: Refused | None = None
        self._work = work
        self._patience = patience
        self._abandoned = False
        self.start()

    def run(self) -> None:
        """Thread's work."""
        try:
            patiently(self._work, say, patience=self._patience)
        except Refused as refused:
            self.refused = refused
        except FencedOut as fenced:
            self.refused = Refused(Reason.FENCED, str(fenced))
        except (TornCheckpoint, TornHead) as torn:
            self.refused = Refused(Reason.CHECKPOINTS_TORN, str(torn))
        except fetch.CannotFetch as cannot:
            self.refused = Refused(cannot.reason, str(cannot))
        except store_errors() as away:
            self.refused = Refused(Reason.STORE_UNREACHABLE, brief(away))
        except Exception as error:  # noqa: BLE001
            # A thread's error would otherwise end in a line on stderr, and the program would start without its data.
            self.refused = Refused(Reason.BAD_REQUEST, f"the node cannot be prepared: {error!r}")

    def exit_code(self) -> int | None:
        """None while it works."""
        return None if self.is_alive() and not self._abandoned else 0

    def kill(self) -> None:
        """Leave it alone."""
        self._abandoned = True

    def ask_to_end(self) -> None:
        """Leave it alone."""
        self._abandoned = True

    def dump_stacks(self) -> int:
        """There is no program."""
        return 0


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def has_no_room(folder: Path) -> bool:
    """Whether the disk under `folder`, which the program may have removed, is full."""
    status = os.statvfs(next(place for place in (folder, *folder.parents) if place.is_dir()))
    return status.f_bavail * status.f_frsize < LEAST_FREE_BYTES
