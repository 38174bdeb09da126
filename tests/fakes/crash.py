"""A process that dies at a chosen line: between any two writes, and on both sides of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.orm import Session

from gpucost.db.engine import Database


class Crash(BaseException):
    """The process died here. Not an `Exception`: no handler of the program sees its own death."""


class Fuse:
    """Blows once.

    Args:
        at: how many calls get through before it blows.
        done: whether the last call is still carried out, and only its answer lost.
    """

    def __init__(self, at: int, *, done: bool) -> None:
        self._left = at
        self._done = done
        self.blown = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """One call."""
        now = self._left == 0 and not self.blown
        self._left -= 1
        self.blown = self.blown or now
        if now and not self._done:
            raise Crash
        yield
        if now:
            raise Crash


class Fragile:
    """Passes every call on to something else, through a fuse.

    Args:
        target: what is called.
        fuse: blows at its time.
        methods: names of what counts as a call.
    """

    def __init__(self, target: Any, fuse: Fuse, methods: tuple[str, ...]) -> None:
        self._target = target
        self._fuse = fuse
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        """The target's attribute, wrapped where it counts as a call."""
        attribute = getattr(self._target, name)
        if name not in self._methods:
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._fuse.around():
                return attribute(*args, **kwargs)

        return call


class FragileDatabase:
    """A database in which every transaction goes through a fuse.

    Args:
        database: the real one.
        fuse: blows before a transaction begins, or after it is committed.
    """

    def __init__(self, database: Database, fuse: Fuse) -> None:
        self._database = database
        self._fuse = fuse

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """As the real one's."""
        with self._fuse.around(), self._database.transaction() as session:
            yield session


PROVIDER_CALLS = ("launch", "find", "describe", "terminate", "price_history", "quotes")
OBJECT_CALLS = ("put", "put_new", "put_if_match", "delete")
