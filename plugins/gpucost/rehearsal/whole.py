"""How is a file written so that its readers find all of it, or the one before?"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Put a file in place of an earlier one, readable by its owner alone; on disk before this returns.

    Raises:
        OSError: it could not be written; the earlier one is still there.
    """
    data = content.encode() if isinstance(content, str) else content
    part = path.with_name(f"{path.name}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
