"""Training while its store misbehaves: a real S3 server behind a proxy that breaks requests, and a full disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from demo.health import BUCKET
from demo.settings import StackSettings
from demo.stack import Stack
from gpucost.clock import ClockSpec, ManualClock
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import JobSpec, JobStore, Phase
from gpucost.objects import Objects, StoreError
from gpucost.training.checkpoints.engine import Checkpoints
from gpucost.training.checkpoints.parts import checked
from gpucost.training.outage import patiently, store_errors
from gpucost.training.workdir import Progress, Workdir
from tests.fakes.s3_proxy import Fault, Mode, S3Proxy

PART = 64 * 1024
PLUGINS = Path(__file__).parents[2] / "plugins"


@dataclass(frozen=True)
class Server:
    """The real S3 server, and who may use it."""

    url: str
    access_key: str
    secret_key: str

    def objects(self, endpoint: str, prefix: str) -> Objects:
        """The objects under a prefix, by way of `endpoint`."""
        session = boto3.Session(aws_access_key_id=self.access_key, aws_secret_access_key=self.secret_key)
        return Objects.open(f"s3://{BUCKET}/{prefix}", endpoint=endpoint, region="us-east-1", session=session)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The stack's S3 server without the rest of the stack."""
    stack = Stack(StackSettings(home=tmp_path_factory.mktemp("s3"), services=("s3",), any_ports=True))
    stack.up()
    try:
        keys = stack.credentials().store
        yield Server(stack.addresses()["s3"], keys.access_key, keys.secret_key)
    finally:
        stack.down()


@pytest.fixture
def proxy(server: Server) -> Iterator[S3Proxy]:
    """A proxy before it, seeded, that lets everything through until it is told otherwise."""
    with S3Proxy(server.url, seed=20261130, delay=0.2) as started:
        yield started


class Training:
    """One job's checkpoints by way of the proxy, and what really lies in the store."""

    def __init__(self, server: Server, proxy: S3Proxy, name: str) -> None:
        self.warnings: list[str] = []
        self.clean = JobStore(server.objects(server.url, name), "job")
        self.clean.claim(1)
        self.proxied = JobStore(server.objects(proxy.url, name), "job")
        self.engine = self._engine(self.proxied)

    def save(self, step: int) -> None:
        self.engine.save(state(step), {"random": step * 7}, step=step, epoch=0)

    def restored(self, store: JobStore) -> int:
        """The step of the state that comes back; it is that very state."""
        found = patiently(self._engine(store).restore, self.warnings.append)
        assert found is not None
        manifest, shared, own = found
        expected = state(manifest.step)
        assert shared.keys() == expected.keys()
        assert torch.equal(shared["weights"], expected["weights"])
        assert (shared["step"], own) == (manifest.step, {"random": manifest.step * 7})
        return manifest.step

    def newest_is_whole(self) -> bool:
        """Whether every part of the newest checkpoint lies in the store as it was written."""
        manifest = self.clean.manifest(self.clean.head().checkpoints[0])
        return all(checked(self.clean.objects, part) for part in manifest.parts)

    def folders(self) -> set[str]:
        """The steps of which anything lies in the store."""
        return {stat.key.split("/")[3] for stat in self.clean.objects.scan("jobs/job/checkpoints")}

    def _engine(self, store: JobStore) -> Checkpoints:
        clock = ManualClock(datetime(2026, 11, 30, tzinfo=UTC))
        return Checkpoints(store, 1, clock, part_bytes=PART, warn=self.warnings.append)


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"step": step, "weights": torch.rand(30_000, generator=generator)}


def test_in_a_rain_of_faults_what_comes_back_is_what_was_saved(server: Server, proxy: S3Proxy) -> None:
    training = Training(server, proxy, "rain")
    training.save(1)
    proxy.rain(0.3)
    reported, failed = 1, list[str]()
    for step in range(2, 42):
        try:
            training.save(step)
            reported = step
        except store_errors() as error:
            failed.append(str(error))
        assert training.newest_is_whole()
        assert reported <= training.restored(training.proxied if step % 4 == 0 else training.clean) <= step
    proxy.rain(0)
    training.save(100)
    assert set(proxy.faults) == set(Fault)
    assert len(failed) < 20
    assert all("\n" not in line for line in failed)
    assert training.restored(training.proxied) == 100
    # Nothing is left of what failed, or was replaced while answers were lost.
    assert training.folders() == {key.split("/")[3] for key in training.clean.head().checkpoints}
    assert not [line for line in training.warnings if "is torn" in line]


def test_a_short_absence_in_the_middle_of_a_save_is_not_even_noticed(server: Server, proxy: S3Proxy) -> None:
    training = Training(server, proxy, "short")
    with away_once(proxy, lambda: threading.Timer(2.5, proxy.set, (Mode.OPEN,)).start()):
        training.save(1)
    assert training.restored(training.proxied) == 1


def test_a_long_absence_in_the_middle_of_a_save_costs_that_save_only(server: Server, proxy: S3Proxy) -> None:
    training = Training(server, proxy, "long")
    training.save(1)
    with away_once(proxy, lambda: None), pytest.raises(StoreError, match="error sending request") as away:
        training.save(2)
    assert "\n" not in str(away.value)
    proxy.set(Mode.OPEN)
    assert training.restored(training.proxied) == 1
    training.save(3)
    assert training.restored(training.proxied) == 3
    assert training.folders() == {"000000000001-0001", "000000000003-0001"}


@contextmanager
def away_once(proxy: S3Proxy, then: Callable[[], None]) -> Iterator[None]:
    """The server goes away when the third part is sent."""
    parts = 0

    def gone(method: str, path: str) -> bool:
        nonlocal parts
        parts += method == "PUT" and path.endswith(".part")
        if parts == 3:
            proxy.set(Mode.REFUSE)
            then()
        return parts == 3

    proxy.once(Fault.SILENT, gone)
    yield
    assert parts >= 3


@pytest.mark.parametrize("document", ["manifest.json", "head.json"])
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.SILENT, Fault.CUT_UPLOAD])
def test_a_lost_answer_leaves_the_store_in_order(server: Server, proxy: S3Proxy, document: str, fault: Fault) -> None:
    training = Training(server, proxy, f"lost-{document}-{fault.name}")
    for step in (1, 2):
        training.save(step)
    proxy.once(fault, lambda method, path: method == "PUT" and path.endswith(document))
    training.save(3)
    assert proxy.faults == {fault: 1}
    assert training.restored(training.clean) == 3
    assert training.folders() == {"000000000002-0001", "000000000003-0001"}


def test_a_garbled_answer_is_not_taken_for_damage_in_the_store(server: Server, proxy: S3Proxy) -> None:
    training = Training(server, proxy, "garbled")
    training.save(1)
    training.save(2)
    for name in ("head.json", "manifest.json", ".part"):
        proxy.once(Fault.SHORTEN, lambda method, path, name=name: method == "GET" and path.endswith(name))  # type: ignore[misc]
    assert training.restored(training.proxied) == 2
    assert proxy.faults == {Fault.SHORTEN: 3}
    assert training.warnings == []


PROGRAM = textwrap.dedent(
    """
    import time
    import torch
    from gpucost.training import checkpointed, prepare

    prepare()
    model = torch.nn.Linear(2000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    with checkpointed(model, optimizer, epochs=1) as run:
        for epoch in run.epochs():
            for batch in run.batches(20_000, 1):
                loss = model(torch.rand(1, 2000)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.05)
                run.step(loss=loss)
    """
)


class Program:
    """A training program on a node, without the agent."""

    def __init__(self, folder: Path, server: Server, endpoint: str) -> None:
        self.store = JobStore(server.objects(server.url, "program"), "job")
        self.store.claim(1)
        self.workdir = Workdir(folder / "node")
        job = JobId(dag_id="d", run_id="r", task_id="t")
        plan = CheckpointPlan(every_steps=10)
        self.workdir.write_job(
            JobSpec(job_id=job, name="t", code_digest="0", program="train.py", checkpoint=plan, clock=ClockSpec.real())
        )
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPUCOST", "AWS"))}
        environ |= {
            "PYTHONPATH": str(PLUGINS),
            "GPUCOST_STORE_URL": f"s3://{BUCKET}/program",
            "GPUCOST_STORE_ENDPOINT": endpoint,
            "GPUCOST_STORE_REGION": "us-east-1",
            "GPUCOST_JOB": "job",
            "GPUCOST_ATTEMPT": "1",
            "GPUCOST_WORKDIR": str(self.workdir.path),
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
        }
        self._log = folder / "program.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ, stdout=log, stderr=log)

    def wait_for(self, what: Callable[[Progress], bool], seconds: float = 240) -> Progress:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log()
            if (progress := self.workdir.progress()) and what(progress):
                return progress
            time.sleep(0.05)
        pytest.fail(f"waited {seconds} s; progress: {self.workdir.progress()}\n{self.log()}")

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def program(tmp_path: Path, server: Server, proxy: S3Proxy) -> Iterator[Program]:
    """A training by way of the proxy."""
    started = Program(tmp_path, server, proxy.url)
    yield started
    started.process.kill()
    started.process.wait()


def test_the_store_away_for_a_minute_costs_no_step_and_no_memory(program: Program, proxy: S3Proxy) -> None:
    before = program.wait_for(lambda progress: (progress.saved_step or 0) >= 60)
    memory = program.memory()
    proxy.set(Mode.BLACK_HOLE)
    time.sleep(30)
    proxy.set(Mode.REFUSE)
    time.sleep(30)
    during = program.wait_for(lambda progress: progress.phase in (Phase.TRAINING, Phase.SAVING))
    assert during.step >= before.step + 20  # It trained on, between saves that failed.
    assert (during.saved_step or 0) <= before.step + 10
    proxy.set(Mode.OPEN)
    saved = program.wait_for(lambda progress: (progress.saved_step or 0) > during.step).saved_step
    program.wait_for(lambda progress: (progress.saved_step or 0) >= (saved or 0) + 30)
    # One save's parts, kept by each that failed, would be more.
    assert program.memory() < memory + 40_000_000
    assert program.store.manifest(program.store.head().checkpoints[0]).step > during.step
    said = [line for line in program.log().splitlines() if "could not be saved; training goes on" in line]
    assert len(said) >= 2
    assert "Debug source" not in program.log()
    assert "Traceback" not in program.log()


DISK_PROGRAM = textwrap.dedent(
    """
    import json, resource, sys
    from pathlib import Path
    import torch
    from gpucost.jobstore import JobStore
    from gpucost.objects import Objects
    from gpucost.training import checkpointed, prepare

    folder, how = Path(sys.argv[1]), sys.argv[2]
    store = JobStore(Objects.open((folder / "checkpoints").as_uri()), "local")
    filler = folder / "somebody-elses-data"
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
            return
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def make_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        filler.unlink(missing_ok=True)

    def look(moment):
        whole = [store.manifest(key).step for key in store.head().checkpoints]
        files = sorted(path.parent.name for path in folder.rglob("*.part*"))
        print(json.dumps({"moment": moment, "whole": whole, "folders": sorted(set(files))}), flush=True)

    prepare()
    model = torch.nn.Linear(1000, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with checkpointed(model, optimizer, epochs=1, every_steps=10, folder=folder / "checkpoints") as run:
        for epoch in run.epochs():
            for batch in run.batches(60, 1):
                loss = model(torch.rand(1, 1000)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
                if run.steps == 25:
                    look("before")
                    fill()
                if run.steps == 45:
                    look("full")
                    make_room()
        run.finish({"loss": loss})
        look("after")
    """
)


def test_on_a_full_disk_saves_fail_clearly_and_training_goes_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUCOST")}
    done = subprocess.run(
        on_a_small_disk(disk, [sys.executable, "-c", DISK_PROGRAM]),
        env=environ | {"PYTHONPATH": str(PLUGINS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    looks = {line["moment"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert looks["before"]["whole"] == looks["full"]["whole"] == [20, 10]
    # What the failed saves had written is gone: it would keep the disk full.
    assert looks["full"]["folders"] == ["000000000010-0001", "000000000020-0001"]
    assert looks["after"]["whole"] == [60, 50]
    failed = [line for line in done.stderr.splitlines() if "could not be saved; training goes on" in line]
    assert ["step 30" in failed[0], "step 40" in failed[1], len(failed)] == [True, True, 2]
    assert all("No space left on device" in line or "File too large" in line for line in failed)
    assert "Traceback" not in done.stderr


def on_a_small_disk(folder: Path, program: list[str]) -> list[str]:
    """The command that runs `program FOLDER HOW` where a real disk is small, or a real limit takes its place.

    A file system of its own needs a namespace, which some machines forbid. There the program limits the size of its
    files instead: a write then fails half done, too, if with another error.
    """
    mounted = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=8m none "$0" && exec "$@"', str(folder)]
    if shutil.which("unshare") and subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode == 0:
        return [*mounted, *program, str(folder), "disk"]
    return [*program, str(folder), "limit"]
