"""Where do both sides meet? The layout of a job in the object store, and the documents in it.

Nodes reach nothing but this store. Airflow's side writes what is to be done, the node writes what came of it:

    agents/<digest>.zip                     what a node runs first
    jobs/<job>/spec.json                    what to train; one per job
    jobs/<job>/code/<digest>.zip            the program's folder
    jobs/<job>/head.json                    who may write (the fencing number), which checkpoints are whole
    jobs/<job>/attempts/<n>/attempt.json    one run of the program on 1..N leases
    jobs/<job>/attempts/<n>/control.json    what we ask of the running attempt
    jobs/<job>/attempts/<n>/metrics/<i>.jsonl, log/<i>.txt, exit.json
    jobs/<job>/checkpoints/<step>-<n>/      parts, then manifest.json, written last
    live/<lease>.json                       heartbeats of all jobs, under one prefix, so that one listing sees all

`head.json` is only ever changed by compare-and-set. A new attempt claims it with a higher number; from then
on nothing that an older attempt still tries to commit is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from gpucost.clock import ClockSpec
from gpucost.job import CheckpointPlan, Environment, FolderSync, HangWatch, JobId
from gpucost.objects import Conflict, ObjectMissing, Objects
from gpucost.reasons import Reason
from gpucost.recipe import Recipe


class FencedOut(RuntimeError):
    """A newer attempt owns the job; whoever gets this writes nothing more and ends."""


class TornHead(RuntimeError):
    """The job's head.json cannot be read, so nobody knows which checkpoints are whole, or who may write."""


class _Document(BaseModel):
    # A diverged loss is NaN or infinite; written as null it could not be read back.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class JobSpec(_Document):
    """What a node needs to know to run the job; nothing secret."""

    job_id: JobId
    name: str
    code_digest: str = Field(description="sha256 of the code zip.")
    program: str
    arguments: tuple[str, ...] = ()
    environment: Environment = Environment()
    data: dict[str, str] = {}
    recipe: Recipe = Recipe()
    seed: int = 0
    world_size: int = 1
    threads: int = 1
    gpu_count: int = Field(default=1, description="GPUs per node; 0: CPU.")
    checkpoint: CheckpointPlan = CheckpointPlan()
    folder_sync: FolderSync | None = None
    hang: HangWatch = HangWatch()
    clock: ClockSpec = Field(default_factory=ClockSpec.real)


class Member(_Document):
    """One lease of an attempt and its part in it."""

    lease_id: str
    role: str = "worker"
    rank: int = Field(default=0, ge=0, description="Node rank, 0 is the one that others meet at.")


class AttemptRecord(_Document):
    """One run of the program; its number is the fencing number."""

    number: int = Field(ge=1)
    members: tuple[Member, ...] = Field(min_length=1)
    created_at: AwareDatetime
    expires_at: AwareDatetime = Field(description="The node ends itself then, unless the control object extends it.")


class Command(StrEnum):
    """What the control object asks of a running attempt."""

    RUN = "run"
    SAVE = "save"
    SAVE_AND_STOP = "save_and_stop"
    RECONFIGURE = "reconfigure"


class Control(_Document):
    """What we ask of the running attempt; the agent polls it.

    `sequence` grows with every change, so that the agent acts once on each.
    """

    sequence: int = Field(default=0, ge=0)
    command: Command = Command.RUN
    why: str = ""
    expires_at: AwareDatetime | None = Field(default=None, description="A later expiry for the node; None: unchanged.")
    recipe: dict[str, object] = Field(default={}, description="RECONFIGURE: options that replace the job's.")


class Phase(StrEnum):
    """What the node is doing."""

    STARTING = "starting"
    RESTORING = "restoring"
    TRAINING = "training"
    SAVING = "saving"
    ENDED = "ended"


class GpuUse(_Document):
    """What one GPU does. Memory in bytes."""

    index: int
    name: str = ""
    utilization_percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_watts: float | None = None


class Telemetry(_Document):
    """What the node's parts do: between two heartbeats (CPU), and at the moment (the rest). Memory in bytes."""

    gpus: tuple[GpuUse, ...] = ()
    cpu_percent: float | None = Field(default=None, description="Of all cores together, 0 to 100.")
    memory_used: int | None = None
    memory_total: int | None = None
    disk_free: int | None = Field(default=None, description="Where the program works.")


class Heartbeat(_Document):
    """The node's word that it lives, and how far it is; written every few seconds."""

    lease_id: str
    job: str = Field(description="The job's key.")
    attempt: int
    sequence: int = Field(ge=0)
    at: AwareDatetime
    phase: Phase
    step: int = Field(default=0, ge=0, description="Optimizer steps done.")
    total_steps: int | None = Field(default=None, description="Steps in all, once the program has said so.")
    epoch: int = 0
    steps_per_second: float | None = Field(default=None, description="Per second of the job's clock.")
    loss: float | None = None
    resumed_step: int | None = Field(default=None, description="The step this attempt went on from; 0: from nothing.")
    saved_step: int | None = Field(default=None, description="The newest committed checkpoint's step.")
    gpu_utilization: float | None = Field(default=None, ge=0, le=1)
    memory_bytes: int | None = None
    telemetry: Telemetry | None = None
    exited: Reason | None = None


class MetricPoint(_Document):
    """Metrics of one step, with the node's own time."""

    step: int = Field(ge=0)
    at: AwareDatetime
    values: dict[str, float]


class ExitRecord(_Document):
    """Why an attempt's program ended, written by the agent as its last act."""

    attempt: int
    reason: Reason
    message: str = ""
    exit_code: int | None = None
    at: AwareDatetime
    step: int = 0
    saved_step: int | None = None
    results: dict[str, float] = Field(default={}, description="Final metrics, e.g. accuracy on held-out data.")
    weights_digest: str | None = Field(default=None, description="sha256 over the final model's tensors.")


class Part(_Document):
    """One immutable object of a checkpoint."""

    key: str
    size: int
    sha256: str
    rank: int | None = Field(default=None, description="The process whose own state it holds; None: that of all.")
    path: str | None = Field(default=None, description="Of a folder's checkpoint: the file that it is a part of.")


class Manifest(_Document):
    """A checkpoint; it exists when this exists, and is written after all its parts."""

    job: str
    attempt: int
    step: int = Field(ge=0)
    epoch: int = 0
    created_at: AwareDatetime
    world_size: int = Field(default=1, description="Processes whose state it holds.")
    parts: tuple[Part, ...]
    digest: str | None = Field(default=None, description="Of all the rest, by whoever reads it back to go on from.")


class Head(_Document):
    """Who may write, and which checkpoints are whole, newest first."""

    fence: int = Field(default=0, ge=0)
    checkpoints: tuple[str, ...] = Field(default=(), description="Keys of manifests, newest first.")


HEAD_READS = 3
"""Reads of a head.json that makes no sense, before it counts as damaged."""

Doc = TypeVar("Doc", bound=BaseModel)


class JobStore:
    """One job's documents.

    Args:
        objects: the store.
        key: the job's key, `JobId.key`.
    """

    def __init__(self, objects: Objects, key: str) -> None:
        self.objects = objects
        self.key = key
        self.root = f"jobs/{key}"

    # What is to be done.

    def write_spec(self, spec: JobSpec) -> None:
        """Write the job's specification."""
        self.objects.put(f"{self.root}/spec.json", _dump(spec))

    def spec(self) -> JobSpec:
        """The job's specification."""
        return self._read(JobSpec, f"{self.root}/spec.json")

    def write_code(self, digest: str, data: bytes) -> None:
        """Store the program's zip under its digest."""
        self.objects.put(f"{self.root}/code/{digest}.zip", data)

    def code(self, digest: str) -> bytes:
        """The program's zip."""
        return self.objects.get(f"{self.root}/code/{digest}.zip")

    def write_attempt(self, record: AttemptRecord) -> None:
        """Announce an attempt; its nodes read this first."""
        self.objects.put(f"{self.attempt_root(record.number)}/attempt.json", _dump(record))

    def attempt(self, number: int) -> AttemptRecord:
        """The record of attempt `number`."""
        return self._read(AttemptRecord, f"{self.attempt_root(number)}/attempt.json")

    def attempt_root(self, number: int) -> str:
        """The folder of attempt `number`."""
        return f"{self.root}/attempts/{number:04d}"

    def ask(self, number: int, control: Control) -> None:
        """Ask something of the running attempt `number`."""
        self.objects.put(f"{self.attempt_root(number)}/control.json", _dump(control))

    def control(self, number: int) -> Control:
        """What is asked of attempt `number`; nothing yet is `Command.RUN`."""
        try:
            return self._read(Control, f"{self.attempt_root(number)}/control.json")
        except ObjectMissing:
            return Control()

    # What came of it.

    def exit_record(self, number: int) -> ExitRecord | None:
        """Why attempt `number` ended, or None while it has not said."""
        try:
            return self._read(ExitRecord, f"{self.attempt_root(number)}/exit.json")
        except ObjectMissing:
            return None

    def write_exit(self, record: ExitRecord) -> None:
        """Say why an attempt ended; the first word stands."""
        try:
            self.objects.put_new(f"{self.attempt_root(record.attempt)}/exit.json", _dump(record))
        except Conflict:
            return

    def write_metrics(self, number: int, index: int, points: list[MetricPoint]) -> None:
        """Store the `index`-th chunk of attempt `number`'s metrics."""
        lines = "".join(point.model_dump_json() + "\n" for point in points)
        self.objects.put(f"{self.attempt_root(number)}/metrics/{index:08d}.jsonl", lines.encode())

    def metrics(self, number: int, after: int = -1, most: int | None = None) -> list[tuple[int, list[MetricPoint]]]:
        """The chunks of attempt `number`'s metrics with an index above `after`, in order, with their index.

        Args:
            number: the attempt's.
            after: index of the last chunk that is known already.
            most: read no more than so many; None: all.
        """
        return [
            (index, [MetricPoint.model_validate_json(line) for line in self.objects.get(key).splitlines()])
            for index, key in self._chunks(f"{self.attempt_root(number)}/metrics", after)[:most]
        ]

    def write_log(self, number: int, index: int, text: str) -> None:
        """Store the `index`-th chunk of attempt `number`'s program log."""
        self.objects.put(f"{self.attempt_root(number)}/log/{index:08d}.txt", text.encode())

    def log(self, number: int, after: int = -1) -> list[tuple[int, str]]:
        """The chunks of attempt `number`'s log with an index above `after`, in order, with their index."""
        return [
            (index, self.objects.get(key).decode(errors="replace"))
            for index, key in self._chunks(f"{self.attempt_root(number)}/log", after)
        ]

    def _chunks(self, prefix: str, after: int) -> list[tuple[int, str]]:
        # Names have a fixed width, so "/00000007~" sorts after chunk 7, whatever its suffix, and before chunk 8.
        known = f"{prefix}/{after:08d}~" if after >= 0 else None
        return sorted(
            (int(stat.key.rsplit("/", 1)[1].split(".")[0]), stat.key) for stat in self.objects.scan(prefix, known)
        )

    # Who may write, and which checkpoints are whole.

    def head(self) -> Head:
        """The present head; an empty one before the first attempt."""
        return self._head()[0]

    def claim(self, attempt: int) -> Head:
        """Make `attempt` the only one that may commit; older ones are fenced out from now on.

        Raises:
            FencedOut: a newer attempt holds it.
        """
        return self._change_head(attempt, lambda head: head.model_copy(update={"fence": attempt}))

    def check_fence(self, attempt: int) -> None:
        """Make sure that `attempt` still owns the job.

        Raises:
            FencedOut: a newer attempt does.
        """
        fence = self.head().fence
        if fence > attempt:
            raise FencedOut(f"attempt {attempt} of {self.key}: attempt {fence} owns the job now")

    def commit(self, manifest: Manifest, keep: int = 2) -> str:
        """Make a checkpoint exist: write its manifest, then put it first in the head.

        All parts must have been written. Checkpoints beyond `keep` are deleted after the head forgot them.

        Returns:
            The manifest's key.

        Raises:
            FencedOut: a newer attempt owns the job; the checkpoint does not count.
        """
        self.check_fence(manifest.attempt)
        key = f"{self.checkpoint_root(manifest.step, manifest.attempt)}/manifest.json"
        self.objects.put(key, _dump(manifest))
        dropped: set[str] = set()

        def with_this_first(head: Head) -> Head:
            keys = (key, *(other for other in head.checkpoints if other != key))
            # Not only the last try's: where an answer was lost, the try before has changed the head already.
            dropped.update(keys[keep:])
            return head.model_copy(update={"checkpoints": keys[:keep]})

        self._change_head(manifest.attempt, with_this_first)
        for old in sorted(dropped):
            self._drop(old)
        return key

    def checkpoint_root(self, step: int, attempt: int) -> str:
        """The folder of the checkpoint that `attempt` makes at `step`."""
        return f"{self.root}/checkpoints/{step:012d}-{attempt:04d}"

    def manifest(self, key: str) -> Manifest:
        """The manifest under `key`."""
        return self._read(Manifest, key)

    def _drop(self, manifest_key: str) -> None:
        # The manifest goes first: a checkpoint without one does not exist, so no reader meets half of it.
        self.objects.delete([manifest_key])
        folder = manifest_key.rsplit("/", 1)[0]
        self.objects.delete([stat.key for stat in self.objects.scan(folder)])

    def _head(self) -> tuple[Head, str | None]:
        key = f"{self.root}/head.json"
        for _ in range(HEAD_READS):
            try:
                data, etag = self.objects.get_with_etag(key)
                return Head.model_validate_json(data), etag
            except ObjectMissing:
                return Head(), None
            except ValidationError:
                continue  # The damage may have come about on the way.
        raise TornHead(
            f"{key} cannot be read: got {data[:40]!r} ({len(data)} bytes), expected the fencing number and the newest "
            f"checkpoints. Nothing was changed. Put back an older version of it, or write one that names the manifests "
            f"under {self.root}/checkpoints/, newest first; remove it only to start the job from nothing"
        )

    def _change_head(self, attempt: int, change: Callable[[Head], Head]) -> Head:
        for _ in range(50):
            head, etag = self._head()
            if head.fence > attempt:
                raise FencedOut(f"attempt {attempt} of {self.key}: attempt {head.fence} owns the job now")
            changed = change(head)
            try:
                if etag is None:
                    self.objects.put_new(f"{self.root}/head.json", _dump(changed))
                else:
                    self.objects.put_if_match(f"{self.root}/head.json", _dump(changed), etag)
            except Conflict:
                continue
            return changed
        raise Conflict(f"{self.root}/head.json changed under 50 tries; too many writers for one job")

    def _read(self, kind: type[Doc], key: str) -> Doc:
        return kind.model_validate_json(self.objects.get(key))


class Live:
    """The heartbeats of all jobs, under one prefix.

    Args:
        objects: the store.
    """

    PREFIX = "live"

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def write(self, beat: Heartbeat) -> None:
        """Replace the lease's heartbeat."""
        self.objects.put(f"{self.PREFIX}/{beat.lease_id}.json", _dump(beat))

    def read(self, lease_id: str) -> Heartbeat | None:
        """The lease's newest heartbeat, or None before its first."""
        try:
            return Heartbeat.model_validate_json(self.objects.get(f"{self.PREFIX}/{lease_id}.json"))
        except ObjectMissing:
            return None

    def etags(self) -> dict[str, str]:
        """Lease id -> ETag of its heartbeat: one listing shows which changed."""
        return {stat.key.rsplit("/", 1)[1].removesuffix(".json"): stat.etag for stat in self.objects.scan(self.PREFIX)}

    def forget(self, lease_id: str) -> None:
        """Remove the heartbeat of a lease that is over."""
        self.objects.delete([f"{self.PREFIX}/{lease_id}.json"])


def _dump(document: BaseModel) -> bytes:
    return document.model_dump_json(exclude_none=True).encode()
