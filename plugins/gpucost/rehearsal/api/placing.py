"""Where may an instance run? Zones by name or id, subnets, and which of them contradict each other."""

from __future__ import annotations

from dataclasses import dataclass

from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.moto_side import RegionSide


@dataclass(frozen=True)
class Place:
    """A zone, with the subnet and its network."""

    zone: str
    subnet_id: str | None
    vpc_id: str | None


def places(
    market: Market, moto: RegionSide, *, zone: str | None, zone_id: str | None, subnets: str | None
) -> list[Place]:
    """Where an instance may run: the zone or the subnets that are named, or every zone of the market.

    Args:
        market: its zones.
        moto: the region's networks.
        zone: a zone's name.
        zone_id: a zone's id.
        subnets: ids of subnets, joined by commas.

    Raises:
        Ec2Error, moto's ServiceException: no such zone or subnet, a zone named twice, a subnet of another zone (its
            words: hashicorp/terraform-provider-aws#13999).
    """
    if zone and zone_id:
        raise Ec2Error(
            "InvalidParameterCombination", "AvailabilityZone and AvailabilityZoneId cannot be specified together."
        )
    if zone_id:
        zone = {known: name for name, known in market.zone_ids(moto.name).items()}.get(zone_id)
        if zone is None:
            raise Ec2Error("InvalidParameterValue", f"Invalid availability zone id: [{zone_id}]")
    if zone and zone not in moto.zone_names():
        raise Ec2Error("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
    named = [part.strip() for part in (subnets or "").split(",") if part.strip()]
    if named:
        return [_in_subnet(moto, subnet, zone) for subnet in named]
    return [Place(name, *moto.subnet_of(None, name)) for name in ([zone] if zone else market.zone_ids(moto.name))]


def _in_subnet(moto: RegionSide, subnet: str, zone: str | None) -> Place:
    found = moto.zone_of_subnet(subnet)
    if zone and found != zone:
        raise Ec2Error(
            "InvalidParameterValue",
            f"Value ({zone}) for parameter availabilityZone is invalid. Subnet '{subnet}' is in the availability zone "
            f"{found}",
        )
    return Place(found, *moto.subnet_of(subnet, found))
