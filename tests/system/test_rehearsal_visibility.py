"""Eventual consistency: what was just created is not shown for a moment, and the order stands all the same."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.system.rehearsal import SLEEPER, Cloud, expect_error, launch, wait_for

LAG_REAL_S = 3.0


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    started = launch(tmp_path_factory.mktemp("slow"), "--consistency-lag-real-s", str(LAG_REAL_S), "--seed", "11")
    yield started
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(timeout=30) == 0


def unseen(look: Callable[[], Any]) -> bool:
    try:
        return not look()
    except ClientError as error:
        if not error.response["Error"]["Code"].endswith(".NotFound"):
            raise
        return True


def test_new_things_are_unseen_for_a_while_by_every_action(slow: Cloud) -> None:
    template = slow.template(SLEEPER)
    answer = slow.buy(template, count=4, ClientToken="lag")
    asked = time.monotonic()
    fleet, ids = answer["FleetId"], answer["Instances"][0]["InstanceIds"]

    def listed() -> set[str]:
        shown = slow.ec2.describe_instances(Filters=[{"Name": "tag:aws:ec2:fleet-id", "Values": [fleet]}])
        return {one["InstanceId"] for r in shown["Reservations"] for one in r["Instances"]}

    def hidden() -> list[str]:
        late = [one for one in ids if one not in listed()]
        assert late, "with this seed one of the four is unseen for long enough"
        return late

    expect_error("InvalidInstanceID.NotFound", lambda: slow.ec2.describe_instances(InstanceIds=hidden()))
    expect_error("InvalidInstanceID.NotFound", lambda: slow.ec2.terminate_instances(InstanceIds=hidden()))
    tags = [{"Key": "a", "Value": "b"}]
    expect_error("InvalidInstanceID.NotFound", lambda: slow.ec2.create_tags(Resources=hidden(), Tags=tags))
    tagged = slow.ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": ids}])["Tags"]
    assert {tag["ResourceId"] for tag in tagged} <= listed()
    hidden()
    again = slow.buy(template, count=4, ClientToken="lag")
    assert (again["FleetId"], again["Instances"]) == (fleet, answer["Instances"]), "the order is beyond doubt"

    wait_for("all are listed", lambda: listed() == set(ids), LAG_REAL_S + 2)
    assert time.monotonic() - asked <= LAG_REAL_S + 1
    time.sleep(max(0.0, asked + LAG_REAL_S - time.monotonic()))
    assert slow.ec2.describe_fleets(FleetIds=[fleet])["Fleets"]
    requests = [one["SpotInstanceRequestId"] for one in map(slow.show, ids)]
    found = slow.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=requests)["SpotInstanceRequests"]
    assert len(found) == 4
    slow.ec2.terminate_instances(InstanceIds=ids)


def test_fleets_and_spot_requests_lag_too(slow: Cloud) -> None:
    template = slow.template(SLEEPER)
    seen_late = {"fleet": 0, "request": 0}
    for _ in range(4):
        answer = slow.buy(template)
        fleet, (one,) = answer["FleetId"], answer["Instances"][0]["InstanceIds"]
        seen_late["fleet"] += unseen(lambda: slow.ec2.describe_fleets(FleetIds=[fleet])["Fleets"])  # noqa: B023
        by_instance = [{"Name": "instance-id", "Values": [one]}]
        seen_late["request"] += unseen(
            lambda: slow.ec2.describe_spot_instance_requests(Filters=by_instance)["SpotInstanceRequests"]  # noqa: B023
        )
        wait_for("the instance is shown", lambda: not unseen(lambda: slow.show(one)), LAG_REAL_S + 2)  # noqa: B023
        slow.ec2.terminate_instances(InstanceIds=[one])
    assert seen_late["fleet"] > 0
    assert seen_late["request"] > 0
