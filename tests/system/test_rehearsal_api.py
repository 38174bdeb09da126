"""The rehearsal cloud as a user meets it: a server process, plain boto3, real instances. Needs nothing but Python."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

ROOT = Path(__file__).resolve().parents[2]
SPEED = 120
TYPE = "g4dn.xlarge"
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]


def wait_for(what: str, look: Callable[[], Any], deadline_s: float = 15.0) -> Any:
    """The first truthy answer of `look`; fails with `what` when none comes in time."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f"{what}: not within {deadline_s} s")


@dataclass
class Cloud:
    """A running rehearsal cloud and a client for it."""

    process: subprocess.Popen[bytes]
    url: str
    state_dir: Path
    ec2: Any

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/rehearsal/{path}", timeout=10) as response:  # noqa: S310
            return json.load(response)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/rehearsal/{path}", data=json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
            return json.load(response)

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="AKIAREHEARSAL",
            aws_secret_access_key="rehearsal",
            config=Config(retries={"max_attempts": 1}, max_pool_connections=50),
        )

    def now(self) -> datetime:
        return datetime.fromisoformat(self.get("status")["now"])

    def template(self, user_data: str, **more: Any) -> str:
        """A launch template whose machines run `user_data`; returns its id."""
        data = {
            "ImageId": "ami-0rehearsal",
            "UserData": base64.b64encode(user_data.encode()).decode(),
            "IamInstanceProfile": {"Name": "gpucost-node"},
            "MetadataOptions": {"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "from", "Value": "template"}]}],
            **more,
        }
        name = f"node-{time.monotonic_ns()}"
        made = self.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
        return str(made["LaunchTemplate"]["LaunchTemplateId"])

    def buy(
        self,
        template: str,
        *,
        zones: list[str] = ZONES,
        instance_type: str = TYPE,
        spot: bool = True,
        count: int = 1,
        tags: dict[str, str] | None = None,
        **more: Any,
    ) -> Any:
        """CreateFleet with one override for each zone."""
        overrides = more.pop("overrides", [{"InstanceType": instance_type, "AvailabilityZone": z} for z in zones])
        return self.ec2.create_fleet(
            Type="instant",
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "$Latest"},
                    "Overrides": overrides,
                }
            ],
            TargetCapacitySpecification={
                "TotalTargetCapacity": count,
                "DefaultTargetCapacityType": "spot" if spot else "on-demand",
            },
            TagSpecifications=[
                {
                    "ResourceType": "instance",
                    "Tags": [{"Key": k, "Value": v} for k, v in (tags or {}).items()],
                }
            ]
            if tags
            else [],
            **more,
        )

    def one(self, template: str, **more: Any) -> str:
        """Buy one instance; its id."""
        answer = self.buy(template, **more)
        assert answer["Instances"], answer["Errors"]
        return str(answer["Instances"][0]["InstanceIds"][0])

    def show(self, instance_id: str) -> Any:
        answer = self.ec2.describe_instances(InstanceIds=[instance_id])
        return answer["Reservations"][0]["Instances"][0]

    def state(self, instance_id: str) -> str:
        return str(self.show(instance_id)["State"]["Name"])

    def folder(self, instance_id: str) -> Path:
        return self.state_dir / "instances" / instance_id

    def wait_state(self, instance_id: str, state: str) -> Any:
        wait_for(f"{instance_id} {state}", lambda: self.state(instance_id) == state)
        return self.show(instance_id)

    def wait_file(self, instance_id: str, name: str) -> str:
        path = self.folder(instance_id) / name
        return str(wait_for(f"{path} written", lambda: path.is_file() and path.read_text()))

    def end_all(self) -> None:
        living = [i["instance_id"] for i in self.get("status")["instances"] if i["state"] in {"pending", "running"}]
        if living:
            self.ec2.terminate_instances(InstanceIds=living)
        for instance_id in living:
            self.wait_state(instance_id, "terminated")


def launch(state_dir: Path, *arguments: str) -> Cloud:
    """Start a rehearsal cloud as its users do, and wait until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state_dir.mkdir(parents=True, exist_ok=True)
    role = state_dir / "role.json"
    role.write_text(json.dumps({"access_key": "node-key", "secret_key": "node-secret"}))
    role.chmod(0o600)
    command = [sys.executable, "-m", "gpucost.rehearsal", "--port", str(port), "--state-dir", str(state_dir)]
    command += ["--market", str(ROOT / "include/market/three_zones.json"), "--speed", str(SPEED)]
    command += ["--role-credentials", str(role), "--image-path", str(Path(sys.executable).parent), *arguments]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "plugins"), "AWS_SECRET_ACCESS_KEY": "must-not-leak"}
    with (state_dir / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stderr=log, stdout=log)
    cloud = Cloud(process, f"http://127.0.0.1:{port}", state_dir, None)
    cloud.ec2 = cloud.client("ec2")

    def healthy() -> bool:
        assert process.poll() is None, (state_dir / "server.log").read_text()
        try:
            return bool(cloud.get("health")["status"] == "ok")
        except urllib.error.URLError:
            return False

    wait_for("the rehearsal cloud answers", healthy, 40)
    return cloud


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    running = launch(tmp_path_factory.mktemp("rehearsal"))
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=30) == 0


@pytest.fixture(autouse=True)
def _no_leftovers(cloud: Cloud) -> Iterator[None]:
    yield
    cloud.end_all()


SLEEPER = "#!/bin/sh\necho up > started\nsleep 600\n"


def marked(instance_id: str) -> list[int]:
    """Pids of every process that carries the instance's id in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"/{instance_id}\0".encode() in environ:
                found.append(int(entry.name))
    return found


def expect_error(code: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ClientError) as caught:
        call()
    assert caught.value.response["Error"]["Code"] == code


def test_price_history_reaches_back_and_is_the_same_over_pages(cloud: Cloud) -> None:
    now = cloud.now()
    question = {
        "InstanceTypes": [TYPE],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": now - timedelta(hours=24),
        "EndTime": now,
    }
    whole = cloud.ec2.describe_spot_price_history(**question)["SpotPriceHistory"]
    paginator = cloud.ec2.get_paginator("describe_spot_price_history")
    pages = list(paginator.paginate(**question, PaginationConfig={"PageSize": 5}))
    assert len(pages) > 2
    assert [row for page in pages for row in page["SpotPriceHistory"]] == whole
    assert {row["AvailabilityZone"] for row in whole} == set(ZONES)
    times = [row["Timestamp"] for row in whole]
    assert times == sorted(times, reverse=True)
    assert len({row["SpotPrice"] for row in whole}) > 5, "prices move"
    assert all(Decimal("0.05") < Decimal(row["SpotPrice"]) <= Decimal("0.526") for row in whole)


def test_start_time_now_gives_the_price_in_force_of_each_zone(cloud: Cloud) -> None:
    now = cloud.now()
    rows = cloud.ec2.describe_spot_price_history(
        InstanceTypes=[TYPE, "g5.xlarge"], ProductDescriptions=["Linux/UNIX"], StartTime=now, EndTime=now
    )["SpotPriceHistory"]
    assert {(row["InstanceType"], row["AvailabilityZone"]) for row in rows} == {
        (kind, zone) for kind in (TYPE, "g5.xlarge") for zone in ZONES
    }
    assert all(row["Timestamp"] <= now for row in rows)
    one = cloud.ec2.describe_spot_price_history(InstanceTypes=[TYPE], AvailabilityZone=ZONES[0], StartTime=now)
    assert {row["AvailabilityZone"] for row in one["SpotPriceHistory"]} == {ZONES[0]}
    windows = cloud.ec2.describe_spot_price_history(InstanceTypes=[TYPE], ProductDescriptions=["Windows"])
    assert windows["SpotPriceHistory"] == []


def test_types_zones_and_other_services_are_there(cloud: Cloud) -> None:
    types = cloud.ec2.describe_instance_types(InstanceTypes=[TYPE, "g5.xlarge", "p3.2xlarge"])["InstanceTypes"]
    gpus = {one["InstanceType"]: one["GpuInfo"]["Gpus"][0]["Name"] for one in types}
    assert gpus == {TYPE: "T4", "g5.xlarge": "A10G", "p3.2xlarge": "V100"}
    assert all(one["VCpuInfo"]["DefaultVCpus"] >= 4 and one["MemoryInfo"]["SizeInMiB"] >= 16384 for one in types)
    zones = cloud.ec2.describe_availability_zones()["AvailabilityZones"]
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in zones}
    assert {name: ids[name] for name in ZONES} == dict(zip(ZONES, ["use1-az6", "use1-az1", "use1-az2"], strict=True))
    assert cloud.client("sts").get_caller_identity()["Account"] == "123456789012"


def test_an_instance_runs_its_user_data_and_shows_what_ec2_shows(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    before = cloud.now()
    instance_id = cloud.one(
        template, tags={"gpucost:job": "shown", "from": "fleet"}, ClientToken="shown", overrides=[
            {"InstanceType": TYPE, "AvailabilityZone": ZONES[1], "MaxPrice": "0.5"}
        ]
    )  # fmt: skip
    shown = cloud.wait_state(instance_id, "running")
    assert cloud.wait_file(instance_id, "started") == "up\n"
    assert before - timedelta(seconds=1) <= shown["LaunchTime"] <= cloud.now()
    assert shown["LaunchTime"].microsecond == 0
    assert shown["Placement"]["AvailabilityZone"] == ZONES[1]
    assert shown["Placement"]["AvailabilityZoneId"] == "use1-az1"
    assert (shown["InstanceLifecycle"], shown["ClientToken"]) == ("spot", "shown")
    assert shown["SpotInstanceRequestId"].startswith("sir-")
    assert shown["StateTransitionReason"] == ""
    tags = {tag["Key"]: tag["Value"] for tag in shown["Tags"]}
    assert (tags["gpucost:job"], tags["from"]) == ("shown", "fleet")
    assert tags["aws:ec2:fleet-id"].startswith("fleet-")
    request = cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[shown["SpotInstanceRequestId"]])
    assert request["SpotInstanceRequests"][0]["Status"]["Code"] == "fulfilled"

    pids = marked(instance_id)
    assert pids, "a real process runs it"
    cloud.ec2.terminate_instances(InstanceIds=[instance_id])
    cloud.ec2.terminate_instances(InstanceIds=[instance_id])
    gone = cloud.wait_state(instance_id, "terminated")
    assert gone["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert gone["StateTransitionReason"].startswith("User initiated (")
    assert not marked(instance_id)
    request = cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[shown["SpotInstanceRequestId"]])
    status = request["SpotInstanceRequests"][0]["Status"]
    assert status["Code"] == "instance-terminated-by-user"
    assert f"({status['UpdateTime']:%Y-%m-%d %H:%M:%S} GMT)" in gone["StateTransitionReason"]


def test_describe_finds_by_tag_state_lifecycle_and_token_and_in_pages(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    spot = [cloud.one(template, tags={"gpucost:job": f"find-{n}"}, ClientToken=f"find-{n}") for n in range(3)]
    owned = cloud.one(template, spot=False, tags={"gpucost:job": "other"})

    def found(*filters: tuple[str, str], **more: Any) -> set[str]:
        pages = cloud.ec2.get_paginator("describe_instances").paginate(
            Filters=[{"Name": name, "Values": [value]} for name, value in filters], **more
        )
        return {i["InstanceId"] for page in pages for r in page["Reservations"] for i in r["Instances"]}

    living = ("instance-state-name", "*ing")
    cloud.wait_state(owned, "running")
    assert found(("tag:gpucost:job", "find-*"), living) == set(spot)
    assert found(("tag:gpucost:job", "find-?"), living, PaginationConfig={"PageSize": 1}) == set(spot)
    assert found(("tag:gpucost:job", "find-1"), living) == {spot[1]}
    assert found(("client-token", "find-2"), ("instance-type", TYPE)) == {spot[2]}
    assert found(("instance-lifecycle", "spot"), ("tag-key", "gpucost:job"), ("instance-state-name", "running")) <= set(
        spot
    )
    assert owned not in found(("instance-lifecycle", "spot"))
    assert "InstanceLifecycle" not in cloud.show(owned)
    cloud.ec2.create_tags(Resources=[spot[0]], Tags=[{"Key": "added", "Value": "later"}])
    assert found(("tag:added", "later")) == {spot[0]}
    expect_error("InvalidParameterValue", lambda: found(("no-such-filter", "x")))


def test_ec2_refuses_what_it_refuses(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    expect_error("InvalidParameterValue", lambda: cloud.buy(template, instance_type="zz.nonexist"))
    expect_error("InvalidParameterValue", lambda: cloud.buy(template, zones=["us-east-1z"]))
    expect_error("InvalidLaunchTemplateId.NotFound", lambda: cloud.buy("lt-00000000000000000"))
    unknown = ["i-00000000000000000"]
    expect_error("InvalidInstanceID.NotFound", lambda: cloud.ec2.terminate_instances(InstanceIds=unknown))
    expect_error("InvalidInstanceID.NotFound", lambda: cloud.ec2.describe_instances(InstanceIds=unknown))
    expect_error("UnsupportedOperation", lambda: cloud.ec2.run_instances(MinCount=1, MaxCount=1))
    low = cloud.buy(template, overrides=[{"InstanceType": TYPE, "AvailabilityZone": ZONES[0], "MaxPrice": "0.01"}])
    assert [error["ErrorCode"] for error in low["Errors"]] == ["SpotMaxPriceTooLow"]
    assert low["Instances"] == []


def test_a_pool_runs_out_and_the_fleet_is_filled_in_part(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    answer = cloud.buy(template, instance_type="p3.2xlarge", zones=ZONES[:1], count=5)
    assert sum(len(group["InstanceIds"]) for group in answer["Instances"]) == 2
    (error,) = answer["Errors"]
    assert error["ErrorCode"] == "InsufficientInstanceCapacity"
    assert error["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"] == ZONES[0]
    again = cloud.buy(template, instance_type="p3.2xlarge", zones=ZONES[:1])
    assert (again["Instances"], again["Errors"][0]["ErrorCode"]) == ([], "InsufficientInstanceCapacity")


def test_strategies_choose_the_pool_that_they_promise(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    rows = cloud.ec2.describe_spot_price_history(InstanceTypes=[TYPE], StartTime=cloud.now())["SpotPriceHistory"]
    prices: dict[str, Decimal] = {}
    for row in rows:  # newest first: the first row of a zone is the one in force
        prices.setdefault(row["AvailabilityZone"], Decimal(row["SpotPrice"]))
    cheapest = min(prices, key=lambda zone: prices[zone])
    for strategy in ("lowest-price", "price-capacity-optimized"):
        answer = cloud.buy(template, SpotOptions={"AllocationStrategy": strategy})
        assert answer["Instances"][0]["AvailabilityZone"] == cheapest
    dearest = max(prices, key=lambda zone: prices[zone])
    overrides = [
        {"InstanceType": TYPE, "AvailabilityZone": zone, "Priority": 0.0 if zone == dearest else 1.0} for zone in ZONES
    ]
    options = {"AllocationStrategy": "capacity-optimized-prioritized"}
    answer = cloud.buy(template, overrides=overrides, SpotOptions=options)
    assert answer["Instances"][0]["AvailabilityZone"] == dearest


def test_one_client_token_is_one_fleet_also_for_forty_at_once(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda number=number: answers.append(cloud.buy(template, ClientToken=f"token-{number % 5}"))
        )
        for number in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 40
    assert len({answer["FleetId"] for answer in answers}) == 5
    assert len({i for answer in answers for group in answer["Instances"] for i in group["InstanceIds"]}) == 5
    expect_error("IdempotentParameterMismatch", lambda: cloud.buy(template, ClientToken="token-1", count=2))


PROBE = """#!/usr/bin/env python
import json, os, urllib.request, urllib.error
import botocore.session
import botocore.utils
frozen = botocore.session.get_session().get_credentials().get_frozen_credentials()
base = os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]

def call(path, method="GET", **headers):
    try:
        request = urllib.request.Request(base + "latest/" + path, method=method, headers=headers)
        return urllib.request.urlopen(request).read().decode()
    except urllib.error.HTTPError as error:
        return error.code

token = call("api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
paths = ["instance-id", "instance-type", "placement/availability-zone", "placement/region",
         "placement/availability-zone-id", "tags/instance/gpucost:job", "iam/security-credentials/",
         "spot/instance-action", "events/recommendations/rebalance"]
seen = {path: call("meta-data/" + path, **{"X-aws-ec2-metadata-token": token}) for path in paths}
seen["no token"] = call("meta-data/instance-id")
seen["bad token"] = call("meta-data/instance-id", **{"X-aws-ec2-metadata-token": "stale"})
seen["identity"] = json.loads(call("dynamic/instance-identity/document", **{"X-aws-ec2-metadata-token": token}))
seen["tags"] = call("meta-data/tags/instance/", **{"X-aws-ec2-metadata-token": token})
seen["credentials"] = [frozen.access_key, frozen.secret_key, frozen.token]
seen["environment"] = sorted(os.environ)
with open("seen.part", "w") as out:
    json.dump(seen, out)
os.rename("seen.part", "seen.json")
"""


def test_an_instance_finds_itself_and_its_role_by_imds(cloud: Cloud) -> None:
    template = cloud.template(PROBE)
    instance_id = cloud.one(template, zones=[ZONES[2]], tags={"gpucost:job": "imds"})
    seen = json.loads(cloud.wait_file(instance_id, "seen.json"))
    assert seen["credentials"][:2] == ["node-key", "node-secret"]
    assert not seen["credentials"][2], "an S3 stand-in refuses static keys with a session token"
    assert seen["instance-id"] == instance_id
    assert (seen["instance-type"], seen["placement/region"]) == (TYPE, "us-east-1")
    assert (seen["placement/availability-zone"], seen["placement/availability-zone-id"]) == (ZONES[2], "use1-az2")
    assert (seen["tags/instance/gpucost:job"], seen["iam/security-credentials/"]) == ("imds", "gpucost-node")
    assert "gpucost:job" in seen["tags"].splitlines()
    assert (seen["spot/instance-action"], seen["events/recommendations/rebalance"]) == (404, 404)
    assert (seen["no token"], seen["bad token"]) == (401, 401)
    assert seen["identity"]["instanceId"] == instance_id
    assert not [name for name in seen["environment"] if "SECRET" in name or "PROXY" in name]
    assert cloud.state(instance_id) == "running", "the end of user data does not end the machine"


def test_shutdown_from_inside_ends_the_instance_as_its_template_says(cloud: Cloud) -> None:
    user_data = "#!/bin/sh\nshutdown -h now\nsleep 600\n"
    ends = cloud.one(cloud.template(user_data))
    stops = cloud.one(cloud.template(user_data, InstanceInitiatedShutdownBehavior="stop"), spot=False)
    shown = cloud.wait_state(ends, "terminated")
    assert shown["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
    assert not marked(ends)
    cloud.wait_state(stops, "stopped")
    cloud.ec2.terminate_instances(InstanceIds=[stops])
    assert cloud.state(stops) == "terminated"


TRAINER = """#!/usr/bin/env python
import json, os, subprocess, time
os.makedirs("work/run", exist_ok=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
for step in range(1, 100000):
    with open("work/run/progress.part", "w") as out:
        json.dump({"step": step, "epoch": 0, "at": "2026-11-30T00:00:00+00:00"}, out)
    os.replace("work/run/progress.part", "work/run/progress.json")
    time.sleep(0.01)
"""


def test_the_script_kills_a_job_at_its_step_once(cloud: Cloud) -> None:
    template = cloud.template(TRAINER)
    cloud.post("script", {"rules": [{"job": "scripted-*", "step": 40, "notice": False, "times": 1}]})
    bystander = cloud.one(template, tags={"gpucost:job": "bystander"})
    first = cloud.one(template, tags={"gpucost:job": "scripted-1"})
    gone = cloud.wait_state(first, "terminated")
    assert gone["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert not marked(first), "children with a session of their own are gone too"
    progress = cloud.folder(first) / "work/run/progress.json"
    assert json.loads(progress.read_text())["step"] >= 40
    status = cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[gone["SpotInstanceRequestId"]])
    assert status["SpotInstanceRequests"][0]["Status"]["Code"] == "instance-terminated-no-capacity"

    second = cloud.one(template, tags={"gpucost:job": "scripted-1"})
    progress = cloud.folder(second) / "work/run/progress.json"
    wait_for("step 80", lambda: progress.is_file() and json.loads(progress.read_text())["step"] >= 80)
    assert cloud.state(second) == "running", "the rule has fired once, as often as it says"
    assert cloud.state(bystander) == "running", "another job is left alone"


NOTICED = """#!/bin/sh
trap 'echo asked > asked; exit 0' TERM
echo up > started
while :; do sleep 0.1; done
"""


def test_a_notice_comes_first_by_imds_and_by_the_queue(cloud: Cloud) -> None:
    sqs, events = cloud.client("sqs"), cloud.client("events")
    queue = sqs.create_queue(QueueName="interruptions")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    pattern = {"source": ["aws.ec2"], "detail-type": ["EC2 Spot Instance Interruption Warning"]}
    events.put_rule(Name="spot", EventPattern=json.dumps(pattern))
    events.put_targets(Rule="spot", Targets=[{"Id": "queue", "Arn": arn}])
    instance_id = cloud.one(cloud.template(NOTICED))
    cloud.wait_file(instance_id, "started")
    asked_real = time.monotonic()
    cloud.post("interrupt", {"instance_id": instance_id, "notice": True})
    (message,) = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=2)["Messages"]
    warning = json.loads(message["Body"])
    assert warning["detail"] == {"instance-id": instance_id, "instance-action": "terminate"}
    assert warning["detail-type"] == pattern["detail-type"][0]
    assert cloud.state(instance_id) == "running"
    wait_for("terminated", lambda: cloud.state(instance_id) == "terminated", 25)
    assert time.monotonic() - asked_real >= 10, "two rehearsal minutes are one real second here: the floor holds"
    assert (cloud.folder(instance_id) / "asked").read_text() == "asked\n", "SIGTERM came before SIGKILL"


def hand_computed(cloud: Cloud, shown: Any) -> Decimal:
    """The invoice's rule, from what the API alone shows."""
    _, _, text = shown["StateTransitionReason"].partition("(")
    end = datetime.fromisoformat(text.removesuffix(" GMT)") + "+00:00")
    start = shown["LaunchTime"]
    seconds = int((end - start).total_seconds())
    if shown["StateReason"]["Code"] == "Server.SpotInstanceTermination" and seconds < 3600:
        return Decimal("0.000000")
    billed, amount, offset = max(seconds, 60), Decimal(0), 0
    while offset < billed:
        at = start + timedelta(seconds=offset)
        price = Decimal("0.526")
        if shown.get("InstanceLifecycle") == "spot":
            rows = cloud.ec2.describe_spot_price_history(
                InstanceTypes=[TYPE], AvailabilityZone=shown["Placement"]["AvailabilityZone"], StartTime=at, EndTime=at
            )["SpotPriceHistory"]
            assert len(rows) == 1
            price = Decimal(rows[0]["SpotPrice"])
        amount += price * min(3600, billed - offset) / 3600
        offset += 3600
    return amount.quantize(Decimal("0.000001"), rounding=ROUND_HALF_EVEN)


def test_the_invoice_equals_what_a_hand_computes_from_the_api(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    bought = {
        "spot": cloud.one(template),
        "on-demand": cloud.one(template, spot=False),
        "interrupted": cloud.one(template),
    }
    for instance_id in bought.values():
        cloud.wait_state(instance_id, "running")
    cloud.post("interrupt", {"instance_id": bought["interrupted"]})
    time.sleep(1.5)
    cloud.ec2.terminate_instances(InstanceIds=[bought["spot"], bought["on-demand"]])
    invoice = cloud.get("invoice")
    amounts = {line["instance_id"]: Decimal(line["amount"]) for line in invoice["lines"]}
    for name, instance_id in bought.items():
        assert amounts[instance_id] == hand_computed(cloud, cloud.wait_state(instance_id, "terminated")), name
    assert amounts[bought["spot"]] > 0
    assert amounts[bought["interrupted"]] == 0
    assert Decimal(invoice["total"]) == sum(amounts.values())


def test_status_and_clock_tell_a_person_what_is_going_on(cloud: Cloud) -> None:
    instance_id = cloud.one(cloud.template(SLEEPER), tags={"gpucost:job": "status"})
    cloud.wait_file(instance_id, "started")
    (line,) = [one for one in cloud.get("status")["instances"] if one["instance_id"] == instance_id]
    assert line["pid"] in marked(instance_id)
    assert (line["state"], line["lifecycle"], line["tags"]["gpucost:job"]) == ("running", "spot", "status")
    spec = cloud.get("clock")
    assert (spec["speed"], set(spec)) == (SPEED, {"origin", "origin_real", "speed"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        cloud.post("interrupt", {"instance_id": "i-00000000000000000"})
    assert caught.value.code == 404


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_cloud(tmp_path: Path, how: signal.Signals) -> None:
    short = launch(tmp_path)
    try:
        user_data = "#!/bin/sh\ntrap '' TERM\nsetsid sleep 600 &\necho up > started\nsleep 600\n"
        instance_id = short.one(short.template(user_data))
        short.wait_file(instance_id, "started")
        assert len(marked(instance_id)) >= 2
        short.process.send_signal(how)
        short.process.wait(timeout=30)
        if how == signal.SIGTERM:
            assert short.process.returncode == 0
            assert not marked(instance_id)
        else:
            wait_for("no process is left", lambda: not marked(instance_id), 8)
    finally:
        short.process.kill()
        short.process.wait()


def test_a_killed_cloud_comes_back_on_its_clock_and_its_prices(tmp_path: Path) -> None:
    def prices_at(cloud: Cloud, moment: datetime) -> dict[tuple[str, str], tuple[str, datetime]]:
        rows = cloud.ec2.describe_spot_price_history(StartTime=moment, EndTime=moment)["SpotPriceHistory"]
        return {(r["InstanceType"], r["AvailabilityZone"]): (r["SpotPrice"], r["Timestamp"]) for r in rows}

    ahead = datetime.now(UTC) + timedelta(days=840)
    first = launch(tmp_path, "--origin", ahead.isoformat())
    second = None
    try:
        spec, before = first.get("clock"), first.now()
        prices = prices_at(first, before)
        assert len(prices) == 9
        first.process.kill()
        first.process.wait(timeout=30)
        second = launch(tmp_path)
        assert second.get("clock") == spec
        assert second.now() > before
        assert prices_at(second, before) == prices
        second.process.kill()
        second.process.wait(timeout=30)
        command = [sys.executable, "-m", "gpucost.rehearsal", "--state-dir", str(tmp_path), "--speed", str(SPEED)]
        command += ["--market", str(ROOT / "include/market/three_zones.json")]
        command += ["--origin", datetime.now(UTC).isoformat()]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "plugins")}
        refused = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1
        assert "use another --state-dir" in refused.stderr
    finally:
        for one in (first, second):
            if one is not None:
                one.process.kill()
                one.process.wait()
