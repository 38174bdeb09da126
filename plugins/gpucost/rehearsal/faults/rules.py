"""What goes wrong, for whom and how often? Rules of faults, as a file or a test writes them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpucost.rehearsal.protocol import catalogue
from gpucost.rehearsal.protocol.reading import Call
from gpucost.rehearsal.wording import read_model

Kind = Literal["error", "error-after", "timeout", "timeout-after", "slow", "refuse", "lost", "doubled", "skew"]

_CALLER = frozenset({"service", "action", "region", "access_key"})
_COUNTED = frozenset({"rate", "times", "skip"})
_ANSWER = frozenset({"code", "message", "status"})

USES: dict[Kind, frozenset[str]] = {
    "error": _CALLER | _COUNTED | _ANSWER,
    "error-after": _CALLER | _COUNTED | _ANSWER,
    "timeout": _CALLER | _COUNTED | {"delay_real_s"},
    "timeout-after": _CALLER | _COUNTED | {"delay_real_s"},
    "slow": _CALLER | _COUNTED | {"delay_real_s"},
    "refuse": frozenset({"pool", "lifecycle", "code", "message"}) | _COUNTED,
    "lost": _COUNTED,
    "doubled": _COUNTED,
    "skew": _CALLER | {"skew_s"},
}
"""The fields that a kind reads; others have no meaning with it and are refused, so that no rule says what it isn't."""

NEEDS: dict[Kind, frozenset[str]] = {
    "error": frozenset({"code"}),
    "error-after": frozenset({"code"}),
    "slow": frozenset({"delay_real_s"}),
    "refuse": frozenset({"code"}),
    "skew": frozenset({"skew_s"}),
}
"""The fields that a kind cannot do without."""


class FaultRule(BaseModel):
    """One fault. Patterns know `*`, `?` and `[...]` and look at upper and lower case.

    Kinds:
        error: answers `code` and does nothing.
        error-after: does the work, then answers `code`.
        timeout: does nothing, holds the connection `delay_real_s`, then closes it without an answer.
        timeout-after: the same, but the work is done: the client cannot know.
        slow: does the work and answers `delay_real_s` later.
        refuse: the pools that match cannot be bought: `code` for each of them in CreateFleet's Errors.
        lost, doubled: a message from EventBridge to its targets never comes, or comes twice.
        skew: who matches sees a cloud whose clock is `skew_s` ahead (negative: behind).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(default="", description="To clear it by; made when empty.")
    kind: Kind
    service: str = Field(default="*", description="Pattern: ec2, sqs, events, sts, imds ...")
    action: str = Field(default="*", description="Pattern: Describe*; for imds INSTANCE-ID/latest/...")
    region: str = Field(default="*", description="Pattern.")
    access_key: str = Field(default="*", description="Pattern.")
    pool: str = Field(default="*", description="Pattern for TYPE@ZONE, refuse only.")
    lifecycle: Literal["*", "spot", "on-demand"] = Field(default="*", description="refuse only.")
    rate: float = Field(default=1.0, gt=0, le=1, description="The share of matches that it fires at.")
    times: int | None = Field(default=None, ge=1, description="How often it fires in all; None: always.")
    skip: int = Field(default=0, ge=0, description="The first matches to leave alone.")
    code: str | None = Field(default=None, min_length=1, description="The error's code, see the catalogue.")
    message: str | None = Field(default=None, min_length=1, description="The error's message instead of AWS's.")
    status: int | None = Field(default=None, ge=400, le=599, description="The HTTP status instead of AWS's.")
    delay_real_s: float = Field(default=0.0, ge=0, le=600, description="Real seconds to hold or to wait.")
    skew_s: float = Field(default=0.0, ge=-86_400, le=86_400, description="How far the cloud's clock is ahead.")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        given = self.model_fields_set - {"id", "kind"}
        for name in sorted(given - USES[self.kind]):
            expected = ", ".join(sorted(USES[self.kind]))
            raise ValueError(f"{name}: got {getattr(self, name)!r}, but kind {self.kind!r} reads only {expected}")
        for name in sorted(NEEDS.get(self.kind, frozenset())):
            if not getattr(self, name):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, kind {self.kind!r} needs one")
        if self.code is not None:
            self._check_code(self.code)
        return self

    def _check_code(self, code: str) -> None:
        entry = catalogue.known(code)
        if self.message is not None:
            # who gives the words knows what they do: any code, also of another service
            return
        if entry is None:
            raise ValueError(
                f"code: {code!r} is not in the catalogue; give a message (and a status) with it, "
                f"or take one of {', '.join(catalogue.codes())}"
            )
        if self.service in catalogue.EVERY - entry.services:
            raise ValueError(f"code: {self.service} does not answer {code!r}, {', '.join(sorted(entry.services))} do")
        if self.kind == "refuse" and code not in catalogue.POOL_CODES:
            raise ValueError(f"code: got {code!r}, expected what a pool answers: {', '.join(catalogue.POOL_CODES)}")

    def concerns(self, call: Call) -> bool:
        """Whether the rule's patterns match the request."""
        return (
            fnmatch.fnmatchcase(call.service, self.service)
            and fnmatch.fnmatchcase(call.action, self.action)
            and fnmatch.fnmatchcase(call.region, self.region)
            and fnmatch.fnmatchcase(call.access_key, self.access_key)
        )

    def concerns_pool(self, instance_type: str, zone: str, lifecycle: str) -> bool:
        """Whether the rule's patterns match a pool and how it is bought."""
        return self.lifecycle in {"*", lifecycle} and fnmatch.fnmatchcase(f"{instance_type}@{zone}", self.pool)


class FaultSet(BaseModel):
    """The body of POST /rehearsal/faults and the content of --faults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: list[FaultRule]

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        check_ids(self.rules, ())
        return self


def check_ids(rules: Sequence[FaultRule], taken: Sequence[str]) -> None:
    """Refuse an id that is there already.

    Raises:
        ValueError: names the rule and the id.
    """
    seen = set(taken)
    for index, rule in enumerate(rules):
        if rule.id and rule.id in seen:
            raise ValueError(f"rules.{index}.id: {rule.id!r} is taken, expected one of its own")
        seen.add(rule.id)


def load_faults(path: Path) -> list[FaultRule]:
    """Read a faults file, JSON {"rules": [...]}.

    Raises:
        ValueError: it cannot be read or is wrong; the message names the file and the fields.
    """
    return read_model(path, FaultSet, "faults", '{"rules": [...]}').rules
