"""The rehearsal cloud by the `aws` command line alone, as in AWS's user guides."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.system.rehearsal import SLEEPER, TYPE, Cloud, launch, wait_for

AWS = Path(sys.executable).with_name("aws")
RUN = ("run-instances", "--image-id", "ami-0rehearsal")


class Aws:
    """The command line, pointed at a rehearsal cloud and at nothing else."""

    def __init__(self, cloud: Cloud, home: Path) -> None:
        self.cloud = cloud
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "AWS_ACCESS_KEY_ID": "AKIAREHEARSAL",
            "AWS_SECRET_ACCESS_KEY": "rehearsal",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_PAGER": "",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(AWS), "--endpoint-url", self.cloud.url, *words, "--output", "json"]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60, check=False)

    def __call__(self, *words: str) -> Any:
        done = self.run(*words)
        assert done.returncode == 0, f"aws {' '.join(words)}: {done.stderr}"
        return json.loads(done.stdout) if done.stdout.strip() else None

    def refusal(self, *words: str) -> str:
        """The code of the error that ends the command; empty when it was not refused."""
        done = self.run(*words)
        said = re.search(r"An error occurred \(([A-Za-z.]+)\) when calling", done.stderr)
        return said.group(1) if done.returncode in {254, 255} and said else ""


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    home = tmp_path_factory.mktemp("aws-cli")
    cloud = launch(home)
    yield Aws(cloud, home)
    cloud.process.send_signal(signal.SIGINT)
    cloud.process.wait(timeout=60)


@pytest.fixture(scope="module")
def template(aws: Aws) -> str:
    data = {
        "ImageId": "ami-0rehearsal",
        "UserData": base64.b64encode(SLEEPER.encode()).decode(),
        "InstanceInitiatedShutdownBehavior": "terminate",
    }
    made = aws("ec2", "create-launch-template", "--launch-template-name", "node", "--launch-template-data",
               json.dumps(data))  # fmt: skip
    return str(made["LaunchTemplate"]["LaunchTemplateId"])


def test_prices_and_places_are_looked_up_as_the_user_guide_does(aws: Aws) -> None:
    now = aws.cloud.now()
    prices = aws("ec2", "describe-spot-price-history", "--instance-types", TYPE, "--product-description",
                 "Linux/UNIX", "--start-time", now.isoformat())["SpotPriceHistory"]  # fmt: skip
    assert {row["AvailabilityZone"] for row in prices} == {f"us-east-1{letter}" for letter in "abc"}
    day = aws("ec2", "describe-spot-price-history", "--instance-types", TYPE, "--availability-zone", "us-east-1a",
              "--start-time", (now - timedelta(days=1)).isoformat(), "--end-time", now.isoformat(),
              "--page-size", "3")["SpotPriceHistory"]  # fmt: skip
    assert len(day) > 3
    offered = aws("ec2", "describe-instance-type-offerings", "--location-type", "availability-zone", "--filters",
                  f"Name=instance-type,Values={TYPE}", "--query", "InstanceTypeOfferings[].Location")  # fmt: skip
    assert "us-east-1a" in offered
    zones = aws("ec2", "describe-availability-zones", "--query", "AvailabilityZones[].[ZoneName,ZoneId]")
    assert ["us-east-1a", "use1-az6"] in zones
    scores = aws("ec2", "get-spot-placement-scores", "--target-capacity", "1", "--instance-types", TYPE, "g5.xlarge",
                 "p3.2xlarge", "--region-names", "us-east-1", "--single-availability-zone")  # fmt: skip
    assert {1 <= one["Score"] <= 10 for one in scores["SpotPlacementScores"]} == {True}
    assert aws("sts", "get-caller-identity")["Account"] == "123456789012"


def test_a_fleet_is_bought_found_tagged_and_ended(aws: Aws, template: str) -> None:
    config = [
        {
            "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "$Latest"},
            "Overrides": [
                {"InstanceType": kind, "AvailabilityZone": zone}
                for kind in (TYPE, "g5.xlarge")
                for zone in ("us-east-1a", "us-east-1b")
            ],
        }
    ]
    words = ("ec2", "create-fleet", "--type", "instant", "--client-token", "once", "--launch-template-configs",
             json.dumps(config), "--target-capacity-specification",
             "TotalTargetCapacity=2,DefaultTargetCapacityType=spot", "--spot-options",
             "AllocationStrategy=price-capacity-optimized", "--tag-specifications",
             "ResourceType=instance,Tags=[{Key=gpucost:job,Value=cli}]")  # fmt: skip
    fleet = aws(*words)
    assert aws(*words)["FleetId"] == fleet["FleetId"], "the same token is the same fleet"
    ids = [one for group in fleet["Instances"] for one in group["InstanceIds"]]
    assert len(ids) == 2
    aws("ec2", "wait", "instance-running", "--instance-ids", *ids)
    found = aws("ec2", "describe-instances", "--filters", "Name=tag:gpucost:job,Values=cl*",
                "Name=instance-lifecycle,Values=spot", "Name=instance-state-name,Values=running", "--query",
                "Reservations[].Instances[].InstanceId")  # fmt: skip
    assert sorted(found) == sorted(ids)
    aws("ec2", "create-tags", "--resources", ids[0], "--tags", "Key=team,Value=vision")
    shown = aws("ec2", "describe-instances", "--instance-ids", ids[0], "--query", "Reservations[0].Instances[0]")
    assert {"Key": "team", "Value": "vision"} in shown["Tags"]
    request = aws("ec2", "describe-spot-instance-requests", "--spot-instance-request-ids",
                  shown["SpotInstanceRequestId"], "--query", "SpotInstanceRequests[0].Status.Code")  # fmt: skip
    assert request == "fulfilled"
    checked = aws("ec2", "describe-instance-status", "--instance-ids", *ids)["InstanceStatuses"]
    assert {one["InstanceId"]: one["InstanceStatus"]["Status"] for one in checked} == dict.fromkeys(ids, "ok")
    aws("ec2", "terminate-instances", "--instance-ids", *ids)
    aws("ec2", "wait", "instance-terminated", "--instance-ids", *ids)
    why = aws("ec2", "describe-instances", "--instance-ids", ids[0], "--query",
              "Reservations[0].Instances[0].StateReason.Code")  # fmt: skip
    assert why == "Client.UserInitiatedShutdown"


def test_run_instances_buys_spot_by_hand(aws: Aws) -> None:
    ran = aws("ec2", "run-instances", "--image-id", "ami-0rehearsal", "--instance-type", TYPE, "--count", "1",
              "--placement", "AvailabilityZone=us-east-1b", "--user-data", SLEEPER, "--instance-market-options",
              "MarketType=spot,SpotOptions={MaxPrice=0.5,SpotInstanceType=one-time}", "--tag-specifications",
              "ResourceType=instance,Tags=[{Key=Name,Value=by-hand}]")["Instances"][0]  # fmt: skip
    assert ran["InstanceLifecycle"] == "spot"
    assert ran["State"]["Name"] == "pending"
    aws("ec2", "wait", "instance-running", "--instance-ids", ran["InstanceId"])
    aws("ec2", "terminate-instances", "--instance-ids", ran["InstanceId"])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("InvalidInstanceID.NotFound", ["describe-instances", "--instance-ids", "i-00000000000000000"]),
        ("InvalidParameterValue", [*RUN, "--instance-type", "zz.nonexist"]),
        ("DryRunOperation", [*RUN, "--instance-type", TYPE, "--dry-run"]),
        (
            "SpotMaxPriceTooLow",
            [*RUN, "--instance-type", TYPE, "--instance-market-options", "MarketType=spot,SpotOptions={MaxPrice=0.01}"],
        ),
        ("InsufficientInstanceCapacity", [*RUN, "--instance-type", TYPE, "--count", "50"]),
    ],
)
def test_it_refuses_in_ec2s_words(aws: Aws, code: str, words: list[str]) -> None:
    assert aws.refusal("ec2", *words) == code


def test_warnings_reach_a_queue(aws: Aws, template: str) -> None:
    queue = aws("sqs", "create-queue", "--queue-name", "interruptions")["QueueUrl"]
    arn = aws("sqs", "get-queue-attributes", "--queue-url", queue, "--attribute-names", "QueueArn",
              "--query", "Attributes.QueueArn")  # fmt: skip
    pattern = {"source": ["aws.ec2"], "detail-type": ["EC2 Spot Instance Interruption Warning"]}
    aws("events", "put-rule", "--name", "spot", "--event-pattern", json.dumps(pattern))
    aws("events", "put-targets", "--rule", "spot", "--targets", f"Id=queue,Arn={arn}")
    ran = aws("ec2", "run-instances", "--launch-template", f"LaunchTemplateId={template},Version=1", "--instance-type",
              TYPE, "--instance-market-options", "MarketType=spot", "--query", "Instances[0].InstanceId")  # fmt: skip
    wait_for("running", lambda: aws.cloud.state(ran) == "running")
    aws.cloud.post("interrupt", {"instance_id": ran, "event": "notice"})
    (message,) = aws("sqs", "receive-message", "--queue-url", queue, "--wait-time-seconds", "5")["Messages"]
    envelope = json.loads(message["Body"])
    assert envelope["detail"] == {"instance-id": ran, "instance-action": "terminate"}
    assert set(envelope) == {
        "version", "id", "detail-type", "source", "account", "time", "region", "resources", "detail"
    }  # fmt: skip
    aws("ec2", "terminate-instances", "--instance-ids", ran)
