"""The demo's job: trigger the DAG, watch it, hold it to its promises, show the result."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr
from rich.console import Console

from gpucost.job import JobId
from gpucost.lifecycle.opening import AwsAccess, Connections, open_services
from gpucost.lifecycle.services import Services

from .airflow_api import FINISHED, AirflowApi, AirflowError
from .credentials import KeyPair
from .earlier import RUN_PREFIX, end_earlier
from .environment import BUCKET, REGION
from .promises import Evidence, Promise, check
from .reference import Reference, start_reference
from .settings import StackError
from .stack import Stack
from .story import Story
from .timeline import Timeline, result_table

DAG_ID, TASK_ID = "spot_training", "train"
LONGEST_SECONDS = 280.0
"""Real seconds after which the demo's job counts as stuck."""
API_PATIENCE = 60.0
"""Real seconds that the api-server may be away, e.g. for a restart, while the job runs on."""


@dataclass(frozen=True)
class DemoJob:
    """What the demo trains, and when the rehearsal cloud takes its first machine away."""

    epochs: int = 12
    step_delay_ms: int = 150
    kill_at_step: int = 170
    checkpoint_steps: int = 50

    @property
    def arguments(self) -> list[str]:
        """The program's arguments; the delay stands in for a model that keeps a GPU busy."""
        return ["--epochs", str(self.epochs), "--step-delay-ms", str(self.step_delay_ms)]

    @property
    def form(self) -> dict[str, Any]:
        """What a person would fill into the DAG's form."""
        return {
            "name": "digits",
            "code": "programs/digits",
            "arguments": self.arguments,
            "gpu_kinds": ["T4"],
            "work_hours": 1.7,
            "launch_hours": 0.25,
            "deadline_hours": 8,
            "budget_usd": "5.00",
            "checkpoint_steps": self.checkpoint_steps,
        }


def services_of(stack: Stack) -> Services:
    """gpucost's rooms, opened with the stack's own addresses and keys."""
    addresses, keys = stack.addresses(), stack.credentials()
    return open_services(
        Connections(
            database_url=SecretStr(stack.settings.database_url),
            sites_file=stack.settings.home / "sites.yaml",
            clock_url=f"{addresses['rehearsal']}/rehearsal/clock",
            aws=_access(keys.cloud, addresses["rehearsal"]),
            store=_access(keys.store, addresses["s3"]),
            store_url=f"s3://{BUCKET}",
            mlflow_uri=addresses["mlflow"],
        )
    )


def run_demo(stack: Stack, console: Console, demo: DemoJob | None = None) -> bool:
    """Run the job on a stack that is up, and print its story and its result.

    Returns:
        Whether every promise was kept.
    """
    demo = demo or DemoJob()
    services = services_of(stack)
    addresses = stack.addresses()
    with _api(stack) as airflow, _reference(stack, demo) as reference:
        job = _begin(airflow, addresses["rehearsal"], demo)
        summary = _watch(airflow, services, job, console)
        evidence = Evidence(
            services=services,
            job=job.key,
            summary=summary,
            checkpoint_steps=demo.checkpoint_steps,
            reference_digest=reference.digest(timeout=120),
            rehearsal=addresses["rehearsal"],
            mlflow=addresses["mlflow"],
        )
    promises = list(check(evidence))
    _show(console, Story(services, job.key), summary, promises)
    _show_pages(console, stack, services, job, summary)
    return all(promise.kept for promise in promises)


def _begin(airflow: AirflowApi, rehearsal: str, demo: DemoJob) -> JobId:
    """Trigger the DAG as a person would, and tell the cloud when to take the machine away."""
    airflow.wait_for_dag(DAG_ID)
    airflow.unpause(DAG_ID)
    end_earlier(airflow, DAG_ID, print)
    run_id = f"{RUN_PREFIX}{int(time.time())}"
    job = JobId(dag_id=DAG_ID, run_id=run_id, task_id=TASK_ID)
    rule = {"job": job.key, "step": demo.kill_at_step, "event": "no-notice", "times": 1}
    httpx.post(f"{rehearsal}/rehearsal/script", json={"rules": [rule]}, trust_env=False).raise_for_status()
    airflow.trigger(DAG_ID, demo.form, run_id)
    return job


class WatchedRun:
    """The state of the demo's run, also over a restart of the api-server.

    Args:
        airflow: the api.
        run_id: the run.
        monotonic: counts real seconds.
    """

    def __init__(self, airflow: AirflowApi, run_id: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._airflow = airflow
        self._run_id = run_id
        self._monotonic = monotonic
        self._heard = monotonic()
        self._state = "queued"

    def state(self) -> str:
        """The state that Airflow tells, or told last.

        Raises:
            AirflowError, httpx.HTTPError: it has told none for a long time.
        """
        try:
            self._state = self._airflow.run(DAG_ID, self._run_id).state
        except (httpx.HTTPError, AirflowError):
            if self._monotonic() - self._heard > API_PATIENCE:
                raise
        else:
            self._heard = self._monotonic()
        return self._state


def _watch(airflow: AirflowApi, services: Services, job: JobId, console: Console) -> dict[str, Any]:
    """Show what happens until the DAG run ends.

    Returns:
        What the task returned.

    Raises:
        StackError: the run failed, or took far too long; with the end of the task's log.
    """
    story = Story(services, job.key)
    watched = WatchedRun(airflow, job.run_id)
    give_up = time.monotonic() + LONGEST_SECONDS
    with Timeline(console=console) as timeline:
        while True:
            for event in story.news():
                timeline.event(event)
            if status := story.status():
                timeline.status(status)
            state = watched.state()
            if state in FINISHED or time.monotonic() > give_up:
                break
            time.sleep(1.0)
        for event in story.news():
            timeline.event(event)
    if state != "success":
        tail = "\n".join(airflow.task_log(DAG_ID, job.run_id, TASK_ID, lines=25))
        raise StackError(f"the run {job.run_id} is {state}, expected success; the end of the task's log:\n{tail}")
    path = f"/dags/{DAG_ID}/dagRuns/{job.run_id}/taskInstances/{TASK_ID}/xcomEntries/return_value"
    value: dict[str, Any] = airflow.request("GET", path)["value"]
    return value


def _show(console: Console, story: Story, summary: dict[str, Any], promises: list[Promise]) -> None:
    console.print()
    console.print(result_table(story.attempts()))
    saved = summary["savings"]
    console.print(
        f"\ncost ${summary['cost']}, on demand ${summary['on_demand']}: saved {saved:.0%}"
        f"   accuracy on held-out digits {summary['results']['accuracy']:.2%}\n",
        highlight=False,
    )
    for promise in promises:
        mark = "[green]kept  [/]" if promise.kept else "[bold red]BROKEN[/]"
        console.print(f"{mark} {promise.text} ({promise.seen})", highlight=False)


def _show_pages(console: Console, stack: Stack, services: Services, job: JobId, summary: dict[str, Any]) -> None:
    addresses = stack.addresses()
    run = f"{addresses['airflow']}/dags/{DAG_ID}/runs/{job.run_id}"
    page = services.tracker.page(summary["mlflow_run_id"]) if services.tracker and summary["mlflow_run_id"] else ""
    console.print(f"\nAirflow  {run}", highlight=False, soft_wrap=True)
    for user, password in stack.credentials().passwords.items():
        console.print(f"         login {user} / {password}", highlight=False, soft_wrap=True)
    console.print(f"MLflow   {page}", highlight=False, soft_wrap=True)
    console.print("The pages stay up; `make down` ends everything.", highlight=False)


def _api(stack: Stack) -> AirflowApi:
    api = AirflowApi(stack.addresses()["airflow"], "admin", stack.credentials().passwords["admin"])
    api.login()
    return api


@contextmanager
def _reference(stack: Stack, demo: DemoJob) -> Iterator[Reference]:
    """The uninterrupted training, beside the job; without the delay, which changes no weight."""
    code = stack.settings.repository / "include" / "programs" / "digits"
    with tempfile.TemporaryDirectory(prefix="reference-", dir=stack.settings.home) as folder:
        reference = start_reference(
            Path(folder),
            code,
            ("--epochs", str(demo.epochs)),
            stack.settings.python,
            stack_id=stack.stack_id,
        )
        try:
            yield reference
        finally:
            reference.stop()


def _access(keys: KeyPair, endpoint: str) -> AwsAccess:
    return AwsAccess(
        access_key=keys.access_key, secret_key=SecretStr(keys.secret_key), region=REGION, endpoint=endpoint
    )
