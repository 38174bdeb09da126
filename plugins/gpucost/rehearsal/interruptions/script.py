"""Which instances are interrupted, at which progress of their job? Rules that a test or a demo writes beforehand."""

from __future__ import annotations

import fnmatch
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpucost.rehearsal.guests import read_small
from gpucost.rehearsal.whole import write_whole
from gpucost.rehearsal.wording import read_model

PROGRESS_FILE = "progress.json"
"""Written by the training agent anywhere below its instance's folder, replaced atomically:
{"step": int, "epoch": int, "at": ISO 8601 time}."""

JOB_TAG = "gpucost:job"
"""The instance's tag that a rule's `job` is matched with."""


InterruptionKind = Literal["notice", "no-notice", "false-notice", "rebalance"]
"""What EC2 may do to a spot instance: take it back with two minutes of warning, or at once; warn for nothing;
recommend a rebalance."""


class Rule(BaseModel):
    """Interrupt instances of a job when it has done `step` steps: each once, `times` of them in all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(default="*", description="Pattern with * and ? for the value of the tag gpucost:job.")
    step: int = Field(ge=0, description="Interrupt when the job's progress shows this step or a later one.")
    event: InterruptionKind = Field(default="no-notice", description="What happens to the instance.")
    times: int = Field(default=1, ge=1, description="How many instances it happens to.")


class RuleSet(BaseModel):
    """The body of POST /rehearsal/script and the content of --script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: list[Rule]


def load_rules(path: Path) -> list[Rule]:
    """Read a rules file.

    Raises:
        ValueError: it cannot be read or is wrong; the message names the file and the fields.
    """
    return read_model(path, RuleSet, "script", '{"rules": [...]}').rules


@dataclass
class _Aimed:
    """A rule, and the instances that it has hit."""

    rule: Rule
    hit: list[str] = field(default_factory=list)

    def may_hit(self, instance_id: str, job: str | None) -> bool:
        left = len(self.hit) < self.rule.times and instance_id not in self.hit
        return left and job is not None and fnmatch.fnmatchcase(job, self.rule.job)


class Script:
    """The rules, each with the instances that it has hit: it hits one instance once.

    Args:
        rules: at the start; those that the kept ones contain already are not added again.
        kept_in: a file that remembers rules and hits over a restart of the cloud.
    """

    def __init__(self, rules: list[Rule] | None = None, kept_in: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._kept_in = kept_in
        self._aimed: list[_Aimed] = _kept(kept_in) if kept_in else []
        known = [aimed.rule for aimed in self._aimed]
        self.add([rule for rule in rules or [] if rule not in known])

    def add(self, rules: list[Rule]) -> None:
        """Add rules behind those that are there."""
        with self._lock:
            self._aimed += [_Aimed(rule) for rule in rules]
            self._keep()

    def _keep(self) -> None:
        if self._kept_in is None:
            return
        content = [{"rule": aimed.rule.model_dump(), "hit": aimed.hit} for aimed in self._aimed]
        write_whole(self._kept_in, json.dumps(content))

    def concerns(self, instance_id: str, job: str | None) -> bool:
        """Whether a rule may still hit this instance: only then is its progress worth watching."""
        with self._lock:
            return any(aimed.may_hit(instance_id, job) for aimed in self._aimed)

    def fire(self, instance_id: str, job: str | None, step: int, shoot: Callable[[InterruptionKind], bool]) -> bool:
        """Let the first rule that is due for this instance, and of which something comes, happen to it.

        Args:
            instance_id: which instance.
            job: the value of its tag.
            step: where its job is.
            shoot: lets it happen; False when it could not, which costs the rule nothing.

        Returns:
            Whether something happened.
        """
        with self._lock:
            due = [aimed for aimed in self._aimed if step >= aimed.rule.step and aimed.may_hit(instance_id, job)]
        for aimed in due:
            if shoot(aimed.rule.event):
                with self._lock:
                    aimed.hit.append(instance_id)
                    self._keep()
                return True
        return False

    def as_json(self) -> list[dict[str, Any]]:
        """The rules with the shots left, for people."""
        with self._lock:
            return [
                {**aimed.rule.model_dump(), "left": aimed.rule.times - len(aimed.hit), "hit": list(aimed.hit)}
                for aimed in self._aimed
            ]


def _kept(path: Path) -> list[_Aimed]:
    try:
        return [_Aimed(Rule.model_validate(one["rule"]), list(one["hit"])) for one in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []


class ProgressReader:
    """Finds and reads the progress files below an instance's folder.

    Walking a folder is dear, so files are searched only every `search_every` looks, and read only when changed.
    """

    def __init__(self, folder: Path, search_every: int = 5) -> None:
        self._folder = folder
        self._search_every = search_every
        self._looks = 0
        self._seen: dict[Path, tuple[int, int]] = {}
        self._step: int | None = None

    def step(self) -> int | None:
        """The highest step seen so far, or None when no progress file was there yet."""
        if self._looks % self._search_every == 0:
            # os.walk leaves out what vanishes or cannot be read while it walks
            for folder, _, files in os.walk(self._folder):
                if PROGRESS_FILE in files:
                    self._seen.setdefault(Path(folder) / PROGRESS_FILE, (0, 0))
        self._looks += 1
        for path, before in list(self._seen.items()):
            self._read(path, before)
        return self._step

    def _read(self, path: Path, before: tuple[int, int]) -> None:
        """Read it when it has changed; what is no progress file, or not whole, may be one at the next look."""
        try:
            status = path.stat()
        except OSError:
            return
        stamp = (status.st_mtime_ns, status.st_ino)
        content = read_small(path) if stamp != before else None
        try:
            step = json.loads(content or b"")["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        self._seen[path] = stamp
        if isinstance(step, int):
            self._step = max(step, self._step or 0)
