"""Machines of the rehearsal cloud as a user meets them: user data, metadata, interruptions, the invoice, restarts."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.system.rehearsal import ROOT, SLEEPER, SPEED, TYPE, ZONES, Cloud, launch, marked, wait_for


@pytest.fixture(autouse=True)
def _no_leftovers(no_leftovers: None) -> None:
    """Every test leaves the shared cloud empty."""


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
    cloud.post("script", {"rules": [{"job": "scripted-*", "step": 40, "event": "no-notice", "times": 1}]})
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
    cloud.post("interrupt", {"instance_id": instance_id, "event": "notice"})
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
    cloud.post("interrupt", {"instance_id": bought["interrupted"], "event": "no-notice"})
    time.sleep(1.5)
    cloud.ec2.terminate_instances(InstanceIds=[bought["spot"], bought["on-demand"]])
    invoice = cloud.get("invoice")
    amounts = {line["instance_id"]: Decimal(line["amount"]) for line in invoice["lines"]}
    for name, instance_id in bought.items():
        assert amounts[instance_id] == hand_computed(cloud, cloud.wait_state(instance_id, "terminated")), name
    assert amounts[bought["spot"]] > 0
    assert amounts[bought["interrupted"]] == 0
    assert Decimal(invoice["compute_total"]) == sum(amounts.values())
    assert Decimal(invoice["total"]) == Decimal(invoice["compute_total"]) + Decimal(invoice["disk_total"])
    with urllib.request.urlopen(f"{cloud.url}/rehearsal/invoice.csv", timeout=10) as response:  # noqa: S310
        assert response.headers["Content-Type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(response.read().decode())))
    billed = {row["lineItem/ResourceId"] for row in rows}
    assert {bought["spot"], bought["on-demand"]} <= billed
    assert bought["interrupted"] not in billed, "a free first hour leaves no row"


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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_cloud_for_long(tmp_path: Path, how: signal.Signals) -> None:
    short = launch(tmp_path, "--keep-machines-real-s", "1")
    try:
        user_data = "#!/bin/sh\ntrap '' TERM\nsetsid sleep 600 &\necho up > started\nsleep 600\n"
        instance_id = short.one(short.template(user_data))
        short.wait_file(instance_id, "started")
        assert len(marked(instance_id)) >= 2
        short.process.send_signal(how)
        short.process.wait(timeout=30)
        if how == signal.SIGINT:
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
