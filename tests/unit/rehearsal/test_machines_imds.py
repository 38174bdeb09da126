"""What a machine is told about itself, and when."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from gpucost.rehearsal.api import views
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import BY_USER, NO_CAPACITY, LaunchSpec
from gpucost.rehearsal.machines.imds import Answer, Imds
from tests.fakes.rehearsal import MemoryJournal, Watch, at, buy, instance, market

SPEC = LaunchSpec(
    image_id="ami-1",
    user_data=b"#!/bin/sh\n",
    profile="arn:aws:iam::123456789012:instance-profile/node",
    metadata_tags=True,
    tags={"gpucost:job": "a", "name": "b"},
)


class Machine:
    """One instance and a client on it."""

    def __init__(self, folder: Path, spec: LaunchSpec = SPEC, skew: timedelta = timedelta(0)) -> None:
        self.watch = Watch()
        self.book = Book(market(), self.watch.clock, MemoryJournal())
        self.role = folder / "role.json"
        self.role.write_text(json.dumps({"access_key": "key", "secret_key": "secret"}))
        self.role.chmod(0o600)
        self.skew = skew
        (self.id,) = buy(self.book, spec=spec)
        self.start()

    def start(self) -> None:
        """A cloud starts: also again."""
        self.imds = Imds(
            self.book,
            zone_ids={"us-east-1a": "use1-az6"},
            account="123456789012",
            role_credentials=self.role,
            skew=lambda _instance_id: self.skew,
        )
        self.token = self.ask("latest/api/token", "PUT", {"x-aws-ec2-metadata-token-ttl-seconds": "60"}).body

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        given = headers if headers is not None else {"x-aws-ec2-metadata-token": self.token}
        return self.imds.answer(self.id, method, path, given)

    def get(self, item: str) -> str:
        answer = self.ask(f"latest/meta-data/{item}")
        assert answer.status == 200, item
        return answer.body

    def status(self, item: str) -> int:
        return self.ask(f"latest/meta-data/{item}").status


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("ttl", ["", "0", "-1", "21601", "²", "9" * 5000, "60s"])
def test_a_token_for_a_time_that_is_none_is_refused(machine: Machine, ttl: str) -> None:
    assert machine.ask("latest/api/token", "PUT", {"x-aws-ec2-metadata-token-ttl-seconds": ttl}).status == 400


def test_folders_list_what_is_in_them(machine: Machine) -> None:
    assert machine.ask("latest/").body.splitlines() == ["dynamic/", "meta-data/", "user-data"]
    names = machine.get("").splitlines()
    assert {"ami-id", "iam/", "instance-id", "placement/", "tags/"} <= set(names)
    assert "spot/" not in names
    assert machine.get("placement/").splitlines() == ["availability-zone", "availability-zone-id", "region"]
    assert machine.get("iam/security-credentials/") == "node"
    assert set(machine.get("tags/instance").splitlines()) >= {"gpucost:job", "name"}
    for item in machine.get("placement").splitlines():
        assert machine.get(f"placement/{item}")


def test_items_say_what_the_book_says(machine: Machine) -> None:
    assert machine.get("placement/availability-zone-id") == "use1-az6"
    assert machine.get("instance-life-cycle") == "spot"
    assert machine.get("tags/instance/gpucost:job") == "a"
    assert machine.ask("latest/user-data").body == "#!/bin/sh\n"
    assert json.loads(machine.get("iam/security-credentials/node"))["AccessKeyId"] == "key"
    assert json.loads(machine.ask("latest/dynamic/instance-identity/document").body)["instanceId"] == machine.id
    assert machine.status("no-such-item") == 404
    assert machine.status("place") == 404


def test_its_name_and_address_are_those_that_the_api_shows(machine: Machine) -> None:
    one = instance(machine.book, machine.id)
    shown = views.instance(one, {"us-east-1a": "use1-az6"}, "123456789012")
    assert shown["PrivateDnsName"] == machine.get("hostname") == machine.get("local-hostname")
    assert shown["PrivateIpAddress"] == machine.get("local-ipv4")
    assert machine.get("hostname").endswith(".ec2.internal"), "as in us-east-1"


def test_without_tags_role_and_user_data_these_are_not_there(tmp_path: Path) -> None:
    plain = Machine(tmp_path, LaunchSpec(tags={"name": "b"}))
    assert plain.status("tags/instance") == 404
    assert plain.status("iam/security-credentials") == 404
    assert plain.ask("latest/user-data").status == 404


def test_a_rebalance_recommendation_is_there_once_it_was_given(machine: Machine) -> None:
    item = "events/recommendations/rebalance"
    assert machine.status(item) == 404
    machine.watch.set(at(minutes=5))
    machine.book.recommend_rebalance(machine.id)
    assert json.loads(machine.get(item)) == {"noticeTime": "2026-11-30T16:05:00Z"}


def test_a_notice_is_there_until_it_is_withdrawn(machine: Machine) -> None:
    assert machine.status("spot/instance-action") == machine.status("spot/termination-time") == 404
    machine.book.give_notice(machine.id, at(minutes=2), None)
    assert json.loads(machine.get("spot/instance-action")) == {"action": "terminate", "time": "2026-11-30T16:02:00Z"}
    assert machine.get("spot/termination-time") == "2026-11-30T16:02:00Z"
    assert machine.get("spot/").splitlines() == ["instance-action", "termination-time"]
    machine.book.withdraw_notice(machine.id)
    assert machine.status("spot/") == 404


def test_a_wrong_clock_moves_the_times_that_a_machine_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, skew=timedelta(seconds=-90))
    machine.book.give_notice(machine.id, at(minutes=2), NO_CAPACITY)
    assert machine.get("spot/termination-time") == "2026-11-30T16:00:30Z"
    assert json.loads(machine.get("spot/instance-action"))["time"] == "2026-11-30T16:00:30Z"


def test_a_token_of_an_earlier_start_is_refused_so_that_clients_fetch_another(machine: Machine) -> None:
    old = machine.token
    machine.start()
    answer = machine.ask("latest/meta-data/instance-id", headers={"x-aws-ec2-metadata-token": old})
    assert answer.status == 401
    assert machine.get("instance-id") == machine.id


def test_a_machine_that_is_gone_is_told_nothing(machine: Machine) -> None:
    machine.book.begin_end(machine.id, BY_USER)
    assert machine.get("instance-id") == machine.id
    machine.book.mark_ended(machine.id)
    assert machine.status("instance-id") == 404
