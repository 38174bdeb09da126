"""What is saved, and when does it count? Parts first, each with its digest; the manifest last.

A checkpoint holds one state that is the same on all processes of the training, and one of each process's own. Each is
one `torch.save` of plain containers and tensors, cut into parts of 16 MiB. Reading walks from the newest manifest back
to the first whose every part is there and has its digest, for every process; torch itself would load a flipped bit
without a word (60 of 60 trials).

What is wrong with a checkpoint is one of three things:
- torn: something is missing or not what was written. It is skipped, with a warning, and the one before is used. If all
  are torn, that is an error: to begin again at step 0 would throw the work away without a word.
- whole, but torch refuses to load it, or it is of another world size. The work is there, and another version of a
  package, or the job's own world size, brings it back; so it is an error, and nothing is skipped.
- out of reach: the store is away. That is an error which passes; see `outage.patiently`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gpucost.clock import Clock
from gpucost.jobstore import FencedOut, JobStore, Manifest, Part, TornHead
from gpucost.training.checkpoints import loading, manifests
from gpucost.training.checkpoints.agreement import TornCheckpoint, by_all, by_first
from gpucost.training.checkpoints.parts import PART_BYTES, PartReader, PartWriter
from gpucost.training.outage import brief, store_errors
from gpucost.training.ranks import Alone, Ranks

if TYPE_CHECKING:
    import torch

FOLDER = re.compile(r"\d{12,}-(\d{4,})")
"""Name of a checkpoint's folder, see `JobStore.checkpoint_root`; the group is the attempt that made it."""

__all__ = ["Checkpoints", "Stateful", "TornCheckpoint", "weights_digest"]


class Stateful(Protocol):
    """Anything that can tell its state and take it back: model, optimizer, scheduler, scaler."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: tensors, numbers, text, and containers of them."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take back a state."""
        ...


class Checkpoints:
    """One attempt's way to the job's checkpoints. All processes of the training call the same methods in one order.

    Whatever fails on one of them, each call ends the same way on all: it returns, or raises the same kind of error.

    Args:
        store: the job's documents.
        attempt: the fencing number; nothing is committed once a newer attempt has claimed the job.
        clock: the job's clock, for `created_at`.
        ranks: the processes of the training.
        keep: whole checkpoints kept.
        part_bytes: size of the parts; about so much memory a save takes beside the state.
        warn: where a line about a torn checkpoint goes, on rank 0.
    """

    def __init__(
        self,
        store: JobStore,
        attempt: int,
        clock: Clock,
        *,
        ranks: Ranks | None = None,
        keep: int = 2,
        part_bytes: int = PART_BYTES,
        warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    ) -> None:
        self.store = store
        self.attempt = attempt
        self._clock = clock
        self._ranks = ranks or Alone()
        self._keep = keep
        self._part_bytes = part_bytes
        self._warn = warn
        self._torn: set[str] = set()
        self._untidy = False

    def save(self, shared: dict[str, Any], own: dict[str, Any], *, step: int, epoch: int) -> str:
        """Write a checkpoint and make it the newest.

        A save that fails leaves the checkpoints before it as they are. What it has written is deleted at once in a
        folder, whose disk may be full, and by the next save elsewhere.

        Args:
            shared: what is the same on all processes; rank 0's is written.
            own: what this process has of its own, e.g. its random generators.
            step: optimizer steps done, the same on all processes.
            epoch: the present epoch.

        Returns:
            The manifest's key.

        Raises:
            FencedOut: a newer attempt owns the job.
            ValueError: a state holds something that could not be loaded again, or the processes are at different steps.
            TornHead: the job's head.json cannot be read.
            one of `store_errors()`: the store is away, full or refuses.
        """
        by_first(self._ranks, self._prepare)
        try:
            told = by_all(self._ranks, lambda: (step, self._write(shared, own, step)))
            return by_first(self._ranks, lambda: self._commit(told, step, epoch))
        except Exception:
            self._untidy = True
            if self._ranks.rank == 0 and self.store.objects.local:
                self._tidy_if_possible()
            raise

    def restore(self) -> tuple[Manifest, dict[str, Any], dict[str, Any]] | None:
        """The newest checkpoint that is whole for all processes, or None when the job has none at all.

        Returns:
            Manifest, the state of all, and this process's own.

        Raises:
            FencedOut: a newer attempt owns the job.
            TornCheckpoint: there are checkpoints, but none is whole.
            ValueError: a whole one is of another world size, or torch refuses to load it.
            TornHead: the job's head.json cannot be read.
            one of `store_errors()`: the store is away.
        """
        torn: list[str] = []
        for key in by_first(self._ranks, self._owned_keys):
            manifest, wrong = by_first(self._ranks, partial(self._manifest, key))
            if manifest is not None:
                states: dict[str, Any] = {}
                told = by_all(self._ranks, partial(self._load, manifest, states))
                wrong = next((line for line in told if line), "")
                if not wrong:
                    return manifest, states["shared"], states["own"]
            self._torn.add(key)
            torn.append(f"{key} ({wrong})")
            if self._ranks.rank == 0:
                self._warn(f"gpucost: checkpoint {key} is torn and was skipped: {wrong}")
        if torn:
            raise TornCheckpoint(
                f"none of this job's {len(torn)} checkpoints is whole: {'; '.join(torn)}. Nothing was deleted, and the "
                "training does not begin again at step 0 by itself. Put back what is missing, or start a new job "
                f"(outside gpucost: another folder; by hand: remove {self.store.root}/head.json)"
            )
        return None

    def sweep(self) -> int:
        """Delete what killed attempts left half written; returns how many checkpoints. Rank 0 does it.

        Only attempts older than this one are touched: they are fenced out, so nothing of theirs can
        become a checkpoint any more.

        Raises:
            TornHead: the job's head.json cannot be read.
            one of `store_errors()`: the store is away.
        """
        return by_first(self._ranks, lambda: self._sweep(lambda attempt: attempt < self.attempt))

    def _prepare(self) -> None:
        self.store.check_fence(self.attempt)
        if self._untidy:
            self._tidy()

    def _write(self, shared: dict[str, Any], own: dict[str, Any], step: int) -> tuple[Part, ...]:
        rank = self._ranks.rank
        root = self.store.checkpoint_root(step, self.attempt)
        parts = self._write_one(shared, f"{root}/", None) if rank == 0 else ()
        return parts + self._write_one(own, f"{root}/rank{rank:05d}-", rank)

    def _write_one(self, state: dict[str, Any], name: str, rank: int | None) -> tuple[Part, ...]:
        import torch

        loading.check_loadable(state)
        writer = PartWriter(self.store.objects, name, self._part_bytes, rank)
        torch.save(state, writer)  # type: ignore[arg-type]  # all that torch asks of a file is write()
        return writer.close()

    def _commit(self, told: list[tuple[int, tuple[Part, ...]]], step: int, epoch: int) -> str:
        if {other for other, _ in told} != {step}:
            raise ValueError(f"save: the processes are at steps {[other for other, _ in told]}, expected one step")
        manifest = manifests.sealed(
            Manifest(
                job=self.store.key,
                attempt=self.attempt,
                step=step,
                epoch=epoch,
                created_at=self._clock.now(),
                world_size=self._ranks.size,
                parts=tuple(part for _, parts in told for part in parts),
            )
        )
        try:
            # A torn checkpoint that restore() skipped still stands in the head; it does not count as kept.
            key = self.store.commit(manifest, keep=self._keep + len(self._torn))
        except store_errors():
            # It counts from the change of the head on, even if the answer was lost, or an old one not deleted.
            key = f"{self.store.checkpoint_root(step, self.attempt)}/manifest.json"
            if key not in self.store.head().checkpoints:
                raise
            self._untidy = True
        if self._torn:
            self._torn &= set(self.store.head().checkpoints)
        return key

    def _owned_keys(self) -> tuple[str, ...]:
        head = self.store.head()
        if head.fence > self.attempt:
            raise FencedOut(f"attempt {self.attempt} of {self.store.key}: attempt {head.fence} owns the job now")
        return head.checkpoints

    def _manifest(self, key: str) -> tuple[Manifest | None, str]:
        """The manifest, or what is wrong with it."""
        try:
            manifest = manifests.read(self.store, key)
        except TornCheckpoint as torn:
            return None, str(torn)
        if manifest.world_size != self._ranks.size:
            raise ValueError(
                f"checkpoint {key} was saved by {manifest.world_size} processes, but {self._ranks.size} are training: "
                f"an exact resumption needs the same number; set world_size={manifest.world_size}, or start a new job"
            )
        return manifest, ""

    def _load(self, manifest: Manifest, into: dict[str, Any]) -> str:
        """Fill `into` with both states, or say what is wrong."""
        for name, rank in (("shared", None), ("own", self._ranks.rank)):
            parts = [part for part in manifest.parts if part.rank == rank]
            try:
                into[name] = loading.load(PartReader(self.store.objects, parts))
            except TornCheckpoint as torn:
                return str(torn)
        return ""

    def _tidy(self) -> None:
        """Delete what this attempt's failed saves have left."""
        self._sweep(lambda attempt: attempt <= self.attempt)
        self._untidy = False

    def _tidy_if_possible(self) -> None:
        failures: tuple[type[Exception], ...] = (TornHead, *store_errors())
        try:
            self._tidy()
        except failures as away:
            self._warn(f"gpucost: what a failed save has left could not be deleted yet: {brief(away)}")

    def _sweep(self, whose: Callable[[int], bool]) -> int:
        whole = {key.rsplit("/", 1)[0] for key in self.store.head().checkpoints}
        root = f"{self.store.root}/checkpoints"
        there = {stat.key.removeprefix(f"{root}/").split("/", 1)[0] for stat in self.store.objects.scan(root)}
        left = [
            folder
            for name in sorted(there)
            if (made := FOLDER.fullmatch(name)) and whose(int(made[1])) and (folder := f"{root}/{name}") not in whole
        ]
        for folder in left:
            self.store.objects.delete_folder(folder)
        return len(left)


def weights_digest(model: torch.nn.Module) -> str:
    """sha256 in hex over the model's state: name, dtype, shape and bytes of each tensor, in sorted order.

    Two models have equal digests when they are equal bit for bit.
    """
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name}\0{value!r}\0".encode())
            continue
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
