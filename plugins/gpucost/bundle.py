"""What is shipped to a node? Zips whose name is their digest: the program's folder, and the agent.

The same files make the same bytes, whoever packs them and when, so that the digest identifies the code.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpucost.objects import Conflict, Objects

AGENT_PARTS = (
    "__init__.py",
    "bundle.py",
    "clock.py",
    "fitness.py",
    "gpus.py",
    "job.py",
    "jobstore.py",
    "money.py",
    "objects.py",
    "reasons.py",
    "recipe.py",
)
"""Modules beside `training/` that the agent needs; nothing of them imports Airflow."""

LEFT_OUT = frozenset(
    {
        "__pycache__",
        "checkpoints",
        ".git",
        ".gpucost-run",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".venv",
    }
)
MAX_CODE_BYTES = 200 * 1024 * 1024

AGENT_MAIN = b"""from gpucost.training.agent.main import main

main()
"""


def pack_code(folder: Path) -> tuple[str, bytes]:
    """Zip the program's folder.

    Returns:
        Its sha256 in hex, and the zip's bytes.

    Raises:
        ValueError: `folder` is no folder, is empty, or holds more than 200 MiB (data belongs in `data`).
    """
    if not folder.is_dir():
        raise ValueError(f"code: got {str(folder)!r}, expected a folder that holds the program")
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not LEFT_OUT & set(path.relative_to(folder).parts)
    ]
    total = sum(path.stat().st_size for path in files)
    if not files:
        raise ValueError(f"code: {str(folder)!r} is empty, expected the program's files")
    if total > MAX_CODE_BYTES:
        raise ValueError(
            f"code: {str(folder)!r} holds {total >> 20} MiB, expected at most {MAX_CODE_BYTES >> 20} MiB; "
            "keep data out of the code folder and name it in `data`"
        )
    return _zip((path.relative_to(folder).as_posix(), path.read_bytes()) for path in files)


@dataclass(frozen=True)
class Agent:
    """What a node runs first: `python3 agent.zip`.

    Args:
        digest: sha256 of the zip, hex.
        data: the zip.
    """

    digest: str
    data: bytes = field(repr=False)

    @property
    def key(self) -> str:
        """Where it lies in the object store."""
        return f"agents/{self.digest}.zip"

    def publish(self, objects: Objects) -> None:
        """Put it where nodes find it, if it is not there yet."""
        try:
            objects.put_new(self.key, self.data)
        except Conflict:
            return


def pack_agent() -> Agent:
    """Zip what a node runs first."""
    package = Path(__file__).parent
    training = sorted((package / "training").rglob("*.py"))
    members = [package / name for name in AGENT_PARTS] + training
    named = [(f"gpucost/{path.relative_to(package).as_posix()}", path.read_bytes()) for path in members]
    return Agent(*_zip([("__main__.py", AGENT_MAIN), *named]))


def unpack(data: bytes, folder: Path) -> None:
    """Unpack a zip made here into `folder`.

    Raises:
        ValueError: a member would land outside `folder`.
    """
    root = folder.resolve()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if not (root / name).resolve().is_relative_to(root):
                raise ValueError(f"zip: member {name!r} lies outside the target folder; refused")
        archive.extractall(root)


def digest_of(data: bytes) -> str:
    """sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def _zip(members: Iterable[tuple[str, bytes]]) -> tuple[str, bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            # A fixed date and mode: otherwise the same code would have another digest on every machine.
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    data = buffer.getvalue()
    return digest_of(data), data
