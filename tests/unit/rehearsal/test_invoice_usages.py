"""From the book's records to the invoice: when compute ends, and when disks do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from gpucost.rehearsal.book.records import BY_USER, FROM_INSIDE, NO_CAPACITY, Disk, Instance, LaunchSpec
from gpucost.rehearsal.book.volumes import volume_id
from gpucost.rehearsal.invoice.rule import Line, bill
from gpucost.rehearsal.invoice.usages import usage_of
from gpucost.rehearsal.market.file import DiskPrice, Zone
from gpucost.rehearsal.market.market import Market, PoolMarket
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.market.series import PricePoint, Steady

START = datetime(2026, 11, 30, 16, 20, 0, tzinfo=UTC)
KEY = PoolKey("us-east-1a", "g4dn.xlarge")


class Still:
    """A spot price that never moves."""

    start = START - timedelta(days=2)

    def at(self, moment: datetime) -> Decimal:
        assert moment >= self.start
        return Decimal("0.36")

    def between(self, first: datetime, last: datetime) -> list[PricePoint]:
        raise AssertionError(f"the invoice asks for the price at moments, not from {first} to {last}")


def market() -> Market:
    return Market(
        label="one pool whose price never moves",
        zones=[Zone(name="us-east-1a", zone_id="use1-az6")],
        types=[],
        pools={KEY: PoolMarket(KEY, Decimal("0.72"), Still(), Steady(1), Steady(1))},
        disk=DiskPrice(usd_per_gib_month=Decimal("0.08"), source="a test", as_of="today"),
    )


def instance(**other: object) -> Instance:
    one = Instance(
        id="i-0123456789abcdef0",
        number=0,
        launch_id="fleet-1",
        client_token="",
        pool=KEY,
        lifecycle="spot",
        spec=LaunchSpec(),
        tags={"team": "vision"},
        created=START,
        launched=START,
        state="running",
    )
    return replace(one, **other)  # type: ignore[arg-type]


def after(minutes: int) -> datetime:
    return START + timedelta(minutes=minutes)


def billed(one: Instance, minute: int) -> Line:
    return bill(usage_of(one, market()), after(minute))


def test_compute_ends_when_it_leaves_running_and_the_root_disk_when_it_is_terminated() -> None:
    leaving = instance(state="shutting-down", ending=BY_USER, ended=after(30))
    line = billed(leaving, 32)
    assert (line.seconds, line.disks[0].seconds) == (1800, 32 * 60)
    line = billed(replace(leaving, state="terminated", gone=after(33)), 600)
    assert (line.seconds, line.disks[0].seconds) == (1800, 33 * 60)
    assert (line.amount, line.disks[0].volume.gib) == (Decimal("0.18"), 8)


def test_a_stopped_instance_pays_for_its_disks_on_and_on() -> None:
    stopped = instance(state="stopped", ending=FROM_INSIDE, ended=after(30), gone=after(31))
    assert billed(stopped, 60).disks[0].seconds == 60 * 60
    assert billed(stopped, 600).disks[0].seconds == 600 * 60
    assert billed(stopped, 60).amount == billed(stopped, 600).amount == Decimal("0.18")


def test_lives_before_a_stop_are_charged_and_disks_count_from_the_first_launch() -> None:
    again = instance(
        launched=after(120),
        earlier=((START, after(30)),),
        state="terminated",
        ending=NO_CAPACITY,
        ended=after(150),
        gone=after(151),
    )
    line = billed(again, 600)
    # half an hour that the owner stopped; EC2 interrupted the second life in its first hour
    assert (line.amount, line.disks[0].seconds) == (Decimal("0.18"), 151 * 60)


def test_every_disk_of_the_launch_is_billed_and_one_that_is_kept_outlives_the_instance() -> None:
    disks = (Disk(gib=50), Disk(device="/dev/sdf", gib=200, delete_on_termination=False))
    ended = instance(spec=LaunchSpec(disks=disks), state="terminated", ending=BY_USER, ended=after(5), gone=after(6))
    line = billed(ended, 60)
    assert [(disk.volume.gib, disk.seconds) for disk in line.disks] == [(50, 6 * 60), (200, 60 * 60)]
    assert line.disks[1].volume.volume_id == volume_id(ended.id, "/dev/sdf") != line.disks[0].volume.volume_id


def test_spot_pays_the_spot_price_and_on_demand_the_list_price() -> None:
    ended = instance(state="terminated", ending=BY_USER, ended=after(60), gone=after(61))
    assert billed(ended, 90).amount == Decimal("0.36")
    assert billed(replace(ended, lifecycle="on-demand"), 90).amount == Decimal("0.72")
    assert billed(ended, 90).usage.on_demand == Decimal("0.72")
