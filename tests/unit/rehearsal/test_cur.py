"""The Cost and Usage Report: read back as CSV it is the invoice, to the last digit."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.rehearsal.invoice.cur import COLUMNS, as_csv, as_rows
from gpucost.rehearsal.invoice.disks import Volume
from gpucost.rehearsal.invoice.document import as_json
from gpucost.rehearsal.invoice.rule import Line, Period, Usage, bill
from tests.unit.rehearsal.test_invoice_properties import NOW, usages

START = datetime(2026, 11, 30, 22, 20, 0, tzinfo=UTC)
FREE = Decimal(0)


def jumping(moment: datetime) -> Decimal:
    """As g2.2xlarge did in 2015: ten times the on-demand price for some minutes, and back."""
    minutes = (moment - START) / timedelta(minutes=1)
    if minutes < 50:
        return Decimal("0.0651")
    return Decimal("6.5") if minutes < 100 else Decimal("0.0712")


def flat(price: str) -> Callable[[datetime], Decimal]:
    return lambda _moment: Decimal(price)


def line(minutes: float, *, zone: str = "us-east-1a", spot: bool = True, **rest: Any) -> Line:
    price_at = rest.pop("price_at", jumping if spot else flat("0.65"))
    ended = START + timedelta(minutes=minutes)
    usage = Usage(
        rest.pop("ident", "i-1"),
        "g2.2xlarge",
        zone,
        "spot" if spot else "on-demand",
        (Period(START, ended, rest.pop("interrupted", False)),),
        price_at,
        on_demand=Decimal("0.65"),
        **rest,
    )
    return bill(usage, NOW)


def read(lines: list[Line]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(as_rows(lines, account="123456789012")))))


def by_resource(rows: list[dict[str, str]]) -> dict[str, Decimal]:
    costs: dict[str, Decimal] = defaultdict(Decimal)
    for row in rows:
        costs[row["lineItem/ResourceId"]] += Decimal(row["lineItem/UnblendedCost"])
    return dict(costs)


def invoiced(lines: list[Line]) -> dict[str, Decimal]:
    """What the JSON says of each resource that costs anything."""
    amounts = {}
    for told in as_json(lines, NOW)["lines"]:
        amounts[told["instance_id"]] = Decimal(told["amount"])
        amounts |= {disk["volume_id"]: Decimal(disk["amount"]) for disk in told["disks"]}
    return {ident: amount for ident, amount in amounts.items() if amount}


def test_a_price_that_jumps_in_mid_life_is_a_row_for_each_clock_hour_and_price() -> None:
    rows = read([line(150)])
    # launched at 22:20; instance-hours begin at 22:20 (.0651), 23:20 (6.5) and 00:20 (.0712)
    assert [
        (row["lineItem/UsageStartDate"], row["lineItem/UnblendedRate"], row["lineItem/UsageAmount"]) for row in rows
    ] == [
        ("2026-11-30T22:00:00Z", "0.0651000000", "0.6666666667"),
        ("2026-11-30T23:00:00Z", "0.0651000000", "0.3333333333"),
        ("2026-11-30T23:00:00Z", "6.5000000000", "0.6666666667"),
        ("2026-12-01T00:00:00Z", "0.0712000000", "0.5000000000"),
        ("2026-12-01T00:00:00Z", "6.5000000000", "0.3333333333"),
    ]
    assert by_resource(rows) == {"i-1": Decimal("0.0651") + Decimal("6.5") + Decimal("0.0356")}


def test_a_spot_row_says_what_aws_says() -> None:
    tags = {"team": "vision, or not", "aws:ec2:fleet-id": "fleet-1"}
    (row,) = read([line(30, tags=tags)])
    assert row["identity/TimeInterval"] == "2026-11-30T22:00:00Z/2026-11-30T23:00:00Z"
    expected = {
        "bill/BillType": "Anniversary",
        "bill/PayerAccountId": "123456789012",
        "bill/BillingPeriodStartDate": "2026-11-01T00:00:00Z",
        "bill/BillingPeriodEndDate": "2026-12-01T00:00:00Z",
        "lineItem/UsageAccountId": "123456789012",
        "lineItem/LineItemType": "Usage",
        "lineItem/UsageEndDate": "2026-11-30T23:00:00Z",
        "lineItem/ProductCode": "AmazonEC2",
        "lineItem/UsageType": "SpotUsage:g2.2xlarge",
        "lineItem/Operation": "RunInstances:SV001",
        "lineItem/AvailabilityZone": "us-east-1a",
        "lineItem/UsageAmount": "0.5000000000",
        "lineItem/CurrencyCode": "USD",
        "lineItem/UnblendedCost": "0.0325500000",
        "lineItem/LineItemDescription": "g2.2xlarge Linux/UNIX Spot Instance-hour in us-east-1 in VPC Zone #1",
        "product/instanceType": "g2.2xlarge",
        "product/region": "us-east-1",
        "pricing/unit": "Hrs",
        "pricing/publicOnDemandRate": "0.6500000000",
        "pricing/publicOnDemandCost": "0.3250000000",
        "resourceTags/user:team": "vision, or not",
        "resourceTags/aws:ec2:fleet-id": "fleet-1",
    }
    assert {column: row[column] for column in expected} == expected


@pytest.mark.parametrize(
    ("zone", "box", "disk"),
    [
        ("us-east-1a", "BoxUsage:g2.2xlarge", "EBS:VolumeUsage.gp3"),
        ("us-west-2b", "USW2-BoxUsage:g2.2xlarge", "USW2-EBS:VolumeUsage.gp3"),
        ("eu-west-1c", "EU-BoxUsage:g2.2xlarge", "EU-EBS:VolumeUsage.gp3"),
    ],
)
def test_usage_types_carry_the_region_and_disks_have_rows_of_their_own(zone: str, box: str, disk: str) -> None:
    volume = Volume("vol-1", 8, "gp3", START, START + timedelta(hours=2), Decimal("0.08"))
    rows = read([line(30, zone=zone, spot=False, volumes=(volume,))])
    first, *disks = sorted(rows, key=lambda row: row["lineItem/ResourceId"])
    assert (first["lineItem/UsageType"], first["lineItem/Operation"]) == (box, "RunInstances")
    assert first["pricing/publicOnDemandCost"] == first["lineItem/UnblendedCost"] == "0.3250000000"
    assert {row["lineItem/UsageType"] for row in disks} == {disk}
    assert {(row["lineItem/Operation"], row["pricing/unit"]) for row in disks} == {("CreateVolume-Gp3", "GB-Mo")}
    # 22:20 to 00:20, in two months' bills
    assert [row["bill/BillingPeriodStartDate"][:7] for row in disks] == ["2026-11", "2026-11", "2026-12"]
    assert sum(Decimal(row["lineItem/UnblendedCost"]) for row in disks) == Decimal("0.001778")


def test_a_free_first_hour_has_no_row_and_an_empty_report_has_its_columns() -> None:
    assert read([line(59, interrupted=True)]) == []
    assert as_csv(as_rows([], account="123456789012")) == ",".join(COLUMNS) + "\n"


def test_zones_are_numbered_and_a_region_of_a_replayed_market_keeps_its_name() -> None:
    (row,) = read([line(30, zone="us-central1-c")])
    assert row["lineItem/UsageType"] == "us-central1-SpotUsage:g2.2xlarge"
    assert (row["lineItem/Operation"], row["product/region"]) == ("RunInstances:SV003", "us-central1")


@given(wanted=st.lists(usages(), min_size=1, max_size=3))
def test_grouped_by_resource_the_report_is_the_invoice(wanted: list[Usage]) -> None:
    lines = []
    for index, usage in enumerate(wanted):
        named = [Volume(f"vol-{index}-{one.volume_id}", *list(vars(one).values())[1:]) for one in usage.volumes]
        lines.append(bill(Usage(f"i-{index}", *list(vars(usage).values())[1:7], tuple(named)), NOW))
    rows = read(lines)
    assert {ident: cost for ident, cost in by_resource(rows).items() if cost} == invoiced(lines)
    assert sum(by_resource(rows).values(), FREE) == Decimal(as_json(lines, NOW)["total"])
    assert len({row["identity/LineItemId"] for row in rows}) == len(rows)
    for row in rows:
        cost, rate, amount = (
            Decimal(row[f"lineItem/{name}"]) for name in ("UnblendedCost", "UnblendedRate", "UsageAmount")
        )
        assert cost >= 0
        # the invoice's rounding, and the usage's tenth decimal
        assert abs(cost - rate * amount) <= Decimal("0.000000501") + rate * Decimal("0.0000000001")
        if row["pricing/unit"] == "Hrs":
            # three lives may end and begin in one clock hour, each with its minimum of a minute
            assert 0 < amount <= 1 + Decimal(2) / 60
