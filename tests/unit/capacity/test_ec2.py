"""EC2 driven through a scripted client: one template per site and agent, one machine per token, nothing forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpucost.capacity.providers.base import LaunchRequest, ProviderError
from gpucost.capacity.providers.ec2 import Ec2
from gpucost.capacity.providers.ec2_shapes import installation
from gpucost.capacity.sites import Sites
from gpucost.market.pool import CapacityType
from gpucost.reasons import Reason
from tests.fakes.provider import T4, pool
from tests.fakes.rooms import START
from tests.unit.capacity.test_ec2_shapes import SITE, instance

GPU = {
    "InstanceType": T4.name,
    "VCpuInfo": {"DefaultVCpus": 4},
    "MemoryInfo": {"SizeInMiB": 16384},
    "GpuInfo": {"Gpus": [{"Name": "T4", "Count": 1, "MemoryInfo": {"SizeInMiB": 16384}}]},
}


class Client:
    """Answers as scripted; an exception among the answers is raised.

    Args:
        answers: method -> its answers, the last one for ever.
    """

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = {
            "describe_availability_zones": [
                {"AvailabilityZones": [{"ZoneName": f"us-east-1{z}", "ZoneId": f"use1-az-{z}"} for z in "ab"]}
            ],
            "describe_instance_types": [{"InstanceTypes": [GPU]}],
            "describe_spot_price_history": [{"SpotPriceHistory": []}],
            "create_launch_template": [{}],
            "create_fleet": [{"Instances": [{"InstanceIds": ["i-1"]}], "Errors": []}],
            "describe_instances": [{"Reservations": [{"Instances": [instance(InstanceId="i-1")]}]}],
            "terminate_instances": [{}],
        } | answers
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def named(self, name: str) -> list[dict[str, Any]]:
        return [asked for called, asked in self.calls if called == name]

    def get_paginator(self, name: str) -> Any:
        client = self

        class Paginator:
            def paginate(self, **asked: Any) -> Iterator[Any]:
                return iter([client._answer(name, asked)])

        return Paginator()

    def __getattr__(self, name: str) -> Any:
        return lambda **asked: self._answer(name, asked)

    def _answer(self, name: str, asked: dict[str, Any]) -> Any:
        self.calls.append((name, asked))
        answers = self.answers[name]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def error(code: str, status: int = 400) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "words"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "x"
    )  # type: ignore[typeddict-item]


def provider(client: Client) -> Ec2:
    return Ec2(lambda region: client, Sites(sites=(SITE,)), "agents/x.zip")


REQUEST = LaunchRequest(pool=pool("a"), client_token="token", tags={"gpucost:lease": "lease-1"})


def test_a_launch_buys_one_machine_under_its_token() -> None:
    client = Client()
    machine = provider(client).launch(REQUEST)
    assert (machine.instance_id, machine.launched_at) == ("i-1", START)
    [fleet] = client.named("create_fleet")
    assert fleet["ClientToken"] == "token"


def test_the_template_is_made_once_and_one_that_is_there_is_used() -> None:
    client = Client(create_launch_template=[error("InvalidLaunchTemplateName.AlreadyExistsException")])
    ec2 = provider(client)
    ec2.launch(REQUEST)
    ec2.launch(REQUEST)
    [made] = client.named("create_launch_template")
    fleets = client.named("create_fleet")
    names = {f["LaunchTemplateConfigs"][0]["LaunchTemplateSpecification"]["LaunchTemplateName"] for f in fleets}
    assert names == {made["LaunchTemplateName"]}


def test_another_agent_is_another_template() -> None:
    names = set()
    for agent in ("agents/x.zip", "agents/y.zip"):
        client = Client()
        Ec2(lambda region: client, Sites(sites=(SITE,)), agent).launch(REQUEST)  # noqa: B023
        names.add(client.named("create_launch_template")[0]["LaunchTemplateName"])
    assert len(names) == 2


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (
            {"Instances": [], "Errors": [{"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "none left"}]},
            Reason.NO_CAPACITY,
            "none left",
        ),
        ({"Errors": [{"ErrorCode": "VcpuLimitExceeded", "ErrorMessage": "0 vCPU"}]}, Reason.QUOTA, "0 vCPU"),
        ({"Instances": [], "Errors": []}, Reason.NO_CAPACITY, "the fleet came back empty"),
        (error("UnauthorizedOperation"), Reason.NOT_AUTHORIZED, "UnauthorizedOperation"),
    ],
)
def test_a_fleet_that_was_not_filled_says_why(answer: Any, reason: Reason, words: str) -> None:
    with pytest.raises(ProviderError, match=words) as refused:
        provider(Client(create_fleet=[answer])).launch(REQUEST)
    assert refused.value.reason is reason


@pytest.mark.parametrize("trouble", [error("RequestLimitExceeded", 503), error("InternalError", 500)])
def test_what_is_bought_is_not_forgotten_because_it_cannot_be_looked_at(trouble: ClientError) -> None:
    machine = provider(Client(describe_instances=[trouble])).launch(REQUEST)
    assert (machine.instance_id, machine.state, machine.client_token) == ("i-1", "pending", "token")
    assert machine.launched_at is None


def test_an_id_that_is_not_visible_yet_is_pending() -> None:
    machine = provider(Client(describe_instances=[{"Reservations": []}])).launch(REQUEST)
    assert (machine.instance_id, machine.state, machine.over) == ("i-1", "pending", False)


def test_a_machine_is_found_by_its_token_a_living_one_first() -> None:
    over = instance(InstanceId="i-0", State={"Code": 48, "Name": "terminated"})
    client = Client(describe_instances=[{"Reservations": [{"Instances": [over, instance(InstanceId="i-1")]}]}])
    found = provider(client).find("us-east-1", "token")
    assert found is not None
    assert found.instance_id == "i-1"
    assert client.named("describe_instances")[0]["Filters"] == [{"Name": "tag:gpucost:token", "Values": ["token"]}]
    assert provider(Client(describe_instances=[{"Reservations": []}])).find("us-east-1", "token") is None


def test_describing_nothing_asks_nothing() -> None:
    client = Client()
    assert provider(client).describe("us-east-1", []) == {}
    assert client.calls == []


def test_owned_machines_are_those_of_this_installation_that_are_not_over() -> None:
    over = instance(InstanceId="i-0", State={"Code": 48, "Name": "terminated"})
    client = Client(describe_instances=[{"Reservations": [{"Instances": [over, instance(InstanceId="i-1")]}]}])
    assert [machine.instance_id for machine in provider(client).owned("us-east-1")] == ["i-1"]
    ours = {"Name": "tag:gpucost:installation", "Values": [installation(SITE)]}
    assert client.named("describe_instances")[0]["Filters"] == [ours]


def test_an_id_that_is_gone_does_not_keep_the_others_alive() -> None:
    client = Client(terminate_instances=[error("InvalidInstanceID.NotFound"), {}])
    provider(client).terminate("us-east-1", ["i-gone", "i-1"])
    assert [asked["InstanceIds"] for asked in client.named("terminate_instances")] == [["i-gone"], ["i-1"]]
    with pytest.raises(ProviderError, match="UnauthorizedOperation"):
        provider(Client(terminate_instances=[error("UnauthorizedOperation")])).terminate("us-east-1", ["i-1"])


def test_quotes_are_spot_prices_and_the_sites_list_prices() -> None:
    point = {"AvailabilityZone": "us-east-1a", "InstanceType": T4.name, "SpotPrice": "0.3", "Timestamp": START}
    client = Client(describe_spot_price_history=[{"SpotPriceHistory": [point]}])
    ec2 = provider(client)
    quotes = {quote.pool.key: quote for quote in ec2.quotes(START)}
    assert set(quotes) == {
        pool("a").key,
        pool("a", CapacityType.ON_DEMAND).key,
        pool("b", CapacityType.ON_DEMAND).key,
    }
    listed = quotes[pool("a", CapacityType.ON_DEMAND).key]
    assert (str(listed.price.amount), listed.source) == ("0.526", "AWS list")
    ec2.quotes(START)
    assert len(client.named("describe_instance_types")) == 1, "types do not change and are asked for once"


def test_a_zone_that_is_not_there_is_named() -> None:
    zones = {"AvailabilityZones": [{"ZoneName": "us-east-1a", "ZoneId": "use1-az-a"}]}
    with pytest.raises(ProviderError, match=r"zones: \['us-east-1b'\] are not in us-east-1.*mend the site") as wrong:
        provider(Client(describe_availability_zones=[zones])).quotes(START)
    assert wrong.value.reason is Reason.BAD_REQUEST


def test_on_demand_has_one_price_for_all_times() -> None:
    [point] = provider(Client()).price_history(pool("a", CapacityType.ON_DEMAND), START, START)
    assert (point.since, str(point.price.amount)) == (START, "0.526")
