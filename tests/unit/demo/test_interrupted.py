"""What an interrupted demo leaves behind, and an api-server that is away for a while."""

import httpx
import pytest

from demo.airflow_api import AirflowApi
from demo.earlier import end_earlier
from demo.job import API_PATIENCE, WatchedRun
from demo.locks import alone, alone_by_name, holder
from demo.settings import StackError

from .fakes import FakeProcesses

RUN = {"dag_id": "spot_training", "state": "running", "run_after": "2026-11-30T12:00:00Z"}


def api(answer):
    def respond(request):
        if request.url.path == "/auth/token":
            return httpx.Response(201, json={"access_token": "t"})
        return answer(request)

    client = httpx.Client(base_url="http://airflow", transport=httpx.MockTransport(respond))
    return AirflowApi("http://airflow", "admin", "pw", client=client)


def test_unfinished_runs_of_demos_are_ended_and_others_are_not():
    asked, said = [], []

    def answer(request):
        asked.append((request.method, request.url.path, request.content))
        if request.method == "GET":
            assert request.url.params.get_list("state") == ["queued", "running"]
            runs = [RUN | {"dag_run_id": name} for name in ("demo_1", "manual__2026")]
            return httpx.Response(200, json={"dag_runs": runs})
        return httpx.Response(200, json={})

    assert end_earlier(api(answer), "spot_training", said.append) == ["demo_1"]
    assert asked[1:] == [("PATCH", "/api/v2/dags/spot_training/dagRuns/demo_1", b'{"state":"failed"}')]
    assert said == ["demo_1, an unfinished run of an interrupted demo, is marked as failed"]


def test_an_api_server_may_be_away_for_a_while_and_not_for_ever():
    now, away = [0.0], [False]

    def answer(request):
        if away[0]:
            raise httpx.ConnectError("away", request=request)
        return httpx.Response(200, json=RUN | {"dag_run_id": "demo_1"})

    watched = WatchedRun(api(answer), "demo_1", monotonic=lambda: now[0])
    assert watched.state() == "running"
    away[0], now[0] = True, API_PATIENCE
    assert watched.state() == "running"
    away[0] = False
    assert watched.state() == "running"
    away[0], now[0] = True, 2 * API_PATIENCE + 1
    with pytest.raises(httpx.ConnectError):
        watched.state()


def test_one_demo_at_a_time(tmp_path):
    path = tmp_path / "demo.lock"
    with alone(path, "busy"), pytest.raises(StackError, match="busy"), alone(path, "busy"):
        pass
    with alone(path, "busy"):
        pass


def test_the_holder_is_known_to_others_while_it_lives(tmp_path):
    path, table = tmp_path / "demo.lock", FakeProcesses()
    assert holder(path, table) is None
    table.add(77)
    path.write_text("77 boot:77")
    assert holder(path, table) == 77
    path.write_text("77 boot:earlier")
    assert holder(path, table) is None
    with alone_by_name(path, "busy", table):
        assert holder(path, table) is None
    assert path.read_text() == ""
