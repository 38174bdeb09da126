"""What every action works with: the market, the book, moto, and what the caller may see of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpucost.rehearsal.api import views
from gpucost.rehearsal.api.kept import KeptViews
from gpucost.rehearsal.api.visibility import Visibility
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import Instance, Launch
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.moto_side import MotoSide, RegionSide

Reason = tuple[str, str]
"""Code and message in EC2's words: why a pool does not serve."""

Refusal = Callable[[PoolKey, str], Reason | None]
"""Asked before a pool is bought from: pool and lifecycle -> why not, or None."""

_INSTANCE_ID = re.compile(r"i-[0-9a-f]+")
_FLEET_ID = re.compile(r"fleet-[0-9a-f-]+")


def no_console(_instance_id: str) -> Path:
    """The console of machines that print nothing."""
    return Path(os.devnull)


@dataclass(frozen=True)
class Context:
    """What the actions share.

    Args:
        market, book, moto: what is sold, who owns it, everything else.
        wake: tells the hypervisor that the book changed.
        visibility: what the API does not show yet.
        refusal: faults that refuse a pool.
        console: where what a machine prints is written.
        instance_views, request_views: what instances and their spot requests look like.
    """

    market: Market
    book: Book
    moto: MotoSide
    wake: Callable[[], None]
    visibility: Visibility
    refusal: Refusal
    console: Callable[[str], Path] = no_console
    instance_views: KeptViews[[Mapping[str, str], str]] = field(default_factory=lambda: KeptViews(views.instance))
    request_views: KeptViews[[Mapping[str, str], Mapping[str, str]]] = field(
        default_factory=lambda: KeptViews(views.spot_request)
    )

    def side(self, region: str) -> RegionSide:
        """Moto's side of a region in which this market sells; UnsupportedOperation for another."""
        if region not in self.market.regions:
            sold = ", ".join(self.market.regions)
            raise Ec2Error("UnsupportedOperation", f"This rehearsal cloud sells in {sold}, not in {region}.")
        return self.moto.region(region)

    def instances(self, region: str) -> list[Instance]:
        """The instances of a region that the API shows, in order of launch."""
        return [one for one in self.book.shown(region) if self.visibility.sees(one.id)]

    def named(self, ids: Sequence[str], region: str) -> list[Instance]:
        """The instances asked for by id, each once; one unknown id is an error for all of them.

        Raises:
            Ec2Error: InvalidInstanceID.Malformed, InvalidInstanceID.NotFound.
        """
        for one in ids:
            if not _INSTANCE_ID.fullmatch(one):
                raise Ec2Error("InvalidInstanceID.Malformed", f'Invalid id: "{one}"')
        shown = {one.id: one for one in self.instances(region)}
        unknown = [one for one in ids if one not in shown]
        if unknown:
            many = len(unknown) > 1
            raise Ec2Error(
                "InvalidInstanceID.NotFound",
                f"The instance ID{'s' if many else ''} '{', '.join(unknown)}' do{'' if many else 'es'} not exist",
            )
        return [shown[one] for one in dict.fromkeys(ids)]

    def fleets(self, region: str) -> dict[str, Launch]:
        """The fleets of a region that the API shows, by id."""
        return {one.id: one for one in self.book.launches("fleet", region) if self.visibility.sees(one.id)}


def check_fleet_id(fleet_id: str) -> None:
    """Refuse what cannot be a fleet's id; raises Ec2Error: InvalidFleetId.Malformed."""
    if not _FLEET_ID.fullmatch(fleet_id):
        raise Ec2Error("InvalidFleetId.Malformed", f"The fleet ID '{fleet_id}' is malformed.")
