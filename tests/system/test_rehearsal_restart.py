"""Any sequence of buy, tag, describe, interrupt, terminate, kill and restart keeps the books: with real processes.

tests/unit/rehearsal/test_books_stay_true.py plays hundreds of such lives with machines that are records. Here are a
few with machines that are processes, which a thread looks for in /proc all the time: whatever the cloud's books say
must be what it saw, up to the time between two of its looks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gpucost.clock import ClockSpec
from tests.system.rehearsal import MARKET, SPEED, ZONES, expect_error, launch, wait_for

STEPS = 25
LOOK_EVERY_REAL_S = 0.05

SECOND_REAL_S = 1 / SPEED
"""The books tell times in whole seconds, cut off."""

WAITER = """#!/bin/sh
mkfifo door
echo up > started
read -r _ < door
shutdown -h now
exec sleep 600
"""
"""A machine that shuts itself down when somebody writes into its `door`; it takes no CPU meanwhile."""

CAPACITY = {"spot": 2, "on-demand": 1}
"""Of each of three zones."""

EVENTS = ("notice", "no-notice", "false-notice", "rebalance")


@dataclass
class Life:
    """What was seen of one process, in real seconds since the epoch: it lived from `first` to `last`.

    It was born after `after`, the beginning of the last look that did not find it yet, and died before `until`, the
    end of the first look that did not find it any more; None while it lives.
    """

    after: float
    first: float
    last: float
    until: float | None = None


class Watcher:
    """Looks for the processes of one cloud's instances in /proc, in a thread of its own.

    Args:
        cloud_id: whose; from the cloud's folder.
    """

    def __init__(self, cloud_id: str) -> None:
        self._prefix = f"GPUCOST_REHEARSAL_INSTANCE={cloud_id}/".encode()
        self._lives: dict[tuple[str, int], list[Life]] = {}
        self._lock = threading.Lock()
        self._began = time.time()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def lives(self) -> dict[str, list[Life]]:
        """Instance id -> its processes' lives so far, those that live now after one more look."""
        self._look()
        with self._lock:
            found: dict[str, list[Life]] = {}
            for (instance_id, _), lives in self._lives.items():
                found.setdefault(instance_id, []).extend(lives)
            return found

    def alive(self) -> Counter[str]:
        """Instance id -> how many processes it has now."""
        with self._lock:
            return Counter(instance_id for instance_id, _ in self._marked())

    def _run(self) -> None:
        while not self._done.wait(LOOK_EVERY_REAL_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            began = time.time()
            seen = set(self._marked())
            ended = time.time()
            for key in seen:
                lives = self._lives.setdefault(key, [])
                if lives and lives[-1].until is None:
                    lives[-1].last = began
                else:
                    lives.append(Life(after=self._began, first=ended, last=began))
            for key, lives in self._lives.items():
                if key not in seen and lives[-1].until is None:
                    lives[-1].until = ended
            self._began = began

    def _marked(self) -> Iterator[tuple[str, int]]:
        for name in os.listdir("/proc"):  # noqa: PTH208 (twenty times a second)
            if name.isdigit():
                try:
                    environ = Path(f"/proc/{name}/environ").read_bytes()
                except OSError:
                    continue
                for item in environ.split(b"\0"):
                    if item.startswith(self._prefix):
                        yield item[len(self._prefix) :].decode(), int(name)


class Customer:
    """One account that does what chance says, by plain boto3, and remembers what it was told.

    Args:
        folder: the cloud's state folder.
        seed: of chance.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.market = _scarce(folder.with_suffix(".json"))
        self.cloud = launch(folder, market=self.market)
        self.template = self.cloud.template(WAITER)
        self.watcher = Watcher(json.loads((folder / "cloud.json").read_text())["cloud_id"])
        self.fleets: dict[str, tuple[str, list[str], dict[str, Any]]] = {}
        self.bought: list[str] = []
        self.tags: dict[str, str] = {}
        self.did: list[str] = []

    def step(self) -> None:
        """One thing of those that do not end the cloud."""
        does = (self.buys, self.buys, self.buys, self.tags_one, self.interrupts, self.terminates, self.shuts_down)
        self.chance.choice(does)()
        self.check()

    def living(self) -> list[dict[str, Any]]:
        return [one for one in self.cloud.get("status")["instances"] if one["state"] in {"pending", "running"}]

    def buys(self) -> None:
        if self.fleets and self.chance.random() < 0.4:
            self.asks_again(self.chance.choice(sorted(self.fleets)))
            return
        zones = self.chance.sample(ZONES, self.chance.randint(1, 3))
        request = {"zones": zones, "spot": self.chance.random() < 0.7, "count": self.chance.randint(1, 3)}
        self.did.append(f"buys {request}")
        token = f"token-{len(self.fleets)}"
        answer = self.cloud.buy(self.template, ClientToken=token, **request)
        assert answer["Instances"] or answer["Errors"]
        self.fleets[token] = (answer["FleetId"], _ids(answer), request)
        self.bought += _ids(answer)

    def asks_again(self, token: str) -> None:
        """Under a token that was used: the same fleet, and nothing is bought; another request is refused."""
        self.did.append(f"asks again with {token}")
        fleet, ids, request = self.fleets[token]
        answer = self.cloud.buy(self.template, ClientToken=token, **request)
        assert (answer["FleetId"], _ids(answer)) == (fleet, ids)
        other = {**request, "count": request["count"] + 1}
        expect_error("IdempotentParameterMismatch", lambda: self.cloud.buy(self.template, ClientToken=token, **other))

    def tags_one(self) -> None:
        if living := self.living():
            instance_id = self.chance.choice(living)["instance_id"]
            value = f"value-{len(self.did)}"
            self.did.append(f"tags {instance_id} with {value}")
            self.cloud.ec2.create_tags(Resources=[instance_id], Tags=[{"Key": "k", "Value": value}])
            self.tags[instance_id] = value

    def interrupts(self) -> None:
        if spot := [one for one in self.living() if one["lifecycle"] == "spot" and not one["notice_at"]]:
            instance_id, event = self.chance.choice(spot)["instance_id"], self.chance.choice(EVENTS)
            self.did.append(f"interrupts {instance_id}: {event}")
            if event != "rebalance" or not self.of(instance_id)["rebalance_at"]:
                self.cloud.post("interrupt", {"instance_id": instance_id, "event": event})

    def terminates(self) -> None:
        if living := self.living():
            ids = [one["instance_id"] for one in self.chance.sample(living, min(len(living), 2))]
            self.did.append(f"terminates {ids}")
            self.cloud.ec2.terminate_instances(InstanceIds=ids)

    def shuts_down(self) -> None:
        """A program of a machine that has booted ends its machine."""
        booted = [one for one in self.living() if (self.cloud.folder(one["instance_id"]) / "started").exists()]
        if booted:
            instance_id = self.chance.choice(booted)["instance_id"]
            self.did.append(f"opens the door of {instance_id}")
            _open_door(self.cloud.folder(instance_id))

    def restarts(self, how: signal.Signals) -> None:
        """Buys, ends the cloud before it is done with that, and starts another; a machine may end itself meanwhile."""
        living = [one["instance_id"] for one in self.living()]
        self.buys()
        self.did.append(f"{how.name}, and another start")
        self.cloud.process.send_signal(how)
        self.cloud.process.wait(timeout=30)
        if self.chance.random() < 0.5:
            for instance_id in living[:1]:
                _open_door(self.cloud.folder(instance_id))
        self.cloud = launch(self.cloud.state_dir, market=self.market, port=urlsplit(self.cloud.url).port or 0)
        lost = [one for one in self.cloud.get("status")["instances"] if one["reason"] == "Server.InternalError"]
        assert not lost, "machines go on without their cloud"
        self.asks_again(self.chance.choice(sorted(self.fleets)))
        self.check()

    def of(self, instance_id: str) -> dict[str, Any]:
        """What the cloud says of one of its instances."""
        [found] = [one for one in self.cloud.get("status")["instances"] if one["instance_id"] == instance_id]
        return dict(found)

    def check(self) -> None:
        """What must hold at every moment."""
        shown = [one for r in self.cloud.ec2.describe_instances()["Reservations"] for one in r["Instances"]]
        held = Counter(
            (one.get("InstanceLifecycle", "on-demand"), one["Placement"]["AvailabilityZone"])
            for one in shown
            if one["State"]["Name"] != "terminated"
        )
        assert all(count <= CAPACITY[lifecycle] for (lifecycle, _), count in held.items()), f"oversold: {held}"
        for one in shown:
            tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
            assert tags.get("k") == self.tags.get(one["InstanceId"])
        alive = self.watcher.alive()
        status = self.cloud.get("status")["instances"]
        assert [one["instance_id"] for one in status] == self.bought, "each instance is one that somebody was told of"
        assert alive.keys() <= set(self.bought), "a process belongs to an instance"
        over = {one["instance_id"] for one in status if one["state"] == "terminated"}
        assert not over & self.watcher.alive().keys(), "no process is left of what is terminated"

    def check_books(self) -> None:
        """The whole history: what is billed was lived, and what lived was somebody's."""
        clock = ClockSpec.model_validate(self.cloud.get("clock"))
        # the processes first: each of them is of an instance that the books know by then
        lives = self.watcher.lives()
        invoice, status = self.cloud.get("invoice"), self.cloud.get("status")["instances"]
        assert [line["instance_id"] for line in invoice["lines"]] == self.bought
        for line in invoice["lines"]:
            begin = _real(clock, line["launched"])
            end = _real(clock, line["ended"] or invoice["as_of"])
            seen = lives.get(line["instance_id"], [])
            missing = (end - begin) - _covered([(one.after, one.until or end) for one in seen], begin, end)
            assert missing <= LOOK_EVERY_REAL_S + SECOND_REAL_S, (
                f"{line} is billed for {missing} real seconds that no process lived: {seen}"
            )
        fleets = self.cloud.ec2.describe_fleets(FleetIds=[fleet for fleet, _, _ in self.fleets.values()])["Fleets"]
        sold = {one["FleetId"]: one["CreateTime"].isoformat() for one in fleets}
        for one in status:
            for life in lives.get(one["instance_id"], []):
                # not at its launch: of a cloud that was killed in between, that is when the next one hears of it
                assert life.first >= _real(clock, sold[one["tags"]["aws:ec2:fleet-id"]]), f"{one} had a process before"
                if one["gone"]:
                    assert life.last <= _real(clock, one["gone"]) + SECOND_REAL_S, f"{one} had a process after its end"
        assert [one["ClientToken"] for one in fleets] == list(self.fleets)
        of_fleet = Counter(one["tags"]["aws:ec2:fleet-id"] for one in status)
        assert of_fleet == {fleet: len(ids) for fleet, ids, _ in self.fleets.values() if ids}, "each token is one fleet"

    def end_all(self) -> None:
        """Terminate what lives, and wait until the books and the host agree that nothing is left."""
        self.cloud.end_all()
        assert not self.watcher.alive()

    def leave(self) -> None:
        """End the cloud, with everything that a failed test may have left."""
        self.watcher.stop()
        if self.cloud.process.poll() is None:
            self.cloud.process.send_signal(signal.SIGINT)
            self.cloud.process.wait(timeout=30)
        wait_for("no machine is left", lambda: not self.watcher.alive(), 40)


def _scarce(path: Path) -> Path:
    """The project's market with so few machines that they are soon sold out."""
    market = json.loads(MARKET.read_text())
    for pool in market["pools"]:
        pool["capacity"] = {lifecycle.replace("-", "_"): count for lifecycle, count in CAPACITY.items()}
    path.write_text(json.dumps(market))
    return path


def _ids(answer: dict[str, Any]) -> list[str]:
    return [instance_id for group in answer["Instances"] for instance_id in group["InstanceIds"]]


def _open_door(folder: Path) -> None:
    try:
        door = os.open(folder / "door", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # nobody waits behind it: opened before, not booted, or ending
    os.write(door, b"\n")
    os.close(door)


def _real(clock: ClockSpec, moment: str) -> float:
    return clock.real_at(datetime.fromisoformat(moment)).timestamp()


def _covered(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """How many seconds of [begin, end] lie in at least one of the spans."""
    total, reached = 0.0, begin
    for first, last in sorted(spans):
        total += max(0.0, min(last, end) - max(first, reached))
        reached = max(reached, min(last, end))
    return total


@pytest.mark.parametrize(
    ("seed", "ends"), [(1, (signal.SIGKILL, signal.SIGTERM)), (2, (signal.SIGKILL,)), (3, (signal.SIGKILL,))]
)
def test_the_books_are_what_was_seen(tmp_path: Path, seed: int, ends: tuple[signal.Signals, ...]) -> None:
    customer = Customer(tmp_path / "state", seed)
    try:
        restarts = dict(zip(customer.chance.sample(range(4, STEPS), len(ends)), ends, strict=True))
        for number in range(STEPS):
            if number in restarts:
                customer.restarts(restarts[number])
            else:
                customer.step()
            time.sleep(customer.chance.uniform(0, 0.1))
        customer.check_books()
        customer.end_all()
        customer.check_books()
    except BaseException as error:
        error.add_note("what was done:\n" + "\n".join(customer.did))
        raise
    finally:
        customer.leave()
