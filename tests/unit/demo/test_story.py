"""The demo's story and promises, told from the books; its sites, its job's form, and its yardstick."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from demo import promises
from demo.job import DemoJob
from demo.promises import Evidence, Promise, check
from demo.reference import Reference, start_reference
from demo.sites import rehearsal_sites, write_sites
from demo.story import Story
from gpucost.capacity.lease import Attempt, Lease
from gpucost.capacity.sites import load_sites
from gpucost.job import CheckpointPlan, GpuNeed, TrainingJob
from gpucost.jobstore import ExitRecord, JobStore
from gpucost.lifecycle import settlement
from gpucost.money import Money
from gpucost.objects import Objects
from gpucost.reasons import Reason
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World

ROOT = Path(__file__).parents[3]
DIGEST = hashlib.sha256(b"weights").hexdigest()


def attempt(world: World, number: int, zone: str) -> Lease:
    services = world.services
    now = world.clock.now()
    services.leases.begin_attempt(Attempt(job=TASK.key, number=number, started_at=now))
    expires = now + timedelta(hours=5)
    order = services.buyer.intend(TASK.key, number, quote(pool(zone), "0.30", now), None, "me", expires)
    return services.buyer.buy(order)


@pytest.fixture
def finished(world: World) -> dict[str, Any]:
    """A job that was killed once at step 60, went on from step 50, and finished; returns its summary."""
    services = world.services
    world.begin()
    first = attempt(world, 1, "a")
    world.pass_hours(1.0)
    world.beat(first.id, step=60, saved_step=50, resumed_step=0)
    world.provider.interrupt(str(first.instance_id))
    settlement.settle_attempt(services, TASK.key, services.buyer.release(first, Reason.CANCELLED))
    second = attempt(world, 2, "b")
    world.pass_hours(1.0)
    results: dict[str, Any] = {"results": {"accuracy": 0.97}, "saved_step": 100, "weights_digest": DIGEST}
    world.exit(second.id, Reason.COMPLETED, **results)
    world.beat(second.id, step=100, saved_step=100, resumed_step=50)
    settlement.settle_attempt(services, TASK.key, services.buyer.release(second, Reason.COMPLETED))
    return settlement.finish(services, TASK.key, "me", Reason.COMPLETED) | {"mlflow_run_id": "run-1"}


# The story.


def test_each_event_is_told_once_and_in_order(world: World) -> None:
    world.begin()
    story = Story(world.services, TASK.key)
    assert (list(story.news()), story.status()) == ([], None)
    lease = attempt(world, 1, "a")
    kinds = [(event.kind, event.text) for event in story.news()]
    assert kinds == [
        ("lease", "asks for us-east-1a g4dn.xlarge spot at $0.3000/h"),
        ("lease", f"got {lease.instance_id}"),
    ]
    assert list(story.news()) == []
    world.pass_hours(0.5)
    world.beat(lease.id, step=60, saved_step=50, resumed_step=0, loss=0.25)
    assert [event.text for event in story.news()] == ["step 50 is safe"]
    assert "step 60/100" in (story.status() or "")
    assert "loss 0.2500  $0.1500 so far" in (story.status() or "")
    world.provider.interrupt(str(lease.instance_id))
    ended = world.services.buyer.release(lease, Reason.CANCELLED)
    settlement.settle_attempt(world.services, TASK.key, ended)
    news = list(story.news())
    assert [event.kind for event in news] == ["interruption", "charge"]
    assert news[0].text == f"{lease.instance_id} was taken away"


def test_a_purchase_that_was_given_up_unseen_is_named(world: World) -> None:
    world.begin()
    buyer = world.services.buyer
    order = buyer.intend(TASK.key, 1, quote(pool(), "0.30", START), None, "me", START + timedelta(hours=5))
    buyer.release(order, Reason.CANCELLED)
    told = [event.text for event in Story(world.services, TASK.key).news()]
    assert told[-1] == f"asks for the end of {order.id} (cancelled)"


def test_a_takeover_is_a_sentence_without_tokens(world: World) -> None:
    world.begin()
    lease = attempt(world, 1, "a")
    story = Story(world.services, TASK.key)
    list(story.news())
    world.services.leases.adopt(lease, "try-token-2", world.clock.now())
    assert [event.text for event in story.news()] == [f"a new try of the task takes {lease.instance_id} over"]


def test_the_result_s_rows_say_what_counted_and_what_was_lost(world: World, finished: dict[str, Any]) -> None:
    first, second = Story(world.services, TASK.key).attempts()
    assert (first.steps, first.lost, first.resumed_at, first.ended_because) == (50, 10, None, "interrupted")
    assert (second.steps, second.lost, second.resumed_at, second.ended_because) == (50, 0, 50, "completed")
    assert second.pool == "use1-az-b g4dn.xlarge spot"
    assert Money.usd(first.dollars + second.dollars) == world.services.books.job_cost(TASK.key)


# The promises.


class Services:
    """What the rehearsal cloud and MLflow answer."""

    def __init__(self, world: World) -> None:
        leases = world.services.leases.of_job(TASK.key)
        charges = world.services.books.charges(job=TASK.key)
        self.lines = [
            {"instance_id": next(one.instance_id for one in leases if one.id == charge.lease_id)}
            | {"amount": str(charge.amount.amount)}
            for charge in charges
        ]
        self.instances: list[dict[str, Any]] = [
            {"instance_id": one.instance_id, "state": "terminated", "tags": {"gpucost:job": TASK.key}} for one in leases
        ]
        self.instances.append({"instance_id": "i-other", "state": "running", "tags": {"gpucost:job": "d/other/t"}})
        self.run = {
            "info": {"status": "FINISHED"},
            "data": {"metrics": [{"key": "gpucost.cost_usd", "value": 0.65}]},
        }
        self.steps = list(range(1, 101))

    def get(self, url: str) -> Any:
        if url.endswith("/rehearsal/invoice"):
            return {"lines": self.lines}
        if url.endswith("/rehearsal/status"):
            return {"instances": self.instances}
        if "/runs/get?run_id=run-1" in url:
            return {"run": self.run}
        assert "metric_key=loss" in url
        return {"metrics": [{"step": step} for step in self.steps]}


@pytest.fixture
def outside(world: World, finished: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Services:
    services = Services(world)
    monkeypatch.setattr(promises, "_get", services.get)
    return services


@pytest.fixture
def evidence(world: World, finished: dict[str, Any]) -> Evidence:
    return Evidence(world.services, TASK.key, finished, 50, DIGEST, "http://cloud", "http://mlflow")


def broken(evidence: Evidence) -> list[Promise]:
    return [promise for promise in check(evidence) if not promise.kept]


def test_a_job_that_went_as_promised_keeps_every_promise(evidence: Evidence, outside: Services) -> None:
    kept = list(check(evidence))
    assert len(kept) == 8
    assert [promise for promise in kept if not promise.kept] == []
    assert kept[0].seen == "interrupted then completed"
    assert kept[1].seen == "resumed at step 50, 10 steps lost"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"checkpoint_steps": 9}, "went on from its checkpoint"),
        ({"reference_digest": "f" * 64}, "the final weights"),
    ],
)
def test_a_broken_promise_is_seen(evidence: Evidence, outside: Services, change: dict[str, Any], text: str) -> None:
    [promise] = broken(replace(evidence, **change))
    assert promise.text.startswith(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weights_digest": None}, "the final weights"),
        ({"results": {"accuracy": 0.94}}, "at least 95%"),
        ({"results": {}}, "at least 95%"),
        ({"mlflow_run_id": None}, "one MLflow run"),
    ],
)
def test_a_summary_that_falls_short_breaks_a_promise(
    evidence: Evidence, outside: Services, change: dict[str, Any], text: str
) -> None:
    [promise] = broken(replace(evidence, summary=evidence.summary | change))
    assert promise.text.startswith(text)


def test_what_the_services_say_can_break_a_promise(evidence: Evidence, outside: Services) -> None:
    outside.lines[0]["amount"] = "0.300001"
    outside.steps.append(100)
    outside.instances[1]["state"] = "running"
    texts = [promise.text.split(",")[0] for promise in broken(evidence)]
    assert texts == ["charged what the cloud invoices", "one MLflow run over both attempts", "no machine is left"]


def test_a_job_that_was_late_breaks_its_promise(world: World, evidence: Evidence, outside: Services) -> None:
    world.begin(deadline=START + timedelta(hours=1.5))
    [promise] = broken(evidence)
    assert (promise.text, promise.seen) == ("finished before its deadline", "-0.5 rehearsed hours to spare")


def test_a_service_that_answers_with_an_error_is_no_kept_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    request = httpx.Request("GET", "http://cloud")
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(500, request=request))
    with pytest.raises(httpx.HTTPStatusError):
        promises._get("http://cloud")


# Sites and form.


def test_the_rehearsal_s_site_is_one_that_gpucost_reads(tmp_path: Path) -> None:
    market = ROOT / "include" / "market" / "three_zones.json"
    path = write_sites(tmp_path, {"s3": "http://127.0.0.1:8333"}, market)
    [site] = load_sites(path).sites
    given = json.loads(market.read_text())
    assert list(site.zones) == [zone["name"] for zone in given["zones"]]
    assert set(site.instance_types) == {kind["name"] for kind in given["instance_types"]}
    assert site.store.endpoint == "http://127.0.0.1:8333"
    assert path.stat().st_mode & 0o077 == 0
    assert yaml.safe_load(path.read_text())["sites"] == rehearsal_sites(given, "http://127.0.0.1:8333")


def test_a_market_of_two_regions_is_two_sites(tmp_path: Path) -> None:
    market = ROOT / "include" / "market" / "small.json"
    sites = load_sites(write_sites(tmp_path, {"s3": "http://127.0.0.1:8333"}, market)).sites
    assert [site.region for site in sites] == ["us-east-1", "us-west-2"]
    assert all(zone.startswith(site.region) for site in sites for zone in site.zones)


def test_the_demo_s_form_is_a_job_that_is_killed_after_a_checkpoint_and_before_its_end() -> None:
    demo = DemoJob()
    form = demo.form
    job = TrainingJob(
        name=form["name"],
        code=form["code"],
        arguments=form["arguments"],
        gpu=GpuNeed(kinds=form["gpu_kinds"]),
        work_hours=form["work_hours"],
        launch_hours=form["launch_hours"],
        deadline=START + timedelta(hours=form["deadline_hours"]),
        budget=Money.usd(form["budget_usd"]),
        checkpoint=CheckpointPlan(every_steps=form["checkpoint_steps"]),
    )
    assert (ROOT / "include" / job.code / job.program).is_file()
    assert job.arguments == ("--epochs", "12", "--step-delay-ms", "150")
    assert demo.kill_at_step > demo.checkpoint_steps
    assert DemoJob(epochs=3).arguments[:2] == ["--epochs", "3"]


# The yardstick.


class Process:
    """A training that ends at once, or never."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends
        self.terminated = False

    def poll(self) -> int | None:
        return 0 if self.ends or self.terminated else None

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            raise subprocess.TimeoutExpired("training", timeout)
        return 0

    def terminate(self) -> None:
        self.terminated = True


def reference(*, ends: bool = True, record: ExitRecord | None = None) -> Reference:
    store = JobStore(Objects.in_memory(), "reference")
    if record is not None:
        store.write_exit(record)
    return Reference(Process(ends), store)  # type: ignore[arg-type]


def test_the_yardstick_is_the_digest_of_the_final_weights() -> None:
    done = ExitRecord(attempt=1, reason=Reason.COMPLETED, at=START, weights_digest=DIGEST)
    assert reference(record=done).digest(1) == DIGEST


@pytest.mark.parametrize(
    ("ends", "record", "words"),
    [
        (True, None, "no word"),
        (True, ExitRecord(attempt=1, reason=Reason.BAD_PROGRAM, at=START, message="no such file"), "no such file"),
        (False, None, "within 1 s"),
    ],
)
def test_a_yardstick_that_is_not_there_says_why(ends: bool, record: ExitRecord | None, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"the uninterrupted training did not finish.*{words}"):
        reference(ends=ends, record=record).digest(1)


def test_stopping_the_yardstick_ends_it_if_it_still_runs() -> None:
    for ends in (True, False):
        one = reference(ends=ends)
        one.stop()
        assert one.process.poll() == 0
        assert one.process.terminated is not ends  # type: ignore[attr-defined]


def test_the_yardstick_gets_its_orders_as_a_node_would_and_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    started: list[tuple[list[Path], dict[str, str]]] = []

    def popen(command: list[Path], *, cwd: Path, env: dict[str, str], stdout: Any, stderr: Any) -> Process:
        started.append((command, env))
        return Process(ends=True)

    monkeypatch.setattr(subprocess, "Popen", popen)
    code = ROOT / "include" / "programs" / "digits"
    one = start_reference(tmp_path, code, ("--epochs", "1"), Path(sys.executable), seed=7, stack_id="mine")
    [(command, env)] = started
    assert command == [Path(sys.executable), tmp_path / "agent.zip"]
    assert (tmp_path / "agent.zip").stat().st_size > 0
    assert "s3cr3t" not in " ".join(env.values())
    assert env["GPUCOST_STACK"] == "mine"
    store = JobStore(Objects.open(env["GPUCOST_STORE_URL"]), env["GPUCOST_JOB"])
    spec = store.spec()
    assert (spec.arguments, spec.seed, spec.gpu_count) == (("--epochs", "1"), 7, 0)
    assert store.code(spec.code_digest)
    assert [member.lease_id for member in store.attempt(int(env["GPUCOST_ATTEMPT"])).members] == [env["GPUCOST_LEASE"]]
    assert store.head().fence == 1
    assert one.store.key == env["GPUCOST_JOB"]
