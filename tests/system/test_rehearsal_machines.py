"""Machines of the rehearsal cloud as real processes: they outlive their cloud, and end when they must."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.system.rehearsal import SPEED, Cloud, launch, marked, wait_for

QUICK = ("--boot-s", "5")

COUNTER = """#!/usr/bin/env python
import json, os, time, urllib.request
base = os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]

def who_am_i():
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    request = urllib.request.Request(base + "latest/api/token", method="PUT", headers=ttl)
    token = urllib.request.urlopen(request, timeout=2).read().decode()
    request = urllib.request.Request(base + "latest/meta-data/instance-id", headers={"X-aws-ec2-metadata-token": token})
    return urllib.request.urlopen(request, timeout=2).read().decode()

count = 0
while True:
    count += 1
    try:
        name = who_am_i()
    except OSError:
        name = None
    with open("count.part", "w") as out:
        json.dump({"count": count, "pid": os.getpid(), "name": name}, out)
    os.replace("count.part", "count.json")
    time.sleep(0.05)
"""


class Site:
    """A state folder and the clouds that are started on it, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clouds: list[Cloud] = []

    def start(self, *arguments: str, port: int = 0) -> Cloud:
        cloud = launch(self.folder, *QUICK, *arguments, port=port)
        self.clouds.append(cloud)
        return cloud

    def restart(self, how: signal.Signals, *arguments: str) -> Cloud:
        """End the present cloud, and start another at its address."""
        last = self.clouds[-1]
        last.process.send_signal(how)
        last.process.wait(timeout=30)
        return self.start(*arguments, port=urlsplit(last.url).port or 0)

    def end(self) -> None:
        for cloud in self.clouds:
            if cloud.process.poll() is None:
                cloud.process.send_signal(signal.SIGINT)
                try:
                    cloud.process.wait(timeout=30)
                finally:
                    cloud.process.kill()
        found = list((self.folder / "instances").glob("i-*"))
        wait_for("no machine is left", lambda: not [path for path in found if marked(path.name)], 40)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()


def line_of(cloud: Cloud, instance_id: str) -> Any:
    (line,) = [one for one in cloud.get("status")["instances"] if one["instance_id"] == instance_id]
    return line


def wait_line(cloud: Cloud, instance_id: str, state: str, deadline_s: float = 15.0) -> Any:
    wait_for(f"{instance_id} {state}", lambda: line_of(cloud, instance_id)["state"] == state, deadline_s)
    return line_of(cloud, instance_id)


def billed_s(cloud: Cloud, instance_id: str) -> int:
    (line,) = [one for one in cloud.get("invoice")["lines"] if one["instance_id"] == instance_id]
    return int(line["seconds"])


def counted(cloud: Cloud, instance_id: str) -> Any:
    return json.loads(cloud.wait_file(instance_id, "count.json"))


def log_of(cloud: Cloud) -> str:
    return (cloud.state_dir / "server.log").read_text()


def test_a_machine_lives_from_its_launch_on(site: Site) -> None:
    cloud = site.start("--boot-s", "600")
    template = cloud.template("#!/bin/sh\necho up > started\nsleep 600\n")
    instance_id = cloud.one(template)
    wait_for("its first process", lambda: marked(instance_id), 2)
    assert line_of(cloud, instance_id)["state"] == "pending"
    (init,) = marked(instance_id)
    assert line_of(cloud, instance_id)["pid"] == init
    assert not (cloud.folder(instance_id) / "started").exists()
    cloud.wait_file(instance_id, "started")
    assert wait_line(cloud, instance_id, "running")["pid"] != init
    assert init in marked(instance_id)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_machines_go_on_over_a_restart_of_the_cloud(site: Site, how: signal.Signals) -> None:
    cloud = site.start()
    template = cloud.template(COUNTER)
    instance_id = cloud.one(template, spot=False)
    wait_for("it counts", lambda: counted(cloud, instance_id)["name"] == instance_id)
    before, seconds, pids = counted(cloud, instance_id), billed_s(cloud, instance_id), set(marked(instance_id))

    cloud = site.restart(how)
    line = line_of(cloud, instance_id)
    assert (line["state"], line["pid"]) == ("running", before["pid"])
    assert set(marked(instance_id)) == pids
    after = wait_for(
        "its metadata again", lambda: (found := counted(cloud, instance_id))["name"] == instance_id and found
    )
    assert after["pid"] == before["pid"]
    assert after["count"] > before["count"], "it went on meanwhile"
    assert billed_s(cloud, instance_id) > seconds

    cloud.ec2.terminate_instances(InstanceIds=[instance_id])
    wait_line(cloud, instance_id, "terminated")
    assert not marked(instance_id)


def test_a_machine_that_removed_its_disk_is_the_same_one_after_a_restart(site: Site, tmp_path: Path) -> None:
    boots = tmp_path / "boots"
    cloud = site.start()
    user_data = f'#!/bin/sh\necho boot >> {boots}\ncd /\nrm -rf "$HOME"\nsleep 600\n'
    instance_id = cloud.one(cloud.template(user_data), spot=False)
    wait_for("its disk is gone", lambda: boots.exists() and not cloud.folder(instance_id).exists())
    pids = set(marked(instance_id))
    cloud = site.restart(signal.SIGKILL)
    time.sleep(1.5)
    assert line_of(cloud, instance_id)["state"] == "running"
    assert set(marked(instance_id)) == pids
    assert boots.read_text() == "boot\n", "its user data ran once"
    cloud.ec2.terminate_instances(InstanceIds=[instance_id])
    wait_line(cloud, instance_id, "terminated")
    assert not marked(instance_id)


def test_a_machine_that_waited_for_its_boot_boots_without_its_cloud(site: Site) -> None:
    cloud = site.start("--boot-s", str(SPEED * 6))
    instance_id = cloud.one(cloud.template("#!/bin/sh\necho up >> started\nsleep 600\n"))
    wait_for("it is on", lambda: (cloud.folder(instance_id) / ".machine/init.pid").exists())
    assert line_of(cloud, instance_id)["state"] == "pending"
    cloud.process.kill()
    cloud.process.wait(timeout=30)
    assert cloud.wait_file(instance_id, "started") == "up\n"
    cloud = site.restart(signal.SIGKILL, "--boot-s", str(SPEED * 6))
    wait_line(cloud, instance_id, "running")
    time.sleep(0.5)
    assert (cloud.folder(instance_id) / "started").read_text() == "up\n", "it booted once"


def test_machines_end_when_no_cloud_comes_back_in_time(site: Site) -> None:
    cloud = site.start("--keep-machines-real-s", "2")
    instance_id = cloud.one(cloud.template(COUNTER), spot=False)
    counted(cloud, instance_id)
    cloud.process.kill()
    cloud.process.wait(timeout=30)
    time.sleep(1)
    assert marked(instance_id), "it is given some time"
    wait_for("the guard ends it", lambda: not marked(instance_id), 8)
    off = json.loads((site.folder / "powered-off.json").read_text())
    cloud = site.restart(signal.SIGKILL)
    line = wait_line(cloud, instance_id, "terminated")
    assert line["reason"] == "Server.InternalError"
    spec = cloud.get("clock")
    real = datetime.fromisoformat(off["at"]) - datetime.fromisoformat(spec["origin_real"])
    expected = datetime.fromisoformat(spec["origin"]) + real * spec["speed"]
    assert timedelta(0) <= expected - datetime.fromisoformat(line["ended"]) < timedelta(seconds=1)
    assert not (site.folder / "powered-off.json").exists()


def test_ctrl_c_ends_machines_in_the_books_too(site: Site) -> None:
    cloud = site.start()
    instance_id = cloud.one(cloud.template(COUNTER), spot=False)
    counted(cloud, instance_id)
    cloud = site.restart(signal.SIGINT)
    line = line_of(cloud, instance_id)
    assert line["state"] == "terminated"
    seconds = billed_s(cloud, instance_id)
    time.sleep(0.2)
    assert billed_s(cloud, instance_id) == seconds
    assert not marked(instance_id)


def test_a_guard_that_is_asked_to_end_after_its_cloud_ends_machines_at_once(site: Site) -> None:
    cloud = site.start("--keep-machines-real-s", "600")
    instance_id = cloud.one(cloud.template(COUNTER))
    counted(cloud, instance_id)
    guard = wait_for("the guard", lambda: (site.folder / "guard.json").exists() and site.folder / "guard.json")
    pid = json.loads(guard.read_text())["pid"]
    os.kill(pid, signal.SIGTERM)
    time.sleep(1.5)
    assert marked(instance_id), "not while its cloud lives"
    cloud.process.kill()
    cloud.process.wait(timeout=30)
    wait_for("no process is left", lambda: not marked(instance_id), 8)


def test_user_data_that_cannot_be_run_leaves_the_machine_up_and_says_so(site: Site) -> None:
    cloud = site.start()
    instance_id = cloud.one(cloud.template("echo no interpreter is named\n"))
    wait_line(cloud, instance_id, "running")
    wait_for("a line on the console", lambda: "user data cannot be run" in cloud.wait_file(instance_id, "console.log"))
    assert "expected #! and an interpreter" in log_of(cloud)
    assert marked(instance_id)


def test_user_data_has_a_process_group_and_signals_of_its_own(site: Site) -> None:
    cloud = site.start()
    probe = """#!/usr/bin/env python
import json, os, signal
names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE"]
ignored = [name for name in names if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
ours = [os.getpid() == os.getpgrp(), os.getpid() == os.getsid(0)]
print("to the console", flush=True)
with open("seen.part", "w") as out:
    json.dump({"ignored": ignored, "ours": ours, "input": os.readlink("/proc/self/fd/0")}, out)
os.rename("seen.part", "seen.json")
os.killpg(0, signal.SIGTERM)
"""
    instance_id = cloud.one(cloud.template(probe))
    seen = json.loads(cloud.wait_file(instance_id, "seen.json"))
    assert seen == {"ignored": ["SIGPIPE"], "ours": [True, True], "input": "/dev/null"}, "Python ignores SIGPIPE itself"
    wait_for("its end is told", lambda: f"{instance_id} user data ended with 143" in log_of(cloud))
    assert "to the console" in (cloud.folder(instance_id) / "console.log").read_text()
    assert line_of(cloud, instance_id)["state"] == "running"


HUNGRY = """#!/bin/sh
sleep 600 &
python -c 'import time; kept = b"x" * 200_000_000; time.sleep(600)'
echo "ended with $?" > ended
sleep 600
"""


def test_what_takes_more_memory_than_the_machine_has_is_killed(site: Site) -> None:
    cloud = site.start("--memory-mib", "128")
    instance_id = cloud.one(cloud.template(HUNGRY))
    assert cloud.wait_file(instance_id, "ended") == "ended with 137\n"
    console = (cloud.folder(instance_id) / "console.log").read_text()
    assert "Out of memory: Killed process" in console
    assert "(python" in console
    assert "Out of memory" in log_of(cloud)
    assert line_of(cloud, instance_id)["state"] == "running"


def test_nobody_is_billed_before_the_first_process_lives(site: Site) -> None:
    cloud = site.start("--speed", "3600")
    answer = cloud.buy(cloud.template("#!/bin/sh\nsleep 600\n"), count=16)
    ids = [each for group in answer["Instances"] for each in group["InstanceIds"]]
    assert len(ids) > 4
    wait_for("all are on", lambda: all((cloud.folder(each) / ".machine/init.pid").exists() for each in ids))
    spec = cloud.get("clock")
    origin_real, origin = datetime.fromisoformat(spec["origin_real"]), datetime.fromisoformat(spec["origin"])
    for each in ids:
        init = psutil.Process(int((cloud.folder(each) / ".machine/init.pid").read_text()))
        launched = cloud.show(each)["LaunchTime"]
        real = origin_real + (launched - origin) / spec["speed"]
        # the kernel tells births to its tick of 10 ms, and whole rehearsal seconds are rounded down
        early = datetime.fromtimestamp(init.create_time(), UTC) - real
        assert early < timedelta(seconds=0.02), "its launch is the birth of its first process, not its sale"


def test_a_guest_cannot_keep_others_from_being_looked_after(site: Site) -> None:
    cloud = site.start()
    requests = site.folder / "requests"
    nasty = cloud.one(cloud.template(f"#!/bin/sh\nmkdir {requests}/${{PWD##*/}}\necho done > done\nsleep 600\n"))
    cloud.wait_file(nasty, "done")
    assert (requests / nasty).is_dir()
    other = cloud.one(cloud.template("#!/bin/sh\nshutdown -h now\n"))
    wait_line(cloud, other, "terminated")
    cloud.ec2.terminate_instances(InstanceIds=[nasty])
    wait_line(cloud, nasty, "terminated")
    assert cloud.get("health") == {"status": "ok"}


@pytest.mark.parametrize("command", ["poweroff", "halt -p", "shutdown -P now"])
def test_a_spot_instance_that_powers_itself_off_is_terminated_whatever_its_template_says(
    site: Site, command: str
) -> None:
    cloud = site.start()
    template = cloud.template(f"#!/bin/sh\n{command}\n", InstanceInitiatedShutdownBehavior="stop")
    instance_id = cloud.one(template)
    assert wait_line(cloud, instance_id, "terminated")["reason"] == "Client.InstanceInitiatedShutdown"


def test_a_halted_machine_stands_still_and_goes_on_costing(site: Site) -> None:
    cloud = site.start()
    instance_id = cloud.one(cloud.template("#!/bin/sh\n(while :; do date >> ticks; sleep 0.1; done) &\nhalt\n"))
    console = wait_for("it says so", lambda: "System halted" in cloud.wait_file(instance_id, "console.log"))
    assert console
    time.sleep(0.5)
    ticks, seconds = (cloud.folder(instance_id) / "ticks").read_text(), billed_s(cloud, instance_id)
    time.sleep(1)
    assert (cloud.folder(instance_id) / "ticks").read_text() == ticks
    assert line_of(cloud, instance_id)["state"] == "running"
    assert billed_s(cloud, instance_id) > seconds
    cloud.ec2.terminate_instances(InstanceIds=[instance_id])
    wait_line(cloud, instance_id, "terminated")
    assert not marked(instance_id)
