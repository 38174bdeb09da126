"""What does a market file say? Zones, instance types with their list prices, pools; every price with its source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpucost.money import ExactDecimal
from gpucost.rehearsal.market.places import PoolKey, region_of
from gpucost.rehearsal.wording import in_one_line

PositivePrice = Annotated[ExactDecimal, Field(gt=0)]


class MarketError(ValueError):
    """A market file that cannot be used; the message names the field, its value and what was expected."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourcedPrice(_Model):
    """A price per instance-hour with where it comes from."""

    usd_per_hour: PositivePrice = Field(description="US dollars per instance-hour, as a string such as '0.2043'.")
    source: str = Field(min_length=1, description="Where the figure was read.")
    as_of: str = Field(min_length=1, description="The date or revision of that source.")


def _zone_name(name: str) -> str:
    region_of(name)
    return name


class Zone(_Model):
    """An availability zone: its name in this account, and the id that is the same for everybody."""

    name: Annotated[str, AfterValidator(_zone_name)] = Field(description="For example us-east-1a.")
    zone_id: str = Field(min_length=1, description="For example use1-az6.")


class TypeOffer(_Model):
    """An instance type and its on-demand list price in each region."""

    name: str = Field(pattern=r"^[a-z0-9]+[.-][a-z0-9.-]+$", description="For example g4dn.xlarge.")
    gpu: str = Field(min_length=1, description="For people: which GPU it has.")
    on_demand: dict[str, SourcedPrice] = Field(description="Region -> list price.")
    describe: dict[str, Any] | None = Field(
        default=None,
        description="DescribeInstanceTypes' answer for a type that moto does not know, in the API's own field names.",
    )


class DiskPrice(_Model):
    """What a volume costs, with where the figure comes from."""

    usd_per_gib_month: PositivePrice = Field(description="US dollars per GiB and month of a gp3 volume.")
    source: str = Field(min_length=1, description="Where the figure was read.")
    as_of: str = Field(min_length=1, description="The date or revision of that source.")


class Quota(_Model):
    """How many vCPUs of one family may run at once in a region; spot and on-demand are counted apart."""

    region: str
    lifecycle: Literal["spot", "on-demand"]
    family: Literal["standard", "g", "p"] = Field(
        description="Of instance types: g is G and VT; p is P; standard is A, C, D, H, I, M, R, T and Z."
    )
    vcpus: int = Field(ge=0)


class Moves(_Model):
    """How the spot price of a pool moves."""

    mean_hours_between_changes: float = Field(default=2.0, gt=0, le=240)
    relative_step: float = Field(default=0.03, ge=0, le=0.5, description="Standard deviation of one change, of 1.")
    reversion: float = Field(
        default=0.15, gt=0, le=1, description="How far each change pulls the price back to its base, of 1."
    )


class Capacity(_Model):
    """How many instances the pool holds at once: always, or at most where availability moves."""

    spot: int = Field(ge=0)
    on_demand: int = Field(ge=0)


class Durations(_Model):
    """How long something lasts: a mixture of two exponentials, many short ones and a few long ones."""

    short_hours: float = Field(gt=0, le=2000, description="Mean of the short ones.")
    long_hours: float = Field(gt=0, le=2000, description="Mean of the long ones.")
    short_share: float = Field(ge=0, le=1, description="Which share of them, by number, are short.")

    @property
    def mean_hours(self) -> float:
        """The mean of all."""
        return self.short_share * self.short_hours + (1 - self.short_share) * self.long_hours

    @property
    def short_share_of_time(self) -> float:
        """The share of the short ones in the time that all last together."""
        return self.short_share * self.short_hours / self.mean_hours


class OnOff(_Model):
    """What is there for a while, away for a while, and so on."""

    lifetimes: Durations = Field(description="How long it is there.")
    outages: Durations = Field(description="How long it is away.")

    @property
    def available_share(self) -> float:
        """The share of the time that it is there, in the long run."""
        return self.lifetimes.mean_hours / (self.lifetimes.mean_hours + self.outages.mean_hours)


class Availability(OnOff):
    """How the spot capacity of one pool comes and goes by itself."""

    fading: float = Field(
        default=0.25, ge=0, le=1, description="The last share of a lifetime, in which machines get fewer before none."
    )


class Shortage(OnOff):
    """A shortage of one type that all zones of a region share; spot capacity only."""

    region: str
    instance_type: str


class PoolOffer(_Model):
    """One pool: a zone, a type, a spot price to start from, its moves, its capacity."""

    zone: str
    instance_type: str
    spot: SourcedPrice
    moves: Moves = Moves()
    capacity: Capacity
    availability: Availability | None = Field(default=None, description="Left out: spot capacity never moves.")
    on_demand_refusals: OnOff | None = Field(
        default=None, description="When new on-demand instances are refused (outages). Left out: never."
    )

    @property
    def key(self) -> PoolKey:
        """The pool's zone and type."""
        return PoolKey(self.zone, self.instance_type)


class MarketFile(_Model):
    """The whole market file. See `include/market/three_zones.json`."""

    label: str = Field(min_length=1, description="What these figures are, for people.")
    seed: int = Field(ge=0, description="What moves by chance is a function of this and of the clock's origin.")
    history_hours: int = Field(default=48, ge=24, le=2160, description="Price history before the start.")
    zones: list[Zone] = Field(min_length=1)
    instance_types: list[TypeOffer] = Field(min_length=1)
    pools: list[PoolOffer] = Field(min_length=1)
    shortages: list[Shortage] = Field(default_factory=list, description="At most one for a region and type.")
    disk: DiskPrice
    quotas: list[Quota] = Field(default_factory=list, description="What is not named has no limit.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        zones = {zone.name for zone in self.zones}
        types = {offer.name: offer for offer in self.instance_types}
        seen: set[PoolKey] = set()
        for index, pool in enumerate(self.pools):
            where = f"pools.{index}"
            _among(f"{where}.zone", pool.zone, zones)
            _among(f"{where}.instance_type", pool.instance_type, types)
            _not_dearer(where, pool, types[pool.instance_type])
            if pool.key in seen:
                raise ValueError(f"{where}: {pool.key} is listed twice, expected one entry for each zone and type")
            seen.add(pool.key)
        regions = {region_of(name) for name in zones}
        for index, quota in enumerate(self.quotas):
            _among(f"quotas.{index}.region", quota.region, regions)
        short: set[tuple[str, str]] = set()
        for index, shortage in enumerate(self.shortages):
            _among(f"shortages.{index}.region", shortage.region, regions)
            _among(f"shortages.{index}.instance_type", shortage.instance_type, types)
            place = (shortage.region, shortage.instance_type)
            if place in short:
                raise ValueError(f"shortages.{index}: {' '.join(place)} is listed twice, expected one entry")
            short.add(place)
        return self


def _among(where: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{where}: got {value!r}, expected one of {sorted(known)}")


def _not_dearer(where: str, pool: PoolOffer, offer: TypeOffer) -> None:
    listed = offer.on_demand.get(pool.key.region)
    if listed is None:
        raise ValueError(
            f"{where}: {pool.instance_type} has no on_demand price in {pool.key.region}, expected one there"
        )
    if pool.spot.usd_per_hour > listed.usd_per_hour:
        raise ValueError(
            f"{where}.spot.usd_per_hour: got {pool.spot.usd_per_hour}, expected at most the on-demand price "
            f"{listed.usd_per_hour} of {pool.instance_type}"
        )


def load_market(path: Path) -> MarketFile:
    """Read and check a market file.

    Raises:
        MarketError: the file is away or wrong; the message names the file and every field at fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MarketError(f"market: cannot read {path}: {error.strerror}; give a market file with --market") from error
    try:
        return MarketFile.model_validate_json(text)
    except ValidationError as error:
        raise MarketError(f"market: {path} is not a market file: {in_one_line(error)}") from error
