"""How would AWS's Cost and Usage Report show this invoice? Hourly rows in the columns of the legacy (CSV) report.

There is one row for each instance or volume, clock hour in UTC and price. A minimum of 60 seconds that ends in the
next clock hour has its seconds there. A free first hour has no row: nothing is charged. Compute and disk are rows of
their own, by their ResourceId: sum UnblendedCost by it and you have the invoice's amounts, exactly:

    The invoice rounds once for each instance and volume, to the micro-dollar; the report has many rows with ten
    decimals. So that both agree, an amount is dealt out to its rows in proportion to their exact costs: after row k
    the rows before and with it have cost amount * exact(1..k) / exact(1..n), rounded to ten decimals; row k costs
    the difference. The last sum is the amount itself, no row is negative, and a row is off its UnblendedRate times
    UsageAmount by no more than the rounding of the amount.

Sources: Cost and Usage Report user guide, identity, bill, line item, pricing and resource tag details (columns); EC2
and EBS user guides, "Understand codes ... in billing and usage reports" (BoxUsage, SpotUsage, EBS:VolumeUsage); "AWS
Region billing codes" (prefixes; none in us-east-1); EC2 User Guide, "AMI billing information fields": the operation
of a spot instance ends in SV and the number of its zone. AWS does not say how zones are numbered: here by their
letter, 1 for us-east-1a. A region that is not AWS's, of a replayed market, has its name for a code.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

from gpucost.rehearsal.invoice.disks import DiskLine, gib_months
from gpucost.rehearsal.invoice.measure import HOUR_S, rounded
from gpucost.rehearsal.invoice.rule import Line
from gpucost.rehearsal.market.places import region_of

PLACES = 10
"""Decimals of usage, rates and costs in the report."""

COLUMNS = (
    "identity/LineItemId",
    "identity/TimeInterval",
    "bill/BillType",
    "bill/PayerAccountId",
    "bill/BillingPeriodStartDate",
    "bill/BillingPeriodEndDate",
    "lineItem/UsageAccountId",
    "lineItem/LineItemType",
    "lineItem/UsageStartDate",
    "lineItem/UsageEndDate",
    "lineItem/ProductCode",
    "lineItem/UsageType",
    "lineItem/Operation",
    "lineItem/AvailabilityZone",
    "lineItem/ResourceId",
    "lineItem/UsageAmount",
    "lineItem/CurrencyCode",
    "lineItem/UnblendedRate",
    "lineItem/UnblendedCost",
    "lineItem/LineItemDescription",
    "product/instanceType",
    "product/region",
    "pricing/unit",
    "pricing/publicOnDemandRate",
    "pricing/publicOnDemandCost",
)
"""The columns that every report has, in its order; after them one for each tag key, `resourceTags/user:<key>`."""

REGION_CODES = {
    "af-south-1": "AFS1",
    "ap-east-1": "APE1",
    "ap-east-2": "APE2",
    "ap-northeast-1": "APN1",
    "ap-northeast-2": "APN2",
    "ap-northeast-3": "APN3",
    "ap-south-1": "APS3",
    "ap-south-2": "APS5",
    "ap-southeast-1": "APS1",
    "ap-southeast-2": "APS2",
    "ap-southeast-3": "APS4",
    "ap-southeast-4": "APS6",
    "ap-southeast-5": "APS7",
    "ap-southeast-6": "APS8",
    "ap-southeast-7": "APS9",
    "ca-central-1": "CAN1",
    "ca-west-1": "CAN2",
    "eu-central-1": "EUC1",
    "eu-central-2": "EUC2",
    "eu-north-1": "EUN1",
    "eu-south-1": "EUS1",
    "eu-south-2": "EUS2",
    "eu-west-1": "EU",
    "eu-west-2": "EUW2",
    "eu-west-3": "EUW3",
    "il-central-1": "ILC1",
    "me-central-1": "MEC1",
    "me-south-1": "MES1",
    "mx-central-1": "MXC1",
    "sa-east-1": "SAE1",
    "us-east-2": "USE2",
    "us-west-1": "USW1",
    "us-west-2": "USW2",
}
"""What a usage type begins with, outside us-east-1."""


@dataclass(frozen=True)
class _Resource:
    """What all rows of one instance or volume have in common; prices are US dollars per `unit`."""

    ident: str
    zone: str
    usage_type: str
    operation: str
    unit: str
    instance_type: str
    public_rate: Decimal | None
    tags: Mapping[str, str]


@dataclass(frozen=True)
class _Use:
    """`quantity` units at `price` within one clock hour."""

    hour: datetime
    price: Decimal
    quantity: Fraction
    description: str


def as_rows(lines: Sequence[Line], *, account: str) -> list[dict[str, str]]:
    """The report's rows, by hour, then by resource; each has every column, empty where there is nothing to say.

    Args:
        lines: the invoice.
        account: the twelve digits of the account that uses and pays.
    """
    rows: list[dict[str, str]] = []
    for line in lines:
        rows += _rows(*_compute(line), line.amount, account)
        for disk in line.disks:
            rows += _rows(*_disk(line, disk), disk.amount, account)
    tag_columns = sorted({column for row in rows for column in row} - set(COLUMNS))
    rows.sort(
        key=lambda row: (row["lineItem/UsageStartDate"], row["lineItem/ResourceId"], row["lineItem/UnblendedRate"])
    )
    return [{column: row.get(column, "") for column in (*COLUMNS, *tag_columns)} for row in rows]


def as_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows of `as_rows` as CSV with a line of column names, also when there are no rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _compute(line: Line) -> tuple[_Resource, list[_Use]]:
    usage = line.usage
    spot = usage.lifecycle == "spot"
    number = _zone_number(usage.zone)
    resource = _Resource(
        ident=usage.instance_id,
        zone=usage.zone,
        usage_type=_prefixed(usage.zone, f"{'SpotUsage' if spot else 'BoxUsage'}:{usage.instance_type}"),
        operation=f"RunInstances:SV{number:03d}" if spot else "RunInstances",
        unit="Hrs",
        instance_type=usage.instance_type,
        public_rate=usage.on_demand,
        tags=usage.tags,
    )
    seconds: dict[tuple[datetime, Decimal], int] = defaultdict(int)
    for part in line.segments:
        for hour, within in _by_hour(part.start, part.seconds):
            seconds[hour, part.price] += within
    uses = []
    for (hour, price), count in seconds.items():
        description = f"${price} per On Demand Linux {usage.instance_type} Instance Hour"
        if spot:
            place = f"{region_of(usage.zone)} in VPC Zone #{number}"
            description = f"{usage.instance_type} Linux/UNIX Spot Instance-hour in {place}"
        uses.append(_Use(hour, price, Fraction(count, HOUR_S), description))
    return resource, uses


def _disk(line: Line, disk: DiskLine) -> tuple[_Resource, list[_Use]]:
    volume, zone = disk.volume, line.usage.zone
    resource = _Resource(
        ident=volume.volume_id,
        zone=zone,
        usage_type=_prefixed(zone, f"EBS:VolumeUsage.{volume.volume_type}"),
        operation=f"CreateVolume-{volume.volume_type.capitalize()}",
        unit="GB-Mo",
        instance_type="",
        public_rate=volume.usd_per_gib_month,
        tags=volume.tags,
    )
    price = volume.usd_per_gib_month
    description = f"${price} per GB-month of {volume.volume_type} provisioned storage - {region_of(zone)}"
    return resource, [
        _Use(hour, price, gib_months(volume, within), description)
        for hour, within in _by_hour(volume.created, disk.billed_seconds)
    ]


def _by_hour(start: datetime, seconds: int) -> Iterator[tuple[datetime, int]]:
    """Clock hours in UTC, and how many of the `seconds` from `start` on lie in each."""
    moment, left = start.astimezone(UTC), seconds
    while left:
        hour = moment.replace(minute=0, second=0)
        within = min(left, HOUR_S - int((moment - hour).total_seconds()))
        yield hour, within
        moment, left = moment + timedelta(seconds=within), left - within


def _dealt(amount: Decimal, exact: Sequence[Fraction]) -> list[Decimal]:
    """`amount` in parts that are in proportion to `exact`; see the module's docstring."""
    total, so_far, given, parts = sum(exact, Fraction(0)), Fraction(0), Decimal(0), []
    for one in exact:
        so_far += one
        until = rounded(Fraction(amount) * so_far / total if total else Fraction(0), PLACES)
        parts.append(until - given)
        given = until
    return parts


def _rows(resource: _Resource, uses: Sequence[_Use], amount: Decimal, account: str) -> Iterator[dict[str, str]]:
    costs = _dealt(amount, [Fraction(use.price) * use.quantity for use in uses])
    for use, cost in zip(uses, costs, strict=True):
        yield _row(resource, use, cost, account)


def _row(resource: _Resource, use: _Use, cost: Decimal, account: str) -> dict[str, str]:
    start, end = _stamp(use.hour), _stamp(use.hour + timedelta(seconds=HOUR_S))
    month = use.hour.replace(day=1, hour=0)
    next_month = (month + timedelta(days=31)).replace(day=1)
    key = f"{resource.ident}/{resource.usage_type}/{start}/{use.price}"
    return {
        "identity/LineItemId": hashlib.sha256(key.encode()).hexdigest()[:52],
        "identity/TimeInterval": f"{start}/{end}",
        "bill/BillType": "Anniversary",
        "bill/PayerAccountId": account,
        "bill/BillingPeriodStartDate": _stamp(month),
        "bill/BillingPeriodEndDate": _stamp(next_month),
        "lineItem/UsageAccountId": account,
        "lineItem/LineItemType": "Usage",
        "lineItem/UsageStartDate": start,
        "lineItem/UsageEndDate": end,
        "lineItem/ProductCode": "AmazonEC2",
        "lineItem/UsageType": resource.usage_type,
        "lineItem/Operation": resource.operation,
        "lineItem/AvailabilityZone": resource.zone,
        "lineItem/ResourceId": resource.ident,
        "lineItem/UsageAmount": _number(rounded(use.quantity, PLACES)),
        "lineItem/CurrencyCode": "USD",
        "lineItem/UnblendedRate": _number(use.price),
        "lineItem/UnblendedCost": _number(cost),
        "lineItem/LineItemDescription": use.description,
        "product/instanceType": resource.instance_type,
        "product/region": region_of(resource.zone),
        "pricing/unit": resource.unit,
        **_public(resource, use, cost),
        **{_tag_column(name): value for name, value in resource.tags.items()},
    }


def _public(resource: _Resource, use: _Use, cost: Decimal) -> dict[str, str]:
    """The list price beside what was paid; the same cost, to the last digit, where the list price was paid."""
    rate = resource.public_rate
    if rate is None:
        return {}
    public = cost if rate == use.price else rounded(Fraction(rate) * use.quantity, PLACES)
    return {"pricing/publicOnDemandRate": _number(rate), "pricing/publicOnDemandCost": _number(public)}


def _tag_column(key: str) -> str:
    """AWS's own tags keep their prefix: resourceTags/aws:ec2:fleet-id."""
    return f"resourceTags/{key}" if key.startswith("aws:") else f"resourceTags/user:{key}"


def _number(value: Decimal) -> str:
    return f"{value:.{PLACES}f}"


def _stamp(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _prefixed(zone: str, usage_type: str) -> str:
    region = region_of(zone)
    return usage_type if region == "us-east-1" else f"{REGION_CODES.get(region, region)}-{usage_type}"


def _zone_number(zone: str) -> int:
    return ord(zone[-1]) - ord("a") + 1
