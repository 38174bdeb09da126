"""Where do bytes lie? An object store behind a few calls: S3-compatible, a folder, or memory.

A thin layer over obstore that adds what both sides need: our error types, and a conditional write that
also works on a folder. Credentials come from boto3's default chain unless a session is passed in.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from boto3.session import Session
    from obstore.store import ClientConfig, ObjectStore, S3Config, S3Credential


class ObjectMissing(KeyError):
    """There is no object under that key."""


class Conflict(RuntimeError):
    """Somebody else wrote the object first; read it again and decide anew."""


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
            folder = Path(parts.path)
            folder.mkdir(parents=True, exist_ok=True)
            from obstore.store import LocalStore

            return cls(LocalStore(folder), folder)
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

        try:
            result = obstore.get(self._store, key)
            return bytes(result.bytes()), str(result.meta["e_tag"])
        except FileNotFoundError as missing:
            raise ObjectMissing(key) from missing

    def put(self, key: str, data: bytes) -> None:
        """Write, replacing what was there."""
        import obstore

        obstore.put(self._store, key, data)

    def put_new(self, key: str, data: bytes) -> None:
        """Write only if there is nothing yet.

        Raises:
            Conflict: there is something.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

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

        for chunk in obstore.list(self._store, prefix=prefix, offset=after):
            for meta in chunk:
                yield Stat(meta["path"], meta["size"], str(meta["e_tag"]), meta["last_modified"])

    def delete(self, keys: list[str]) -> None:
        """Delete; a key that is not there is no error."""
        import obstore

        for key in keys:
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                continue


def _s3_store(
    bucket: str, prefix: str, endpoint: str | None, region: str | None, session: Session | None
) -> ObjectStore:
    import boto3
    from obstore.store import S3Store

    session = session or boto3.Session(region_name=region)
    client_options: ClientConfig = {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=120),
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
        retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=90)},
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
