"""How does a program that saves by itself survive? Its folder is kept in the store, and is there again at a restart.

A checkpoint of a folder is an index (names, sizes, modes, times, links), then the files in parts of 16 MiB, then the
manifest. What counts as a consistent picture of a folder is said in `picture`.

When the program was killed while it wrote, its folder holds what a crash would have left on a disk of its own; a
program that writes to another name and renames (`os.replace`) always finds whole files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from gpucost.clock import Clock
from gpucost.jobstore import JobStore, Manifest
from gpucost.training.agent.foldertransfer import Download, Files, Kept, Upload
from gpucost.training.agent.picture import PROC, Index, Look, Seen, look_at, moved, open_for_writing
from gpucost.training.checkpoints import manifests
from gpucost.training.checkpoints.agreement import TornCheckpoint
from gpucost.training.checkpoints.engine import Checkpoints
from gpucost.training.checkpoints.parts import PART_BYTES
from gpucost.training.outage import patiently, store_errors

ROUNDS = 3
"""Tries within one save to find nothing changed; what stayed is not uploaded again."""
PATIENT_LOOKS = 5
"""Saves put off because some files are being written. After so many, the others are saved: with these as they were in
the checkpoint before, or without them. A file that is open all the time must not keep the rest from being saved."""
LOOKS_UNTIL_WARNING = 3


class FolderSync:
    """Keeps one folder in the store. Its methods may be called by several threads.

    Args:
        store: the job's documents.
        attempt: the fencing number; nothing is committed once a newer attempt has claimed the job.
        clock: the job's clock.
        folder: the program saves there; it need not exist yet.
        keep: whole checkpoints kept.
        warn: takes a line for people.
        part_bytes: size of the parts.
        patience: real seconds for which each request of `restore` waits for a store that is away; None: as `outage`
            says.
        proc: where Linux tells which files are open.
    """

    def __init__(
        self,
        store: JobStore,
        attempt: int,
        clock: Clock,
        folder: Path,
        *,
        keep: int = 2,
        warn: Callable[[str], None],
        part_bytes: int = PART_BYTES,
        patience: float | None = None,
        proc: Path = PROC,
    ) -> None:
        self.saved_step: int | None = None
        """The newest checkpoint that was restored or saved here; counts the folder's checkpoints, over all attempts."""
        self._store = store
        self._attempt = attempt
        self._clock = clock
        self._folder = folder
        self._keep = keep
        self._warn = warn
        self._part_bytes = part_bytes
        self._patience = patience
        self._proc = proc
        self._lock = threading.Lock()
        self._torn: set[str] = set()
        self._kept = Kept({}, {})
        self._upload: Upload | None = None
        self._before = Look()
        self._put_off = 0
        self._told: set[str] = set()

    def restore(self) -> bool:
        """Put the newest whole checkpoint into the folder, in place of what is there; whether there was any.

        Raises:
            TornCheckpoint: there are checkpoints, but none is whole; to begin from nothing would lose the work.
            CannotFetch: the disk is too small.
            TornHead: the job's head.json cannot be read.
            one of `store_errors()`: the store was away for too long.
        """
        with self._lock:
            keys = patiently(self._store.head, self._warn, patience=self._patience).checkpoints
            patiently(Checkpoints(self._store, self._attempt, self._clock).sweep, self._warn, patience=self._patience)
            wrong = []
            for key in keys:
                try:
                    self._restore(key)
                except TornCheckpoint as torn:
                    self._torn.add(key)
                    wrong.append(f"{key} ({torn})")
                    self._warn(f"checkpoint {key} of the folder is torn and was skipped: {torn}")
                else:
                    return True
        if wrong:
            raise TornCheckpoint(
                f"none of the folder's {len(wrong)} checkpoints is whole: {'; '.join(wrong)}. Nothing was deleted; put "
                "back what is missing, or start a new job to begin from nothing"
            )
        return False

    def save(self, final: bool = False) -> bool:
        """Upload the folder if anything has changed since the last time, as a picture of one moment.

        Args:
            final: the program has ended; what is there is taken as it is.

        Returns:
            Whether a checkpoint was made. False: nothing changed, or the program is writing; call it again later.

        Raises:
            FencedOut: a newer attempt owns the job.
            TornHead: the job's head.json cannot be read.
            one of `store_errors()`: the store is away; what is uploaded already is not uploaded again the next time.
        """
        with self._lock:
            look = look_at(self._folder)
            if not self._is_new(look, final):
                return False
            busy = set() if final else self._busy(look)
            if busy and self._put_off < PATIENT_LOOKS:
                return self._later(busy)
            self._store.check_fence(self._attempt)
            if self._torn:
                self._torn &= set(self._store.head().checkpoints)
            self._upload = self._upload or self._new_upload()
            return self._save(self._upload, look, busy, final)

    def _save(self, upload: Upload, look: Look, held: set[str], final: bool) -> bool:
        for round_ in range(1, 2 * ROUNDS + 1):
            look = _holding(look, held, self._kept)
            if look.seen == self._kept.seen:
                return False
            files, unread = upload.files(look)
            after = look_at(self._folder)
            changed = ({*moved(look, after), *unread}) - held
            if not changed or (final and round_ >= ROUNDS):
                self._commit(upload, look, files, unread)
                self._put_off = PATIENT_LOOKS if held else 0
                return True
            if round_ >= ROUNDS:
                if self._put_off < PATIENT_LOOKS:
                    return self._later(changed)
                held = held | changed
            look = after
        return self._later(changed)

    def _is_new(self, look: Look, final: bool) -> bool:
        for path, why in look.left_out.items():
            self._tell(f"{path} is left out: {why}")
        if final:
            for path in look.temporary:
                self._tell(f"{path} is left out: its name says that it is not finished")
        if self._kept.files and not any(seen.entry.kind == "file" for seen in look.seen.values()):
            self._tell("no file is left; the last checkpoint is kept")
            return False
        return look.seen != self._kept.seen

    def _busy(self, look: Look) -> set[str]:
        """What somebody seems to be in the middle of writing."""
        # A temporary file that lies still since the last look is left from a program that was killed: it tells nothing.
        fresh = {path for path, seen in look.temporary.items() if self._before.temporary.get(path) != seen}
        self._before = look
        return fresh.union(open_for_writing(self._folder, look.changed_since(self._kept.seen), self._proc))

    def _later(self, busy: set[str]) -> bool:
        self._put_off += 1
        if self._put_off == LOOKS_UNTIL_WARNING:
            self._tell(
                f"not saved {self._put_off} times in a row, because files are being written: "
                f"{', '.join(sorted(busy)[:5])}; let the program write to a name that ends with .tmp, then rename"
            )
        return False

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._warn(f"folder {self._folder.name}: {line}")

    def _new_upload(self) -> Upload:
        # Steps of torn checkpoints count, too: a new one must come after them.
        steps = (int(key.rsplit("/", 2)[1].split("-")[0]) for key in self._store.head().checkpoints)
        step = max(steps, default=0) + 1
        root = self._store.checkpoint_root(step, self._attempt)
        return Upload(self._store.objects, step, root, self._folder, self._kept, self._part_bytes)

    def _commit(self, upload: Upload, look: Look, files: Files, unread: list[str]) -> None:
        for path in unread:
            self._tell(f"{path} is left out: it could not be read to its end")
        seen = {path: one for path, one in look.seen.items() if path not in unread}
        text = Index(entries=tuple(one.entry for one in seen.values())).model_dump_json().encode()
        pieces = [text[start : start + self._part_bytes] for start in range(0, len(text), self._part_bytes)]
        manifest = Manifest(
            job=self._store.key,
            attempt=self._attempt,
            step=upload.step,
            created_at=self._clock.now(),
            parts=(
                *(upload.put(piece, None) for piece in pieces),
                *(part for parts in files.values() for part in parts),
            ),
        )
        try:
            # A torn checkpoint that was skipped still stands in the head; it does not count as kept.
            self._store.commit(manifests.sealed(manifest), keep=self._keep + len(self._torn))
        except store_errors():
            # It counts from the change of the head on, even if the answer was lost, or an old one not deleted.
            if f"{upload.root}/manifest.json" not in self._store.head().checkpoints:
                raise
        self._remember(Kept(seen, files), manifest.step)

    def _remember(self, kept: Kept, step: int) -> None:
        self._kept, self.saved_step, self._upload = kept, step, None

    def _restore(self, key: str) -> None:
        manifest = patiently(lambda: manifests.read(self._store, key), self._warn, patience=self._patience)
        files = Download(self._store.objects, self._warn, self._patience).replace(self._folder, manifest)
        self._remember(Kept(look_at(self._folder).seen, files), manifest.step)


def _holding(look: Look, held: set[str], kept: Kept) -> Look:
    """The look, with the files that are held as they were in the checkpoint before; without those it has not."""
    seen: dict[str, Seen] = {}
    for path, one in look.seen.items():
        if path not in held or one.entry.kind != "file":
            seen[path] = one
        elif path in kept.files:
            seen[path] = kept.seen[path]
    for path in (held & kept.files.keys()) - look.seen.keys():  # Deleted at this moment, or about to be replaced.
        if all(up in seen and seen[up].entry.kind == "folder" for up in _folders_of(path)):
            seen[path] = kept.seen[path]
    return Look(seen=seen)


def _folders_of(path: str) -> list[str]:
    return [up.as_posix() for up in PurePosixPath(path).parents[:-1]]
