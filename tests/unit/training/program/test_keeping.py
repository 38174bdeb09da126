"""What is saved, and how a run ends, when a program does more than step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpucost.jobstore import Command
from gpucost.training import checkpointed, prepare, weights_digest
from gpucost.training.program.keeping import Stopped
from gpucost.training.program.loop import Run
from gpucost.training.workdir import Request
from tests.fakes.node import Node


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch, every_steps=1)


def begun() -> tuple[torch.nn.Module, Run]:
    prepare()
    model = torch.nn.Linear(2, 1)
    return model, checkpointed(model, torch.optim.SGD(model.parameters()), epochs=2)


def test_the_finished_model_is_saved_although_its_last_step_was(node: Node) -> None:
    model, run = begun()
    with run:
        for _ in run.epochs():
            for _batch in run.batches(4, 2):
                run.step()
        with torch.no_grad():
            model.weight.add_(1.0)  # As averaged weights are put into the model in the end.
        run.finish()
    result = node.workdir.result()
    assert result is not None
    node.attempt(2)
    model, run = begun()
    with run:
        assert weights_digest(model) == result.weights_digest
        assert list(run.epochs()) == []
        run.finish()
    assert [node.store.manifest(key).attempt for key in node.store.head().checkpoints] == [1, 1], "nothing is new"
    result = node.workdir.result()
    assert result is not None
    assert result.status == "finished"


def test_a_run_that_was_told_to_stop_is_not_finished_by_a_finally(node: Node) -> None:
    def train() -> None:
        _, run = begun()
        with run:
            try:
                for _ in run.epochs():
                    for _batch in run.batches(4, 2):
                        node.workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))
                        run.step()
            finally:
                run.finish({"loss": 1.0})

    with pytest.raises(Stopped):
        train()
    result = node.workdir.result()
    assert result is not None
    assert (result.status, result.step) == ("stopped", 1)
    node.attempt(2)
    _, run = begun()
    with run:
        assert list(run.epochs()) == [0, 1]


def test_a_save_in_the_middle_of_a_step_would_lose_the_batch_and_is_refused(node: Node) -> None:
    _, run = begun()
    with run:
        assert run.save(), "before the first batch nothing can be lost"
        for _batch in run.batches(4, 2):
            with pytest.raises(ValueError, match=r"expected right after run\.step"):
                run.save()
            run.step()
            assert run.save()


def test_a_save_after_the_batches_would_repeat_the_end_of_the_epoch_and_is_refused(node: Node) -> None:
    _, run = begun()
    with run:
        for epoch in run.epochs():
            assert run.save(), "between two epochs nothing is repeated"
            for _batch in run.batches(4, 2):
                run.step()
                if epoch == 0:
                    break
            with pytest.raises(ValueError, match="within a step or after the batches"):
                run.save()
