"""Where does a run keep its things? A folder beside the job file, which one run has for itself.

.gpucost-run/<name>/
    store/        the job's documents and checkpoints, unless another store is named
    work/         the node's work folder: the program's code, log and metrics
    agent.zip     what is started
    agent.log     what the agent said in the newest run
    lock          held by the command and its agent for as long as either lives
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOME = ".gpucost-run"


class Busy(RuntimeError):
    """Another run of the job lives on this machine."""


class NoPlace(RuntimeError):
    """The folder cannot be made or written."""


@dataclass(frozen=True)
class Place:
    """The folder of one job's runs.

    Args:
        folder: `.gpucost-run/<name>`.
        store_url: where the job's documents are.
    """

    folder: Path
    store_url: str

    @classmethod
    def beside(cls, job_file: Path, name: str, store_url: str = "") -> Place:
        """The folder for the job of that name; made when it is not there.

        Args:
            job_file: the YAML file.
            name: the job's.
            store_url: file:///folder or s3://bucket/prefix; empty: in the folder.

        Raises:
            NoPlace: it cannot be made.
        """
        home = job_file.absolute().parent / HOME
        folder = home / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "job")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (home / ".gitignore").write_text("*\n", encoding="utf-8")
        except OSError as refused:
            raise NoPlace(f"{folder}: {refused.strerror}, expected a folder for the run's log and state") from refused
        return cls(folder, store_url or (folder / "store").as_uri())

    @property
    def work(self) -> Path:
        """The node's work folder; kept from run to run, so that data need not be fetched again."""
        return self.folder / "work"

    @property
    def agent_zip(self) -> Path:
        """What is started."""
        return self.folder / "agent.zip"

    @property
    def agent_log(self) -> Path:
        """What the agent said."""
        return self.folder / "agent.log"

    @contextmanager
    def held(self) -> Iterator[int]:
        """Have the folder for oneself; gives the descriptor that whoever must hold it longer inherits.

        Raises:
            Busy: another run has it.
            NoPlace: it cannot be written to.
        """
        path = self.folder / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as refused:
            raise NoPlace(f"{path}: {refused.strerror}, expected to be able to write there") from refused
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as taken:
                owner = path.read_text(encoding="ascii").strip() or "another one"
                raise Busy(
                    f"this job runs already on this machine (process {owner}, in {self.folder}); end that run with "
                    "Ctrl-C first. After a kill its agent may need half a minute to save"
                ) from taken
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)
