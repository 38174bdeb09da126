"""Any sequence of buy, tag, describe, interrupt, terminate, restart keeps the books.

Every instance-second on the invoice belongs to a process that lived, no process is without an instance, capacity is
never oversold, each token is one fleet. Machines are records here (tests/fakes/rehearsal_power.py), so that hundreds
of lives pass in a second; tests/system/test_rehearsal_restart.py does the same with real processes.
"""

from __future__ import annotations

import itertools
import math
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpucost.rehearsal.book.book import Book, TokenReused
from gpucost.rehearsal.book.records import BY_USER, Instance, LaunchSpec, Lifecycle
from gpucost.rehearsal.interruptions.fate import Habits
from gpucost.rehearsal.interruptions.interrupter import Interrupter, NoticeLength
from gpucost.rehearsal.interruptions.script import InterruptionKind, Script
from gpucost.rehearsal.invoice.rule import Line, bill
from gpucost.rehearsal.invoice.usages import usage_of
from gpucost.rehearsal.machines.hypervisor import Hypervisor
from gpucost.rehearsal.market.places import PoolKey
from gpucost.rehearsal.settings import Settings
from tests.fakes.rehearsal import ORIGIN, OTHER, POOL, MemoryJournal, Watch, at, buy, capacity, market
from tests.fakes.rehearsal_power import FakePower

SPEED = 60.0
TOKENS = ["", "", "a", "b", "c"]
KINDS: list[InterruptionKind] = ["notice", "no-notice", "false-notice", "rebalance"]
LINGERS_S = 25 * SPEED
"""A machine that ends is not billed, while its programs get their time to end; a hypervisor looks but now and then."""

LOOKS_S = 4 * SPEED
"""A machine whose first process was killed by a stranger is found dead at one of the next looks."""

POOLS = st.sampled_from([POOL, OTHER])
PICK = st.integers(0, 10_000)
LATE_S = st.sampled_from([0, 61, 200])
"""How late a busy host looks at what was sold."""


class Quiet:
    """An event bus that nobody listens to."""

    def warn(self, one: Instance) -> None:
        """Nothing."""

    def recommend(self, one: Instance) -> None:
        """Nothing."""


class Rehearsal(RuleBasedStateMachine):
    """One cloud over several lives."""

    def __init__(self) -> None:
        super().__init__()
        long_ago = ORIGIN - timedelta(days=2)
        self.market = market(
            spot=capacity((long_ago, 3), (at(hours=2), 1), (at(hours=3), 2), (at(hours=5), 0), (at(hours=6), 3)),
            prices=((long_ago, "0.2"), (at(hours=1), "0.31"), (at(hours=4), "0.25"), (at(hours=7), "0.55")),
        )
        self.watch = Watch(SPEED)
        self.clock = self.watch.clock
        self.power = FakePower(self.clock)
        self.journal = MemoryJournal()
        self.ids = itertools.count()
        self.fleets: dict[str, tuple[str, list[str]]] = {}
        self.died: set[str] = set()
        self.start()

    def start(self) -> None:
        self.book = Book(self.market, self.clock, self.journal, new_id=lambda kind: f"{kind}-{next(self.ids):017x}")
        self.book.restore(self.journal.events())
        config = Settings(state_dir=Path("state"), market=Path("market.json"), boot_s=30)
        self.interrupter = Interrupter(
            self.book,
            self.market,
            self.clock,
            Quiet(),
            Script(),
            lambda instance_id: Path("nowhere") / instance_id,
            habits=Habits(silent_share=0.3),
            length=NoticeLength(120, 1),
        )
        self.hypervisor = Hypervisor(
            self.book,
            self.clock,
            config,
            self.power,
            on_tick=lambda: self.interrupter.tick(),
            monotonic=lambda: (self.clock.now() - ORIGIN).total_seconds() / SPEED,
        )
        self.hypervisor.adopt()
        self.power.open()
        self.hypervisor.tick()

    def one_of(self, pick: int) -> Instance:
        every = self.book.every()
        return every[pick % len(every)]

    @rule(
        pool=POOLS,
        count=st.integers(1, 4),
        token=st.sampled_from(TOKENS),
        spot=st.booleans(),
        cheap=st.booleans(),
        late_s=LATE_S,
        regrets=st.booleans(),
    )
    def buys(self, pool: PoolKey, count: int, token: str, spot: bool, cheap: bool, late_s: int, regrets: bool) -> None:
        lifecycle: Lifecycle = "spot" if spot else "on-demand"
        was_known = token and token in self.fleets
        before = len(self.book.every())
        spec = LaunchSpec(shutdown_behavior="stop" if cheap else "terminate")
        ids = buy(
            self.book, count, pool=pool, lifecycle=lifecycle, token=token, cap="0.3" if cheap else None, spec=spec
        )  # type: ignore[arg-type]
        if was_known:
            assert self.fleets[token][1] == ids, "the token's one fleet is answered again"
            assert len(self.book.every()) == before, "and nothing is launched"
        elif token:
            self.fleets[token] = (token, ids)
        now = self.clock.now()
        if len(self.book.every()) > before:
            for sold in {(one.pool, one.lifecycle) for one in self.book.every()[before:]}:
                held = [one for one in self.book.holding() if (one.pool, one.lifecycle) == sold]
                assert len(held) <= self.market.capacity(*sold, now), "never more than there is"
        self.is_looked_at(late_s, ids if regrets else [])

    def is_looked_at(self, late_s: int, ended: list[str]) -> None:
        """A busy host looks at last; some owners think better of it meanwhile."""
        self.watch.set(self.clock.now() + timedelta(seconds=late_s))
        for instance_id in ended:
            self.book.begin_end(instance_id, BY_USER)
        self.every_second_on_the_invoice_was_lived()
        self.hypervisor.tick()

    @precondition(lambda self: self.fleets)
    @rule(pick=PICK)
    def asks_for_something_else_with_a_used_token(self, pick: int) -> None:
        token = sorted(self.fleets)[pick % len(self.fleets)]
        try:
            self.book.launch_once("fleet", "us-east-1", token, "other", {}, {}, lambda _now: ([], lambda _made: {}))
        except TokenReused:
            return
        raise AssertionError("another request with a used token was accepted")

    @precondition(lambda self: self.book.every())
    @rule(pick=PICK, value=st.sampled_from("xyz"))
    def tags(self, pick: int, value: str) -> None:
        one = self.one_of(pick)
        assert self.book.add_tags([one.id], {"k": value}) == []
        found = self.book.get(one.id)
        assert found is not None
        assert found.tags["k"] == value

    @rule()
    def describes(self) -> None:
        shown = {one.id for one in self.book.shown("us-east-1")}
        assert {one.id for one in self.book.holding()} <= shown
        assert self.book.shown("eu-west-1") == []

    @precondition(lambda self: self.book.holding())
    @rule(pick=PICK, kind=st.sampled_from(KINDS))
    def interrupts(self, pick: int, kind: InterruptionKind) -> None:
        spot = [one for one in self.book.holding() if one.lifecycle == "spot"]
        if spot:
            self.interrupter.interrupt(spot[pick % len(spot)].id, kind)

    @precondition(lambda self: self.book.every())
    @rule(pick=PICK)
    def terminates(self, pick: int) -> None:
        one = self.one_of(pick)
        if one.state == "stopped":
            self.book.terminate_stopped(one.id)
        else:
            self.book.begin_end(one.id, BY_USER)

    @precondition(lambda self: self.power.living())
    @rule(pick=PICK)
    def shuts_down_from_inside(self, pick: int) -> None:
        ids = sorted(self.power.living())
        self.power.ask_shutdown(ids[pick % len(ids)])
        self.hypervisor.tick()

    @precondition(lambda self: [one for one in self.book.every() if one.state == "stopped"])
    @rule(pick=PICK, late_s=LATE_S, regrets=st.booleans())
    def starts_again(self, pick: int, late_s: int, regrets: bool) -> None:
        stopped = [one for one in self.book.every() if one.state == "stopped"]
        one = stopped[pick % len(stopped)]
        with self.book.locked:
            if self.book.free(one.pool, one.lifecycle, self.clock.now()) > 0:
                self.book.start_again(one.id)
        self.is_looked_at(late_s, [one.id] if regrets else [])

    @precondition(lambda self: self.power.living())
    @rule(pick=PICK)
    def a_machine_dies(self, pick: int) -> None:
        ids = sorted(one for one in self.power.living() if self.power.was_on(one))
        if ids:
            self.power.init_dies(ids[pick % len(ids)])
            self.died.add(ids[pick % len(ids)])

    @rule(seconds=st.sampled_from([1, 7, 29, 61, 119, 600, 1800, 3600]))
    def time_passes(self, seconds: int) -> None:
        begun, step = self.clock.now(), max(1, seconds // 20)
        for passed in range(step, seconds + step, step):
            self.watch.set(begun + timedelta(seconds=min(passed, seconds)))
            self.hypervisor.tick()

    @rule(bought=st.integers(0, 2))
    def the_cloud_is_killed_and_started_again(self, bought: int) -> None:
        if bought:
            buy(self.book, bought)
        before = self.book.every()
        self.power.cloud_dies()
        self.start()
        assert [one.id for one in self.book.every()] == [one.id for one in before]

    @rule(seconds=st.integers(1, 3000))
    def the_host_dies_and_comes_back(self, seconds: int) -> None:
        on = self.power.living()
        buy(self.book, 1)
        self.power.host_dies()
        self.watch.set(self.clock.now() + timedelta(seconds=seconds))
        self.start()
        assert not [one.id for one in self.book.every() if one.id in on and one.living], "they died with their host"

    @rule()
    def the_cloud_is_ended_and_started_again(self) -> None:
        self.hypervisor.stop()
        assert not self.power.living(), "nothing outlives it"
        assert not self.book.holding(), "and the book knows"
        self.start()

    @invariant()
    def the_book_is_the_journal(self) -> None:
        again = Book(self.market, self.clock, MemoryJournal())
        again.restore(self.journal.events())
        assert again.every() == self.book.every()
        assert again.launches("fleet", "us-east-1") == self.book.launches("fleet", "us-east-1")

    @invariant()
    def no_process_is_without_an_instance(self) -> None:
        assert self.power.living() <= {one.id for one in self.book.holding()}

    @invariant()
    def every_second_on_the_invoice_was_lived(self) -> None:
        now = self.book.now()
        for one in self.book.every():
            line = bill(usage_of(one, self.market), now)
            lived = sum(_seconds(start, end or self.clock.now()) for start, end in self._inits(one.id))
            late = LOOKS_S if one.id in self.died else 0
            assert line.seconds <= lived + late, f"{one.id} is billed for more than lived"
            assert lived - line.seconds <= LINGERS_S * (len(one.earlier) + 1), f"{one.id} lived and was not billed"
            _check_amount(one, line)

    def _inits(self, instance_id: str) -> list[tuple[datetime, datetime | None]]:
        return [(p.started, p.ended) for p in self.power.processes if p.instance_id == instance_id and p.name == "sh"]

    def teardown(self) -> None:
        for one in self.book.every():
            self.terminates_by_id(one.id)
        for _ in range(10):
            self.watch.set(self.clock.now() + timedelta(minutes=1))
            self.hypervisor.tick()
        assert not self.power.living()
        assert {one.state for one in self.book.every()} <= {"terminated"}

    def terminates_by_id(self, instance_id: str) -> None:
        self.book.terminate_stopped(instance_id)
        self.book.begin_end(instance_id, BY_USER)


def _seconds(start: datetime, end: datetime) -> int:
    return math.ceil((end - start).total_seconds()) + 1


def _check_amount(one: Instance, line: Line) -> None:
    free = one.lifecycle == "spot" and one.ending is not None and one.ending.by_ec2 and line.seconds < 3600
    assert line.amount >= 0
    if not free and not one.earlier:
        assert line.amount >= (Decimal("0.2") * 60 / 3600).quantize(Decimal("0.0001")), "at least a minute"


TestRehearsal = Rehearsal.TestCase
TestRehearsal.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
