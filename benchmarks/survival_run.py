"""Does one training that is killed thirty times end as one that never was? Plays the machine's owner, and checks.

The moments are drawn by a seeded generator: which attempt is killed in a step, in a save (state is gathered and
serialized), in an upload, in a restore or in its start; and then waited for by what the program says of itself.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.survival_nodes import Node, Pipe
from gpucost.jobstore import AttemptRecord, Command, JobSpec, JobStore, Member
from gpucost.training.workdir import EXIT_STOPPED, Request, Result, Workdir

KINDS = [*["step", "save", "upload", "restore"] * 8, "start"]
"""Where attempts are ended, in turn; then shuffled."""
WARNINGS = ("all", "ranks", "one", "request")
"""How a node is told to stop: SIGTERM to every process, to the ranks, to one of them; or the agent's request."""
STATED_SECONDS = 10.0
"""By then a warned node must be gone: the shortest notice that a cloud gives here."""
ATTEMPT_SECONDS = 120.0

Start = Callable[[int, Workdir, Pipe], Node]
"""(attempt, workdir, pipe) -> the machine that runs it."""


@dataclass
class Outcome:
    """What must not depend on the kills: weights, results, and the loss of every step of every rank."""

    digest: str | None = None
    results: dict[str, float] = field(default_factory=dict)
    losses: set[tuple[int, int, str]] = field(default_factory=set)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    steps: int = 0


@dataclass
class Report:
    """One run."""

    name: str
    kills: Counter[str] = field(default_factory=Counter)
    """By what was killed."""
    rank_kills: int = 0
    most_lost: int = 0
    warnings: int = 0
    warned_lost: int = 0
    longest_exit: float = 0.0
    seconds: float = 0.0
    attempts: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    problems: list[str] = field(default_factory=list)


@dataclass
class Aim:
    """When an attempt is to end: in a `kind` of moment, once `step` is reached; by a warning in some `way`, or a kill.

    `nth`: of the save's writes to the store, the one in which it ends (0: the first).
    """

    kind: str
    step: int
    way: str = ""
    nth: int = 0

    def reached(self, pipe: Pipe) -> bool:
        """Whether the moment has begun."""
        seen = pipe.seen[0]
        if self.kind == "start":
            return True
        if self.kind == "restore":
            return seen.phase == "restoring"
        if self.kind == "step":
            return seen.phase == "training" and seen.step >= self.step
        in_save = seen.phase == "saving" and seen.step >= self.step
        return in_save if self.kind == "save" else in_save and bool(writing(pipe)) and seen.calls > self.nth


def writing(pipe: Pipe) -> list[str]:
    """The changes of the store that are under way."""
    return [seen.call for seen in pipe.seen if seen.call.startswith(("put", "delete"))]


def struck(pipe: Pipe) -> str:
    """In what kind of moment the attempt's last word was said."""
    phase = pipe.seen[0].phase
    if phase == "saving":
        return "upload" if writing(pipe) else "save"
    return {"starting": "start", "restoring": "restore", "training": "step", "ended": "end"}[phase]


class Typical:
    """How long things take, learned from what was seen, so that a moment inside of one can be drawn."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def learn(self, pipe: Pipe) -> None:
        """Take in an attempt."""
        for what, seconds in pipe.lasted:
            self._seconds[what].append(seconds)

    def of(self, kind: str) -> float:
        """Seconds that this kind of moment lasts."""
        name = {"save": "gather", "upload": "write", "restore": "restoring", "start": "starting"}.get(kind, kind)
        known = self._seconds[name][-200:]
        return statistics.median(known) if known else 0.5 if kind == "start" else 0.02


class Training:
    """One training, over all its attempts.

    Args:
        name: of the run.
        spec: of the job.
        store: the job's documents.
        folder: for the machines' folders.
        start: switches a machine on.
        chance: draws the moments.
        typical: what is known of durations.
    """

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        store: JobStore,
        folder: Path,
        start: Start,
        chance: random.Random,
        typical: Typical,
    ) -> None:
        self.report = Report(name)
        self._spec = spec
        self._store = store
        self._folder = folder
        self._start = start
        self._chance = chance
        self._typical = typical
        self._done = 0
        self._resumed = 0
        self._warned_step: int | None = None
        self._restored = False
        folder.mkdir(parents=True)
        store.write_spec(spec)

    def undisturbed(self) -> Outcome:
        """Train without any kill.

        Raises:
            RuntimeError: it did not finish.
        """
        self._last_attempt()
        self._clear()
        if self.report.problems:
            raise RuntimeError("\n".join(self.report.problems))
        return self.report.outcome

    def disturbed(self, kills: int, warnings: int, expected: Outcome) -> Report:
        """Train with so many kills and warnings; then compare."""
        began = time.monotonic()
        ends = self._shuffled(["kill"] * kills + ["warning"] * warnings)
        kinds = self._shuffled((KINDS * (1 + len(ends) // len(KINDS)))[: len(ends)])
        for number, (how, kind) in enumerate(zip(ends, kinds, strict=True)):
            aim = self._aim(how, kind, left=len(ends) - number, steps=expected.steps)
            if not self._attempt(aim):
                break
        if not self.report.outcome.digest:
            self._last_attempt()
        self._compare(expected)
        if (killed := self.report.kills.total()) < kills:
            self._problem(f"{killed} kills, expected {kills}")
        self._clear()
        self.report.seconds = time.monotonic() - began
        return self.report

    def _shuffled(self, things: list[str]) -> list[str]:
        return self._chance.sample(things, len(things))

    def _aim(self, how: str, kind: str, left: int, steps: int) -> Aim:
        chance = self._chance
        ahead = steps - self._saved()
        if ahead <= 0 and kind not in ("restore", "start"):
            kind = "restore"
        # On average, the rest of the steps is spread over the ends that are left.
        step = self._saved() + chance.randint(1, max(1, min(ahead - 1, round(2 * ahead / (left + 1)))))
        return Aim(kind, step, chance.choice(WARNINGS) if how == "warning" else "", nth=chance.randint(0, 3))

    def _saved(self) -> int:
        checkpoints = self._store.head().checkpoints
        return int(checkpoints[0].split("/")[-2].split("-")[0]) if checkpoints else 0

    def _attempt(self, aim: Aim) -> bool:
        """One attempt that is ended as aimed; False: the training was complete before."""
        number, workdir, pipe, node = self._switch_on()
        try:
            codes = self._wait(node, pipe, lambda: aim.reached(pipe))
            if codes is None:
                time.sleep(self._chance.uniform(0, 1.0) * self._typical.of(aim.kind))
                if aim.way:
                    self._warn(node, pipe, workdir, aim.way)
                elif self._chance.random() < 0.3 and self._spec.world_size > 1:
                    self.report.rank_kills += 1
                    node.lose_rank(self._chance.random())
                    time.sleep(self._chance.uniform(0, 0.1))
        finally:
            node.power_off()
            pipe.close()
        if codes is None and not aim.way:
            self.report.kills[struck(pipe)] += 1
        self._take(number, workdir, pipe)
        if codes is not None:
            self._ended(number, workdir, codes)
        elif aim.way:
            self._check_warned(number, workdir)
        self._remove(workdir)
        return not self.report.outcome.digest

    def _last_attempt(self) -> None:
        number, workdir, pipe, node = self._switch_on()
        try:
            codes = self._wait(node, pipe, lambda: False)
        finally:
            node.power_off()
            pipe.close()
        self._take(number, workdir, pipe)
        self._ended(number, workdir, codes or [])
        self._remove(workdir)

    def _switch_on(self) -> tuple[int, Workdir, Pipe, Node]:
        self.report.attempts += 1
        number, now = self.report.attempts, datetime.now(UTC)
        record = AttemptRecord(
            number=number,
            members=(Member(lease_id=f"lease-{number}"),),
            created_at=now,
            expires_at=now + timedelta(hours=1),
        )
        self._store.write_attempt(record)
        self._store.claim(number)
        workdir = Workdir(self._folder / f"node-{number}")
        workdir.write_job(self._spec)
        pipe = Pipe(workdir.path / "pipe", self._spec.world_size)
        return number, workdir, pipe, self._start(number, workdir, pipe)

    def _wait(self, node: Node, pipe: Pipe, until: Callable[[], bool]) -> list[int] | None:
        """Until the moment has come (None), or everything has ended: its exit codes."""
        give_up = time.monotonic() + ATTEMPT_SECONDS
        while not until():
            if not pipe.read(0.02) and (codes := node.poll()) is not None:
                return codes
            if time.monotonic() > give_up:
                self._problem(f"attempt {self.report.attempts}: no end after {ATTEMPT_SECONDS:g} s; {pipe.seen}")
                return []
        return None

    def _warn(self, node: Node, pipe: Pipe, workdir: Workdir, way: str) -> None:
        began = time.monotonic()
        if way == "request":
            workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP, why="a notice"))
        else:
            node.warn(way, self._chance.random())
        self._wait(node, pipe, lambda: False)
        exit_seconds = time.monotonic() - began
        self.report.warnings += 1
        self.report.longest_exit = max(self.report.longest_exit, exit_seconds)
        if exit_seconds > STATED_SECONDS:
            self._problem(f"attempt {self.report.attempts}: warned by {way}, gone after {exit_seconds:.1f} s")

    def _take(self, number: int, workdir: Workdir, pipe: Pipe) -> None:
        """What every attempt must keep to: where it went on from, and what it computed."""
        self._typical.learn(pipe)
        seen = pipe.seen[0]
        self._restored = seen.resumed is not None
        if seen.resumed is not None:
            lost = self._done - seen.resumed
            if self._warned_step is not None and lost > 0:
                self._problem(f"attempt {number}: warned at step {self._done}, went on from {seen.resumed}")
            if seen.resumed < self._resumed:
                self._problem(f"attempt {number}: went on from {seen.resumed}, earlier than {self._resumed} before")
            if lost > self._spec.checkpoint.every_steps:
                self._problem(f"attempt {number}: {lost} steps lost, done {self._done}, went on from {seen.resumed}")
            self.report.most_lost = max(self.report.most_lost, lost)
            self._resumed, self._done, self._warned_step = seen.resumed, max(seen.step, seen.resumed), None
        self.report.outcome.losses |= set(pipe.losses)
        self._read_metrics(number, workdir)

    def _read_metrics(self, number: int, workdir: Workdir) -> None:
        text = workdir.metrics.read_text() if workdir.metrics.exists() else ""
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # Cut off by a kill; nobody reads it.
            point = json.loads(line)
            known = self.report.outcome.metrics.setdefault(point["step"], {})
            for name, value in point["values"].items():
                if known.setdefault(name, value) != value:
                    self._problem(f"attempt {number}: {name} of step {point['step']} is {value}, was {known[name]}")

    def _check_warned(self, number: int, workdir: Workdir) -> None:
        """No step is lost; one that was warned before its first step may have nothing to say."""
        if not self._restored:
            return  # What a kill before it has cost is not its loss.
        result, saved = workdir.result(), self._saved()
        lost = self._done - saved
        self.report.warned_lost = max(self.report.warned_lost, lost)
        self._warned_step = self._done
        if lost > 0:
            self._problem(f"attempt {number}: warned at step {self._done}, saved {saved}; {self._log(workdir)}")
        if result is None:
            return
        if result.status == "finished":
            self._finish(result)
        elif (result.status, result.step, result.saved_step or 0) != ("stopped", self._done, saved):
            self._problem(f"attempt {number}: warned at step {self._done}, result {result}, saved {saved}")

    def _ended(self, number: int, workdir: Workdir, codes: list[int]) -> None:
        """It ended without being told to: that is right only when it is complete."""
        result = workdir.result()
        if result and result.status == "finished" and not any(codes):
            self._finish(result)
            return
        stopped = EXIT_STOPPED in codes
        self._problem(f"attempt {number}: exit codes {codes}, {result}{', stopped' * stopped}; {self._log(workdir)}")

    def _finish(self, result: Result) -> None:
        outcome = self.report.outcome
        outcome.digest, outcome.results, outcome.steps = result.weights_digest, result.results, result.step

    def _compare(self, expected: Outcome) -> None:
        got = self.report.outcome
        if got.digest != expected.digest:
            self._problem(f"weights {got.digest}, expected {expected.digest}")
        if (got.results, got.steps) != (expected.results, expected.steps):
            self._problem(f"results {got.results} at {got.steps}, expected {expected.results} at {expected.steps}")
        if strange := sorted(got.losses - expected.losses, key=lambda loss: loss[1]):
            self._problem(f"{len(strange)} losses that the undisturbed run has not, the first: {strange[0]}")
        if missing := sorted(expected.losses - got.losses, key=lambda loss: loss[1]):
            self._problem(f"{len(missing)} losses of the undisturbed run are missing, the first: {missing[0]}")
        if got.metrics != expected.metrics:
            steps = [step for step in expected.metrics if got.metrics.get(step) != expected.metrics[step]]
            self._problem(f"logged metrics differ at steps {steps[:5]}")
        self._check_store()

    def _check_store(self) -> None:
        """What half a save has left is swept; the kept checkpoints are whole."""
        head = self._store.head()
        whole = {key.rsplit("/", 1)[0] for key in head.checkpoints}
        found = {stat.key.rsplit("/", 1)[0] for stat in self._store.objects.scan(f"{self._store.root}/checkpoints")}
        if found != whole:
            self._problem(f"checkpoints in the store: {sorted(found)}, in the head: {sorted(whole)}")

    def _log(self, workdir: Workdir) -> str:
        lines = workdir.log.read_text(errors="replace").splitlines() if workdir.log.exists() else ["no log"]
        return "its log:\n    " + "\n    ".join(lines[-15:])

    def _problem(self, what: str) -> None:
        self.report.problems.append(f"{self.report.name}: {what}")

    def _remove(self, workdir: Workdir) -> None:
        shutil.rmtree(workdir.path, ignore_errors=True)

    def _clear(self) -> None:
        self._store.objects.delete([stat.key for stat in self._store.objects.scan(self._store.root)])
        shutil.rmtree(self._folder, ignore_errors=True)


def spec_of(**fields: Any) -> JobSpec:
    """A job's specification; `code_digest` is of no use to a forked program."""
    return JobSpec(**{"name": "survival", "code_digest": "0" * 64, "gpu_count": 0, **fields})
