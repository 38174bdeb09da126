"""The two programs, killed and warned at random moments on a real store; `benchmarks/survival.py` at its smallest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import survival_run
from benchmarks.survival import Bed, Combination, Series, bed
from benchmarks.survival_run import Report

FORGETFUL = """
import torch
from gpucost.training import checkpointed, prepare

prepare()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = torch.Generator().manual_seed(1)  # Not part of the state: begins anew in every attempt.
with checkpointed(model, optimizer, epochs=4) as run:
    for _epoch in run.epochs():
        for _batch in run.batches(100, 10):
            loss = model(torch.rand(5, 4, generator=own)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
    run.finish()
"""


@pytest.fixture(scope="module")
def stand() -> Iterator[Bed]:
    with bed(s3=True) as stand:
        yield stand


def train(stand: Bed, what: Combination, kills: int, warnings: int) -> Report:
    (report,) = Series(stand, what).run(
        first=1, runs=1, kills=kills, warnings=warnings, seed=20261130, parallel=1, each=lambda _report: None
    )
    return report


@pytest.mark.parametrize(
    ("program", "processes", "store"),
    [("digits", 1, "folder"), ("digits", 2, "s3"), ("ctr", 1, "s3"), ("ctr", 2, "folder")],
)
def test_killed_and_warned_at_random_moments_it_ends_as_if_nothing_had_been(
    stand: Bed, monkeypatch: pytest.MonkeyPatch, program: str, processes: int, store: str
) -> None:
    monkeypatch.setattr(survival_run, "STATED_SECONDS", 60.0)  # A busy machine; the benchmark holds it to 10 s.
    report = train(stand, Combination(program, processes, store), kills=6, warnings=2)
    assert report.problems == []
    assert (report.kills.total(), report.warnings, report.warned_lost) == (6, 2, 0)
    assert report.most_lost <= 4
    assert len(+report.kills) >= 2  # Moments of two kinds at least, even on a machine that is late for some.


def test_a_program_with_a_state_of_its_own_is_found_out(stand: Bed, tmp_path: Path) -> None:
    """What is compared can differ: else the tests above would show nothing."""
    (tmp_path / "forgetful").mkdir()
    (tmp_path / "forgetful" / "train.py").write_text(FORGETFUL)
    report = train(replace(stand, programs=tmp_path), Combination("forgetful", 1, "folder"), kills=3, warnings=1)
    assert any("weights" in problem for problem in report.problems)
    assert any("losses that the undisturbed run has not" in problem for problem in report.problems)
