"""How many copies of a message come into its queue? One; or none, or two, when a fault says so.

Asked for every message that is sent to a queue, by an event rule or directly: what goes nowhere asks nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from moto.sqs.models import Message, Queue

_motos_add: Any = Queue.add_message


def put_copies(copies: Callable[[], int]) -> None:
    """Let moto's queues ask `copies` for each message; the last call counts."""

    def add_message(queue: Any, message: Message) -> None:
        # what was received before only moves to another queue
        count = 1 if message.approximate_receive_count else copies()
        for _ in range(count):
            # both have one id, as when SQS delivers twice; each has receipts of its own
            _motos_add(queue, copy.deepcopy(message) if count > 1 else message)

    Queue.add_message = add_message  # type: ignore[method-assign,assignment]
