"""What does each option of a recipe do to the loss, the memory and the speed? Small trainings on a CPU.

    PYTHONPATH=plugins python benchmarks/recipe_options.py --rounds 3

Prints the table of docs/reference/recipe.md. Each training runs in its own process, by the job.json that an agent
would write; next to every training with an option runs one without, in alternating order: ratios are of such pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpucost.fitness import refusal, remarks
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import JobSpec, JobStore
from gpucost.objects import Objects
from gpucost.recipe import Options, Recipe
from gpucost.training import checkpointed, prepare
from gpucost.training.workdir import Workdir

BATCH = 256
STEPS = 48
"""Of the training without options; a larger batch has fewer, and sees the same samples."""
WARM_UP = 5
"""Steps whose time does not count: the first allocations, and compilation."""

TRIED: dict[str, dict[str, Any]] = {
    "precision: bf16": {"precision": "bf16"},
    "batch: 512": {"batch": 512},
    "accumulate: 4": {"accumulate": 4},
    "clip_norm: 1.0": {"clip_norm": 1.0},
    "gradient_checkpointing: true": {"gradient_checkpointing": True},
    "workers: 2": {"workers": 2},
    "compile: true": {"compile": True},
    "checkpoint_every_steps: 4": {"checkpoint_every_steps": 4},
    "checkpoint_every_steps: 4, checkpoint_min_seconds: 5": {"checkpoint_every_steps": 4, "checkpoint_min_seconds": 5},
    "checkpoint_max_seconds: 5": {"checkpoint_max_seconds": 5},
}
NOT_HERE: dict[str, dict[str, Any]] = {
    "precision: tf32": {"precision": "tf32"},
    "precision: fp16": {"precision": "fp16"},
    "nccl_timeout_seconds: 300": {"nccl_timeout_seconds": 300},
}
COLUMNS = ("memory", "samples_per_second", "samples_per_cpu_second", "first_step_seconds")


@dataclass(frozen=True)
class Outcome:
    """What one training did.

    Args:
        losses: mean loss of each optimizer step.
        memory: peak bytes beyond what the process held before its first step; workers' memory is not in it.
        samples_per_second: after the warm-up, by the clock on the wall.
        samples_per_cpu_second: the same by this process's CPU time, which a busy machine does not distort; workers'
            and savers' time is in it only as far as it is spent in this process.
        first_step_seconds: until the first step was done.
    """

    losses: list[float]
    memory: float
    samples_per_second: float
    samples_per_cpu_second: float
    first_step_seconds: float


class Digits:
    """scikit-learn's digits as images of 1 x 8 x 8 pixels (float32, 0 to 1), moved by up to a pixel at random."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.images = digits.images.astype(np.float32) / 16
        self.labels = digits.target.astype(np.int64)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCH * STEPS // 2

    def __getitem__(self, index: int) -> tuple[Any, int]:
        rows, columns = np.random.default_rng([self.epoch, index]).integers(-1, 2, size=2)
        which = index % len(self.labels)
        moved = np.roll(self.images[which], (rows, columns), axis=(0, 1))
        return moved[None], int(self.labels[which])


def network() -> Any:
    """A residual network for images of 8 x 8 pixels."""
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.GroupNorm(4, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1), nn.GELU()
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            changed: torch.Tensor = self.inner(images)
            return images + changed

    class Reader(nn.Module):
        def __init__(self, width: int = 32, depth: int = 6) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, width, 3, padding=1)
            self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
            self.answer = nn.Linear(width * 16, 10)
            self.pool = nn.AvgPool2d(2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            hidden = self.first(images)
            for block in self.blocks:
                hidden = block(hidden)
            answer: torch.Tensor = self.answer(self.pool(hidden).flatten(1))
            return answer

    return Reader()


def train(answer: Path) -> None:
    """The program: trains by the recipe that it finds, and knows nothing of it."""
    import torch
    from torch.nn import functional

    prepare()
    model, digits = network(), Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # What torch loads when it is first used is no memory of the training.
    model(torch.zeros(2, 1, 8, 8)).sum().backward()
    optimizer.zero_grad()
    losses: list[float] = []
    parts: list[tuple[float, int]] = []
    with checkpointed(model, optimizer, epochs=2) as run:
        before, begun = _reset_peak(), time.perf_counter()
        first = warm = warm_cpu = warm_samples = samples = 0.0
        for _epoch in run.epochs():
            for images, labels in run.batches(digits, BATCH, drop_last=True):
                loss = functional.cross_entropy(model(images), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                parts.append((loss.item(), len(labels)))
                samples += len(labels)
                steps = run.steps
                run.step(loss=loss)
                if run.steps == steps:
                    continue
                losses.append(sum(value * count for value, count in parts) / sum(count for _, count in parts))
                parts.clear()
                if run.steps == 1:
                    first = time.perf_counter() - begun
                if run.steps == WARM_UP:
                    warm, warm_cpu, warm_samples = time.perf_counter(), time.process_time(), samples
        seconds, cpu, peak = time.perf_counter() - warm, time.process_time() - warm_cpu, _memory("VmHWM")
        run.finish({})
    done = samples - warm_samples
    outcome = Outcome(losses, peak - before, done / seconds, done / cpu, first)
    answer.write_text(json.dumps(outcome.__dict__))


def _reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> float:
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{name}:")]
    return float(line.split()[1]) * 1024


def measure(recipe: dict[str, Any]) -> Outcome:
    """One training in a process and a store of its own."""
    job_id = JobId(dag_id="benchmark", run_id="1", task_id="train")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = JobSpec(
            job_id=job_id,
            name="benchmark",
            code_digest="",
            program="",
            recipe=Recipe.model_validate(recipe),
            gpu_count=0,
            checkpoint=CheckpointPlan(every_steps=10**6),
        )
        Workdir(folder / "work").write_job(spec)
        (folder / "store").mkdir()
        url = (folder / "store").as_uri()
        JobStore(Objects.open(url), job_id.key).claim(1)
        around = {
            "GPUCOST_WORKDIR": str(folder / "work"),
            "GPUCOST_ATTEMPT": "1",
            "GPUCOST_JOB": job_id.key,
            "GPUCOST_STORE_URL": url,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        command = [sys.executable, __file__, "--answer", str(folder / "answer.json")]
        done = subprocess.run(command, env=os.environ | around, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{recipe}: exit code {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        return Outcome(**json.loads((folder / "answer.json").read_text()))


def pairs(rounds: int) -> dict[str, list[tuple[Outcome, Outcome]]]:
    """Option -> trainings without it and with it, side by side."""
    found: dict[str, list[tuple[Outcome, Outcome]]] = {name: [] for name in TRIED}
    for number in range(rounds):
        for name, recipe in TRIED.items():
            order = ({}, recipe) if number % 2 == 0 else (recipe, {})
            outcomes = [measure(one) for one in order]
            found[name].append((outcomes[0], outcomes[1]) if number % 2 == 0 else (outcomes[1], outcomes[0]))
            sys.stderr.write(f"round {number + 1} of {rounds}: {name}\n")
    return found


def rows(found: dict[str, list[tuple[Outcome, Outcome]]]) -> Iterator[str]:
    """The table's lines."""
    yield "| option | final loss, with / without | largest distance | memory | samples/s | samples/CPU-s | first step |"
    yield "|---|---|---|---|---|---|---|"
    for name, both in found.items():
        without, with_it = both[0]
        curve, other = _same_samples(without.losses, with_it.losses)
        distance = max(abs(one - two) for one, two in zip(curve, other, strict=True))
        last = " / ".join(f"{statistics.mean(one[-5:]):.3f}" for one in (other, curve))
        ratios = [_ratio(both, what) for what in COLUMNS]
        yield f"| `{name}` | {last} | {distance:.2g} | {' | '.join(ratios)} |"


def _same_samples(one: list[float], other: list[float]) -> tuple[list[float], list[float]]:
    """Two curves, the longer one's steps joined until both have seen the same samples at each point."""
    points = min(len(one), len(other))
    joined = [
        np.asarray(curve[: len(curve) // points * points]).reshape(points, -1).mean(axis=1) for curve in (one, other)
    ]
    return joined[0].tolist(), joined[1].tolist()


def _ratio(both: list[tuple[Outcome, Outcome]], what: str) -> str:
    ratios = sorted(getattr(with_it, what) / getattr(without, what) for without, with_it in both)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def main() -> None:
    """Measure, or be one of the trainings that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="options whose line contains this text")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        train(args.answer)
        return
    for name in [one for one in TRIED if args.only and args.only not in one]:
        del TRIED[name]
    sys.stdout.write("\n".join(rows(pairs(args.rounds))) + "\n")
    for name, recipe in NOT_HERE.items():
        options = Options.model_validate(recipe)
        sys.stdout.write(f"| `{name}` | {refusal(options, None) or remarks(options, None)[0]} | | | | | |\n")


if __name__ == "__main__":
    main()
