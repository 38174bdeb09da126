"""What the market adds to moto's tables, and what the rest of the rehearsal asks of moto."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from moto.core.base_backend import BackendDict
from moto.core.exceptions import ServiceException
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from gpucost.rehearsal.market.file import MarketError, MarketFile
from gpucost.rehearsal.market.market import Market, from_file
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services import instance_types, launch_templates, memory, tables
from gpucost.rehearsal.services.app import changes
from gpucost.rehearsal.services.moto_side import MotoSide

SOURCED = {"usd_per_hour": "1", "source": "made up for a test", "as_of": "2026-11-30"}
DESCRIBED = {"VCpuInfo": {"DefaultVCpus": 208}, "MemoryInfo": {"SizeInMiB": 1916928}}


def market(zones: dict[str, str], kind: str = "g4dn.xlarge", describe: dict[str, Any] | None = None) -> Market:
    """A market that sells one type in every zone of `zones` (name -> id)."""
    regions = {name.rpartition("-")[0] if name[-2] == "-" else name[:-1] for name in zones}
    prices = dict.fromkeys(regions, SOURCED)
    offer = {"name": kind, "gpu": "1x", "on_demand": prices, **({"describe": describe} if describe else {})}
    capacity = {"spot": 1, "on_demand": 1}
    file = MarketFile.model_validate(
        {
            "label": "made up",
            "seed": 1,
            "zones": [{"name": name, "zone_id": ident} for name, ident in zones.items()],
            "instance_types": [offer],
            "pools": [{"zone": n, "instance_type": kind, "spot": SOURCED, "capacity": capacity} for n in zones],
            "disk": {"usd_per_gib_month": "0.08", "source": "made up for a test", "as_of": "2026-11-30"},
        }
    )
    return from_file(file, datetime(2026, 11, 30, tzinfo=UTC))


@pytest.fixture(autouse=True)
def _as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Moto's tables and state belong to the process: give them back as they were."""
    monkeypatch.setattr(RegionsAndZonesBackend, "regions", list(RegionsAndZonesBackend.regions))
    zones = {name: list(known) for name, known in RegionsAndZonesBackend.zones.items()}
    monkeypatch.setattr(RegionsAndZonesBackend, "zones", zones)
    monkeypatch.setattr(tables, "_ADDED", set())
    monkeypatch.setenv("MOTO_ALLOW_NONEXISTENT_REGION", "false")
    types, offerings = dict(INSTANCE_TYPES), {kind: dict(rows) for kind, rows in INSTANCE_TYPE_OFFERINGS.items()}
    yield
    INSTANCE_TYPES.clear()
    INSTANCE_TYPES.update(types)
    INSTANCE_TYPE_OFFERINGS.update(offerings)
    BackendDict.reset()
    memory._BORN.clear()


def test_zones_of_another_cloud_are_there_with_default_subnets() -> None:
    zones = {"us-central1-a": "us-central1-a", "us-central1-f": "us-central1-f"}
    side = MotoSide(market(zones, "a3-highgpu-8g", DESCRIBED))
    region = side.region("us-central1")
    assert region.zone_names() == ["us-central1-a", "us-central1-f"]
    subnet, vpc = region.subnet_of(None, "us-central1-f")
    assert subnet
    assert vpc
    assert region.zone_of_subnet(subnet) == "us-central1-f"
    assert region.knows_type("a3-highgpu-8g")
    assert (side.vcpus_of("a3-highgpu-8g"), side.memory_mib_of("a3-highgpu-8g")) == (208, 1916928)
    assert (side.vcpus_of("m5.large"), side.memory_mib_of("m5.large")) == (2, 8192)


@pytest.mark.parametrize("zones", [{"us-east-1a": "use1-az9"}, {"us-east-1z": "use1-az6"}])
def test_what_moto_knows_is_not_contradicted(zones: dict[str, str]) -> None:
    with pytest.raises(MarketError, match=r"zones\.0: got us-east-1\S = .*'us-east-1a': 'use1-az6'"):
        MotoSide(market(zones))


def test_a_zone_that_moto_lacks_is_added_to_its_region() -> None:
    side = MotoSide(market({"us-west-2a": "usw2-az2", "us-west-2q": "usw2-az9"}))
    assert "us-west-2q" in side.region("us-west-2").zone_names()
    assert side.region("us-west-2").subnet_of(None, "us-west-2q")[0] is not None


@pytest.mark.parametrize(
    ("describe", "sentence"),
    [
        (None, r"instance_types\.0\.describe: a3-highgpu-8g is not among moto's types"),
        ({"VCpuInfo": {"DefaultVCpus": 208}}, r"instance_types\.0\.describe\.MemoryInfo\.SizeInMiB: not there"),
    ],
)
def test_a_type_that_nobody_describes_is_refused(describe: dict[str, Any] | None, sentence: str) -> None:
    with pytest.raises(MarketError, match=sentence):
        MotoSide(market({"us-central1-a": "us-central1-a"}, "a3-highgpu-8g", describe))


def test_a_market_with_more_zones_finds_its_old_state(tmp_path: Path) -> None:
    first = MotoSide(market({"us-central1-a": "us-central1-a"}, "a3-highgpu-8g", DESCRIBED), tmp_path)
    (old, _) = first.region("us-central1").subnet_of(None, "us-central1-a")
    first.region("us-central1").add_tags([str(old)], {"job": "42"})
    BackendDict.reset()
    memory._BORN.clear()
    more = {"us-central1-a": "us-central1-a", "us-central1-b": "us-central1-b"}
    second = MotoSide(market(more, "a3-highgpu-8g", DESCRIBED), tmp_path).region("us-central1")
    assert second.subnet_of(None, "us-central1-a")[0] == old
    assert second.subnet_of(None, "us-central1-b")[0] not in {None, old}
    assert {tag["Value"] for tag in second.tags() if tag["ResourceId"] == old} == {"42"}


def test_a_template_is_found_by_id_or_name_and_version() -> None:
    region = MotoSide(market({"us-east-1a": "use1-az6"})).region("us-east-1")
    backend = memory.ec2_backend("us-east-1")
    template = backend.create_launch_template("node", "", {"ImageId": "ami-1"}, {})
    template.create_version({"ImageId": "ami-2", "UserData": base64.b64encode(b"#!/bin/sh\n").decode()}, "")
    data, spec = region.launch_template({"LaunchTemplateName": "node", "Version": "$Latest"})
    assert data["ImageId"] == spec.image_id == "ami-2"
    assert (spec.user_data, spec.template_id, spec.template_version) == (b"#!/bin/sh\n", template.id, "2")
    assert region.launch_template({"LaunchTemplateId": template.id})[1].image_id == "ami-1"
    for wanted, code in (
        ({"LaunchTemplateId": template.id, "Version": "7"}, "InvalidLaunchTemplateId.VersionNotFound"),
        ({"LaunchTemplateId": template.id, "Version": "0"}, "InvalidParameterValue"),
        ({"LaunchTemplateId": template.id, "Version": "²"}, "InvalidParameterValue"),
        ({"LaunchTemplateId": template.id, "Version": "9" * 5000}, "InvalidParameterValue"),
        ({"LaunchTemplateId": "lt-none"}, "InvalidLaunchTemplateId.NotFound"),
        ({}, "MissingParameter"),
    ):
        with pytest.raises((Ec2Error, ServiceException)) as caught:
            region.launch_template(wanted)
        assert getattr(caught.value, "code", "") == code


def test_more_than_fifteen_templates_are_shown_with_their_present_tags() -> None:
    MotoSide(market({"us-east-1a": "use1-az6"}))
    backend = memory.ec2_backend("us-east-1")
    ids = [backend.create_launch_template(f"node-{n}", "", {}, {}).id for n in range(30)]
    backend.create_tags([ids[20]], {"job": "42"})
    describe = launch_templates.ACTIONS["DescribeLaunchTemplates"]
    assert [one["LaunchTemplateId"] for one in describe({}, "us-east-1")["LaunchTemplates"]] == ids
    mine = {"Filters": [{"Name": "tag:job", "Values": ["4*"]}]}
    (found,) = describe(mine, "us-east-1")["LaunchTemplates"]
    assert (found["LaunchTemplateName"], found["Tags"]) == ("node-20", [{"Key": "job", "Value": "42"}])
    first = describe({"MaxResults": 20}, "us-east-1")
    rest = describe({"MaxResults": 20, "NextToken": first["NextToken"]}, "us-east-1")
    assert [one["LaunchTemplateId"] for one in first["LaunchTemplates"] + rest["LaunchTemplates"]] == ids
    assert rest["NextToken"] is None
    for request in ({"LaunchTemplateIds": ["lt-none"]}, {"LaunchTemplateNames": ["none"]}):
        with pytest.raises(Ec2Error, match="NotFound"):
            describe(request, "us-east-1")


def test_filters_of_types_reach_into_lists() -> None:
    describe = instance_types.ACTIONS["DescribeInstanceTypes"]

    def names(name: str, *values: str) -> set[str]:
        found: set[str] = set()
        request: dict[str, Any] = {"Filters": [{"Name": name, "Values": list(values)}]}
        while request.get("NextToken", "first"):
            answer = describe(request, "us-east-1")
            found |= {one["InstanceType"] for one in answer["InstanceTypes"]}
            request["NextToken"] = answer["NextToken"]
        return found

    assert "g4dn.xlarge" in names("instance-storage-info.disk.size-in-gb", "125")
    assert "g4dn.xlarge" not in names("bare-metal", "true")
    assert "g4dn.metal" in names("bare-metal", "true")
    assert names("instance-type", "g4dn.1?xlarge") == {"g4dn.12xlarge", "g4dn.16xlarge"}


@pytest.mark.parametrize(
    ("action", "method", "expected"),
    [
        ("CreateTags", "POST", True),
        ("DeleteMessage", "POST", True),
        ("AssumeRole", "POST", True),
        ("ReceiveMessage", "POST", False),
        ("DescribeSubnets", "POST", False),
        ("GetQueueUrl", "GET", False),
        ("", "PUT", True),
        ("", "GET", False),
    ],
)
def test_a_request_changes_state_by_its_name(action: str, method: str, expected: bool) -> None:
    assert changes(action, method) is expected
