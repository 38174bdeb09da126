"""How does the cloud read what programs on its machines wrote? They may have put anything there.

A folder, a pipe that would never end, a chain of links, a file of gigabytes: none of it may stop the cloud.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

SMALL = 65_536
"""Bytes; what the cloud reads of a machine is a number or a line of JSON."""


def read_small(path: Path) -> bytes | None:
    """The content of a regular file, its first `SMALL` bytes; None when there is none, or it is not ours to read."""
    return _read(path, last=False)


def read_end(path: Path) -> bytes | None:
    """The last `SMALL` bytes of a regular file, as `read_small` reads the first."""
    return _read(path, last=True)


def _read(path: Path, *, last: bool) -> bytes | None:
    try:
        # without waiting for whoever may write into a pipe
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return None
        return os.pread(file, SMALL, max(0, status.st_size - SMALL) if last else 0)
    except OSError:
        return None
    finally:
        os.close(file)


def remove(path: Path) -> None:
    """Remove whatever is there, a folder with everything in it; nothing there is fine, too.

    Raises:
        OSError: it is still there.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o700)
        shutil.rmtree(path)
