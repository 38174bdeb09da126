"""A recipe changes how a model computes, not what the program sees of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpucost.recipe import Options
from gpucost.training.program.applying import apply


class Blocks(nn.Module):
    """A model with a list of blocks, which counts how often these are computed."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Dropout(0.5)) for _ in range(2)
        )
        self.last = nn.Linear(8, 1)
        self.computed = 0
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        self.seen.append(hidden.dtype)
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        answer: torch.Tensor = self.last(hidden)
        return answer


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model(torch.ones(6, 4)).square().mean().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("which", [True, ("blocks.*",), ("blocks.0", "first")])
def test_recomputed_activations_give_the_same_gradients_dropout_and_all(which: bool | tuple[str, ...]) -> None:
    plain, recomputed = Blocks(), Blocks()
    apply(Options(gradient_checkpointing=which), recomputed)
    calls = []
    for block in recomputed.blocks:
        block[0].register_forward_hook(lambda *_: calls.append(1))
    assert all(map(torch.equal, gradients(plain), gradients(recomputed)))
    assert len(calls) > 2, "a block is computed again in the backward pass"
    assert recomputed.state_dict().keys() == plain.state_dict().keys()


def test_modules_that_are_not_there_are_told_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"layers.*the model has: first, blocks, blocks\.0"):
        apply(Options(gradient_checkpointing=("layers.*",)), Blocks())


def test_a_model_without_lists_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient_checkpointing: got True"):
        apply(Options(gradient_checkpointing=True), nn.Linear(2, 2))


def test_batch_normalization_would_count_twice_and_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0 has batch normalization \(BatchNorm1d\)"):
        apply(Options(gradient_checkpointing=("blocks.0",)), Blocks(norm=True))


def test_lower_precision_inside_full_precision_outside() -> None:
    model = Blocks()
    apply(Options(precision="bf16"), model)
    answer = model(torch.ones(2, 4))
    assert model.seen == [torch.bfloat16]
    assert answer.dtype is torch.float32
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    """As the moving average of the weights does, which evaluates a deep copy."""
    model = Blocks().eval()
    apply(Options(precision="bf16", gradient_checkpointing=True), model)
    average = copy.deepcopy(model)
    with torch.no_grad():
        average.last.bias.add_(1.0)
        difference = average(torch.ones(2, 4)) - model(torch.ones(2, 4))
    torch.testing.assert_close(difference, torch.ones(2, 1), rtol=0.02, atol=0.02)


def test_nothing_chosen_is_nothing_changed() -> None:
    model = Blocks()
    kind = type(model)
    apply(Options(), model)
    assert type(model) is kind
