"""The terminal: what a person sees, whole, and how a wrong configuration is told."""

from __future__ import annotations

from datetime import timedelta

import pytest
from typer.testing import CliRunner, Result

from gpucost.capacity.lease import Lease
from gpucost.capacity.providers.base import ProviderError
from gpucost.cli import app
from gpucost.hooks.gpucost import GpuCostHook
from gpucost.reasons import Reason
from tests.fakes.provider import pool, quote
from tests.fakes.rooms import START, TASK, World


@pytest.fixture(autouse=True)
def _rooms(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuCostHook, "services", lambda self: world.services)


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def buy(world: World, hours: float = 5.0, name: str = "digits") -> Lease:
    world.begin(name=name)
    buyer = world.services.buyer
    order = buyer.intend(TASK.key, 1, quote(pool(), "0.30", START), None, "me", START + timedelta(hours=hours))
    return buyer.buy(order)


def test_quotes_come_cheapest_first(world: World) -> None:
    result = call("quotes")
    assert result.exit_code == 0
    head, *rows = result.output.splitlines()
    assert "per instance-hour" in head
    assert [row.split()[0] for row in rows[:3]] == [pool(zone).key for zone in "abc"]
    assert ["$0.3000/h" in rows[0], "1 x T4" in rows[0], "2026-11-30 12:00" in rows[0]] == [True] * 3
    assert len(rows) == 6


def test_leases_are_shown_whole_on_one_line_each(world: World) -> None:
    lease = buy(world)
    _, row = call("leases").output.splitlines()
    for word in (lease.id, "active", str(lease.instance_id), lease.pool.key, "$0.3000/h", "11-30 12:00", "11-30 17:00"):
        assert word in row


def test_leases_that_are_over_are_shown_for_their_job_only(world: World) -> None:
    lease = buy(world)
    world.services.buyer.release(lease, Reason.CANCELLED)
    assert lease.id not in call("leases").output
    assert lease.id in call("leases", TASK.key).output


def test_reap_says_first_what_it_would_end_and_then_ends_it(world: World) -> None:
    lease = buy(world, hours=1.0)
    world.pass_hours(2.0)
    said = f"{lease.instance_id}: it was to end by 2026-11-30 13:00 UTC, $0.3000/h\n1 found\n"
    assert call("reap", "--dry-run").output == f"would end {said}"
    assert len(world.provider.alive()) == 1
    assert call("reap").output == f"ends {said}"
    assert world.provider.alive() == []
    assert call("reap").output == "0 found\n"


def test_reap_leaves_a_job_that_airflow_may_still_want(world: World) -> None:
    buy(world)
    assert call("reap").output == "0 found\n"
    assert len(world.provider.alive()) == 1


def test_report_shows_what_a_job_cost_and_its_name_as_written(world: World) -> None:
    lease = buy(world, name="digits [red] 1")
    world.pass_hours(1.0)
    world.services.jobs.end(TASK.key, "me", Reason.CANCELLED, START)
    call("reap")
    output = call("report", TASK.key).output
    assert output.startswith("# digits [red] 1\n")
    assert "- cost: $0.3000\n" in output
    assert lease.pool.key in output


def test_a_report_of_no_job_says_so() -> None:
    result = call("report", "nothing")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: job: 'nothing' is not in the books")


@pytest.mark.parametrize("words", [("quotes",), ("leases",), ("reap",), ("report", "x")])
@pytest.mark.parametrize("wrong", [ValueError("connection gpucost_db: none"), ConnectionError("clock_url: silent")])
def test_a_wrong_configuration_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], wrong: Exception
) -> None:
    def services(hook: GpuCostHook) -> None:
        raise wrong

    monkeypatch.setattr(GpuCostHook, "services", services)
    result = call(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {wrong}\n")


def test_a_connection_that_is_missing_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("AIRFLOW_CONN_GPUCOST_DB", raising=False)
    result = call("leases")
    assert result.exit_code == 2
    assert "connection gpucost_db: there is none" in result.stderr


@pytest.mark.parametrize("command", ["quotes", "reap"])
def test_what_the_cloud_refuses_is_told_in_one_line(world: World, command: str) -> None:
    world.provider.away = ProviderError(Reason.NOT_AUTHORIZED, "UnauthorizedOperation: ec2:DescribeInstances")
    result = call(command)
    assert (result.exit_code, result.stderr) == (1, "error: UnauthorizedOperation: ec2:DescribeInstances\n")
