"""Real traces replayed at 3,600 times speed: availability and prices seen through the API equal the files."""

from __future__ import annotations

import bisect
import contextlib
import csv
import itertools
import json
import signal
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from tests.system.rehearsal import ROOT, Cloud, launch

TRACES = ROOT.parent / "shared/traces"
SPEED = 3600
ORIGIN = datetime(2026, 11, 30, tzinfo=UTC)

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces at {TRACES}: they are not part of the project")


@dataclass(frozen=True)
class Told:
    """One file, read by this test on its own: what it says of a zone, by hours since the trace began."""

    zone: str
    instance_type: str
    gap_s: float
    available: list[int]
    prices: list[Decimal]

    @property
    def region(self) -> str:
        return self.zone.rstrip("abcdefgh").rstrip("-")

    def tick(self, since_s: float) -> int:
        return int(since_s // self.gap_s)


def told(folder: Path) -> list[Told]:
    files = [json.loads(path.read_text(), parse_float=Decimal) for path in sorted(folder.glob("*.json"))]
    return [
        Told(
            file["metadata"]["zone"],
            file["metadata"]["instance_type"],
            float(file["metadata"]["gap_seconds"]),
            file["data"],
            file["prices"],
        )
        for file in files
    ]


def start(folder: Path, home: Path, offset: timedelta) -> Cloud:
    hours = str(offset.total_seconds() / 3600)
    return launch(
        home,
        "--market",
        str(folder),
        "--speed",
        str(SPEED),
        "--origin",
        ORIGIN.isoformat(),
        "--offset-hours",
        hours,
        "--spot-capacity",
        "1000",
    )


def end(cloud: Cloud) -> None:
    cloud.process.send_signal(signal.SIGINT)
    cloud.process.wait(timeout=60)


def busiest(files: list[Told], window: timedelta) -> timedelta:
    """Where in the traces the most happens: the offset of the window with the most changes of availability."""
    ticks = int(window.total_seconds() // files[0].gap_s)
    last = min(len(one.available) for one in files) - ticks - 1
    flips = [
        sum(a != b for one in files for a, b in itertools.pairwise(one.available[at : at + ticks]))
        for at in range(0, last, ticks)
    ]
    return timedelta(seconds=flips.index(max(flips)) * ticks * files[0].gap_s)


@pytest.fixture(params=["availability_aws_v100_2023", "availability_gcp_h100_2025"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cloud, list[Told], timedelta]]:
    folder = TRACES / request.param
    files = told(folder)
    offset = busiest(files, timedelta(hours=24))
    cloud = start(folder, tmp_path, offset)
    yield cloud, files, offset
    end(cloud)


def test_what_can_be_bought_is_what_the_files_say(replay: tuple[Cloud, list[Told], timedelta]) -> None:
    cloud, files, offset = replay
    clients = {region: cloud.client("ec2", region) for region in {one.region for one in files}}
    templates = {
        region: ec2.create_launch_template(LaunchTemplateName="told", LaunchTemplateData={"ImageId": "ami-0rehearsal"})
        for region, ec2 in clients.items()
    }
    seen = {0: 0, 1: 0}
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for one in files:
            ec2 = clients[one.region]
            before = cloud.now()
            answer = ec2.create_fleet(
                Type="instant",
                LaunchTemplateConfigs=[
                    {
                        "LaunchTemplateSpecification": {
                            "LaunchTemplateId": templates[one.region]["LaunchTemplate"]["LaunchTemplateId"],
                            "Version": "1",
                        },
                        "Overrides": [
                            {"InstanceType": one.instance_type, "AvailabilityZone": one.zone, "MaxPrice": "1000"}
                        ],
                    }
                ],
                TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
            )
            after = cloud.now()
            moments = [(moment - ORIGIN + offset).total_seconds() for moment in (before, after)]
            possible = set(one.available[one.tick(moments[0] - 1) : one.tick(moments[1]) + 1])
            sold = int(bool(answer["Instances"]))
            assert sold in possible, f"{one.zone} from {before} to {after}: sold {sold}, the file says {possible}"
            if len(possible) == 1:
                seen[sold] += 1
            if sold:
                # its place is given back, unless a notice does that already
                with contextlib.suppress(urllib.error.HTTPError):
                    cloud.post(
                        "interrupt", {"instance_id": answer["Instances"][0]["InstanceIds"][0], "event": "no-notice"}
                    )
            else:
                assert answer["Errors"][0]["ErrorCode"] == "InsufficientInstanceCapacity"
    assert min(seen.values()) >= 10, f"both kinds of answers were seen: {seen}"


def test_prices_are_those_of_the_files(replay: tuple[Cloud, list[Told], timedelta]) -> None:
    cloud, files, offset = replay
    time.sleep(5)
    now = cloud.now()
    first = now - timedelta(hours=24)
    for one in files:
        pages = (
            cloud.client("ec2", one.region)
            .get_paginator("describe_spot_price_history")
            .paginate(InstanceTypes=[one.instance_type], AvailabilityZone=one.zone, StartTime=first, EndTime=now)
        )
        rows = sorted(
            (row["Timestamp"], Decimal(row["SpotPrice"])) for page in pages for row in page["SpotPriceHistory"]
        )
        assert rows, one.zone
        begin = ORIGIN - offset
        checked = 0
        for tick, price in enumerate(one.prices):
            at = begin + timedelta(seconds=tick * one.gap_s)
            if first <= at <= now:
                index = bisect.bisect_right(rows, at, key=lambda row: row[0]) - 1
                assert index >= 0, f"{one.zone} has no price at {at}"
                assert rows[index][1] == price, f"{one.zone} at {at}"
                checked += 1
        assert checked > 10


def test_a_price_history_of_2015_is_told_point_by_point(tmp_path: Path) -> None:
    folder = TRACES / "prices_aws_g2_2015"
    files = {path.stem: list(csv.DictReader(path.open())) for path in sorted(folder.glob("*.csv"))}
    first = min(datetime.fromisoformat(rows[0]["timestamp"]) for rows in files.values())
    offset = timedelta(days=30)
    cloud = start(folder, tmp_path, offset)
    try:
        time.sleep(4)
        now = cloud.now()
        for name, rows in files.items():
            instance_type, zone = name.split("_")
            pages = (
                cloud.client("ec2", "us-east-1")
                .get_paginator("describe_spot_price_history")
                .paginate(
                    InstanceTypes=[instance_type],
                    AvailabilityZone=zone,
                    StartTime=ORIGIN - timedelta(days=2),
                    EndTime=now,
                )
            )
            seen = sorted(
                (row["Timestamp"], Decimal(row["SpotPrice"])) for page in pages for row in page["SpotPriceHistory"]
            )
            moved = [
                (
                    ORIGIN - offset + (datetime.fromisoformat(row["timestamp"]) - first),
                    Decimal(row["spot_usd_per_hour"]),
                )
                for row in rows
            ]
            wanted = [(at, price) for at, price in moved if ORIGIN - timedelta(days=2) < at <= now]
            changes = [point for index, point in enumerate(moved) if index == 0 or moved[index - 1][1] != point[1]]
            wanted = [point for point in wanted if point in changes]
            assert len(wanted) > 20
            assert seen[1:] == wanted, name
    finally:
        end(cloud)
