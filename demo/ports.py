"""Which port does a service get?

A default that is busy moves to the next free port, and the terminal says so; a port that the user set does not move.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .settings import DEFAULT_PORTS, PORT_VARIABLES, StackError

INTERNAL_RANGE = range(20_000, 32_000)
"""Ports that nobody types. Below Linux's range for outgoing connections, which takes ports without asking."""

NEXT_TRIES = 200


def is_free(port: int) -> bool:
    """Can a service listen on this port of the loopback?"""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a connection that lingers from the last run does not count as busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def listening(pids: Collection[int]) -> set[int]:
    """The TCP ports that these processes listen on."""
    import psutil

    connections = psutil.net_connections(kind="tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.pid in pids}


def who_listens(port: int) -> str:
    """The program behind a busy port, as far as we may see it: `name (pid 123)`."""
    import psutil

    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                break
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                break
    return "a program of another user"


@dataclass
class PortChooser:
    """Hands out ports, none twice.

    Args:
        free: tells whether a port can be listened on.
        listener: names the program that holds a busy port.
        held: the ports that some processes listen on.
        rng: spreads the internal ports, so that two stacks that start together do not meet.
    """

    free: Callable[[int], bool] = is_free
    listener: Callable[[int], str] = who_listens
    held: Callable[[Collection[int]], set[int]] = listening
    rng: random.Random = field(default_factory=random.Random)
    taken: set[int] = field(default_factory=set)
    moved: list[str] = field(default_factory=list)
    """One sentence per default that was busy."""

    def public(
        self,
        names: Sequence[str],
        fixed: Mapping[str, int],
        remembered: Mapping[str, int],
        held: set[int],
        again: Callable[[], set[int]] = set,
    ) -> dict[str, int]:
        """Ports with a well-known default.

        Args:
            names: which of `DEFAULT_PORTS`.
            fixed: ports set by the user.
            remembered: ports of the last start, kept where they can be, so that bookmarks stay right.
            held: ports that our own running services listen on; they count as free for the one that remembers them.
            again: asks for `held` once more: a service in mid-start may have begun to listen since.

        Raises:
            StackError: a port set by the user is busy; names variable, port and listener.
        """
        chosen: dict[str, int] = {}
        for name in names:
            wanted = fixed.get(name)
            if wanted is not None:
                mine = remembered.get(name) == wanted
                self._insist(name, wanted, held if mine else set(), again if mine else set)
                chosen[name] = wanted
            else:
                chosen[name] = self._default(name, remembered.get(name), held, again)
            self.taken.add(chosen[name])
        return chosen

    def internal(self, remembered: int | None = None, held: bool = False) -> int:
        """A free port that nobody needs to know; the remembered one if it is still ours or free."""
        if remembered is not None and remembered not in self.taken and (held or self.free(remembered)):
            self.taken.add(remembered)
            return remembered
        for _ in range(NEXT_TRIES):
            port = self.rng.choice(INTERNAL_RANGE)
            if port not in self.taken and self.free(port):
                self.taken.add(port)
                return port
        raise StackError(f"no free port found in {INTERNAL_RANGE.start}-{INTERNAL_RANGE.stop}: end some programs")

    def _insist(self, name: str, port: int, held: set[int], again: Callable[[], set[int]]) -> None:
        if port in self.taken:
            raise StackError(f"{PORT_VARIABLES[name]}={port}: another service of this stack has this port already")
        if port not in held and not self.free(port) and port not in again():
            raise StackError(
                f"{PORT_VARIABLES[name]}={port} is busy: {self.listener(port)} listens there. "
                f"End that program, set another {PORT_VARIABLES[name]}, or unset it to get a free port"
            )

    def _default(self, name: str, remembered: int | None, held: set[int], again: Callable[[], set[int]]) -> int:
        if remembered is not None and remembered not in self.taken:  # noqa: SIM102 - two questions, two lines
            if remembered in held or self.free(remembered) or remembered in again():
                return remembered
        default = DEFAULT_PORTS[name]
        if default not in self.taken and self.free(default):
            return default
        for port in range(default + 1, default + 1 + NEXT_TRIES):
            if port not in self.taken and self.free(port):
                self.moved.append(f"port {default} for {name} is busy ({self.listener(default)}): using {port}")
                return port
        raise StackError(f"no free port for {name} after {default}: set {PORT_VARIABLES[name]}")
