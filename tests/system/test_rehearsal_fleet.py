"""CreateFleet and its relatives on the rehearsal cloud, by boto3, as AWS documents them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from tests.system.rehearsal import SLEEPER, TYPE, ZONES, Cloud, expect_error, forty_at_once

G5 = "g5.xlarge"
P3 = "p3.2xlarge"


@pytest.fixture(autouse=True)
def _no_leftovers(no_leftovers: None) -> None:
    """Every test leaves the shared cloud empty."""


@pytest.fixture(scope="module")
def template(cloud: Cloud) -> str:
    return cloud.template(SLEEPER)


def ids(answer: Any) -> list[str]:
    return [one for group in answer["Instances"] for one in group["InstanceIds"]]


def codes(answer: Any) -> list[str]:
    return [error["ErrorCode"] for error in answer["Errors"]]


def override(zone: str, instance_type: str = TYPE, **more: Any) -> dict[str, Any]:
    return {"InstanceType": instance_type, "AvailabilityZone": zone, **more}


def test_a_pool_runs_out_and_the_fleet_is_filled_in_part(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    answer = cloud.buy(template, instance_type="p3.2xlarge", zones=ZONES[:1], count=5)
    assert sum(len(group["InstanceIds"]) for group in answer["Instances"]) == 2
    (error,) = answer["Errors"]
    assert error["ErrorCode"] == "InsufficientInstanceCapacity"
    assert error["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"] == ZONES[0]
    again = cloud.buy(template, instance_type="p3.2xlarge", zones=ZONES[:1])
    assert (again["Instances"], again["Errors"][0]["ErrorCode"]) == ([], "InsufficientInstanceCapacity")


def test_strategies_choose_the_pool_that_they_promise(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    rows = cloud.ec2.describe_spot_price_history(InstanceTypes=[TYPE], StartTime=cloud.now())["SpotPriceHistory"]
    prices: dict[str, Decimal] = {}
    for row in rows:  # newest first: the first row of a zone is the one in force
        prices.setdefault(row["AvailabilityZone"], Decimal(row["SpotPrice"]))
    cheapest = min(prices, key=lambda zone: prices[zone])
    for strategy in ("lowest-price", "price-capacity-optimized"):
        answer = cloud.buy(template, SpotOptions={"AllocationStrategy": strategy})
        assert answer["Instances"][0]["AvailabilityZone"] == cheapest
    dearest = max(prices, key=lambda zone: prices[zone])
    overrides = [
        {"InstanceType": TYPE, "AvailabilityZone": zone, "Priority": 0.0 if zone == dearest else 1.0} for zone in ZONES
    ]
    options = {"AllocationStrategy": "capacity-optimized-prioritized"}
    answer = cloud.buy(template, overrides=overrides, SpotOptions=options)
    assert answer["Instances"][0]["AvailabilityZone"] == dearest


def test_one_client_token_is_one_fleet_also_for_forty_at_once(cloud: Cloud) -> None:
    template = cloud.template(SLEEPER)
    answers = forty_at_once(lambda number: cloud.buy(template, ClientToken=f"token-{number % 5}"))
    assert len({answer["FleetId"] for answer in answers}) == 5
    assert len({i for answer in answers for group in answer["Instances"] for i in group["InstanceIds"]}) == 5
    expect_error("IdempotentParameterMismatch", lambda: cloud.buy(template, ClientToken="token-1", count=2))


def test_what_is_wrong_is_refused_as_ec2_refuses_it(cloud: Cloud, template: str) -> None:
    message = expect_error("InvalidParameterValue", lambda: cloud.buy(template, instance_type="zz.nonexist"))
    assert "zz.nonexist" in message
    expect_error("InvalidParameterValue", lambda: cloud.buy(template, zones=["us-east-1z"]))
    expect_error("InvalidLaunchTemplateId.NotFound", lambda: cloud.buy("lt-00000000000000000"))
    expect_error("InvalidFleetConfig", lambda: cloud.buy(template, zones=[ZONES[0], ZONES[0]]))
    expect_error("InvalidParameterValue", lambda: cloud.buy(template, ClientToken="t" * 65))
    assert "instant" in expect_error("UnsupportedOperation", lambda: maintain(cloud, template)), "it says what to do"
    by_needs = [{"InstanceRequirements": {"VCpuCount": {"Min": 1}, "MemoryMiB": {"Min": 1}}}]
    expect_error("UnsupportedOperation", lambda: cloud.buy(template, overrides=by_needs))
    stop = {"InstanceInterruptionBehavior": "stop"}
    expect_error("UnsupportedOperation", lambda: cloud.buy(template, SpotOptions=stop))
    expect_error("InvalidParameterCombination", lambda: cloud.buy(template, SpotOptions={"MinTargetCapacity": 1}))
    expect_error("DryRunOperation", lambda: cloud.buy(template, DryRun=True))


def maintain(cloud: Cloud, template: str) -> Any:
    return cloud.ec2.create_fleet(
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "1"},
                "Overrides": [override(ZONES[0])],
            }
        ],
        TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
    )


def test_a_place_is_named_by_subnet_zone_or_zone_id(cloud: Cloud, template: str) -> None:
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in cloud.ec2.describe_subnets()["Subnets"]}
    bought = {
        "subnet": cloud.buy(template, overrides=[{"InstanceType": TYPE, "SubnetId": subnets[ZONES[1]]}]),
        "zone id": cloud.buy(template, overrides=[{"InstanceType": TYPE, "AvailabilityZoneId": "use1-az1"}]),
        "both": cloud.buy(template, overrides=[override(ZONES[1], SubnetId=subnets[ZONES[1]])]),
    }
    for how, answer in bought.items():
        shown = cloud.show(ids(answer)[0])
        assert (shown["Placement"]["AvailabilityZone"], shown["SubnetId"]) == (ZONES[1], subnets[ZONES[1]]), how
    contrary = [override(ZONES[0], SubnetId=subnets[ZONES[1]])]
    message = expect_error("InvalidParameterValue", lambda: cloud.buy(template, overrides=contrary))
    assert ZONES[1] in message
    unknown = [{"InstanceType": TYPE, "SubnetId": "subnet-00000000"}]
    expect_error("InvalidSubnetID.NotFound", lambda: cloud.buy(template, overrides=unknown))


def test_a_pool_that_is_not_sold_or_too_dear_is_an_error_of_its_own(cloud: Cloud, template: str) -> None:
    answer = cloud.buy(
        template, overrides=[override(ZONES[0], MaxPrice="0.01"), override("us-east-1d"), override(ZONES[2])], count=2
    )
    assert codes(answer) == ["SpotMaxPriceTooLow", "InvalidFleetConfiguration"]
    assert [error["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"] for error in answer["Errors"]] == [
        ZONES[0], "us-east-1d"
    ]  # fmt: skip
    assert [group["AvailabilityZone"] for group in answer["Instances"]] == [ZONES[2]]
    expect_error(
        "InvalidParameterValue", lambda: cloud.buy(template, overrides=[override(ZONES[0], MaxPrice="0.0001")])
    )


def test_a_mixed_fleet_of_several_templates_gets_both_lifecycles(cloud: Cloud, template: str) -> None:
    other = cloud.template(SLEEPER, ImageId="ami-0other")
    answer = cloud.ec2.create_fleet(
        Type="instant",
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": one, "Version": "1"},
                "Overrides": [override(zone)],
            }
            for one, zone in ((template, ZONES[0]), (other, ZONES[1]))
        ],
        TargetCapacitySpecification={
            "TotalTargetCapacity": 7, "OnDemandTargetCapacity": 3, "DefaultTargetCapacityType": "spot"
        },
    )  # fmt: skip
    groups = {(g["Lifecycle"], g["AvailabilityZone"]): g for g in answer["Instances"]}
    count = {
        life: sum(len(g["InstanceIds"]) for (one, _), g in groups.items() if one == life)
        for life in ("spot", "on-demand")
    }
    assert count == {"spot": 4, "on-demand": 3}
    ((_, group),) = [(key, g) for key, g in groups.items() if key == ("on-demand", ZONES[1])]
    assert group["LaunchTemplateAndOverrides"]["LaunchTemplateSpecification"]["LaunchTemplateId"] == other
    assert cloud.show(group["InstanceIds"][0])["ImageId"] == "ami-0other"


def test_on_demand_follows_priorities_and_diversified_spreads(cloud: Cloud, template: str) -> None:
    overrides = [override(zone, Priority=float(n)) for n, zone in enumerate(reversed(ZONES))]
    first = cloud.buy(template, spot=False, overrides=overrides, OnDemandOptions={"AllocationStrategy": "prioritized"})
    assert [group["AvailabilityZone"] for group in first["Instances"]] == [ZONES[2]]
    spread = cloud.buy(template, count=3, SpotOptions={"AllocationStrategy": "diversified"})
    assert {group["AvailabilityZone"]: len(group["InstanceIds"]) for group in spread["Instances"]} == dict.fromkeys(
        ZONES, 1
    )


def test_weights_count_units_and_round_up(cloud: Cloud, template: str) -> None:
    weighted = [override(ZONES[0], WeightedCapacity=1.0), override(ZONES[0], P3, WeightedCapacity=4.0)]
    answer = cloud.buy(template, overrides=weighted, count=9, SpotOptions={"AllocationStrategy": "lowest-price"})
    bought = {group["InstanceType"]: len(group["InstanceIds"]) for group in answer["Instances"]}
    assert bought == {P3: 2, TYPE: 1}, "a quarter of the larger machine is cheaper, but there are only two"
    assert codes(answer) == ["InsufficientInstanceCapacity"]
    assert units(cloud, answer) == 9
    # the cap of a weighted override is the price of one unit: a quarter of the on-demand price
    capped = [override(ZONES[1], P3, WeightedCapacity=4.0, MaxPrice="0.765")]
    rounded = cloud.buy(template, overrides=capped, count=2)
    assert (len(ids(rounded)), codes(rounded), units(cloud, rounded)) == (1, [], 4)
    request = cloud.show(ids(rounded)[0])["SpotInstanceRequestId"]
    (shown,) = cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[request])["SpotInstanceRequests"]
    assert Decimal(shown["SpotPrice"]) == Decimal("3.06")


def units(cloud: Cloud, answer: Any) -> float:
    (fleet,) = cloud.ec2.describe_fleets(FleetIds=[answer["FleetId"]])["Fleets"]
    return float(fleet["FulfilledCapacity"])


def test_the_whole_fleet_can_have_a_price_cap(cloud: Cloud, template: str) -> None:
    on_demand = cloud.buy(template, spot=False, zones=ZONES[:1], count=2, OnDemandOptions={"MaxTotalPrice": "1.0"})
    assert (len(ids(on_demand)), codes(on_demand)) == (1, ["UnfulfillableCapacity"])
    spot = cloud.buy(template, zones=ZONES[:1], count=2, SpotOptions={"MaxTotalPrice": "5"})
    assert (len(ids(spot)), codes(spot)) == (2, [])


def test_a_fleet_below_its_minimum_launches_nothing(cloud: Cloud, template: str) -> None:
    single = {"SingleInstanceType": True, "SingleAvailabilityZone": True}
    short = cloud.buy(template, instance_type=P3, count=4, SpotOptions={"MinTargetCapacity": 3, **single})
    assert (ids(short), codes(short)) == ([], ["InsufficientInstanceCapacity"])
    enough = cloud.buy(template, instance_type=P3, count=4, SpotOptions={"MinTargetCapacity": 2, **single})
    assert len(ids(enough)) == 2
    assert len({group["AvailabilityZone"] for group in enough["Instances"]}) == 1
    types = [override(zone, kind) for zone in ZONES for kind in (TYPE, G5)]
    one_type = cloud.buy(template, overrides=types, count=10, SpotOptions={"SingleInstanceType": True})
    assert {group["InstanceType"] for group in one_type["Instances"]} == {TYPE}
    assert len(ids(one_type)) == 10


def test_quotas_are_counted_in_vcpus_by_lifecycle(cloud: Cloud) -> None:
    europe = Cloud(cloud.process, cloud.url, cloud.state_dir, cloud.client("ec2", "eu-west-1"))
    template = europe.template(SLEEPER)
    zones = ["eu-west-1a", "eu-west-1b"]
    spot = europe.buy(template, zones=zones, count=5)
    assert (len(ids(spot)), set(codes(spot))) == (3, {"MaxSpotInstanceCountExceeded"}), "12 vCPUs are three machines"
    on_demand = europe.buy(template, zones=zones, count=3, spot=False)
    assert (len(ids(on_demand)), set(codes(on_demand))) == (2, {"VcpuLimitExceeded"})
    assert "current vCPU limit of 8" in on_demand["Errors"][0]["ErrorMessage"]
    europe.ec2.terminate_instances(InstanceIds=ids(spot)[:1])
    europe.wait_state(ids(spot)[0], "terminated")
    assert len(ids(europe.buy(template, zones=zones))) == 1


def test_faults_refuse_a_pool(cloud: Cloud, template: str) -> None:
    rule = {"id": "no-a", "kind": "refuse", "code": "UnfulfillableCapacity", "pool": f"*@{ZONES[0]}"}
    cloud.post("faults", {"rules": [rule]})
    try:
        answer = cloud.buy(template, zones=ZONES[:1])
    finally:
        cloud.post("faults/clear", {"id": "no-a"})
    assert (ids(answer), codes(answer)) == ([], ["UnfulfillableCapacity"])


def test_fleets_are_described_by_id_and_deleted_with_their_instances(cloud: Cloud, template: str) -> None:
    answer = cloud.buy(
        template,
        count=2,
        zones=ZONES[:1],
        fleet_tags={"a": "b"},
    )
    assert answer["FleetId"] not in {fleet["FleetId"] for fleet in cloud.ec2.describe_fleets()["Fleets"]}, (
        "EC2 shows instant fleets only to those who name them"
    )
    (fleet,) = cloud.ec2.describe_fleets(FleetIds=[answer["FleetId"]])["Fleets"]
    assert (fleet["FleetState"], fleet["ActivityStatus"], fleet["Type"]) == ("active", "fulfilled", "instant")
    assert (fleet["FulfilledCapacity"], fleet["Tags"]) == (2, [{"Key": "a", "Value": "b"}])
    assert ids(fleet) == ids(answer)
    assert fleet["LaunchTemplateConfigs"][0]["Overrides"] == [override(ZONES[0])]
    named = {"FleetIds": [answer["FleetId"]], "Filters": [{"Name": "fleet-state", "Values": ["deleted*"]}]}
    assert cloud.ec2.describe_fleets(**named)["Fleets"] == []
    expect_error("Unsupported", lambda: cloud.ec2.describe_fleet_instances(FleetId=answer["FleetId"]))

    def delete(*fleet_ids: str, terminate: bool = True) -> Any:
        return cloud.ec2.delete_fleets(FleetIds=list(fleet_ids), TerminateInstances=terminate)

    expect_error("InvalidParameterValue", lambda: delete(answer["FleetId"], terminate=False))
    unknown = "fleet-00000000000000000"
    done = delete(answer["FleetId"], unknown)
    assert [(one["FleetId"], one["CurrentFleetState"]) for one in done["SuccessfulFleetDeletions"]] == [
        (answer["FleetId"], "deleted_terminating")
    ]
    assert [one["Error"]["Code"] for one in done["UnsuccessfulFleetDeletions"]] == ["fleetIdDoesNotExist"]
    for one in ids(answer):
        assert cloud.wait_state(one, "terminated")["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    (fleet,) = cloud.ec2.describe_fleets(**named)["Fleets"]
    assert fleet["FleetState"] == "deleted"
    again = delete(answer["FleetId"])["UnsuccessfulFleetDeletions"]
    assert [one["Error"]["Code"] for one in again] == ["fleetNotInDeletableState"]
    expect_error("InvalidFleetId.NotFound", lambda: cloud.ec2.describe_fleets(FleetIds=[unknown]))
    expect_error("InvalidFleetId.Malformed", lambda: cloud.ec2.describe_fleets(FleetIds=["fleet"]))


def test_groups_and_keys_that_do_not_exist_are_told_with_the_launch(cloud: Cloud) -> None:
    wrong = cloud.template(SLEEPER, SecurityGroupIds=["sg-00000000000000000"])
    assert codes(cloud.buy(wrong, zones=ZONES[:1])) == ["InvalidGroup.NotFound"]
    wrong = cloud.template(SLEEPER, KeyName="nobody's")
    assert codes(cloud.buy(wrong, zones=ZONES[:1])) == ["InvalidKeyPair.NotFound"]
