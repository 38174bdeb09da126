"""A site is where we may buy, and with what settings: image, network, role, disk, instance types.

Sites come from a YAML file that the platform team keeps; it holds no secret.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from gpucost.money import InstanceHourPrice


class _Setting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ListPrice(_Setting):
    """The on-demand price of one instance type, written down with its source and date."""

    price: InstanceHourPrice
    source: str = Field(min_length=1)
    as_of: AwareDatetime


class StoreSettings(_Setting):
    """The object store that nodes of this site reach."""

    url: str = Field(pattern=r"^(s3|file)://", description="s3://bucket/prefix")
    endpoint: str | None = Field(default=None, description="Address of an S3-compatible server; None: AWS.")
    region: str = "us-east-1"


class Site(_Setting):
    """One region in which machines may be bought."""

    provider: str = "aws"
    region: str
    image: str = Field(description="Image id (ami-…) whose python3 has torch, boto3, obstore and pydantic.")
    zones: tuple[str, ...] = Field(min_length=1, description="Names of the zones to buy in.")
    subnets: dict[str, str] = Field(default_factory=dict, description="Zone name -> subnet id; empty: default subnets.")
    security_groups: tuple[str, ...] = ()
    role: str | None = Field(default=None, description="Instance profile that lets nodes reach the store.")
    root_device: str = Field(
        default="/dev/xvda",
        pattern=r"^/dev/\w+$",
        description="The image's RootDeviceName; another name adds a second disk.",
    )
    volume_gib: int = Field(default=100, ge=8, description="Size of the root disk, GiB.")
    instance_types: dict[str, ListPrice] = Field(min_length=1, description="Type -> on-demand list price.")
    store: StoreSettings

    @field_validator("subnets")
    @classmethod
    def _named_zones(cls, subnets: dict[str, str], info: Any) -> dict[str, str]:
        unknown = set(subnets) - set(info.data.get("zones", ()))
        if unknown:
            raise ValueError(f"got subnets for {sorted(unknown)}, expected zones that are listed in zones")
        return subnets


class Sites(_Setting):
    """All sites, one per provider and region."""

    sites: tuple[Site, ...] = Field(min_length=1)

    def of(self, provider: str) -> tuple[Site, ...]:
        """The sites of one provider."""
        return tuple(site for site in self.sites if site.provider == provider)

    def site(self, provider: str, region: str) -> Site:
        """The site of a provider in a region.

        Raises:
            KeyError: none is configured there.
        """
        for site in self.of(provider):
            if site.region == region:
                return site
        raise KeyError(f"sites: no site for {provider} in {region}; add one to the sites file")


def load_sites(path: Path) -> Sites:
    """Read the sites file.

    Raises:
        ValueError: it is missing or wrong; the message names the file, each field, and what was expected.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError as missing:
        raise ValueError(
            f"sites_file: got {str(path)!r}, expected a YAML file; set AIRFLOW__GPUCOST__SITES_FILE to it"
        ) from missing
    except yaml.YAMLError as broken:
        raise ValueError(f"{path}: this is not YAML: {broken}") from broken
    try:
        return Sites.model_validate(content)
    except ValidationError as wrong:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong.errors())
        raise ValueError(f"{path}: {details}") from wrong
