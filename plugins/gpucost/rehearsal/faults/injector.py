"""Which fault happens now? Rules with their counters, asked by the gate, the fleet planner and the event bus."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucost.rehearsal.faults.kept import KeptFile
from gpucost.rehearsal.faults.rules import FaultRule, check_ids
from gpucost.rehearsal.protocol import catalogue
from gpucost.rehearsal.protocol.reading import Call

if TYPE_CHECKING:
    from gpucost.rehearsal.market.places import PoolKey

log = logging.getLogger(__name__)

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


class _Armed:
    """A rule with its counters and its own random numbers.

    Args:
        given: the rule as it was asked for.
        rule: the same, with an id.
        seed: of all rules.
        seen, fired, drawn: how many requests it matched, it fired at, it drew a random number for, in earlier lives.
    """

    def __init__(
        self, given: FaultRule, rule: FaultRule, seed: int, seen: int = 0, fired: int = 0, drawn: int = 0
    ) -> None:
        self.given = given
        self.rule = rule
        self.seen = seen
        self.fired = fired
        self._drawn = drawn
        # a string seeds the same numbers in every process, a hash would not
        self._chance = random.Random(f"{seed}:{rule.id}")  # noqa: S311 (faults, not secrets)
        for _ in range(drawn):
            self._chance.random()

    def fires(self) -> bool:
        """Count one match, and tell whether it is one that fires."""
        self.seen += 1
        if self.seen <= self.rule.skip or (self.rule.times is not None and self.fired >= self.rule.times):
            return False
        if self.rule.rate < 1:
            self._drawn += 1
            if self._chance.random() >= self.rule.rate:
                return False
        self.fired += 1
        return True

    def as_json(self) -> dict[str, Any]:
        """What makes the same again; the rule's fields as they were given."""
        given = self.given.model_dump(exclude_unset=True)
        return {"given": given, "id": self.rule.id, "seen": self.seen, "fired": self.fired, "drawn": self._drawn}


class Injector:
    """The faults of one rehearsal; safe to use from many threads.

    The same seed, rules and order of requests give the same faults. Every rule draws from random numbers of its
    own, so that another rule changes nothing for it.

    Args:
        seed: of the random numbers.
        rules: at the start. One that is kept already is not added again; one with the id of a kept one is put in its
            place.
        kept_in: a file that remembers rules and counts over a restart of the cloud; None: they are forgotten.

    Raises:
        ValueError: two rules have one id, or the file cannot be read.
    """

    def __init__(self, seed: int = 0, rules: Iterable[FaultRule] = (), kept_in: Path | None = None) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._kept = KeptFile(kept_in)
        self._armed = self._of_earlier_lives()
        self._made = 0
        rules = list(rules)
        known = [one.given for one in self._armed]
        renewed = {rule.id for rule in rules if rule.id and rule not in known}
        self._armed = [one for one in self._armed if one.rule.id not in renewed]
        self.add([rule for rule in rules if rule not in known])

    def _of_earlier_lives(self) -> list[_Armed]:
        document = self._kept.read()
        try:
            return [_rearmed(one, self._seed) for one in document.get("rules", [])]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._kept.damaged(ValueError(str(error))) from error

    def add(self, rules: list[FaultRule]) -> list[FaultRule]:
        """Add rules behind those that are there; returns them with the ids that were made.

        Raises:
            ValueError: an id is taken.
        """
        with self._lock:
            check_ids(rules, [one.rule.id for one in self._armed])
            named = [self._named(rule, {one.id for one in rules}) for rule in rules]
            self._armed += [_Armed(given, rule, self._seed) for given, rule in zip(rules, named, strict=True)]
            self._keep()
            return named

    def _keep(self) -> None:
        self._kept.write({"rules": [one.as_json() for one in self._armed]})

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
            self._keep()
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
            outcome = self._first(lambda rule: rule.kind in OUTCOMES and rule.concerns(call))
            slow = self._all(lambda rule: rule.kind == "slow" and rule.concerns(call))
        if outcome is None and not slow:
            return NOTHING
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

    def copies(self) -> int:
        """How many copies of a message come into its queue: 1, or 0 of a lost and 2 of a doubled one."""
        with self._lock:
            rule = self._first(lambda one: one.kind in {"lost", "doubled"})
        if rule is None:
            return 1
        log.info("fault %s: a message is %s", rule.id, rule.kind)
        return 0 if rule.kind == "lost" else 2

    def skew(self, call: Call) -> float:
        """How many seconds the cloud's clock is ahead for this request."""
        with self._lock:
            before = {one.rule.id for one in self._armed if one.seen}
            rules = self._all(lambda rule: rule.kind == "skew" and rule.concerns(call))
        for rule in rules:
            if rule.id not in before:
                log.info("fault %s: the clock is %+g s off for %s", rule.id, rule.skew_s, call.service)
        return sum(rule.skew_s for rule in rules)

    def imds_skew(self, instance_id: str) -> float:
        """How many seconds ahead the times are that an instance's metadata tells: spot action, rebalance."""
        return self.skew(Call("imds", f"{instance_id}/latest/meta-data/"))

    def _first(self, concerns: Callable[[FaultRule], bool]) -> FaultRule | None:
        """The first rule that fires; those behind it do not count the match."""
        matching = [one for one in self._armed if concerns(one.rule)]
        found = next((one.rule for one in matching if one.fires()), None)
        if matching:
            self._keep()
        return found

    def _all(self, concerns: Callable[[FaultRule], bool]) -> list[FaultRule]:
        """Every rule that fires."""
        matching = [one for one in self._armed if concerns(one.rule)]
        found = [one.rule for one in matching if one.fires()]
        if matching:
            self._keep()
        return found


def _rearmed(document: Mapping[str, Any], seed: int) -> _Armed:
    given = FaultRule.model_validate(document["given"])
    rule = given.model_copy(update={"id": document["id"]})
    return _Armed(given, rule, seed, document["seen"], document["fired"], document["drawn"])


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
