"""Where does the job stand? What its store holds from earlier runs, what has changed since, and the next attempt."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from gpucost.job import JobId, TrainingJob
from gpucost.jobstore import AttemptRecord, ExitRecord, Head, JobSpec, JobStore, Member
from gpucost.objects import ObjectMissing, Objects

LIVES = timedelta(days=365)
"""A run on one's own machine costs nothing that must be bounded; the agent wants an expiry."""
NOT_COMPARED = frozenset({"job_id", "clock", "code_digest"})
FILES_TOLD = 5


@dataclass(frozen=True)
class Stand:
    """How far a job is.

    Args:
        store: the job's documents.
        job_id: which job, with its generation.
        head: who wrote last, and which checkpoints are whole.
        spec: what was run last; None: nothing yet.
        ending: how the newest attempt ended; None: it has not said, or there was none.
        saved_step: steps in the newest checkpoint; None: there is none.
    """

    store: JobStore
    job_id: JobId
    head: Head
    spec: JobSpec | None
    ending: ExitRecord | None
    saved_step: int | None

    @property
    def number(self) -> int:
        """The next attempt's."""
        return self.head.fence + 1


def newest(objects: Objects, job_id: JobId) -> Stand:
    """How far the newest generation of a job is; the first one's while there is none.

    Raises:
        pydantic.ValidationError: what the store holds cannot be read.
        TornHead: it is not known which checkpoints are whole.
    """
    found = look(objects, job_id)
    while (later := look(objects, found.job_id.next_generation())).spec is not None:
        found = later
    return found


def look(objects: Objects, job_id: JobId) -> Stand:
    """How far one generation of a job is."""
    store = JobStore(objects, job_id.key)
    try:
        spec = store.spec()
    except ObjectMissing:
        spec = None
    head = store.head()
    ending = store.exit_record(head.fence) if head.fence else None
    return Stand(store, job_id, head, spec, ending, saved_step(store, head))


def saved_step(store: JobStore, head: Head) -> int | None:
    """Steps in the newest checkpoint; None: there is none."""
    for key in head.checkpoints:
        try:
            return store.manifest(key).step
        except ObjectMissing:
            continue
    return None


def spec_of(job_id: JobId, job: TrainingJob, code_digest: str) -> JobSpec:
    """What the agent is told, as Airflow's side would."""
    shared = set(JobSpec.model_fields) & set(TrainingJob.model_fields)
    same = {name: getattr(job, name) for name in shared}
    return JobSpec(job_id=job_id, code_digest=code_digest, gpu_count=job.gpu.count, **same)


def begin(stand: Stand, spec: JobSpec, code: bytes, lease: str, now: datetime) -> int:
    """Write down the next attempt, and make it the one that may write.

    Returns:
        Its number.

    Raises:
        FencedOut: somebody else began one meanwhile.
    """
    store, number = stand.store, stand.number
    store.write_code(spec.code_digest, code)
    store.write_spec(spec)
    store.claim(number)
    record = AttemptRecord(number=number, members=(Member(lease_id=lease),), created_at=now, expires_at=now + LIVES)
    store.write_attempt(record)
    return number


def changes(stand: Stand, spec: JobSpec, code: bytes) -> list[str]:
    """What is no longer as it was when the job ran last, one line each."""
    if stand.spec is None:
        return []
    before, after = _flat(stand.spec), _flat(spec)
    told = [
        f"{name}: {before.get(name, 'not set')} -> {after.get(name, 'not set')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    if stand.spec.code_digest != spec.code_digest:
        digests = f"{stand.spec.code_digest[:12]} -> {spec.code_digest[:12]}"
        told.insert(0, f"code: {digests}{_files(stand.store, stand.spec.code_digest, code)}")
    return told


def _flat(spec: JobSpec) -> dict[str, Any]:
    return dict(_leaves("", spec.model_dump(exclude=set(NOT_COMPARED), exclude_none=True)))


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, list(value) if isinstance(value, tuple) else value
        return
    for name, inner in value.items():
        yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)


def _files(store: JobStore, digest: str, code: bytes) -> str:
    try:
        before = _members(store.code(digest))
    except ObjectMissing:
        return ""
    after = _members(code)
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    more = f" and {len(names) - FILES_TOLD} more" if len(names) > FILES_TOLD else ""
    return f" ({', '.join(names[:FILES_TOLD])}{more})"


def _members(code: bytes) -> dict[str, int]:
    with zipfile.ZipFile(io.BytesIO(code)) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}
