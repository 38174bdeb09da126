"""What is on an instance's disk when it is powered on: its first process, its power switches, its user data.

The first process, `init`, is on the disk too. It lives as long as the machine is on, so that every second of the
machine belongs to a process that lived, and it needs the cloud only for the moment of its boot: when the cloud is
killed meanwhile, it boots at once, and goes on alone.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from gpucost.rehearsal.guests import read_small, remove
from gpucost.rehearsal.machines.processes import MARKER

MOST_DIGITS = 9
"""Of a pid or an exit status."""

SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

CONSOLE = "console.log"
"""What the machine prints."""

HIDDEN = ".machine"
"""Folder of the files that the machine and the cloud tell each other by."""

INIT = f"{HIDDEN}/init"
INIT_PID = f"{HIDDEN}/init.pid"
PROGRAM_PID = f"{HIDDEN}/program.pid"
EXIT_STATUS = f"{HIDDEN}/exit-status"

# A trap with a command, not an ignored signal: what is ignored here would be ignored by the user data as well.
# `setsid`: user data that signals its own process group must not meet init.
INIT_SCRIPT = f"""\
#!/bin/sh
# The first process of a rehearsal instance: the machine is on as long as this lives.
# It boots when its standard input gives a line or ends; $1 says why the user data cannot be run.
trap : HUP INT TERM
echo $$ > {INIT_PID}
read -r boot
if [ -n "$1" ]; then
  echo "user data cannot be run: $1"
else
  setsid /bin/sh -c 'echo $$ > {PROGRAM_PID}; exec ./user-data' < /dev/null
  echo $? > {EXIT_STATUS}
fi
trap '' HUP INT TERM
exec sleep infinity < /dev/null
"""

SHUTDOWN_STUB = """\
#!/bin/sh
# Stands in for shutdown(8): asks the rehearsal cloud to power this instance off.
# Accepts: [-h|-P|--poweroff] [now|+MINUTES], or -c to cancel, or -H or --halt.
request={request}
when=+1
for word in "$@"; do
  case "$word" in
    -c) rm -f "$request"; exit 0 ;;
    -H|--halt) exec {folder}/bin/halt ;;
    -r|--reboot) echo "shutdown: this rehearsal instance cannot reboot" >&2; exit 1 ;;
    now|+[0-9]*) when="$word" ;;
  esac
done
printf '%s' "$when" > "$request.part" && mv "$request.part" "$request"
"""

POWEROFF_STUB = """\
#!/bin/sh
exec {folder}/bin/shutdown -h now
"""

# SIGSTOP: programs stand still as on a halted CPU, and only the end of the machine moves them again.
HALT_STUB = """\
#!/bin/sh
# Stands in for halt(8). On EC2 it powers nothing off: the CPU stands still, and the instance runs on and is billed.
for word in "$@"; do
  case "$word" in
    -p|--poweroff) exec {folder}/bin/shutdown -h now ;;
  esac
done
echo "System halted: nothing runs any more, and the instance is still on" >> {folder}/{console}
read -r program < {folder}/{program_pid} && kill -s STOP -- "-$program"
kill -s STOP $$
"""
"""Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_ChangingInstanceInitiatedShutdownBehavior.html:
halt initiates no shutdown, and the instance keeps running with its CPU in HLT."""

NO_USER_DATA = b"#!/bin/sh\n"


def folder_of(state_dir: Path, instance_id: str) -> Path:
    """Where an instance's disk is in a cloud's folder."""
    return state_dir / "instances" / instance_id


def prepare(folder: Path, user_data: bytes | None, request: Path) -> str:
    """Make an instance's disk, or make the one of an earlier life ready for the next.

    Args:
        folder: the disk.
        user_data: what it runs when it has booted.
        request: the file in which its `shutdown` writes `now` or `+MINUTES`.

    Returns:
        Why the user data cannot be run; empty when it can.
    """
    for part in (folder, folder / "bin", folder / "tmp", folder / HIDDEN):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in (request, *(folder / name for name in (INIT_PID, PROGRAM_PID, EXIT_STATUS))):
        remove(old)
    if not (folder / CONSOLE).is_file():
        remove(folder / CONSOLE)
    _program(folder / INIT, INIT_SCRIPT.encode())
    quoted = {
        "folder": shlex.quote(str(folder)),
        "request": shlex.quote(str(request)),
        "console": CONSOLE,
        "program_pid": PROGRAM_PID,
    }
    for name, stub in (("shutdown", SHUTDOWN_STUB), ("poweroff", POWEROFF_STUB), ("halt", HALT_STUB)):
        _program(folder / "bin" / name, stub.format(**quoted).encode())
    _program(folder / "user-data", user_data or NO_USER_DATA)
    return _fault(user_data or NO_USER_DATA)


def _program(path: Path, content: bytes) -> None:
    remove(path)
    path.write_bytes(content)
    path.chmod(0o700)


def _fault(user_data: bytes) -> str:
    """Why the kernel would not run it; a shell in its place might, and would hide what fails on EC2."""
    if user_data.startswith(b"\x7fELF"):
        return ""
    # to the kernel a zero byte ends the line, too
    first = user_data.partition(b"\n")[0].partition(b"\0")[0].decode("utf-8", errors="replace")
    words = first.removeprefix("#!").split()
    if not first.startswith("#!") or not words:
        return f"it begins with {first[:40]!r}, expected #! and an interpreter"
    if not os.access(words[0], os.X_OK):
        return f"its interpreter {words[0]} is not a program on this machine"
    return ""


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


def number_in(path: Path) -> int | None:
    """The number that a machine wrote into a file; None when it has not, or not to the end."""
    text = (read_small(path) or b"").strip()
    return int(text) if text.isdigit() and len(text) <= MOST_DIGITS else None
