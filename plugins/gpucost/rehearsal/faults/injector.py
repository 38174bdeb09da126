"""Which fault happens now? Rules with their counters, asked by the gate, the fleet planner and the event bus."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gpucost.rehearsal.faults import catalogue
from gpucost.rehearsal.faults.rules import Call, FaultRule, check_ids

if TYPE_CHECKING:
    from gpucost.rehearsal.market.places import PoolKey

log = logging.getLogger(__name__)

Fate = Literal["once", "lost", "twice"]

OUTCOMES = frozenset({"error", "error-after", "timeout", "timeout-after"})
"""Kinds that decide what the client sees instead of its answer."""


@dataclass(frozen=True)
class Decision:
    """What happens to one request.

    Args:
        outcome: the rule that replaces its answer, or None.
        delay_real_s: how long its answer waits, real seconds.
    """

    outcome: FaultRule | None = None
    delay_real_s: float = 0.0


NOTHING = Decision()


@dataclass
class _Armed:
    """A rule with its counters and its own random numbers."""

    rule: FaultRule
    chance: random.Random
    seen: int = 0
    fired: int = 0

    def fires(self) -> bool:
        """Count one match, and tell whether it is one that fires."""
        self.seen += 1
        if self.seen <= self.rule.skip or (self.rule.times is not None and self.fired >= self.rule.times):
            return False
        if self.rule.rate < 1 and self.chance.random() >= self.rule.rate:
            return False
        self.fired += 1
        return True


class Injector:
    """The faults of one rehearsal; safe to use from many threads.

    The same seed, rules and order of requests give the same faults. Every rule draws from random numbers of its
    own, so that another rule changes nothing for it.
    """

    def __init__(self, seed: int = 0, rules: Iterable[FaultRule] = ()) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []
        self._made = 0
        self.add(list(rules))

    def add(self, rules: list[FaultRule]) -> list[FaultRule]:
        """Add rules behind those that are there; returns them with the ids that were made.

        Raises:
            ValueError: an id is taken.
        """
        with self._lock:
            check_ids(rules, [one.rule.id for one in self._armed])
            named = [self._named(rule, {one.id for one in rules}) for rule in rules]
            # a string seeds the same numbers in every process, a hash would not
            self._armed += [_Armed(one, random.Random(f"{self._seed}:{one.id}")) for one in named]  # noqa: S311
            return named

    def _named(self, rule: FaultRule, given: set[str]) -> FaultRule:
        if rule.id:
            return rule
        taken = given | {one.rule.id for one in self._armed}
        self._made += 1
        while f"fault-{self._made}" in taken:
            self._made += 1
        return rule.model_copy(update={"id": f"fault-{self._made}"})

    def clear(self, rule_id: str | None = None) -> int:
        """Remove one rule, or all; returns how many went."""
        with self._lock:
            kept = [one for one in self._armed if rule_id is not None and one.rule.id != rule_id]
            gone = len(self._armed) - len(kept)
            self._armed = kept
            return gone

    def as_json(self) -> list[dict[str, Any]]:
        """The rules, how many requests they matched and how often they fired; fields as they were given."""
        with self._lock:
            return [
                {
                    **one.rule.model_dump(exclude_unset=True),
                    "id": one.rule.id,
                    "matched": one.seen,
                    "fired": one.fired,
                }
                for one in self._armed
            ]

    def decide(self, call: Call) -> Decision:
        """What happens to a request: the first rule that fires decides its answer, every slow one adds its delay."""
        with self._lock:
            if not self._armed:
                return NOTHING
            outcome = self._first(lambda rule: rule.kind in OUTCOMES and rule.concerns(call))
            matching = [one for one in self._armed if one.rule.kind == "slow" and one.rule.concerns(call)]
            slow = [one.rule for one in matching if one.fires()]
        for rule in [*slow, *([outcome] if outcome else [])]:
            log.info("fault %s: %s for %s %s %s", rule.id, _words(rule), call.service, call.action, call.access_key)
        return Decision(outcome, sum(rule.delay_real_s for rule in slow))

    def refusal(self, pool: PoolKey, lifecycle: str) -> tuple[str, str] | None:
        """Code and message when a pool cannot be bought now, for the fleet's Errors; None when it can."""
        with self._lock:
            rule = self._first(
                lambda one: one.kind == "refuse" and one.concerns_pool(pool.instance_type, pool.zone, lifecycle)
            )
        if rule is None or rule.code is None:
            return None
        failure = catalogue.failure(rule.code, rule.message)
        log.info("fault %s: %s %s in %s refused: %s", rule.id, lifecycle, pool.instance_type, pool.zone, failure.code)
        return failure.code, failure.message

    def message_fate(self) -> Fate:
        """What happens to one event on its way from the event bus to all of its targets."""
        with self._lock:
            rule = self._first(lambda one: one.kind in {"lost", "doubled"})
        if rule is None:
            return "once"
        log.info("fault %s: an event is %s", rule.id, rule.kind)
        return "lost" if rule.kind == "lost" else "twice"

    def skew(self, call: Call) -> float:
        """How many seconds the cloud's clock is ahead for this request."""
        total = 0.0
        with self._lock:
            for one in self._armed:
                if one.rule.kind == "skew" and one.rule.concerns(call):
                    if one.seen == 0:
                        log.info("fault %s: the clock is %+g s off for %s", one.rule.id, one.rule.skew_s, call.service)
                    one.seen += 1
                    one.fired += 1
                    total += one.rule.skew_s
        return total

    def imds_skew(self, instance_id: str) -> float:
        """How many seconds ahead the times are that an instance's metadata tells: spot action, rebalance."""
        return self.skew(Call("imds", f"{instance_id}/latest/meta-data/"))

    def _first(self, concerns: Callable[[FaultRule], bool]) -> FaultRule | None:
        for one in self._armed:
            if concerns(one.rule) and one.fires():
                return one.rule
        return None


def _words(rule: FaultRule) -> str:
    """What a fault does, for the log."""
    words = {
        "error": f"answers {rule.code}",
        "error-after": f"does the work and answers {rule.code}",
        "timeout": f"no answer, closed after {rule.delay_real_s:g} s",
        "timeout-after": f"does the work, no answer, closed after {rule.delay_real_s:g} s",
        "slow": f"answers {rule.delay_real_s:g} s later",
    }
    return words[rule.kind]
