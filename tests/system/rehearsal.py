"""A rehearsal cloud for system tests: a server process as its users start it, and a boto3 client for it."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.system.shapes import check_shapes

ROOT = Path(__file__).resolve().parents[2]
MARKET = ROOT / "include/market/three_zones.json"
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


def tag_specifications(**tags: dict[str, str] | None) -> list[dict[str, Any]]:
    """TagSpecifications: kind of resource -> tags; hyphens are written as underscores."""
    return [
        {"ResourceType": kind.replace("_", "-"), "Tags": [{"Key": k, "Value": v} for k, v in of_kind.items()]}
        for kind, of_kind in tags.items()
        if of_kind
    ]


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
            f"{self.url}/rehearsal/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
            return json.load(response)

    def client(
        self,
        service: str,
        region: str = "us-east-1",
        *,
        key: str = "AKIAREHEARSAL",
        token: str | None = None,
        parameter_validation: bool = True,
        **config: Any,
    ) -> Any:
        """A boto3 client; every answer of EC2 is checked against EC2's own model.

        Args:
            service, region: whose.
            key, token: of an access key that was lent; the secret does not matter.
            parameter_validation: whether botocore refuses what AWS would refuse.
            config: of botocore; left out, it asks twice at most.
        """
        made = boto3.client(
            service,
            endpoint_url=self.url,
            region_name=region,
            aws_access_key_id=key,
            aws_secret_access_key="rehearsal",
            aws_session_token=token,
            config=Config(
                **{"retries": {"max_attempts": 1}, "max_pool_connections": 50, **config},
                parameter_validation=parameter_validation,
            ),
        )
        if service == "ec2":
            check_shapes(made)
        return made

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
        fleet_tags: dict[str, str] | None = None,
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
            TagSpecifications=tag_specifications(instance=tags, fleet=fleet_tags),
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
        """Terminate everything in every region, and wait until it has ended."""

        def left() -> list[Any]:
            return [one for one in self.get("status")["instances"] if one["state"] != "terminated"]

        by_region: dict[str, list[str]] = {}
        for one in left():
            by_region.setdefault(one["zone"][:-1], []).append(one["instance_id"])
        for region, ids in by_region.items():
            self.client("ec2", region).terminate_instances(InstanceIds=ids)
        wait_for("everything has ended", lambda: not left())


def launch(state_dir: Path, *arguments: str, market: Path = MARKET, port: int = 0) -> Cloud:
    """Start a rehearsal cloud as its users do, and wait until it answers; new instances are shown at once."""
    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    state_dir.mkdir(parents=True, exist_ok=True)
    role = state_dir / "role.json"
    role.write_text(json.dumps({"access_key": "node-key", "secret_key": "node-secret"}))
    role.chmod(0o600)
    command = [sys.executable, "-m", "gpucost.rehearsal", "--port", str(port), "--state-dir", str(state_dir)]
    command += ["--market", str(market), "--speed", str(SPEED)]
    command += ["--role-credentials", str(role), "--image-path", str(Path(sys.executable).parent)]
    if "--consistency-lag-real-s" not in arguments:
        command += ["--consistency-lag-real-s", "0"]
    command += arguments
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "plugins"), "AWS_SECRET_ACCESS_KEY": "must-not-leak"}
    with (state_dir / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stderr=log, stdout=log)
    cloud = Cloud(process, f"http://127.0.0.1:{port}", state_dir, None)
    cloud.ec2 = cloud.client("ec2")

    def healthy() -> bool:
        assert process.poll() is None, (state_dir / "server.log").read_text()
        try:
            return bool(cloud.get("health")["status"] == "ok")
        except OSError:
            # not there yet, or cut off by a cloud that cannot start: the next look sees its end
            return False

    try:
        wait_for("the rehearsal cloud answers", healthy, 40)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return cloud


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


def expect_error(code: str, call: Callable[[], Any]) -> str:
    """What `call` raises has this code; its message."""
    with pytest.raises(ClientError) as caught:
        call()
    error = caught.value.response["Error"]
    assert error["Code"] == code, error
    return str(error["Message"])


def two_regions(path: Path) -> Path:
    """The project's market with a second region, whose quotas are small: 12 vCPUs of G on spot, 8 on demand."""
    market = json.loads(MARKET.read_text())
    price = {"usd_per_hour": "0.6", "source": "made up for a test", "as_of": "2026-11-30"}
    cheap = {**price, "usd_per_hour": "0.3"}
    market["zones"] += [{"name": f"eu-west-1{letter}", "zone_id": f"euw1-az{n}"} for letter, n in (("a", 3), ("b", 1))]
    for offer in market["instance_types"][:2]:
        offer["on_demand"]["eu-west-1"] = price
    for zone in ("eu-west-1a", "eu-west-1b"):
        market["pools"].append(
            {"zone": zone, "instance_type": TYPE, "spot": cheap, "capacity": {"spot": 6, "on_demand": 6}}
        )
    market["quotas"] = [
        {"region": "eu-west-1", "lifecycle": "spot", "family": "g", "vcpus": 12},
        {"region": "eu-west-1", "lifecycle": "on-demand", "family": "g", "vcpus": 8},
    ]
    path.write_text(json.dumps(market))
    return path


def forty_at_once(ask: Callable[[int], Any]) -> list[Any]:
    """The forty answers of `ask(0)` to `ask(39)`, each from a thread of its own; fails with the first that fails."""
    with ThreadPoolExecutor(max_workers=40) as threads:
        return list(threads.map(ask, range(40)))
