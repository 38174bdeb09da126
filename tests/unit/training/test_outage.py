"""A store that is away for a while is waited for, within bounds."""

from __future__ import annotations

import pytest

from gpucost.training.outage import brief, patiently


class Store:
    """Away until `back`; time passes while somebody sleeps."""

    def __init__(self, back: float) -> None:
        self.now = 0.0
        self.back = back
        self.said: list[str] = []

    def ask(self) -> str:
        if self.now < self.back:
            raise ConnectionRefusedError("refused")
        return "here"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self) -> str:
        return patiently(self.ask, self.said.append, patience=60, sleep=self.sleep, real=lambda: self.now)


def test_it_is_waited_for_and_said_once() -> None:
    store = Store(back=50)
    assert store.wait() == "here"
    assert store.said == ["waiting up to 60 s for the object store: refused"]


def test_patience_ends() -> None:
    store = Store(back=1000)
    with pytest.raises(ConnectionRefusedError):
        store.wait()
    assert 55 <= store.now <= 60


def test_missing_credentials_are_not_waited_for() -> None:
    def ask() -> None:
        raise PermissionError("no credentials found")

    with pytest.raises(PermissionError):
        patiently(ask, print, sleep=lambda seconds: pytest.fail("waited"))


def test_an_error_is_one_line() -> None:
    assert brief(OSError("Generic S3 error: refused\n\nDebug source:\nGeneric {")) == "Generic S3 error: refused"
    assert brief(TimeoutError()) == "TimeoutError"
