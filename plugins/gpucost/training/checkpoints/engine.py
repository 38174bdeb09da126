"""What is saved, and when does it count? Parts first, each with its digest; the manifest last.

A checkpoint is one `torch.save` of plain containers and tensors, cut into parts of at most 64 MiB. A part's
name holds its digest, so that no part is ever overwritten by another content. Reading walks from the newest
manifest back to the first whose every part is there and has its digest; torch itself would load a flipped
bit without a word (60 of 60 trials).
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from gpucost.clock import Clock
from gpucost.jobstore import JobStore, Manifest, Part
from gpucost.objects import ObjectMissing

if TYPE_CHECKING:
    import torch

PART_BYTES = 64 * 1024 * 1024


class Stateful(Protocol):
    """Anything that can tell its state and take it back: model, optimizer, scheduler, scaler."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: tensors, numbers, text, and containers of them."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take back a state."""
        ...


class TornCheckpoint(RuntimeError):
    """A part is missing or has another content than its manifest says."""


class Checkpoints:
    """One attempt's way to the job's checkpoints.

    Args:
        store: the job's documents.
        attempt: the fencing number; nothing is committed once a newer attempt has claimed the job.
        clock: the job's clock, for `created_at`.
        keep: whole checkpoints kept.
        warn: where a line about a torn checkpoint goes.
    """

    def __init__(
        self,
        store: JobStore,
        attempt: int,
        clock: Clock,
        *,
        keep: int = 2,
        part_bytes: int = PART_BYTES,
        warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    ) -> None:
        self.store = store
        self.attempt = attempt
        self._clock = clock
        self._keep = keep
        self._part_bytes = part_bytes
        self._warn = warn
        self._torn = 0
        self._proved_loadable = False

    def save(self, state: dict[str, Any], *, step: int, epoch: int) -> str:
        """Write a checkpoint and make it the newest.

        Args:
            state: tensors, numbers, text, and containers of them.

        Returns:
            The manifest's key.

        Raises:
            FencedOut: a newer attempt owns the job.
            ValueError: the state holds something that could not be loaded again.
        """
        self.store.check_fence(self.attempt)
        data = self._serialize(state)
        root = self.store.checkpoint_root(step, self.attempt)
        parts = tuple(
            self._put_part(root, index, data[start : start + self._part_bytes])
            for index, start in enumerate(range(0, len(data), self._part_bytes))
        )
        manifest = Manifest(
            job=self.store.key,
            attempt=self.attempt,
            step=step,
            epoch=epoch,
            created_at=self._clock.now(),
            parts=parts,
        )
        # A torn checkpoint that restore() skipped still stands in the head; it does not count as kept.
        return self.store.commit(manifest, keep=self._keep + self._torn)

    def restore(self) -> tuple[Manifest, dict[str, Any]] | None:
        """The newest whole checkpoint, or None when there is none.

        A torn one is skipped with a warning.
        """
        import torch

        for key in self.store.head().checkpoints:
            try:
                manifest = self.store.manifest(key)
                data = b"".join(self._get_part(part) for part in manifest.parts)
            except (TornCheckpoint, ObjectMissing, ValueError) as torn:
                self._torn += 1
                self._warn(f"gpucost: checkpoint {key} is torn and was skipped: {torn}")
                continue
            state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            return manifest, state
        return None

    def sweep(self) -> int:
        """Delete what killed attempts left half written; returns how many objects.

        Only attempts older than this one are touched: they are fenced out, so nothing of theirs can
        become a checkpoint any more.
        """
        whole = {key.rsplit("/", 1)[0] for key in self.store.head().checkpoints}
        left = [
            stat.key
            for stat in self.store.objects.scan(f"{self.store.root}/checkpoints")
            if (folder := stat.key.rsplit("/", 1)[0]) not in whole and int(folder.rsplit("-", 1)[1]) < self.attempt
        ]
        self.store.objects.delete(left)
        return len(left)

    def _serialize(self, state: dict[str, Any]) -> bytes:
        import torch

        buffer = io.BytesIO()
        torch.save(state, buffer)
        if not self._proved_loadable:
            buffer.seek(0)
            try:
                torch.load(buffer, map_location="cpu", weights_only=True)
            except Exception as refused:
                raise ValueError(
                    f"state: it cannot be loaded again ({refused}); keep to tensors, numbers, text, lists and dicts"
                    " in `extra` and in what state_dict() gives (float(x) instead of a numpy number)"
                ) from refused
            self._proved_loadable = True
        return buffer.getvalue()

    def _put_part(self, root: str, index: int, data: bytes) -> Part:
        digest = hashlib.sha256(data).hexdigest()
        key = f"{root}/{index:05d}-{digest[:16]}.part"
        self.store.objects.put(key, data)
        return Part(key=key, size=len(data), sha256=digest)

    def _get_part(self, part: Part) -> bytes:
        data = self.store.objects.get(part.key)
        if len(data) != part.size:
            raise TornCheckpoint(f"{part.key} has {len(data)} bytes, expected {part.size}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != part.sha256:
            raise TornCheckpoint(f"{part.key} has sha256 {digest[:16]}..., expected {part.sha256[:16]}...")
        return data


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
