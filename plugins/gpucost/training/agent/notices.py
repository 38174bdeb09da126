"""Will this machine be taken away? The cloud's notices, read from instance metadata.

An action (terminate, stop, hibernate) states its time: the program is stopped before it. A rebalance
recommendation states only a higher risk, and often nothing follows: the program saves and goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from gpucost.training.agent.imds import Metadata

POLL_SECONDS = 5.0
"""EC2's advice for polling."""


@dataclass(frozen=True)
class Action:
    """The machine is taken at `at`, on the clock that the cloud tells."""

    what: str
    at: datetime


@dataclass(frozen=True)
class Rebalance:
    """The machine is more likely to be taken than before, said at `at`."""

    at: datetime


class Notices:
    """The notices of this machine; each is told once.

    Args:
        metadata: the instance metadata service.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._told: set[Action | Rebalance] = set()

    def new(self) -> Iterator[Action | Rebalance]:
        """Notices not told before, each as soon as it is read: trouble with a later one does not hold it back.

        Raises:
            OSError: the service does not answer.
            ValueError: it answers something else than documented.
        """
        if text := self._metadata.get("spot/instance-action"):
            yield from self._once(parse_action(text))
        if text := self._metadata.get("events/recommendations/rebalance"):
            yield from self._once(parse_rebalance(text))

    def _once(self, notice: Action | Rebalance) -> Iterator[Action | Rebalance]:
        if notice not in self._told:
            self._told.add(notice)
            yield notice


def parse_action(text: str) -> Action:
    """Read `{"action": "terminate", "time": "2026-11-30T12:00:00Z"}`.

    Raises:
        ValueError: it is something else.
    """
    document = _fields(text, "action", "time")
    return Action(document["action"], _moment(document["time"]))


def parse_rebalance(text: str) -> Rebalance:
    """Read `{"noticeTime": "2026-11-30T12:00:00Z"}`.

    Raises:
        ValueError: it is something else.
    """
    return Rebalance(_moment(_fields(text, "noticeTime")["noticeTime"]))


def _fields(text: str, *names: str) -> dict[str, str]:
    document = json.loads(text)
    if not isinstance(document, dict) or not all(isinstance(document.get(name), str) for name in names):
        raise ValueError(f"notice: got {text[:200]!r}, expected a JSON object with {' and '.join(names)}")
    return {name: document[name] for name in names}


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"notice: got the time {text!r} without a time zone")
    return moment
