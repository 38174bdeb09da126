"""The client of Airflow's API, against made-up answers."""

import json

import httpx
import pytest

from demo.airflow_api import AirflowApi, AirflowError


class Server:
    """Answers by (method, path); remembers what was asked."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []
        self.logins = 0

    def __call__(self, request):
        if request.url.path == "/auth/token":
            self.logins += 1
            return httpx.Response(201, json={"access_token": f"token{self.logins}"})
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.method, request.url.path, request.headers["Authorization"], body))
        answer = self.answers[request.method, request.url.path]
        return answer.pop(0) if isinstance(answer, list) else answer

    def api(self):
        client = httpx.Client(base_url="http://airflow", transport=httpx.MockTransport(self))
        return AirflowApi("http://airflow", "admin", "pw", client=client)


RUN = {"dag_id": "d", "dag_run_id": "r", "state": "queued", "run_after": "2026-11-30T12:00:00Z"}
RUNS = "/api/v2/dags/d/dagRuns"


def test_a_manual_run_has_no_logical_date():
    server = Server({("POST", RUNS): httpx.Response(200, json=RUN)})
    run = server.api().trigger("d", {"deadline": "1h"}, run_id="r")
    assert (run.dag_run_id, run.state) == ("r", "queued")
    assert server.asked[0][3] == {"logical_date": None, "conf": {"deadline": "1h"}, "dag_run_id": "r"}


def test_a_token_that_has_run_out_is_renewed_once():
    server = Server({("GET", f"{RUNS}/r"): [httpx.Response(401), httpx.Response(200, json=RUN)]})
    assert server.api().run("d", "r").state == "queued"
    assert [asked[2] for asked in server.asked] == ["Bearer token1", "Bearer token2"]


def test_a_refusal_says_what_was_asked_and_answered():
    server = Server({("POST", RUNS): httpx.Response(404, json={"detail": "no DAG d"})})
    with pytest.raises(AirflowError, match=r"POST /api/v2/dags/d/dagRuns: 404 .*no DAG d"):
        server.api().trigger("d")


def test_a_run_is_waited_for_until_it_has_ended():
    states = ["queued", "running", "success"]
    server = Server({("GET", f"{RUNS}/r"): [httpx.Response(200, json=RUN | {"state": state}) for state in states]})
    slept = []
    assert server.api().wait_for_run("d", "r", timeout=60, sleep=slept.append).state == "success"
    assert len(slept) == 2


def test_a_run_that_does_not_end_is_an_error_with_its_tasks():
    task = {"task_id": "train", "state": "deferred", "try_number": 1}
    server = Server(
        {
            ("GET", f"{RUNS}/r"): httpx.Response(200, json=RUN),
            ("GET", f"{RUNS}/r/taskInstances"): httpx.Response(200, json={"task_instances": [task]}),
        }
    )
    with pytest.raises(AirflowError, match="queued after -1 s: train=deferred"):
        server.api().wait_for_run("d", "r", timeout=-1)


def test_a_log_is_its_lines_without_the_list_of_sources():
    content = [
        {"event": "::group::Log message source details"},
        {"event": "/logs/attempt=1.log"},
        {"timestamp": "t1", "level": "info", "event": "bought"},
        {"timestamp": "t2", "level": "error", "event": "failed", "error_detail": [{"exc_type": "ValueError"}]},
    ]
    path = f"{RUNS}/r/taskInstances/train/logs/1"
    server = Server({("GET", path): httpx.Response(200, json={"content": content})})
    assert server.api().task_log("d", "r", "train") == [
        "t1 info bought",
        't2 error failed [{"exc_type": "ValueError"}]',
    ]


def test_marking_and_clearing_send_what_a_person_would():
    task = f"{RUNS}/r/taskInstances/train"
    server = Server(
        {
            ("PATCH", task): httpx.Response(200, json={}),
            ("POST", "/api/v2/dags/d/clearTaskInstances"): httpx.Response(200, json={}),
        }
    )
    api = server.api()
    api.set_task_state("d", "r", "train", "failed")
    api.clear("d", "r", "train")
    assert server.asked[0][3] == {"new_state": "failed"}
    assert server.asked[1][3] == {"dry_run": False, "dag_run_id": "r", "task_ids": ["train"], "only_failed": False}


def test_a_dag_that_is_never_seen_is_an_error_with_the_import_errors():
    errors = {"import_errors": [{"filename": "d.py", "stack_trace": "Traceback\nImportError: no torch\n"}]}
    server = Server(
        {
            ("GET", "/api/v2/dags/d"): httpx.Response(404, json={}),
            ("GET", "/api/v2/importErrors"): httpx.Response(200, json=errors),
        }
    )
    with pytest.raises(AirflowError, match=r"not seen within 0 s: d\.py: ImportError: no torch"):
        server.api().wait_for_dag("d", timeout=0)
