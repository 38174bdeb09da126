"""Which instances are interrupted, at which progress of their job? Rules that a test or a demo writes beforehand."""

from __future__ import annotations

import fnmatch
import json
import os
import threading
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PROGRESS_FILE = "progress.json"
"""Written by the training agent anywhere below its instance's folder, replaced atomically:
{"step": int, "epoch": int, "at": ISO 8601 time}."""

JOB_TAG = "gpucost:job"
"""The instance's tag that a rule's `job` is matched with."""


Event = Literal["notice", "no-notice", "false-notice", "rebalance"]
"""What EC2 may do to a spot instance: take it back with two minutes of warning, or at once; warn for nothing;
recommend a rebalance."""


class Rule(BaseModel):
    """Interrupt instances of a job when it has done `step` steps, `times` times over all instances."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(default="*", description="Pattern with * and ? for the value of the tag gpucost:job.")
    step: int = Field(ge=0, description="Interrupt when the job's progress shows this step or a later one.")
    event: Event = Field(default="no-notice", description="What happens to the instance.")
    times: int = Field(default=1, ge=1, description="How often the rule fires in all.")


class RuleSet(BaseModel):
    """The body of POST /rehearsal/script and the content of --script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: list[Rule]


def load_rules(path: Path) -> list[Rule]:
    """Read a rules file.

    Raises:
        ValueError: it cannot be read or is wrong; the message names the file and the fields.
    """
    try:
        return RuleSet.model_validate_json(path.read_bytes()).rules
    except OSError as error:
        raise ValueError(f"script: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ValueError(f'script: {path} is not {{"rules": [...]}}: {error}') from error


class Script:
    """The rules with the shots that each has left.

    Args:
        rules: at the start; those that the kept ones contain already are not added again.
        kept_in: a file that remembers rules and shots over a restart of the cloud.
    """

    def __init__(self, rules: list[Rule] | None = None, kept_in: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._kept_in = kept_in
        self._rules: list[tuple[Rule, int]] = _kept(kept_in) if kept_in else []
        known = [rule for rule, _ in self._rules]
        self.add([rule for rule in rules or [] if rule not in known])

    def add(self, rules: list[Rule]) -> None:
        """Add rules behind those that are there."""
        with self._lock:
            self._rules += [(rule, rule.times) for rule in rules]
            self._keep()

    def _keep(self) -> None:
        if self._kept_in is None:
            return
        part = self._kept_in.with_suffix(".part")
        part.write_text(json.dumps([[rule.model_dump(), left] for rule, left in self._rules]), encoding="utf-8")
        part.replace(self._kept_in)

    def concerns(self, job: str | None) -> bool:
        """Whether a rule with shots left may interrupt this job: only then is its progress worth watching."""
        with self._lock:
            return any(left and _matches(rule, job) for rule, left in self._rules)

    def fire(self, job: str | None, step: int) -> Rule | None:
        """The first rule that interrupts this job at this step; it has one shot less then."""
        with self._lock:
            for index, (rule, left) in enumerate(self._rules):
                if left and step >= rule.step and _matches(rule, job):
                    self._rules[index] = (rule, left - 1)
                    self._keep()
                    return rule
            return None

    def as_json(self) -> list[dict[str, Any]]:
        """The rules with the shots left, for people."""
        with self._lock:
            return [{**rule.model_dump(), "left": left} for rule, left in self._rules]


def _kept(path: Path) -> list[tuple[Rule, int]]:
    try:
        return [(Rule.model_validate(rule), left) for rule, left in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []


def _matches(rule: Rule, job: str | None) -> bool:
    return job is not None and fnmatch.fnmatchcase(job, rule.job)


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
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == before:
                return
            step = json.loads(path.read_bytes())["step"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            # not our file, or not replaced atomically: the next look may find it whole
            return
        self._seen[path] = stamp
        if isinstance(step, int):
            self._step = max(step, self._step or 0)
