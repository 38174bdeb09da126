"""Which samples a program gets, whatever a recipe makes of its batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpucost.jobstore import Command
from gpucost.recipe import Recipe
from gpucost.training import checkpointed, prepare, steps_per_epoch
from gpucost.training.program.keeping import Stopped
from gpucost.training.program.loop import Run
from gpucost.training.program.state import RunState
from gpucost.training.program.stepping import Stepping
from gpucost.training.ranks import ranks
from gpucost.training.workdir import EXIT_REFUSED, Request
from tests.fakes.node import Node

SAMPLES, BATCH = 40, 8


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch, every_steps=2)


class Killed(BaseException):
    """Stands for the power going off."""


def begun(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Run]:
    prepare()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, checkpointed(model, optimizer, epochs=1, **options)


def train(seen: list[int], after: Callable[[Run], None] = lambda run: None) -> int:
    """One epoch; `seen` gets the samples of every batch that was completed."""
    model, optimizer, run = begun()
    part: list[int] = []
    with run:
        for _ in run.epochs():
            for batch in run.batches(SAMPLES, BATCH):
                part += batch.tolist()
                optimizer.zero_grad()
                run.backward(model(torch.ones(len(batch), 4)).mean())
                optimizer.step()
                before = run.steps
                run.step()
                if run.steps > before:
                    seen += part
                    part = []
                after(run)
        run.finish()
    return run.steps


@pytest.mark.parametrize(
    ("first", "then", "steps"),
    [
        ({"accumulate": 4}, {"accumulate": 1}, 5),
        ({"accumulate": 1}, {"accumulate": 4}, 5),
        ({"batch": 10}, {}, 5),
        ({}, {"batch": 24}, 3),
    ],
)
def test_on_a_gpu_with_another_recipe_the_epoch_goes_on_where_it_was(
    node: Node, first: dict[str, int], then: dict[str, int], steps: int
) -> None:
    def kill(run: Run) -> None:
        if run.steps == 2:
            raise Killed

    seen: list[int] = []
    node.recipe = Recipe.model_validate(first)
    node.attempt(1)
    with pytest.raises(Killed):
        train(seen, kill)
    node.recipe = Recipe.model_validate(then)
    node.attempt(2)
    assert train(seen) == steps
    assert sorted(seen) == list(range(SAMPLES))


def test_a_batch_that_was_half_done_begins_again_where_it_is_cut_in_another_way(node: Node) -> None:
    def stop(run: Run) -> None:
        node.workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))

    seen: list[int] = []
    node.recipe = Recipe(accumulate=4)
    node.attempt(1)
    with pytest.raises(Stopped):
        train(seen, stop)
    assert seen == []
    node.recipe = Recipe()
    node.attempt(2)
    assert train(seen) == 5
    assert sorted(seen) == list(range(SAMPLES))


def test_a_checkpoint_of_a_gpu_that_needed_a_scaler_serves_one_that_does_not() -> None:
    def state(precision: Any) -> RunState:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters())
        options = Recipe(precision=precision).for_gpu(None)
        return RunState({"model": model, "optimizer": optimizer}, Stepping(model, optimizer, None, options))

    with_scaler = state("fp16")
    scaler = with_scaler.stepping.scaler
    assert scaler is not None
    scaler.scale(torch.ones(1))
    scaler.update(1024.0)
    saved = with_scaler.shared(), with_scaler.own()
    state("bf16").take(*saved)
    again = state("fp16")
    again.take(*saved)
    assert again.stepping.scaler is not None
    assert again.stepping.scaler.get_scale() == 1024.0
    without = state("bf16")
    again.take(without.shared(), without.own())


def test_an_evaluation_by_the_same_call_is_refused(node: Node) -> None:
    _, _, run = begun()
    with run:
        for _ in run.epochs():
            for _batch in run.batches(SAMPLES, BATCH):
                run.step()
            with pytest.raises(ValueError, match=r"run\.batches: asked for twice in epoch 0"):
                list(run.batches(16, 4, shuffle=False))


def test_an_epoch_without_a_batch_is_refused(node: Node) -> None:
    _, _, run = begun()
    with run, pytest.raises(ValueError, match="5 samples in batches of 8 for 1 processes make no batch at all"):
        list(run.batches(5, BATCH, drop_last=True))


@pytest.mark.parametrize("recipe", [Recipe(batch=4), Recipe(accumulate=2)])
def test_an_option_that_would_do_nothing_is_refused(
    node: Node, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    node.recipe = recipe
    node.attempt(1)
    _, _, run = begun()
    with run, pytest.raises(SystemExit) as ended:
        run.step()
    assert ended.value.code == EXIT_REFUSED
    assert "would do nothing" in capsys.readouterr().err


def test_a_recipe_that_this_machine_cannot_do_is_refused_wherever_it_is_looked_at_first(node: Node) -> None:
    node.recipe = Recipe(precision="fp16")
    node.attempt(1)
    with pytest.raises(SystemExit) as ended:
        steps_per_epoch(10, 2)
    assert ended.value.code == EXIT_REFUSED


def test_workers_are_of_no_use_for_indices_and_that_is_said(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.recipe = Recipe(workers=2)
    node.attempt(1)
    train([])
    assert "recipe.workers has no effect" in capsys.readouterr().err


def test_without_workers_what_is_meant_for_them_is_left_out(node: Node) -> None:
    node.recipe = Recipe(workers=0)
    node.attempt(1)
    _, _, run = begun()
    data = [float(number) for number in range(SAMPLES)]
    loader = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    with run:
        assert len(list(run.batches(data, BATCH, **loader))) == 5


def test_data_that_has_changed_is_told(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    def part(samples: int, stop: bool) -> None:
        _, _, run = begun()
        with run:
            for _ in run.epochs():
                for _batch in run.batches(samples, BATCH):
                    run.step()
                    if stop and run.steps == 3:
                        raise Killed

    with pytest.raises(Killed):
        part(40, stop=True)
    node.attempt(2)
    part(48, stop=False)
    assert "the data has 48 samples now and had 40 when the run was saved" in capsys.readouterr().err


def test_a_program_with_a_loader_of_its_own_gets_its_random_numbers_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws(steps: int) -> list[float]:
        _, _, run = begun()
        found = []
        with run:
            for _ in range(steps):
                found.append(torch.rand(1).item() + float(np.random.rand()))
                run.step()
        return found

    first = draws(4)
    node.attempt(2)
    resumed = draws(2)
    node.store = type(node.store)(node.store.objects, "another")
    monkeypatch.setenv("GPUCOST_JOB", "another")
    node.attempt(1)
    assert first + resumed == draws(6)


def test_several_processes_that_have_not_met_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"call prepare\(\) before"):
        ranks()
