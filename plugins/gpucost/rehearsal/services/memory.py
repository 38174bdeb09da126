"""How does moto's state outlive the process? A snapshot of each backend that a request changed, before its answer.

Moto keeps everything in memory. A journal of requests, replayed at the start, would be smaller, but moto draws every
id by chance and reads the clock, so that a replay makes other queues and templates than those that were answered. A
snapshot gives back what was there. Two things keep it small and quick:

- The backend of EC2 is born with 1,300 images and their snapshots, nearly all of its state. It is made with seeded
  random numbers here, so that it is born the same at every start; snapshots name these objects instead of holding them.
- What a request changed is in the backend of its service and region, but for a few services that pass things on to
  others. A backend whose bytes are as before is not written again.

Snapshots are pickles: a file that somebody else wrote could run anything here. They are read from a folder that only
this user can enter, and nowhere else.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import stat
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import moto
from moto.backends import get_backend
from moto.core.base_backend import BackendDict, BaseBackend
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_api._internal import mock_random
from moto.utilities.utils import get_partition

from gpucost.rehearsal.services.lock import LOCK
from gpucost.rehearsal.whole import write_whole

log = logging.getLogger(__name__)

FORMAT = 1
SEED = "gpucost rehearsal"

BULKY = frozenset({"s3"})
"""Not kept: objects belong into an object store beside the rehearsal."""

REACH: dict[str, frozenset[str] | None] = {
    "cloudformation": None,
    "events": frozenset({"events", "logs", "sqs"}),
    "resourcegroupstaggingapi": None,
    "scheduler": None,
    "sns": frozenset({"sns", "sqs"}),
    "stepfunctions": None,
    "tagging": None,
}
"""Services whose requests change the state of others, and of which, in any region; None: of all."""

UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError)
"""What reading a pickle may raise that is damaged, or of classes that cannot be pickled."""

Key = tuple[str, str, str]
"""A backend: service, account, region."""

_backends_of: Any = get_backend
"""Service -> moto's dict of account -> region -> backend."""

_LOCKS: dict[type, Any] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
    threading.Condition: threading.Condition,
}

_BORN: dict[str, list[Any]] = {}
"""Region -> the objects that its EC2 backend is born with."""


def ec2_backend(region: str) -> Any:
    """The EC2 backend of a region, made in the same way at every start."""
    with LOCK:
        backends = _backends_of("ec2")[DEFAULT_ACCOUNT_ID]
        if region not in backends.keys():  # noqa: SIM118 (`in` asks moto whether it could be made)
            mock_random.seed(f"{SEED}/{region}")
            born = backends[region]
            mock_random.seed()
            _BORN[region] = [*born.amis.values(), *born.snapshots.values()]
        return backends[region]


class Memory:
    """Keeps moto's state in a folder. All methods expect `LOCK` to be held.

    Args:
        folder: for the snapshots; made when missing. None: nothing is kept.

    Raises:
        ValueError: the folder is open to others.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._written: dict[Key, bytes] = {}
        self._given_up: set[Key] = set()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)

    def take_up(self) -> None:
        """Give moto the state of an earlier life.

        Raises:
            ValueError: a snapshot is of another moto, or none at all; the message says what to do.
        """
        for path in sorted(self._folder.glob("*.snapshot")) if self._folder is not None else []:
            service, account, region = path.name.removesuffix(".snapshot").split(".")
            backend = ec2_backend(region) if service == "ec2" else _backends_of(service)[account][region]
            with path.open("rb") as file:
                _check_header(path, file.readline())
                try:
                    state = _Unpickler(file).load()
                except UNREADABLE as error:
                    raise ValueError(
                        f"state_dir: {path} cannot be read: {error}; remove it to begin without {service}'s state in "
                        f"{region}, or use another --state-dir"
                    ) from error
            # the backend itself stays: moto's classes and other backends refer to it
            backend.__dict__.clear()
            backend.__dict__.update(state)
            self._written[service, account, region] = b""

    def keep(self, service: str, region: str | None) -> None:
        """Write down what a request to a service and region (None: any) may have changed."""
        if self._folder is None:
            return
        for key, backend in list(_backends()):
            kept = key[0] not in BULKY and key not in self._given_up
            if kept and _reaches(service, region, key):
                self._keep(key, backend)

    def _keep(self, key: Key, backend: BaseBackend) -> None:
        try:
            content = _pickled(backend)
            if key not in self._written:
                # once: better no memory of a service than a cloud that cannot start again
                _Unpickler(io.BytesIO(content)).load()
        except (pickle.PicklingError, RecursionError, *UNREADABLE) as error:
            self._given_up.add(key)
            log.warning("%s in %s will not be there after a restart: moto's state of it cannot be written: %s",
                        key[0], key[2], error)  # fmt: skip
            return
        digest = hashlib.blake2b(content).digest()
        if self._written.get(key) == digest:
            return
        assert self._folder is not None  # noqa: S101 (keep() saw it)
        _write(self._folder / f"{'.'.join(key)}.snapshot", content)
        self._written[key] = digest


def _reaches(service: str, region: str | None, key: Key) -> bool:
    if service in REACH:
        services = REACH[service]
        return services is None or key[0] in services
    return key[0] == service and (region is None or key[2] in {region, get_partition(region)})


def _backends() -> Iterator[tuple[Key, BaseBackend]]:
    for backends in BackendDict._instances:  # type: ignore[misc]  # the only list of what is in use
        for account, region, backend in backends.iter_backends():
            yield (backends.service_name, account, region), backend


class _Pickler(pickle.Pickler):
    """Names backends and what EC2 is born with instead of writing them; locks are written as new ones."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=5)
        self._names: dict[int, tuple[Any, ...]] = {}
        for key, backend in _backends():
            self._names[id(backend)] = key
            # functions within functions have no name to be found by; as makers of defaults, the next life has them too
            for name, value in vars(backend).items():
                if isinstance(value, defaultdict) and isinstance(value.default_factory, FunctionType):
                    self._names[id(value.default_factory)] = (*key, name)
        for region, born in _BORN.items():
            self._names |= {id(one): (region, number) for number, one in enumerate(born)}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        return self._names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        made_by = _LOCKS.get(type(obj))
        if made_by is not None:
            return made_by, ()
        if isinstance(obj, defaultdict) and type(obj) is not defaultdict:
            # pickle would call such a class as if its arguments were a defaultdict's
            return _new_defaults, (type(obj), obj.default_factory), vars(obj) or None, None, iter(obj.items())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Gives the backends and the born objects of this life for their names."""

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        if len(pid) == 2:
            region, number = pid
            ec2_backend(region)
            return _BORN[region][number]
        service, account, region, *name = pid
        backend = ec2_backend(region) if service == "ec2" else _backends_of(service)[account][region]
        return vars(backend)[name[0]].default_factory if name else backend


def _new_defaults(kind: Any, factory: Any) -> Any:
    made = kind.__new__(kind)
    made.default_factory = factory
    return made


def _pickled(backend: BaseBackend) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(backend.__dict__)
    return file.getvalue()


def _header() -> dict[str, Any]:
    return {"format": FORMAT, "moto": moto.__version__}


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise ValueError(f"state_dir: {path} is not a snapshot of moto's state; use another --state-dir") from error
    if header != _header():
        raise ValueError(
            f"state_dir: {path} was written by {header}, this is {_header()}: go on with that moto "
            f"(pip install moto=={header.get('moto')}), or use another --state-dir"
        )


def _check_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"state_dir: {folder} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, expected "
            f"{os.getuid()} with 700: what is read from there could run anything; run chmod 700 on it, or use another "
            "--state-dir"
        )


def _write(path: Path, content: bytes) -> None:
    write_whole(path, json.dumps(_header()).encode() + b"\n" + content)
