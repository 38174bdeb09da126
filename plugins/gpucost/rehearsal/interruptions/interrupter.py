"""Which instance is taken back, when, and who is told before? By the market, by a script, by hand.

The market takes instances back when a pool holds fewer than it gave, or when the spot price passes what the owner
would pay. Both are known ahead here, so the notice comes as early as AWS gives it: two minutes, in rehearsal time,
but never less than a few real seconds, which programs need. At high speeds that floor is hours of rehearsal time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from gpucost.clock import SpecClock
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import NO_CAPACITY, PRICE, Ending, Instance
from gpucost.rehearsal.interruptions.fate import Fate, Habits, draw
from gpucost.rehearsal.interruptions.script import JOB_TAG, InterruptionKind, ProgressReader, Script
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.market.places import PoolKey

log = logging.getLogger(__name__)

RISKS_EVERY_REAL_S = 1.0
"""How often rebalances are thought about: they come minutes to hours ahead, so that this is early enough."""


class Messenger(Protocol):
    """Tells the outside: EventBridge."""

    def warn(self, instance: Instance) -> None:
        """EC2 Spot Instance Interruption Warning."""
        ...

    def recommend(self, instance: Instance) -> None:
        """EC2 Instance Rebalance Recommendation."""
        ...


@dataclass(frozen=True)
class NoticeLength:
    """How long a notice is.

    Args:
        notice_s: rehearsal seconds, as AWS gives.
        floor_real_s: never less, real seconds.
    """

    notice_s: float = 120.0
    floor_real_s: float = 10.0


class Interrupter:
    """Decides and announces interruptions; the hypervisor then makes the machines follow.

    Args:
        book: the instances.
        market: what each pool holds and costs, also in time to come.
        clock: the rehearsal clock.
        messenger: tells the outside.
        script: interruptions at a job's progress.
        folder: an instance's disk, where its progress is.
        habits: how often the cloud warns, and warns for nothing.
        length: how long a notice is.
        wake: tells the hypervisor that the book changed.
    """

    def __init__(
        self,
        book: Book,
        market: Market,
        clock: SpecClock,
        messenger: Messenger,
        script: Script,
        folder: Callable[[str], Path],
        *,
        habits: Habits | None = None,
        length: NoticeLength | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._book = book
        self._market = market
        self._clock = clock
        self._messenger = messenger
        self._script = script
        self._folder = folder
        self._habits = habits or Habits()
        self._length = length or NoticeLength()
        self._wake = wake
        self._fates: dict[str, Fate] = {}
        self._progress: dict[str, ProgressReader] = {}
        self._told: dict[str, str] = {}
        self._risks_at: datetime | None = None

    def tick(self) -> None:
        """Look at every spot instance once: carry out what is due, and see what comes."""
        now = self._clock.now()
        spot = [one for one in self._book.holding() if one.lifecycle == "spot" and one.living]
        self._forget(spot)
        waiting = [one for one in spot if not self._carry_out(one, now)]
        for pool, instances in _by_pool(waiting).items():
            self._follow_market(pool, instances, now)
        if self._risks_at is None or now >= self._risks_at:
            self._risks_at = now + timedelta(seconds=RISKS_EVERY_REAL_S * self._clock.spec.speed)
            for pool, instances in _by_pool(waiting).items():
                self._see_risks(pool, instances, now)
        self._follow_script(waiting)

    def interrupt(self, instance_id: str, kind: InterruptionKind) -> bool:
        """By hand or by the script: let it happen to a spot instance. False when it is ending, or was told already."""
        if kind == "notice":
            return self._give_notice(instance_id, self._clock.now(), NO_CAPACITY)
        if kind == "false-notice":
            return self._give_notice(instance_id, self._clock.now(), None)
        if kind == "rebalance":
            return self._recommend(instance_id)
        return self._cut(instance_id, NO_CAPACITY)

    def _carry_out(self, one: Instance, now: datetime) -> bool:
        """Whether the moment of its notice has come."""
        if one.action_at is None or now < one.action_at:
            return False
        if one.noticed_for is None:
            self._book.withdraw_notice(one.id)
            log.info("%s notice passed, and nothing happened", one.id)
        elif self._book.begin_end(one.id, one.noticed_for):
            log.info("%s interrupted by EC2, as announced: %s", one.id, one.noticed_for.spot_status)
            self._wake()
        return True

    def _follow_market(self, pool: PoolKey, instances: list[Instance], now: datetime) -> None:
        """See as far ahead as a notice is long; who is going already makes room."""
        horizon = now + self._lead()
        # a notice that will come to nothing changes nothing here: nobody outside knows it from a real one
        staying = [one for one in instances if one.noticed_for is None]
        for point in self._market.capacities(pool, "spot", now, horizon):
            at = max(point.at, now)
            for one in self._by_rank(staying)[: max(0, len(staying) - point.count)]:
                self._take_back(one, at, now, NO_CAPACITY)
        instances = staying
        cheapest = min((one.max_price for one in instances if one.max_price is not None), default=None)
        if cheapest is None:
            return
        for price in self._market.prices(pool).between(now, horizon):
            if price.price > cheapest:
                for one in instances:
                    if one.max_price is not None and one.max_price < price.price:
                        self._take_back(one, max(price.at, now), now, PRICE)

    def _take_back(self, one: Instance, at: datetime, now: datetime, ending: Ending) -> None:
        """It is taken back at `at`: with a notice as soon as this is known, or without a word at that moment."""
        if not self._fate(one).silent:
            self._give_notice(one.id, at - self._lead(), ending)
        elif at <= now:
            self._cut(one.id, ending)

    def _see_risks(self, pool: PoolKey, instances: list[Instance], now: datetime) -> None:
        ranked = {one.id: place for place, one in enumerate(reversed(self._by_rank(instances)))}
        for one in instances:
            fate, since = self._fate(one), now - one.launched
            if fate.false_notice is not None and fate.false_notice <= since < fate.false_notice + self._lead():
                # a notice lasts longer than this window, so that it is given once
                self._give_notice(one.id, now, None)
            if one.rebalance_at is not None:
                continue
            early = fate.rebalance_lead
            foretold = early is not None and self._market.capacity(pool, "spot", now + early) <= ranked[one.id]
            if foretold or (fate.false_rebalance is not None and since >= fate.false_rebalance):
                self._recommend(one.id)

    def _follow_script(self, instances: Iterable[Instance]) -> None:
        for one in instances:
            job = one.tags.get(JOB_TAG)
            if one.noticed_for is not None or one.state != "running" or not self._script.concerns(one.id, job):
                continue
            try:
                self._follow_job(one, job)
            except Exception as error:
                # what one job leaves on its disk must not stop the script for the others
                if self._told.get(one.id) != str(error):
                    self._told[one.id] = str(error)
                    log.exception("%s job %s: the script could not follow it; it keeps trying", one.id, job)

    def _follow_job(self, one: Instance, job: str | None) -> None:
        step = self._progress.setdefault(one.id, ProgressReader(self._folder(one.id))).step()
        if step is None:
            return

        def shoot(kind: InterruptionKind) -> bool:
            happened = self.interrupt(one.id, kind)
            if happened:
                log.info("%s job %s is at step %s: the script said %s", one.id, job, step, kind)
            return happened

        self._script.fire(one.id, job, step, shoot)

    def _give_notice(self, instance_id: str, earliest: datetime, ending: Ending | None) -> bool:
        """Warn now; the interruption comes a notice after `earliest`, and at least a whole notice after now."""
        now = self._clock.now()
        action_at = max(earliest, now) + self._lead()
        noticed = self._book.give_notice(instance_id, action_at, ending)
        if noticed is None or noticed.action_at is None:
            return False
        ahead_s = (action_at - now).total_seconds()
        false = "; a false one: nothing will follow" if ending is None else ""
        log.info("%s interruption notice: terminate at %s, %.0f s ahead, %s%s",
                 instance_id, noticed.action_at.isoformat(), ahead_s, self._length_in_words(), false)  # fmt: skip
        self._messenger.warn(noticed)
        return True

    def _recommend(self, instance_id: str) -> bool:
        told = self._book.recommend_rebalance(instance_id)
        if told is None:
            return False
        log.info("%s rebalance recommendation", instance_id)
        self._messenger.recommend(told)
        return True

    def _cut(self, instance_id: str, ending: Ending) -> bool:
        before = self._book.begin_end(instance_id, ending, abrupt=True)
        if before is None:
            return False
        how = "without notice" if before.action_at is None else "before the moment of its notice"
        log.info("%s interrupted by EC2 %s: %s", instance_id, how, ending.spot_status)
        self._wake()
        return True

    def _lead(self) -> timedelta:
        return timedelta(seconds=max(self._length.notice_s, self._length.floor_real_s * self._clock.spec.speed))

    def _length_in_words(self) -> str:
        if self._lead() <= timedelta(seconds=self._length.notice_s):
            return "as AWS gives"
        floor = f"{self._length.floor_real_s:g} real seconds"
        return f"instead of {self._length.notice_s:g} s: the floor of {floor} applied"

    def _by_rank(self, instances: list[Instance]) -> list[Instance]:
        """Who goes first, first."""
        return sorted(instances, key=lambda one: (self._fate(one).rank, one.number), reverse=True)

    def _fate(self, one: Instance) -> Fate:
        if one.id not in self._fates:
            self._fates[one.id] = draw(self._habits, self._market.seed, one.number)
        return self._fates[one.id]

    def _forget(self, living: list[Instance]) -> None:
        ids = {one.id for one in living}
        for kept in (self._fates, self._progress, self._told):
            for gone in kept.keys() - ids:
                del kept[gone]


def _by_pool(instances: list[Instance]) -> dict[PoolKey, list[Instance]]:
    pools: dict[PoolKey, list[Instance]] = {}
    for one in instances:
        pools.setdefault(one.pool, []).append(one)
    return pools
