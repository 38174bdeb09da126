"""What EC2 tells of its instances: the envelopes, and what happens to them on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from gpucost.rehearsal.book.records import Instance, LaunchSpec
from gpucost.rehearsal.interruptions.events import Announcer, Envelope
from gpucost.rehearsal.market.places import PoolKey

NOW = datetime(2026, 11, 30, 12, 0, 5, 900_000, tzinfo=UTC)
ONE = Instance(
    id="i-0123456789abcdef0",
    number=0,
    launch_id="fleet-1",
    client_token="",
    pool=PoolKey("us-west-2b", "g4dn.xlarge"),
    lifecycle="spot",
    spec=LaunchSpec(),
    tags={},
    created=NOW,
    launched=NOW,
)


class RecordingBus:
    """Remembers what was put on it; `full` says which events it refuses."""

    def __init__(self, full: Callable[[Envelope], bool] = lambda _event: False) -> None:
        self.got: list[tuple[str, Envelope]] = []
        self._full = full

    def put_event(self, region: str, event: Envelope) -> None:
        if self._full(event):
            raise ValueError("the bus is full")
        self.got.append((region, event))


def announced(tell: Callable[[Announcer], None], bus: RecordingBus | None = None) -> list[Any]:
    """What is on the bus after `tell`, with the announcer ended."""
    bus = bus or RecordingBus()
    numbers = iter(range(100))
    announcer = Announcer(bus, lambda: NOW, "123456789012", new_id=lambda: f"id-{next(numbers)}")
    tell(announcer)
    announcer.stop()
    return bus.got


def test_a_warning_has_the_envelope_of_awss_page() -> None:
    noticed = replace(ONE, notice_at=NOW + timedelta(seconds=60), action_at=NOW + timedelta(seconds=180))
    assert announced(lambda a: a.warn(noticed)) == [
        (
            "us-west-2",
            {
                "version": "0",
                "id": "id-0",
                "detail-type": "EC2 Spot Instance Interruption Warning",
                "source": "aws.ec2",
                "account": "123456789012",
                "time": "2026-11-30T12:01:05Z",
                "region": "us-west-2",
                "resources": ["arn:aws:ec2:us-west-2b:instance/i-0123456789abcdef0"],
                "detail": {"instance-id": "i-0123456789abcdef0", "instance-action": "terminate"},
            },
        )
    ]


def test_a_recommendation_names_the_instance_and_no_action() -> None:
    there = timezone(timedelta(hours=2))
    risky = replace(ONE, rebalance_at=datetime(2026, 11, 30, 15, 30, tzinfo=there))
    ((_, event),) = announced(lambda a: a.recommend(risky))
    assert event["detail-type"] == "EC2 Instance Rebalance Recommendation"
    assert event["detail"] == {"instance-id": ONE.id}
    assert event["resources"] == [f"arn:aws:ec2:us-west-2b:instance/{ONE.id}"]
    assert event["time"] == "2026-11-30T13:30:00Z"


def test_a_state_change_has_ec2s_usual_arn_and_the_time_of_the_clock() -> None:
    ((_, event),) = announced(lambda a: a.state_changed(replace(ONE, state="shutting-down")))
    assert event["detail-type"] == "EC2 Instance State-change Notification"
    assert event["detail"] == {"instance-id": ONE.id, "state": "shutting-down"}
    assert event["resources"] == [f"arn:aws:ec2:us-west-2:123456789012:instance/{ONE.id}"]
    assert event["time"] == "2026-11-30T12:00:05Z"


def test_only_changes_of_state_are_told() -> None:
    running = replace(ONE, state="running")

    def tell(announcer: Announcer) -> None:
        announcer.changed(None, ONE)
        announcer.changed(ONE, running)
        announcer.changed(running, replace(running, tags={"job": "42"}))

    assert [event["detail"]["state"] for _, event in announced(tell)] == ["pending", "running"]


def test_a_bus_that_fails_is_told_in_the_log_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def tell(announcer: Announcer) -> None:
        announcer.warn(replace(ONE, id="i-first", notice_at=NOW))
        announcer.warn(replace(ONE, id="i-second", notice_at=NOW))

    got = announced(tell, RecordingBus(full=lambda event: event["detail"]["instance-id"] == "i-first"))
    assert [event["detail"]["instance-id"] for _, event in got] == ["i-second"]
    assert "EC2 Spot Instance Interruption Warning of i-first" in caplog.text
    assert "the bus is full" in caplog.text


def test_who_announces_does_not_wait_for_the_bus() -> None:
    let_go = threading.Event()

    class SlowBus(RecordingBus):
        def put_event(self, region: str, event: Envelope) -> None:
            assert let_go.wait(10)
            super().put_event(region, event)

    bus = SlowBus()

    def tell(announcer: Announcer) -> None:
        for state in ("pending", "running", "shutting-down"):
            announcer.state_changed(replace(ONE, state=state))  # type: ignore[arg-type]
        assert bus.got == []
        let_go.set()

    told = [event["detail"]["state"] for _, event in announced(tell, bus)]
    assert told == ["pending", "running", "shutting-down"]
