"""Where do bytes lie? An object store behind a few calls: S3-compatible, a folder, or memory.

A thin layer over obstore that adds what both sides need: our error types, and a conditional write that
also works on a folder. Credentials come from boto3's default chain unless a session is passed in.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from boto3.session import Session
    from obstore.store import ClientConfig, ObjectStore, S3Config, S3Credential


class ObjectMissing(KeyError):
    """There is no object under that key."""


class Conflict(RuntimeError):
    """Somebody else wrote the object first; read it again and decide anew."""


class StoreError(OSError):
    """The store is away, too slow, full, or refuses; one line says which."""


class NotAllowed(StoreError, PermissionError):
    """The store answers, and refuses these credentials."""


REQUEST_SECONDS = 30.0
"""Longest for one try at a request, its body included; 16 MiB need half a MiB/s."""
RETRY_SECONDS = 15.0
"""No new try begins later than this, so that a call takes `REQUEST_SECONDS + RETRY_SECONDS` at most. A store that
accepts a connection and never answers uses up the first try and gets no second one."""


@dataclass(frozen=True)
class Stat:
    """One object of a listing: key relative to the store's root, bytes, ETag, and when it was written."""

    key: str
    size: int
    etag: str
    modified: datetime


class Objects:
    """Objects under one root, addressed by keys relative to it.

    Args:
        store: an obstore store whose root is the place to work under.
        folder: its path when it is a local folder, where conditional writes take a file lock.
    """

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder

    @property
    def local(self) -> bool:
        """Whether it is a folder, or memory: it answers at once, and its space is this machine's."""
        return self._folder is not None or type(self._store).__name__ == "MemoryStore"

    @classmethod
    def in_memory(cls) -> Objects:
        """An empty store that lives as long as this object; for tests."""
        from obstore.store import MemoryStore

        return cls(MemoryStore())

    @classmethod
    def open(
        cls, url: str, *, endpoint: str | None = None, region: str | None = None, session: Session | None = None
    ) -> Objects:
        """Open `s3://bucket/prefix` or `file:///folder`.

        Args:
            url: the root; keys are relative to it.
            endpoint: address of an S3-compatible server; None: AWS.
            region: the bucket's region.
            session: boto3 session whose credentials to use; None: the default chain (environment,
                profile, or the machine's role).

        Raises:
            ValueError: for another scheme.
        """
        parts = urlsplit(url)
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            folder.mkdir(parents=True, exist_ok=True)
            from obstore.store import LocalStore

            return cls(LocalStore(folder, automatic_cleanup=True), folder)
        if parts.scheme != "s3" or not parts.netloc:
            raise ValueError(f"store: got {url!r}, expected s3://bucket/prefix or file:///folder")
        return cls(_s3_store(parts.netloc, parts.path.strip("/"), endpoint, region, session))

    def get(self, key: str) -> bytes:
        """The object's bytes.

        Raises:
            ObjectMissing: there is none.
        """
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """The object's bytes and the ETag to pass to `put_if_match`."""
        import obstore

        with _one_line():
            try:
                result = obstore.get(self._store, key)
                data = bytes(result.bytes())
            except FileNotFoundError as missing:
                raise ObjectMissing(key) from missing
            if len(data) != result.meta["size"]:
                raise StoreError(f"{key}: {len(data)} of {result.meta['size']} bytes came")
            return data, str(result.meta["e_tag"])

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write in one request, replacing what was there; a reader sees all of it or nothing."""
        import obstore

        with _one_line():
            # In parts it would take more requests, copy the bytes, and leave a hidden half when it is cut off.
            obstore.put(self._store, key, data, use_multipart=False)

    def put_new(self, key: str, data: bytes) -> None:
        """Write only if there is nothing yet.

        Raises:
            Conflict: there is something.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with _one_line():
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as taken:
                raise Conflict(f"{key} exists already") from taken

    def put_if_match(self, key: str, data: bytes, etag: str) -> None:
        """Replace the object only if it is still the one with `etag`.

        Raises:
            Conflict: it changed, or is gone.
        """
        import obstore
        from obstore.exceptions import NotFoundError, PreconditionError

        if self._folder is not None:
            self._locked_replace(key, data, etag)
            return
        with _one_line():
            try:
                obstore.put(self._store, key, data, mode={"e_tag": etag}, use_multipart=False)
            except (PreconditionError, NotFoundError) as changed:
                raise Conflict(f"{key} was changed by somebody else") from changed

    def _locked_replace(self, key: str, data: bytes, etag: str) -> None:
        # A folder has no If-Match; every writer of gpucost takes this lock, so compare and write are one.
        assert self._folder is not None  # noqa: S101
        with (self._folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                current = self.get_with_etag(key)[1]
            except ObjectMissing as gone:
                raise Conflict(f"{key} is gone") from gone
            if current != etag:
                raise Conflict(f"{key} was changed by somebody else")
            self.put(key, data)

    def scan(self, prefix: str, after: str | None = None) -> Iterator[Stat]:
        """Every object whose key lies under the folder `prefix`, in no promised order.

        Args:
            prefix: the folder.
            after: only keys that sort after this one; a store does not even list the others.
        """
        import obstore

        with _one_line():
            for chunk in obstore.list(self._store, prefix=prefix, offset=after):
                for meta in chunk:
                    yield Stat(meta["path"], meta["size"], str(meta["e_tag"]), meta["last_modified"])

    def stat(self, key: str) -> Stat:
        """Size, ETag and time of one object.

        Raises:
            ObjectMissing: there is none.
        """
        import obstore

        with _one_line():
            try:
                meta = obstore.head(self._store, key)
            except FileNotFoundError as missing:
                raise ObjectMissing(key) from missing
        return Stat(meta["path"], meta["size"], str(meta["e_tag"]), meta["last_modified"])

    def get_range(self, key: str, start: int, end: int, etag: str) -> bytes:
        """Bytes `start` to `end` (not included) of the object, if it is still the one with `etag`.

        Raises:
            ObjectMissing: there is none.
            Conflict: it changed.
        """
        import obstore
        from obstore.exceptions import PreconditionError

        with _one_line():
            try:
                result = obstore.get(self._store, key, options={"range": (start, end), "if_match": etag})
                return bytes(result.bytes())
            except FileNotFoundError as missing:
                raise ObjectMissing(key) from missing
            except PreconditionError as changed:
                raise Conflict(f"{key} was changed by somebody else") from changed

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store; its bytes do not pass through this machine, unless it is a folder.

        Raises:
            ObjectMissing: there is no `source`.
        """
        import obstore

        if self._folder is not None:
            # obstore would make a second name for the same bytes on the disk: damaged once, damaged twice.
            self.put(target, self.get(source))
            return
        with _one_line():
            try:
                obstore.copy(self._store, source, target)
            except FileNotFoundError as missing:
                raise ObjectMissing(source) from missing

    def delete(self, keys: list[str]) -> None:
        """Delete; a key that is not there is no error."""
        import obstore

        for key in keys:
            with _one_line():
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    def delete_folder(self, prefix: str) -> None:
        """Delete everything under the folder `prefix`, also what a writer that was killed has left half written."""
        if self._folder is not None:
            # A listing does not show the half-written files, and deleting keys would leave the empty folders.
            shutil.rmtree(self._folder / prefix, ignore_errors=True)
            return
        self.delete([stat.key for stat in self.scan(prefix)])


@contextmanager
def _one_line() -> Iterator[None]:
    """Raise what obstore raises as `StoreError`: it appends a page for its own developers, chained or not."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
        raise (NotAllowed if refused else StoreError)(_first_line(str(error))) from None


def _first_line(text: str) -> str:
    """The first line, and of the page that a server sends with a refusal its code."""
    line = text.split("\n", 1)[0].split(": <?xml", 1)[0].strip()
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"{line} ({code[1]})" if code else line


def _s3_store(
    bucket: str, prefix: str, endpoint: str | None, region: str | None, session: Session | None
) -> ObjectStore:
    import boto3
    from obstore.store import S3Store

    session = session or boto3.Session(region_name=region)
    client_options: ClientConfig = {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
        "allow_http": bool(endpoint and endpoint.startswith("http://")),
    }
    config: S3Config = {"region": region or session.region_name or "us-east-1", "conditional_put": "etag"}
    if endpoint:
        config["endpoint"] = endpoint
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=config,
        client_options=client_options,
        retry_config={
            # As many as fit: eight would be used up within two seconds of refused connections.
            "max_retries": 100,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
        credential_provider=_credentials(session),
    )


def _credentials(session: Session) -> Callable[[], S3Credential]:
    """Give obstore the credentials of boto3's chain, renewed by boto3 itself.

    A role without a session token is told by an empty string in some metadata services; sent on as a
    token it would be refused, so it becomes None.
    """
    chain = session.get_credentials()
    if chain is None:
        raise PermissionError(
            "object store: no credentials found in the environment, a profile, or the machine's role; "
            "set the connection's login and password, or give the machine a role"
        )

    def provide() -> S3Credential:
        frozen = chain.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key or "",
            "secret_access_key": frozen.secret_key or "",
            "token": frozen.token or None,
            "expires_at": datetime.now(UTC) + timedelta(minutes=5),
        }

    return provide
