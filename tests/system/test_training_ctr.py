"""The program on clicks, as people run it: plain python, files on disk, killed and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpucost.clock import SpecClock
from gpucost.jobstore import JobStore
from gpucost.objects import Objects
from gpucost.training.checkpoints.engine import Checkpoints

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "include" / "programs" / "ctr"
ROWS, BATCH = 16_000, 64
STEPS = 225
"""Of one epoch over nine tenths of the rows."""


class Desk:
    """A folder where data lies and the program is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUCOST", "PYTHON"))}
        self.environ = kept | {"PYTHONPATH": str(ROOT / "plugins"), "OMP_NUM_THREADS": "1"}
        self.data = folder / "clicks.tsv"

    def generate(self) -> dict[str, float]:
        command = [sys.executable, str(PROGRAM / "generate.py"), str(self.data), "--rows", str(ROWS), "--seed", "4"]
        said = subprocess.run(command, check=True, env=self.environ, capture_output=True, text=True).stdout
        best: dict[str, float] = json.loads((self.folder / "best.json").read_text())
        assert json.loads(said) == best
        return best

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        where = self.folder / name
        where.mkdir(exist_ok=True)
        command = [sys.executable, str(PROGRAM / "train.py"), "--data", str(self.data), "--epochs", "2"]
        command += ["--batch-size", str(BATCH), "--buckets", "100", "--width", "4", *arguments]
        # A group of its own: killed, it takes the processes that load data along.
        return subprocess.Popen(
            command, cwd=where, env=self.environ, stderr=subprocess.PIPE, text=True, process_group=0
        )

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        store = JobStore(Objects.open((self.folder / name / "checkpoints").as_uri()), "local")
        found = Checkpoints(store, store.head().fence, SpecClock()).restore()
        assert found is not None
        assert found[0].step == 2 * STEPS
        weights: dict[str, torch.Tensor] = found[1]["things"]["model"]
        return weights


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def kill_after(process: subprocess.Popen[str], step: int) -> None:
    """At once, as a cloud does, when the program has said that it did the step."""
    for line in _lines(process):
        if (said := re.search(r"step (\d+):", line)) and int(said[1]) >= step:
            os.killpg(process.pid, signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL


def end(process: subprocess.Popen[str]) -> list[str]:
    lines = list(_lines(process))
    assert process.wait() == 0, "".join(lines)
    return lines


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    return iter(process.stderr)


def test_it_learns_and_a_killed_run_ends_with_the_same_weights(desk: Desk) -> None:
    best = desk.generate()
    said = end(desk.start("whole", "--workers", "0"))
    (*_, reached) = (float(auc) for line in said for auc in re.findall(r"auc ([0-9.]+)", line))
    # Of what can be learned above chance, three fifths: it has seen few rows. And nobody beats the truth by much.
    assert 0.5 + 0.6 * (best["auc"] - 0.5) < reached < best["auc"] + 0.01

    kill_after(desk.start("killed", "--workers", "2"), 130)
    kill_after(desk.start("killed", "--workers", "2"), 290)
    resumed = end(desk.start("killed", "--workers", "1"))
    assert any("going on from step 200 (epoch 0)" in line for line in resumed)
    whole, killed = desk.weights("whole"), desk.weights("killed")
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert [line for line in said if "auc" in line][-1] == [line for line in resumed if "auc" in line][-1]


def test_a_malformed_line_ends_the_program_and_is_named(desk: Desk) -> None:
    good = "0" + "\t1" * 13 + "\t0123abcd" * 26
    desk.data.write_text("\n".join([good] * 50 + ["0\tbroken"] + [good] * 50))
    process = desk.start("broken", "--workers", "1")
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 1
    assert f"{desk.data}, line 51: got 2 fields, expected 40" in said
