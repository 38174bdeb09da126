"""Who is taken back, when, and who is told before."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.interruptions.fate import Habits, draw, load_habits
from gpucost.rehearsal.interruptions.interrupter import Interrupter, NoticeLength
from gpucost.rehearsal.interruptions.script import InterruptionKind, ProgressReader, Rule, Script
from gpucost.rehearsal.market.market import Market
from tests.fakes.rehearsal import ORIGIN, MemoryJournal, Watch, at, buy, capacity, instance, market

CALM = Habits(silent_share=0, rebalance_share=0, false_rebalances_per_day=0)
LONG_AGO = ORIGIN - timedelta(days=1)


class Bus:
    """Hears what is announced."""

    def __init__(self) -> None:
        self.warned: list[str] = []
        self.recommended: list[str] = []

    def warn(self, one: Instance) -> None:
        self.warned.append(one.id)

    def recommend(self, one: Instance) -> None:
        self.recommended.append(one.id)


class Scene:
    """A book with its interrupter, and a hand that turns the clock."""

    def __init__(self, sold: Market, folder: Path, habits: Habits = CALM, speed: float = 60, floor: float = 1) -> None:
        self.watch = Watch(speed)
        self.book = Book(sold, self.watch.clock, MemoryJournal())
        self.bus = Bus()
        self.script = Script()
        self.interrupter = Interrupter(
            self.book,
            sold,
            self.watch.clock,
            self.bus,
            self.script,
            lambda instance_id: folder / instance_id,
            habits=habits,
            length=NoticeLength(120, floor),
        )

    def tick(self, moment: datetime) -> None:
        self.watch.set(moment)
        self.interrupter.tick()

    def show(self, instance_id: str) -> Instance:
        return instance(self.book, instance_id)

    def ending(self, ids: list[str]) -> list[str]:
        return [i for i in ids if not self.show(i).living]


def test_a_pool_that_shrinks_warns_two_minutes_ahead_and_takes_back_what_is_too_much(tmp_path: Path) -> None:
    scene = Scene(market(capacity((LONG_AGO, 3), (at(hours=1), 1))), tmp_path)
    ids = buy(scene.book, 3)
    scene.tick(at(minutes=57))
    assert not scene.bus.warned
    scene.tick(at(minutes=58))
    assert len(scene.bus.warned) == 2, "two too many, and each told once"
    scene.tick(at(minutes=59))
    assert len(scene.bus.warned) == 2
    assert {scene.show(i).action_at for i in scene.bus.warned} == {at(hours=1)}
    assert not scene.ending(ids)
    scene.tick(at(hours=1))
    assert set(scene.ending(ids)) == set(scene.bus.warned)
    gone = scene.show(scene.bus.warned[0])
    assert gone.ending is not None
    assert (gone.ending.spot_status, gone.abrupt) == ("instance-terminated-no-capacity", False)
    assert gone.ended == at(hours=1)


def test_who_leaves_by_himself_makes_room(tmp_path: Path) -> None:
    from gpucost.rehearsal.book.records import BY_USER

    scene = Scene(market(capacity((LONG_AGO, 2), (at(hours=1), 1))), tmp_path)
    ids = buy(scene.book, 2)
    scene.book.begin_end(ids[0], BY_USER)
    scene.tick(at(hours=1, minutes=5))
    assert not scene.bus.warned
    assert scene.show(ids[1]).living


def test_a_noticed_instance_counts_as_gone_so_nobody_else_goes_for_it(tmp_path: Path) -> None:
    scene = Scene(market(capacity((LONG_AGO, 3), (at(minutes=1), 2))), tmp_path)
    ids = buy(scene.book, 3)
    for minute in (0, 0.5, 1, 1.5):
        scene.tick(at(minutes=minute))
    assert len(scene.bus.warned) == 1
    assert scene.show(scene.bus.warned[0]).action_at == at(minutes=2), "bought too late for the whole notice before"
    scene.tick(at(minutes=3))
    assert len(scene.ending(ids)) == 1


def test_the_floor_holds_at_high_speed_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(market(capacity((LONG_AGO, 1), (at(days=1), 0))), tmp_path, speed=3600, floor=10)
    (one,) = buy(scene.book)
    with caplog.at_level(logging.INFO):
        scene.tick(at(hours=14, minutes=1))
    assert scene.show(one).action_at == at(hours=24, minutes=1)
    assert "floor of 10 real seconds applied" in caplog.text


def test_some_go_without_a_word(tmp_path: Path) -> None:
    silent = Habits(silent_share=1, rebalance_share=0, false_rebalances_per_day=0)
    scene = Scene(market(capacity((LONG_AGO, 1), (at(hours=1), 0))), tmp_path, silent)
    (one,) = buy(scene.book)
    scene.tick(at(minutes=59, seconds=59))
    assert scene.show(one).living
    scene.tick(at(hours=1))
    assert not scene.bus.warned
    assert scene.show(one).abrupt
    assert scene.show(one).ended == at(hours=1)


def test_a_price_above_the_cap_takes_back_who_would_not_pay_it(tmp_path: Path) -> None:
    prices = ((LONG_AGO, "0.2"), (at(hours=2), "0.31"), (at(hours=2, minutes=1), "0.25"))
    scene = Scene(market(prices=prices), tmp_path)
    (poor,), (rich,) = buy(scene.book, cap="0.3"), buy(scene.book, cap="0.31")
    scene.tick(at(hours=1, minutes=58))
    assert scene.bus.warned == [poor]
    scene.tick(at(hours=2))
    ending = scene.show(poor).ending
    assert ending is not None
    assert ending.spot_status == "instance-terminated-by-price"
    assert scene.show(rich).living


def test_a_rebalance_comes_before_the_notice(tmp_path: Path) -> None:
    foretold = Habits(silent_share=0, rebalance_share=1, rebalance_lead_minutes=30, false_rebalances_per_day=0)
    scene = Scene(market(capacity((LONG_AGO, 4), (at(hours=50), 0))), tmp_path, foretold)
    ids = buy(scene.book, 4)
    minute = 0
    while not scene.bus.recommended:
        minute += 5
        scene.tick(at(minutes=minute))
    while len(scene.bus.recommended) < 4:
        minute += 1
        scene.tick(at(minutes=minute))
    assert minute < 50 * 60
    assert sorted(scene.bus.recommended) == sorted(ids)
    assert all(scene.show(i).rebalance_at is not None for i in ids)


def test_some_rebalances_come_to_nothing(tmp_path: Path) -> None:
    nervous = Habits(silent_share=0, rebalance_share=0, false_rebalances_per_day=24)
    scene = Scene(market(), tmp_path, nervous)
    ids = buy(scene.book, 4)
    for hour in range(24):
        scene.tick(at(hours=hour))
    assert sorted(scene.bus.recommended) == sorted(ids)
    assert not scene.bus.warned
    assert not scene.ending(ids)


def test_a_false_notice_passes_and_leaves_no_trace(tmp_path: Path) -> None:
    scene = Scene(market(), tmp_path)
    (one,) = buy(scene.book)
    assert scene.interrupter.interrupt(one, "false-notice")
    assert not scene.interrupter.interrupt(one, "false-notice"), "it was told already"
    assert scene.bus.warned == [one]
    assert scene.show(one).action_at == at(minutes=2)
    scene.tick(at(minutes=2))
    assert scene.show(one).living
    assert scene.show(one).action_at is None
    assert scene.interrupter.interrupt(one, "notice")


@pytest.mark.parametrize("why", ["capacity", "price"])
def test_a_false_notice_shields_from_no_real_one(tmp_path: Path, why: str) -> None:
    gone = capacity((LONG_AGO, 1), (at(minutes=3), 0)) if why == "capacity" else None
    prices = ((LONG_AGO, "0.2"), (at(minutes=3), "0.31" if why == "price" else "0.2"))
    scene = Scene(market(gone, prices), tmp_path)
    (one,) = buy(scene.book, cap="0.3")
    assert scene.interrupter.interrupt(one, "false-notice")
    scene.tick(at(minutes=1, seconds=30))
    assert scene.bus.warned == [one, one], "announced again, with the moment that counts"
    assert scene.show(one).action_at == at(minutes=3, seconds=30)
    scene.tick(at(minutes=2))
    assert scene.show(one).action_at == at(minutes=3, seconds=30), "the false one has not taken it away"
    scene.tick(at(minutes=3, seconds=30))
    ending = scene.show(one).ending
    assert ending is not None
    assert ending.spot_status == f"instance-terminated-{'no-capacity' if why == 'capacity' else 'by-price'}"


def test_false_notices_by_habit_are_given_once(tmp_path: Path) -> None:
    liar = Habits(silent_share=0, rebalance_share=0, false_rebalances_per_day=0, false_notices_per_day=10)
    scene = Scene(market(), tmp_path, liar)
    ids = buy(scene.book, 4)
    for minute in range(2 * 24 * 60):
        scene.tick(at(minutes=minute))
    assert sorted(scene.bus.warned) == sorted(ids)
    assert not scene.ending(ids)


def runs_a_job(scene: Scene, folder: Path, job: str, step: int) -> str:
    """A running instance whose job is at a step."""
    (one,) = buy(scene.book, tags={"gpucost:job": job})
    scene.book.mark_running(one)
    (folder / one / "work").mkdir(parents=True)
    (folder / one / "work/progress.json").write_text(json.dumps({"step": step}))
    return one


@pytest.mark.parametrize("kind", ["notice", "no-notice", "rebalance"])
def test_a_script_fires_at_the_step_of_a_job(tmp_path: Path, kind: InterruptionKind) -> None:
    scene = Scene(market(), tmp_path)
    mine, other = runs_a_job(scene, tmp_path, "mine", 300), runs_a_job(scene, tmp_path, "x", 300)
    scene.script.add([Rule(job="mine", step=300, event=kind)])
    scene.tick(at(minutes=1))
    hit = scene.show(mine)
    assert {"notice": hit.action_at is not None, "no-notice": hit.abrupt, "rebalance": hit.rebalance_at is not None}[
        kind
    ]
    quiet = scene.show(other)
    assert quiet.living
    assert (quiet.action_at, quiet.rebalance_at) == (None, None)


@pytest.mark.parametrize("kind", ["rebalance", "false-notice"])
def test_a_rule_hits_each_instance_once_however_long_it_stays_at_the_step(
    tmp_path: Path, kind: InterruptionKind
) -> None:
    scene = Scene(market(), tmp_path)
    first = runs_a_job(scene, tmp_path, "mine", 300)
    scene.script.add([Rule(job="mine", step=300, event=kind, times=2)])
    for minute in range(1, 20):
        scene.tick(at(minutes=minute))
    assert scene.bus.warned + scene.bus.recommended == [first]
    second = runs_a_job(scene, tmp_path, "mine", 300)
    for minute in range(20, 40):
        scene.tick(at(minutes=minute))
    assert scene.bus.warned + scene.bus.recommended == [first, second], "the second shot was kept for another"


def test_an_instance_that_was_told_already_costs_no_shot(tmp_path: Path) -> None:
    scene = Scene(market(), tmp_path)
    told, other = runs_a_job(scene, tmp_path, "mine", 300), runs_a_job(scene, tmp_path, "mine", 10)
    assert scene.interrupter.interrupt(told, "rebalance")
    scene.script.add([Rule(job="mine", step=300, event="rebalance")])
    scene.tick(at(minutes=1))
    (tmp_path / other / "work/progress.json").write_text('{"step":  300}')
    scene.tick(at(minutes=2))
    assert scene.bus.recommended == [told, other]


def test_what_one_job_leaves_on_its_disk_does_not_stop_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(market(), tmp_path)
    bad, worse, good = (runs_a_job(scene, tmp_path, "mine", 300) for _ in range(3))
    loop = tmp_path / bad / "work/progress.json"
    loop.unlink()
    loop.symlink_to(loop)
    whole = ProgressReader.step

    def step(reader: ProgressReader) -> int | None:
        if reader._folder.name == worse:
            raise RuntimeError("nobody thought of this")
        return whole(reader)

    monkeypatch.setattr(ProgressReader, "step", step)
    scene.script.add([Rule(job="mine", step=300, times=9)])
    for minute in (1, 2, 3):
        scene.tick(at(minutes=minute))
    assert scene.ending([bad, worse, good]) == [good]
    assert len([record for record in caplog.records if "nobody thought of this" in str(record.exc_text)]) == 1


@given(st.integers(0, 2**31), st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_a_fate_is_a_function_of_seed_and_number_and_rates_move_nothing_else(
    seed: int, number: int, silent: float, foretold: float
) -> None:
    habits = Habits(silent_share=silent, rebalance_share=foretold)
    fate = draw(habits, seed, number)
    assert fate == draw(habits, seed, number)
    more = draw(Habits(silent_share=1, rebalance_share=1), seed, number)
    assert more.rank == fate.rank
    assert more.silent
    assert more.rebalance_lead is not None
    assert fate.rebalance_lead in {None, more.rebalance_lead}


def test_habits_from_a_file_name_the_field_at_fault(tmp_path: Path) -> None:
    path = tmp_path / "habits.json"
    path.write_text('{"silent_share": 2}')
    with pytest.raises(ValueError, match="silent_share"):
        load_habits(path)
    path.write_text('{"silent_share": 1}')
    assert load_habits(path).silent_share == 1
    with pytest.raises(ValueError, match="cannot read"):
        load_habits(tmp_path / "none.json")
