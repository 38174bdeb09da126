"""How fast does the rehearsal cloud answer with 200 instances and 5 buyers at once, and how big is it?

    python benchmarks/rehearsal_load.py [--seconds 20] [--instances 200] [--buyers 5]

Starts a real rehearsal cloud, and after it moto's own server as the peer; lets the buyers, one process each, with
plain boto3 and without pauses between their calls, buy until all instances run, and then measures. Times are of
HTTP alone, from botocore's `before-send` to its `before-parse`: the request is signed, the answer is here and not
parsed yet. The buyers' own parsing takes most of the CPU: 60 ms for all instances, to the server's 2. Memory is
without the instances' programs. Prints a table, and whether the targets are held; the exit status is 1 when one is
not. Everything that is started is ended.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
MARKET = ROOT / "include/market/three_zones.json"
REGION, ZONES, TYPE = "us-east-1", ("us-east-1a", "us-east-1b", "us-east-1c"), "g4dn.xlarge"
USER_DATA = "#!/bin/sh\nexec sleep 3600\n"
IMAGE = "ami-12c6146b"  # one that moto has
FLEET = 4
TARGET_MS, TARGET_MB = 100, 500
BUY = "CreateFleet (moto: RunInstances)"
PATIENCE_S = 180

Samples = list[tuple[str, float]]
"""What was asked, and the milliseconds that the answer took."""


@dataclass
class Buyer:
    """One customer with a client of its own; keeps the times of its calls."""

    url: str
    template: str | None
    name: str
    what: str = ""
    sent: float = 0.0
    samples: Samples = field(default_factory=list)
    mine: list[str] = field(default_factory=list)
    bought: int = 0

    def __post_init__(self) -> None:
        self.ec2 = client(self.url)
        self.ec2.meta.events.register("before-send.ec2", self._before_send)
        self.ec2.meta.events.register("before-parse.ec2", self._before_parse)

    def _before_send(self, **_: Any) -> None:
        self.sent = time.perf_counter()

    def _before_parse(self, **_: Any) -> None:
        self.samples.append((self.what, (time.perf_counter() - self.sent) * 1000))

    def call(self, what: str, method: str, **parameters: Any) -> Any:
        """One API call, its time kept under `what`."""
        self.what = what
        return getattr(self.ec2, method)(**parameters)

    def buy(self, count: int) -> None:
        """Buy instances: by CreateFleet from the rehearsal, by RunInstances from moto, which has no template here."""
        self.bought += 1
        tags = [{"Key": "buyer", "Value": self.name}, {"Key": "gpucost:job", "Value": f"{self.name}-{self.bought}"}]
        tagged = [{"ResourceType": "instance", "Tags": tags}]
        if self.template is None:
            answer = self.call(BUY, "run_instances", ImageId=IMAGE, MinCount=count, MaxCount=count,
                               InstanceType=TYPE, TagSpecifications=tagged)  # fmt: skip
            self.mine += [one["InstanceId"] for one in answer["Instances"]]
            return
        answer = self.call(
            BUY,
            "create_fleet",
            Type="instant",
            ClientToken=f"{self.name}-{self.bought}-{time.time_ns()}",
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateId": self.template, "Version": "$Latest"},
                    "Overrides": [{"InstanceType": TYPE, "AvailabilityZone": zone} for zone in ZONES],
                }
            ],
            TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": "spot"},
            SpotOptions={"AllocationStrategy": "price-capacity-optimized"},
            TagSpecifications=tagged,
        )
        if answer["Errors"]:
            raise RuntimeError(f"CreateFleet: {answer['Errors']}")
        self.mine += [one for group in answer["Instances"] for one in group["InstanceIds"]]

    def running(self) -> int:
        """How many instances run, of all buyers; the answer has every one of them."""
        states = [{"Name": "instance-state-name", "Values": ["running"]}]
        answer = self.call("DescribeInstances, all, by filter", "describe_instances", Filters=states)
        return sum(len(one["Instances"]) for one in answer["Reservations"])

    def look_around(self) -> None:
        """What a buyer asks between two purchases."""
        own = [{"Name": "tag:buyer", "Values": [self.name]}]
        self.running()
        self.call("DescribeInstances, own, by tag", "describe_instances", Filters=own)
        self.call("DescribeInstances, 4 ids", "describe_instances", InstanceIds=self.mine[:4])
        since = datetime.now(UTC) - timedelta(hours=6)
        self.call("DescribeSpotPriceHistory", "describe_spot_price_history", InstanceTypes=[TYPE], StartTime=since,
                  ProductDescriptions=["Linux/UNIX"])  # fmt: skip
        self.call("DescribeSpotInstanceRequests", "describe_spot_instance_requests")
        step = str(len(self.samples))
        self.call("CreateTags", "create_tags", Resources=self.mine[:1], Tags=[{"Key": "step", "Value": step}])


def client(url: str) -> Any:
    """Plain boto3, with no second tries that would hide slow answers."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "ec2",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id="AKIAREHEARSAL",
        aws_secret_access_key="rehearsal",  # noqa: S106 (no secret: the server takes any)
        config=Config(retries={"total_max_attempts": 1}),
    )


def customer(url: str, template: str | None, name: str, share: int, everybody: int, seconds: float) -> Samples:
    """One buyer process: buys its share while looking around, waits for the others, then is measured."""
    buyer = Buyer(url, template, name)
    while len(buyer.mine) < share:
        buyer.buy(min(FLEET, share - len(buyer.mine)))
    patience = time.monotonic() + PATIENCE_S
    while buyer.running() < everybody:
        if time.monotonic() > patience:
            raise RuntimeError(f"{name}: {everybody} instances do not run after {PATIENCE_S} s")
        time.sleep(0.2)
    buyer.samples.clear()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        buyer.look_around()
        oldest = buyer.mine.pop(0)
        buyer.call("TerminateInstances", "terminate_instances", InstanceIds=[oldest])
        buyer.buy(1)
    return buyer.samples


@dataclass
class Server:
    """A server under load and the most memory that its own processes took, in MB."""

    url: str
    processes: Callable[[], list[psutil.Process]]
    pss: float = 0.0
    rss: float = 0.0

    def look(self) -> None:
        """Keep the largest sizes seen."""
        own = self.processes()
        self.pss = max(self.pss, sum(_pss_mb(one.pid) for one in own))
        self.rss = max(self.rss, sum(one.memory_info().rss for one in own) / 1e6)


def _pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


@contextlib.contextmanager
def rehearsal(folder: Path, instances: int) -> Iterator[Server]:
    """A rehearsal cloud with capacity for everybody, in real time, its machines up after two seconds."""
    market = json.loads(MARKET.read_text(encoding="utf-8"))
    for pool in market["pools"]:
        pool["capacity"] = {"spot": instances, "on_demand": instances}
    market.pop("quotas", None)
    (folder / "market.json").write_text(json.dumps(market), encoding="utf-8")
    state = folder / "state"
    command = [sys.executable, "-m", "gpucost.rehearsal", "--state-dir", str(state), "--boot-s", "2"]
    command += ["--market", str(folder / "market.json")]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "plugins")}
    with running(command, env, folder / "rehearsal.log") as process:
        endpoint = state / "endpoint.json"
        wait_until(process, endpoint.is_file)
        server = psutil.Process(process.pid)

        def own() -> list[psutil.Process]:
            return [server, *(one for one in server.children() if _is_guard(one))]

        yield Server(json.loads(endpoint.read_text(encoding="utf-8"))["url"], own)


def _is_guard(process: psutil.Process) -> bool:
    """Whether a child of the server is its guard; all others are instances, or just being made into one."""
    try:
        return any(word.endswith(".guard") for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def peer(folder: Path) -> Iterator[Server]:
    """moto's own server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, {"PATH": os.environ["PATH"]}, folder / "moto.log") as process:

        def healthy() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(process, healthy)
        yield Server(f"http://127.0.0.1:{port}", lambda: [psutil.Process(process.pid)])


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is asked to end at the end, and made to when it does not; a failure comes with what it wrote."""
    with log.open("wb") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as process:
        try:
            yield process
        except Exception as error:
            error.add_note(log.read_text(encoding="utf-8")[-4000:])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    """Wait for a server to be ready."""
    end = time.monotonic() + 60
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args!r} has ended, or was not ready within 60 s")
        time.sleep(0.1)


def load(server: Server, template: str | None, buyers: int, instances: int, seconds: float) -> dict[str, list[float]]:
    """Let the buyers loose; the sorted times by what was asked."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            server.look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(buyers, mp_context=spawn) as pool:
            share = instances // buyers
            results = [
                pool.submit(customer, server.url, template, f"buyer-{n}", share, share * buyers, seconds)
                for n in range(buyers)
            ]
            samples = [sample for result in results for sample in result.result()]
    finally:
        done.set()
        watcher.join()
    times: dict[str, list[float]] = {}
    for what, milliseconds in samples:
        times.setdefault(what, []).append(milliseconds)
        times.setdefault("all calls", []).append(milliseconds)
    return {what: sorted(values) for what, values in times.items()}


def _p95(values: list[float]) -> float:
    return values[int(len(values) * 0.95)]


def show(ours: dict[str, list[float]], theirs: dict[str, list[float]], cloud: Server, moto: Server) -> bool:
    """Print the table; whether the targets are held."""
    columns = f"{'calls':>7}{'median':>8}{'p95':>8}"
    out = [f"{'milliseconds':34}{columns}   {'moto:':>5}{columns}{'ratio':>7}"]
    for what in sorted(ours, key=lambda one: (one == "all calls", one)):
        a, b = ours[what], theirs[what]
        out.append(
            f"{what:34}{len(a):7}{statistics.median(a):8.1f}{_p95(a):8.1f}   {len(b):12}{statistics.median(b):8.1f}"
            f"{_p95(b):8.1f}{statistics.median(b) / statistics.median(a):7.1f}x"
        )
    out.append(f"{'memory, MB: PSS (RSS)':34}{cloud.pss:15.0f} ({cloud.rss:.0f}){moto.pss:22.0f} ({moto.rss:.0f})")
    slow = [what for what, values in ours.items() if statistics.median(values) > TARGET_MS]
    held = not slow and cloud.pss < TARGET_MB
    out.append(f"median of every action within {TARGET_MS} ms: {'no: ' + ', '.join(slow) if slow else 'yes'}")
    out.append(f"under {TARGET_MB} MB beside the programs: {'yes' if cloud.pss < TARGET_MB else 'no'}")
    sys.stdout.write("\n".join(out) + "\n")
    return held


def main() -> int:
    """Load both servers, one after the other, and print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--buyers", type=int, default=5)
    given = parser.parse_args()
    busy = psutil.cpu_percent(interval=2)
    sys.stdout.write(f"{os.cpu_count()} cores, {busy:.0f} % of them busy with something else before the start\n")
    with tempfile.TemporaryDirectory(prefix="rehearsal-load-") as name:
        folder = Path(name)
        with rehearsal(folder, given.instances) as cloud:
            data = {"ImageId": IMAGE, "UserData": base64.b64encode(USER_DATA.encode()).decode()}
            made = client(cloud.url).create_launch_template(LaunchTemplateName="load", LaunchTemplateData=data)
            template = made["LaunchTemplate"]["LaunchTemplateId"]
            ours = load(cloud, template, given.buyers, given.instances, given.seconds)
        with peer(folder) as moto:
            theirs = load(moto, None, given.buyers, given.instances, given.seconds)
        return 0 if show(ours, theirs, cloud, moto) else 1


if __name__ == "__main__":
    sys.exit(main())
