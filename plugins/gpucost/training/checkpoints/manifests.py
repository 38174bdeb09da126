"""Is this manifest the one that was written for this checkpoint? It carries a digest of itself, and says where it lies.

Without the digest, a flipped bit in the step or the world size would be believed.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC

from gpucost.jobstore import JobStore, Manifest
from gpucost.objects import ObjectMissing
from gpucost.training.checkpoints.agreement import TornCheckpoint


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its digest."""
    return manifest.model_copy(update={"digest": _digest(manifest)})


def read(store: JobStore, key: str) -> Manifest:
    """The manifest under `key`, which is whole and belongs there.

    Raises:
        TornCheckpoint: it is missing, damaged, or of another checkpoint.
        one of `store_errors()`: the store is away.
    """
    try:
        return _read(store, key)
    except TornCheckpoint:
        return _read(store, key)  # The damage may have come about on the way.


def _read(store: JobStore, key: str) -> Manifest:
    try:
        manifest = store.manifest(key)
    except ObjectMissing as missing:
        raise TornCheckpoint("its manifest is missing") from missing
    except ValueError as garbled:
        raise TornCheckpoint("its manifest is not what was written: it cannot be read") from garbled
    if manifest.digest != _digest(manifest):
        raise TornCheckpoint("its manifest is not what was written: its digest differs")
    if manifest.job != store.key:
        raise TornCheckpoint(f"its manifest is one of job {manifest.job}")
    folder = store.checkpoint_root(manifest.step, manifest.attempt)
    if key != f"{folder}/manifest.json":
        raise TornCheckpoint(f"its manifest is one of step {manifest.step}, attempt {manifest.attempt}")
    return manifest


def _digest(manifest: Manifest) -> str:
    """sha256 over the fields by name: a field that is added to the model later leaves older digests as they are."""
    content = [
        manifest.job,
        manifest.attempt,
        manifest.step,
        manifest.epoch,
        manifest.created_at.astimezone(UTC).isoformat(),
        manifest.world_size,
        [[part.key, part.size, part.sha256, part.rank, part.path] for part in manifest.parts],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
