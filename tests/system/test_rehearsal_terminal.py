"""The rehearsal cloud from a terminal: start it, look, interrupt, bill; what is wrong is one line."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import boto3
import pytest

from tests.system.rehearsal import ROOT, SLEEPER, wait_for

SMALL = ROOT / "include/market/small.json"
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "plugins"), "COLUMNS": "200"}
COMMAND = [sys.executable, "-m", "gpucost", "rehearsal"]


class Terminal:
    """A running cloud as its user sees it: a log, and commands beside it."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        self.log = folder / "log"
        command = [*COMMAND, "--market", str(SMALL), "--speed", "60", "--state-dir", str(self.state_dir)]
        command += ["--consistency-lag-real-s", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
        self.url = str(wait_for("the log tells the address", self._address, 40))

    def _address(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r"rehearsal cloud at (http://127\.0\.0\.1:\d+): Snapshot of AWS", self.log.read_text())
        return found[1] if found else None

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *words, "--state-dir", str(self.state_dir)]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)

    def __call__(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    started = Terminal(tmp_path_factory.mktemp("terminal"))
    yield started
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(timeout=30) == 0
    assert "ending: every instance is killed" in started.log.read_text()


@pytest.fixture(scope="module")
def bought(terminal: Terminal) -> dict[str, str]:
    """The ids of a spot and an on-demand instance, by their lifecycle."""
    ec2 = boto3.client(
        "ec2",
        endpoint_url=terminal.url,
        region_name="us-east-1",
        aws_access_key_id="me",
        aws_secret_access_key="rehearsal",
    )

    def buy(**market: object) -> str:
        answer = ec2.run_instances(
            ImageId="ami-0123456789abcdef0",
            InstanceType="g4dn.xlarge",
            MinCount=1,
            MaxCount=1,
            UserData=SLEEPER,
            **market,
        )
        return str(answer["Instances"][0]["InstanceId"])

    found = {"spot": buy(InstanceMarketOptions={"MarketType": "spot"}), "on-demand": buy()}
    assert set(found.values()) == {one["instance_id"] for one in json.loads(terminal("status", "--json"))["instances"]}
    return found


def test_interrupt_status_and_invoice_follow_one_machine(terminal: Terminal, bought: dict[str, str]) -> None:
    spot = bought["spot"]
    table = terminal("status")
    assert table.startswith("Snapshot of AWS list and spot prices")
    assert "regions us-east-1, us-west-2" in table
    (row,) = [line.split() for line in table.splitlines() if spot in line]
    assert row[1] in {"pending", "running"}
    assert row[2] == "g4dn.xlarge"
    assert row[4] == "spot"

    assert terminal("interrupt", spot, "--event", "rebalance") == f"{spot}: rebalance\n"
    told = terminal("interrupt", spot)
    at = re.fullmatch(rf"{spot}: notice, terminates at (\S+)\n", told)
    assert at, told
    again = terminal.run("interrupt", spot)
    assert (again.returncode, again.stdout) == (1, "")
    said = rf"error: instance_id: {spot} has a notice for \S+; --event no-notice ends it at once\n"
    assert re.fullmatch(said, again.stderr)
    assert f"notice for {at[1][5:10]} {at[1][11:19]}" in terminal("status")
    # a notice does not protect from a cut
    assert terminal("interrupt", spot, "--event", "no-notice") == f"{spot}: no-notice\n"

    def row_after() -> str | None:
        found = [line for line in terminal("status").splitlines() if spot in line and " terminated " in line]
        return found[0] if found else None

    assert "Server.SpotInstanceTermination" in wait_for("it is gone", row_after)


def test_the_three_forms_of_the_invoice_agree(terminal: Terminal, bought: dict[str, str]) -> None:
    bill = json.loads(terminal("invoice", "--json"))
    lines = {line["instance_id"]: line for line in bill["lines"]}
    assert lines[bought["spot"]]["free_first_hour"]
    assert Decimal(lines[bought["on-demand"]]["amount"]) > 0

    table = terminal("invoice")
    (free,) = [line for line in table.splitlines() if bought["spot"] in line]
    assert "interrupted in its first hour" in free
    total = re.search(r"^as of \S+: ([\d.]+) USD, ([\d.]+) of it for disks$", table, re.MULTILINE)
    assert total
    assert Decimal(total[1]) >= Decimal(bill["total"])

    rows = list(csv.DictReader(io.StringIO(terminal("invoice", "--csv"))))
    assert bought["spot"] not in {row["lineItem/ResourceId"] for row in rows}
    of_compute = [row for row in rows if row["lineItem/ResourceId"] == bought["on-demand"]]
    assert {row["lineItem/UsageType"] for row in of_compute} == {"BoxUsage:g4dn.xlarge"}
    assert sum(Decimal(row["lineItem/UnblendedCost"]) for row in rows) >= Decimal(bill["total"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["interrupt", "i-0abc"], "error: instance_id: i-0abc does not exist; see /rehearsal/status\n"),
        (
            ["interrupt", "ON-DEMAND"],
            "error: instance_id: ON-DEMAND is on demand; EC2 interrupts spot instances only\n",
        ),
    ],
)
def test_what_cannot_be_interrupted_is_said_in_one_line(
    words: list[str], said: str, terminal: Terminal, bought: dict[str, str]
) -> None:
    done = terminal.run(*(word.replace("ON-DEMAND", bought["on-demand"]) for word in words))
    assert done.returncode == 1
    assert done.stderr == said.replace("ON-DEMAND", bought["on-demand"])


def test_an_event_that_is_none_is_refused_with_the_known_ones(terminal: Terminal) -> None:
    done = terminal.run("interrupt", "i-0abc", "--event", "stop")
    assert done.returncode == 2
    assert "got 'stop', expected one of notice, no-notice, false-notice, rebalance" in done.stderr


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """A start that must not succeed."""
    return subprocess.run([*COMMAND, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)


def test_wrong_options_are_one_line_each(tmp_path: Path) -> None:
    words = ["--market", str(SMALL), "--state-dir", str(tmp_path / "new")]
    done = start(*words, "--speed", "0", "--origin", "2026-11-30T12:00")
    assert done.returncode == 2
    assert sorted(done.stderr.splitlines()) == [
        "error: origin: got '2026-11-30T12:00', expected timezone info",
        "error: speed: got 0.0, expected greater than 0",
    ]
    assert not (tmp_path / "new").exists()


def test_a_second_cloud_on_the_folder_is_refused(terminal: Terminal) -> None:
    done = start("--market", str(SMALL), "--state-dir", str(terminal.state_dir))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"cannot start: state_dir: another rehearsal cloud runs on {terminal.state_dir}" in line


def test_no_cloud_is_one_line(tmp_path: Path) -> None:
    done = start("status", "--state-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: no rehearsal cloud was started on {tmp_path}; give --state-dir or --url\n"
    away = start("invoice", "--url", "http://127.0.0.1:9")
    assert away.returncode == 1
    assert away.stderr.startswith("error: no rehearsal cloud answers at http://127.0.0.1:9/rehearsal/invoice: ")
    assert len(away.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    ['{"event": "launch", "id": "i-1", "zone": "us-east-1a"}', "123", '{"a": 1}', '{"event": "change", "id": "i-9"}'],
)
def test_a_journal_of_another_version_is_refused_in_words(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "journal.jsonl").write_text(line + "\n")
    origin = "2026-11-30T16:00:00Z"
    (folder / "clock.json").write_text(
        json.dumps({"clock": {"origin_real": origin, "origin": origin, "speed": 60}, "first_origin": origin})
    )
    command = [sys.executable, "-m", "gpucost.rehearsal", "--state-dir", str(folder)]
    command += ["--market", str(ROOT / "include/market/small.json")]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "plugins")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "use another --state-dir" in done.stderr
