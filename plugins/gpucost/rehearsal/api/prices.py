"""DescribeSpotPriceHistory: the price in force at the start and every change after it, in pages, newest first.

Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html: prices go back 90
days; the last page has an empty token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from gpucost.clock import require_utc
from gpucost.rehearsal.api import views
from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.market.series import PricePoint
from gpucost.rehearsal.protocol import filters
from gpucost.rehearsal.protocol.wire import Ec2Error

PAGE = range(1, 1001)
HISTORY = timedelta(days=90)
OF_CHANGES = frozenset({"spot-price", "timestamp"})
"""Filters that choose changes; the others choose pools."""

PRODUCTS = frozenset({views.PRODUCT, f"{views.PRODUCT} (Amazon VPC)"})

Row = tuple[PoolKey, PricePoint]


def describe(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """DescribeSpotPriceHistory."""
    if request.get("AvailabilityZone") and request.get("AvailabilityZoneId"):
        raise Ec2Error(
            "InvalidParameterCombination", "AvailabilityZone and AvailabilityZoneId cannot be specified together."
        )
    size = filters.page_size(request, PAGE)
    offset, pinned = filters.decode_token(request.get("NextToken"))
    # later pages end where the first one did: new changes must not shift what is already counted
    now = _pinned(pinned) if pinned else context.book.now()
    zone_ids = context.market.zone_ids(region)
    rows = _rows(context, request, region, now)
    token = filters.encode_token(offset + size, now.isoformat()) if offset + size < len(rows) else ""
    return {"SpotPriceHistory": [_shown(row, zone_ids) for row in rows[offset : offset + size]], "NextToken": token}


def _pinned(text: str) -> datetime:
    try:
        return require_utc(datetime.fromisoformat(text), "NextToken")
    except ValueError as error:
        raise Ec2Error("InvalidNextToken", f"The token's time '{text}' is invalid") from error


def _rows(context: Context, request: Mapping[str, Any], region: str, now: datetime) -> list[Row]:
    last = min(request.get("EndTime") or now, now)
    first = request.get("StartTime") or now - HISTORY
    rows = [
        (pool, point)
        for pool in _pools(context, request, region)
        for point in context.market.prices(pool).between(min(first, last), last)
    ]
    known: dict[str, Callable[[Row], list[str]]] = {
        "spot-price": lambda row: [_price(row[1])],
        "timestamp": lambda row: [views.filter_time(row[1].at), f"{row[1].at:%a %b %d %H:%M:%S UTC %Y}"],
    }
    wanted = [one for one in request.get("Filters") or [] if one.get("Name") in OF_CHANGES]
    rows = filters.select(rows, wanted, known, lambda _row: {})
    rows.sort(key=lambda row: (-row[1].at.timestamp(), row[0]))
    return rows


def _pools(context: Context, request: Mapping[str, Any], region: str) -> list[PoolKey]:
    products = set(request.get("ProductDescriptions") or PRODUCTS)
    types = request.get("InstanceTypes")
    zone_ids = context.market.zone_ids(region)
    pools = [
        pool
        for pool in context.market.keys(region)
        if products & PRODUCTS
        and (not types or pool.instance_type in types)
        and request.get("AvailabilityZone") in (None, "", pool.zone)
        and request.get("AvailabilityZoneId") in (None, "", zone_ids[pool.zone])
    ]
    known: dict[str, Callable[[PoolKey], list[str]]] = {
        "availability-zone": lambda pool: [pool.zone],
        "availability-zone-id": lambda pool: [zone_ids[pool.zone]],
        "instance-type": lambda pool: [pool.instance_type],
        "product-description": lambda _pool: sorted(PRODUCTS),
    }
    wanted = [one for one in request.get("Filters") or [] if one.get("Name") not in OF_CHANGES]
    return filters.select(pools, wanted, known, lambda _pool: {})


def _price(point: PricePoint) -> str:
    return f"{point.price:.6f}"


def _shown(row: Row, zone_ids: Mapping[str, str]) -> dict[str, Any]:
    pool, point = row
    return {
        "AvailabilityZone": pool.zone,
        "AvailabilityZoneId": zone_ids[pool.zone],
        "InstanceType": pool.instance_type,
        "ProductDescription": views.PRODUCT,
        "SpotPrice": _price(point),
        "Timestamp": point.at,
    }
