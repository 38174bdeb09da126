"""The guards of the unit tests themselves: a socket or a wait is refused, so that no test hides one."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
import pytest_socket

from gpucost.clock import SpecClock


def test_a_socket_is_refused() -> None:
    with pytest.raises(pytest_socket.SocketBlockedError):
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def test_waiting_is_refused() -> None:
    with pytest.raises(pytest.fail.Exception, match="slept for 1"):
        time.sleep(1)
    with pytest.raises(pytest.fail.Exception, match="slept for 2"):
        asyncio.run(asyncio.sleep(2))
    with pytest.raises(pytest.fail.Exception, match="slept for 3"):
        SpecClock().sleep(3)


def test_a_moment_is_allowed() -> None:
    assert time.sleep(0.001) is None  # type: ignore[func-returns-value]
