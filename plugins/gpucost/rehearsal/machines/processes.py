"""An instance's programs as real local processes: how they start, how all of them are found, how they end.

Everything that an instance starts inherits one environment variable, `MARKER`, and belongs to it by that, also
when it made a session of its own. What cleared its environment is still found by its session or its ancestors.
Only a process that did all three (cleared environment, own session, orphaned) escapes; a container or a cgroup
would hold even that, but needs rights that a newcomer's machine does not give.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

MARKER = "GPUCOST_REHEARSAL_INSTANCE"
"""Environment variable `<cloud id>/<instance id>` of everything that an instance runs."""

SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

SHUTDOWN_STUB = """\
#!/bin/sh
# Stands in for shutdown(8): asks the rehearsal cloud to power this instance off.
# Accepts: [-h|-P|--halt|--poweroff] [now|+MINUTES], or -c to cancel.
when=+1
for word in "$@"; do
  case "$word" in
    -c) rm -f "{folder}/{request}"; exit 0 ;;
    -r|--reboot) echo "shutdown: this rehearsal instance cannot reboot" >&2; exit 1 ;;
    now|+[0-9]*) when="$word" ;;
  esac
done
printf '%s' "$when" > "{folder}/{request}.part" && mv "{folder}/{request}.part" "{folder}/{request}"
"""

POWEROFF_STUB = """\
#!/bin/sh
exec "{folder}/bin/shutdown" -h now
"""

SHUTDOWN_REQUEST = ".shutdown-request"
"""File in an instance's folder with `now` or `+MINUTES`, written by the shutdown stub."""


def marker_value(cloud_id: str, instance_id: str) -> str:
    """What MARKER holds for an instance."""
    return f"{cloud_id}/{instance_id}"


def prepare_folder(folder: Path, user_data: bytes) -> None:
    """Make an instance's disk: its bin folder with the power switches, its temporary folder, its user data."""
    for part in (folder, folder / "bin", folder / "tmp"):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    stubs = {"shutdown": SHUTDOWN_STUB, "poweroff": POWEROFF_STUB, "halt": POWEROFF_STUB}
    for name, text in stubs.items():
        stub = folder / "bin" / name
        stub.write_text(text.format(folder=folder, request=SHUTDOWN_REQUEST), encoding="utf-8")
        stub.chmod(0o700)
    script = folder / "user-data"
    script.write_bytes(user_data)
    script.chmod(0o700)


def environment(folder: Path, image_path: Iterable[Path], imds: str, marker: str) -> dict[str, str]:
    """An instance's environment, built from nothing: no credentials, no settings of the host."""
    path = [str(folder / "bin"), *map(str, image_path), *SYSTEM_PATH]
    return {
        "PATH": ":".join(path),
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds,
        "PYTHONUNBUFFERED": "1",
        MARKER: marker,
    }


def start_user_data(folder: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Run the user-data script in its own session, its output in console.log.

    Raises:
        OSError: it cannot be executed (no interpreter of that name, for example).
    """
    with (folder / "console.log").open("ab") as console:
        return _popen(folder, env, console)


def _popen(folder: Path, env: Mapping[str, str], console: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(folder / "user-data")],
        cwd=folder,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=console,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Table:
    """One look at /proc: who is whose child, in which session, with which marker.

    Processes that end while we look are left out; zombies are too: they only wait to be collected.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._marker_of: dict[int, str] = {}
        self._session_of: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        for entry in proc.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    self._look(entry, int(entry.name))

    def _look(self, entry: Path, pid: int) -> None:
        # /proc/PID/stat: pid (name) state ppid pgrp session ...; the name may hold spaces and brackets
        fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if fields[0] in {"Z", "X"}:
            return
        self._children.setdefault(int(fields[1]), []).append(pid)
        self._session_of[pid] = int(fields[3])
        with contextlib.suppress(PermissionError):
            key = f"{MARKER}=".encode()
            for item in (entry / "environ").read_bytes().split(b"\0"):
                if item.startswith(key):
                    self._marker_of[pid] = item[len(key) :].decode("utf-8", errors="replace")

    def belonging(self, marker: str, leader: int | None = None) -> set[int]:
        """The pids of one instance; `leader` is its user data's process, whose id is also its session's."""
        own = {pid for pid, found in self._marker_of.items() if found == marker}
        if leader is not None:
            own |= {pid for pid, session in self._session_of.items() if session == leader}
        return self._with_descendants(own)

    def of_cloud(self, cloud_id: str) -> set[int]:
        """The pids of every instance of one rehearsal cloud."""
        return self._with_descendants(
            {pid for pid, found in self._marker_of.items() if found.startswith(f"{cloud_id}/")}
        )

    def _with_descendants(self, own: set[int]) -> set[int]:
        waiting = list(own)
        while waiting:
            for child in self._children.get(waiting.pop(), []):
                if child not in own:
                    own.add(child)
                    waiting.append(child)
        return own - {os.getpid()}


def send(pids: Iterable[int], what: signal.Signals) -> None:
    """Signal each of them; one that is gone already needs nothing."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)
