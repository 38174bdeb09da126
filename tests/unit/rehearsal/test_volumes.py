"""Volumes: those that instances are made with, and those that outlive them, also over a restart."""

from __future__ import annotations

from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import BY_USER, Disk, LaunchSpec
from gpucost.rehearsal.book.volumes import deleted_at, volume_id
from gpucost.rehearsal.invoice.rule import bill
from gpucost.rehearsal.invoice.usages import usage_of
from tests.fakes.rehearsal import MemoryJournal, Watch, at, buy, instance, market

ROOT = Disk()
KEPT = Disk(device="/dev/sdf", gib=200, delete_on_termination=False)


def test_a_kept_volume_lives_and_costs_until_its_owner_deletes_it() -> None:
    watch, journal, sold = Watch(), MemoryJournal(), market()
    book = Book(sold, watch.clock, journal)
    (one,) = buy(book, spec=LaunchSpec(disks=(ROOT, KEPT), volume_tags={"Name": "scratch"}))
    assert instance(book, one).volume_tags == {"/dev/xvda": {"Name": "scratch"}, "/dev/sdf": {"Name": "scratch"}}
    watch.set(at(minutes=10))
    book.begin_end(one, BY_USER)
    watch.set(at(minutes=11))
    book.mark_ended(one)
    assert [deleted_at(instance(book, one), disk) for disk in (ROOT, KEPT)] == [at(minutes=11), None]
    watch.set(at(minutes=30))
    book.tag_volume(one, KEPT.device, {"team": "blue"})
    book.delete_volume(one, KEPT.device)

    again = Book(sold, watch.clock, MemoryJournal())
    again.restore(journal.events())
    restored = instance(again, one)
    assert restored == instance(book, one)
    assert deleted_at(restored, KEPT) == at(minutes=30)
    root, kept = bill(usage_of(restored, sold), at(hours=5)).disks
    assert (root.seconds, kept.seconds) == (11 * 60, 30 * 60)
    assert (kept.volume.volume_id, kept.volume.tags) == (volume_id(one, KEPT.device), {"team": "blue"})
    assert root.volume.tags == {"Name": "scratch"}
