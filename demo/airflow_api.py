"""A small client of Airflow's REST API: what the demo and the system tests need."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import httpx
from pydantic import BaseModel, ConfigDict

FINISHED = ("success", "failed")


class AirflowError(Exception):
    """Airflow refused a request; the message holds method, path, status and what it answered."""


class TaskInstance(BaseModel):
    """One task of a run, as the API shows it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    task_id: str
    map_index: int = -1
    state: str | None
    try_number: int
    start_date: str | None = None
    end_date: str | None = None


class DagRun(BaseModel):
    """One run of a DAG, as the API shows it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    dag_id: str
    dag_run_id: str
    state: str
    run_after: str


@dataclass
class AirflowApi:
    """Talks to the api-server as one user; logs in when it must, and again when its token has run out.

    Args:
        url: the api-server's address.
        user: name.
        password: password.
        client: for tests; by default one that ignores the proxies of the environment.
    """

    url: str
    user: str
    password: str = field(repr=False)
    client: httpx.Client | None = None

    def __post_init__(self) -> None:
        self._http = self.client or httpx.Client(base_url=self.url, timeout=30.0, trust_env=False)
        self._token: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def login(self) -> None:
        """Get a token.

        Raises:
            AirflowError: name or password are wrong.
        """
        answer = self._http.post("/auth/token", json={"username": self.user, "password": self.password})
        self._token = str(_checked(answer)["access_token"])

    def request(self, method: str, path: str, **arguments: Any) -> Any:
        """Any call below /api/v2; returns the JSON of the answer.

        Raises:
            AirflowError: the answer is no success.
        """
        if self._token is None:
            self.login()
        answer = self._send(method, path, arguments)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            self.login()
            answer = self._send(method, path, arguments)
        return _checked(answer)

    def unpause(self, dag_id: str) -> None:
        """Let a DAG run."""
        self.request("PATCH", f"/dags/{dag_id}", params={"update_mask": "is_paused"}, json={"is_paused": False})

    def wait_for_dag(self, dag_id: str, timeout: float = 60.0, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait until the dag-processor has seen a DAG.

        Raises:
            AirflowError: it was not there within `timeout` seconds; with the import errors that Airflow has.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.request("GET", f"/dags/{dag_id}")
            except AirflowError:
                if time.monotonic() < deadline:
                    sleep(0.5)
                    continue
                errors = "; ".join(self.import_errors()) or "no import errors"
                raise AirflowError(f"DAG {dag_id} was not seen within {timeout:.0f} s: {errors}") from None
            return

    def import_errors(self) -> list[str]:
        """Files in the DAG folder that cannot be imported, with the last line of why."""
        found = self.request("GET", "/importErrors")["import_errors"]
        return [f"{error['filename']}: {error['stack_trace'].strip().splitlines()[-1]}" for error in found]

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None) -> DagRun:
        """Start a manual run; it has no logical date. `conf` overrides the DAG's params."""
        body = {"logical_date": None, "conf": dict(conf or {})} | ({"dag_run_id": run_id} if run_id else {})
        return DagRun.model_validate(self.request("POST", f"/dags/{dag_id}/dagRuns", json=body))

    def run(self, dag_id: str, run_id: str) -> DagRun:
        """A run and its state: queued, running, success or failed."""
        return DagRun.model_validate(self.request("GET", f"/dags/{dag_id}/dagRuns/{run_id}"))

    def unfinished(self, dag_id: str) -> list[DagRun]:
        """The runs of a DAG that are queued or running."""
        states = {"state": ["queued", "running"], "limit": 1000}
        found = self.request("GET", f"/dags/{dag_id}/dagRuns", params=states)["dag_runs"]
        return [DagRun.model_validate(item) for item in found]

    def wait_for_run(
        self, dag_id: str, run_id: str, timeout: float, sleep: Callable[[float], None] = time.sleep
    ) -> DagRun:
        """Wait for the end of a run and return it.

        Raises:
            AirflowError: it had not ended within `timeout` seconds; with the states of its tasks.
        """
        deadline = time.monotonic() + timeout
        while (run := self.run(dag_id, run_id)).state not in FINISHED:
            if time.monotonic() > deadline:
                tasks = ", ".join(f"{task.task_id}={task.state}" for task in self.task_instances(dag_id, run_id))
                raise AirflowError(f"{dag_id} {run_id} is {run.state} after {timeout:.0f} s: {tasks}")
            sleep(1.0)
        return run

    def task_instances(self, dag_id: str, run_id: str) -> list[TaskInstance]:
        """The tasks of a run."""
        found = self.request("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", params={"limit": 1000})
        return [TaskInstance.model_validate(item) for item in found["task_instances"]]

    def task_instance(self, dag_id: str, run_id: str, task_id: str) -> TaskInstance:
        """One task of a run."""
        return TaskInstance.model_validate(
            self.request("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}")
        )

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, lines: int = 100) -> list[str]:
        """The last lines of a task's log, as `time level event`, without the list of its sources."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        content = self.request("GET", path, headers={"Accept": "application/json"})["content"]
        return [line for item in content if (line := _log_line(item)) is not None][-lines:]

    def set_task_state(
        self, dag_id: str, run_id: str, task_id: str, state: Literal["success", "failed", "skipped"]
    ) -> None:
        """Mark a task, as a person does in the UI."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        self.request("PATCH", path, json={"new_state": state})

    def set_run_state(self, dag_id: str, run_id: str, state: Literal["success", "failed", "queued"]) -> None:
        """Mark a run, as a person does in the UI."""
        self.request("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", json={"state": state})

    def clear(self, dag_id: str, run_id: str, task_id: str, *, only_failed: bool = False) -> None:
        """Clear a task, as a person does in the UI: it runs again."""
        body = {"dry_run": False, "dag_run_id": run_id, "task_ids": [task_id], "only_failed": only_failed}
        self.request("POST", f"/dags/{dag_id}/clearTaskInstances", json=body)

    def health(self) -> dict[str, Any]:
        """The state of Airflow's components."""
        return dict(self.request("GET", "/monitor/health"))

    def _send(self, method: str, path: str, arguments: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._token}", **arguments.get("headers", {})}
        return self._http.request(method, f"/api/v2{path}", **{**arguments, "headers": headers})


def _checked(answer: httpx.Response) -> Any:
    if not answer.is_success:
        request = answer.request
        raise AirflowError(f"{request.method} {request.url.path}: {answer.status_code} {answer.text[:500]}")
    try:
        return answer.json() if answer.content else None
    except ValueError:
        raise AirflowError(f"{answer.request.method} {answer.request.url.path}: the answer is no JSON") from None


def _log_line(item: Any) -> str | None:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict) or not item.get("timestamp"):
        return None  # groups with the sources of the log
    details = item.get("error_detail")
    return " ".join(
        filter(None, [item["timestamp"], item.get("level", ""), item["event"], json.dumps(details) if details else ""])
    )
