"""What if the way to the object store is bad? A proxy before a real S3 server, which breaks requests by rule.

A request goes on to the server as it came, with its Host: the client signs that header, and the server compares the
signature with what it receives, so a request signed for the proxy's address stays valid behind it.
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self
from urllib.parse import urlsplit

UPSTREAM_SECONDS = 30.0


class Fault(StrEnum):
    """What may happen to a request or its answer."""

    CUT_UPLOAD = "the connection breaks in the middle of the request's body, at the server too"
    CUT_DOWNLOAD = "the connection breaks in the middle of the answer's body"
    TRUNCATE = "the answer ends before its stated length"
    SHORTEN = "half of the answer's body, with a stated length that fits; GET only"
    DELAY = "the answer comes late"
    ERROR = "500, and the server never saw the request"
    BUSY = "503, and the server never saw the request"
    LOST = "the server did it, but 500 is answered"
    SILENT = "the server did it, but the connection closes without an answer"


class Mode(StrEnum):
    """How the proxy meets connections."""

    OPEN = "open"
    REFUSE = "refuse"
    BLACK_HOLE = "accept, and never answer"


Where = Callable[[str, str], bool]


@dataclass
class _Rain:
    share: float = 0.0
    faults: Sequence[Fault] = ()
    where: Where = lambda _method, _path: True


@dataclass
class _Request:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class _Answer:
    status: int
    reason: str
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class S3Proxy:
    """A proxy on a free port of the loopback; use it in a `with` statement.

    Args:
        upstream: the S3 server's address.
        seed: of the faults' order.
        delay: seconds by which a delayed answer is late.
    """

    def __init__(self, upstream: str, seed: int = 0, delay: float = 0.3) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._chance = random.Random(seed)
        self._delay = delay
        self._rain = _Rain()
        self._once: list[tuple[Fault, Where]] = []
        self._lock = threading.RLock()  # A rule may set the mode.
        self._mode = Mode.OPEN
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._listener = self._listen(0)
        self._port = self._listener.getsockname()[1]
        self.requests: list[tuple[str, str]] = []
        self.faults: Counter[Fault] = Counter()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        """Begin to serve."""
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close every connection."""
        self._closed.set()
        self._listener.close()
        self._drop_connections()

    def rain(self, share: float, faults: Sequence[Fault] = tuple(Fault), where: Where = lambda _m, _p: True) -> None:
        """From now on that share of the requests for which `where(method, path)` holds meets one of these faults."""
        self._rain = _Rain(share, faults, where)

    def once(self, fault: Fault, where: Where) -> None:
        """The next request for which `where(method, path)` holds meets this fault."""
        with self._lock:
            self._once.append((fault, where))

    def set(self, mode: Mode) -> None:
        """Meet connections in another way; those that are open are broken."""
        self._mode = mode
        if mode is Mode.REFUSE:
            # Shut down first: closing alone would not wake the thread that waits for a connection.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        elif self._listener.fileno() == -1:
            self._listener = self._listen(self._port)
        self._drop_connections()

    def _listen(self, port: int) -> socket.socket:
        return socket.create_server(("127.0.0.1", port), backlog=64)

    def _drop_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _reset(connection)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.02)  # Closed for good, or until it is open again.
                continue
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError, http.client.HTTPException, ValueError):
                stream = connection.makefile("rb")
                while request := self._read(stream):
                    if not self._answer(connection, request):
                        break
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _read(self, stream: object) -> _Request | None:
        line = stream.readline().decode("latin-1").split()  # type: ignore[attr-defined]
        if len(line) != 3:
            return None
        message = http.client.parse_headers(stream)  # type: ignore[arg-type]
        size = int(message.get("content-length") or 0)
        body = stream.read(size)  # type: ignore[attr-defined]
        if len(body) < size:
            return None
        return _Request(line[0], line[1], message.items(), body)

    def _fault(self, request: _Request) -> Fault | None:
        with self._lock:
            self.requests.append((request.method, request.path))
            for index, (_, where) in enumerate(self._once):
                if where(request.method, request.path):
                    fault = self._once.pop(index)[0]
                    break
            else:
                rain = self._rain
                if not rain.where(request.method, request.path) or self._chance.random() >= rain.share:
                    return None
                possible = [fault for fault in rain.faults if _applies(fault, request)]
                if not possible:
                    return None
                fault = self._chance.choice(possible)
            self.faults[fault] += 1
            return fault

    def _answer(self, connection: socket.socket, request: _Request) -> bool:
        """Answer one request; whether the connection stays open."""
        if self._mode is not Mode.OPEN:
            while self._mode is Mode.BLACK_HOLE and not self._closed.is_set():
                time.sleep(0.05)
            return False
        fault = self._fault(request)
        if fault is Fault.CUT_UPLOAD:
            self._forward_half(request)
            _reset(connection)
            return False
        if fault in (Fault.ERROR, Fault.BUSY):
            status = 500 if fault is Fault.ERROR else 503
            return _send(connection, _Answer(status, "Broken by the test"), request.method)
        answer = self._forward(request)
        if fault is Fault.SILENT:
            return False
        if fault is Fault.LOST:
            return _send(connection, _Answer(500, "Broken by the test"), request.method)
        if fault is Fault.SHORTEN:
            answer.body = answer.body[: len(answer.body) // 2]
        if fault is Fault.DELAY:
            time.sleep(self._delay)
        if fault in (Fault.CUT_DOWNLOAD, Fault.TRUNCATE):
            _send(connection, answer, request.method, most=len(answer.body) // 2)
            if fault is Fault.CUT_DOWNLOAD:
                _reset(connection)
            return False
        return _send(connection, answer, request.method)

    def _forward(self, request: _Request) -> _Answer:
        with closing(http.client.HTTPConnection(*self._upstream, timeout=UPSTREAM_SECONDS)) as server:
            server.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers:
                if name.lower() != "connection":
                    server.putheader(name, value)
            server.endheaders(request.body)
            response = server.getresponse()
            headers = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in ("transfer-encoding", "connection", "keep-alive")
            ]
            return _Answer(response.status, response.reason, headers, response.read())

    def _forward_half(self, request: _Request) -> None:
        head = f"{request.method} {request.path} HTTP/1.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in request.headers) + "\r\n"
        with suppress(OSError), socket.create_connection(self._upstream) as server:
            server.sendall(head.encode("latin-1") + request.body[: len(request.body) // 2])
            time.sleep(0.02)
            _reset(server)


def _applies(fault: Fault, request: _Request) -> bool:
    if fault is Fault.CUT_UPLOAD:
        return bool(request.body)
    if fault in (Fault.CUT_DOWNLOAD, Fault.TRUNCATE, Fault.SHORTEN):
        return request.method == "GET"
    return True


def _send(connection: socket.socket, answer: _Answer, method: str, most: int | None = None) -> bool:
    body = b"" if method == "HEAD" or answer.status in (204, 304) else answer.body
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
    lines += [
        f"{name}: {value}" for name, value in answer.headers if name.lower() != "content-length" or method == "HEAD"
    ]
    if method != "HEAD" and answer.status not in (204, 304):
        lines.append(f"Content-Length: {len(body)}")
    connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body[:most])
    return True


def _reset(connection: socket.socket) -> None:
    """Break it at once: the other side gets an error, not an end."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
