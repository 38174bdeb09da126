"""One request at a time: moto's state is a set of plain dicts of this process, made for one thread.

Without a lock, 40 threads lose nothing most of the time; but a walk over a dict that another thread adds to fails, two
receivers may get the same message at once, and a snapshot could hold half a change. So whoever uses moto's state holds
`LOCK`. The one request that takes long, SQS's long polling, gives it back while it waits.
"""

from __future__ import annotations

import threading
from typing import Any

from moto.sqs.models import Queue

LOCK = threading.Condition(threading.RLock())
"""Held by whoever looks at or changes moto's state; notified after changes."""

LOOK_AGAIN_S = 0.2
"""A waiting receiver looks this often, real seconds: messages also become visible by time alone."""


def let_receivers_wait_without_lock() -> None:
    """Make moto's long polling wait on `LOCK`, which other requests can take meanwhile; once is enough."""

    def wait_for_messages(_queue: Any, timeout: float) -> None:
        LOCK.wait(min(timeout, LOOK_AGAIN_S))

    Queue.wait_for_messages = wait_for_messages  # type: ignore[method-assign,assignment]
