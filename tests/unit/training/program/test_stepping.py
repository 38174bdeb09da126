"""However a batch is cut, the optimizer steps once, with the gradient of the whole batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpucost.recipe import Options
from gpucost.training.program import sampler
from gpucost.training.program.stepping import Stepping
from gpucost.training.workdir import EXIT_REFUSED

SAMPLES = 7
DATA = torch.linspace(-1, 1, SAMPLES * 3).reshape(SAMPLES, 3)


@contextmanager
def expect_refusal(words: str, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The program ends as one whose recipe cannot be done, and says why."""
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == EXIT_REFUSED
    assert words in capsys.readouterr().err


def model() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(3, 1)


def loss_of(net: torch.nn.Module, indices: Any) -> torch.Tensor:
    loss: torch.Tensor = (net(DATA[indices]) - 2).square().mean()
    return loss


def trained(options: Options, accumulate: int, order: str, weighted: bool, batch: int = SAMPLES) -> torch.nn.Linear:
    """Two steps over all samples."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    stepping = Stepping(net, optimizer, scheduler, options)
    planned = [np.arange(SAMPLES)[start : start + batch] for start in range(0, SAMPLES, batch)] * 2
    for share in sampler.shares(planned, accumulate=accumulate, rank=0, world_size=1):
        with stepping.hand_out(share):
            if order == "zero first":
                optimizer.zero_grad()
            if order == "zero model":
                net.zero_grad()
            loss = loss_of(net, share.indices)
            if weighted:
                stepping.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            if order == "zero last":
                optimizer.zero_grad()
            scheduler.step()
    assert scheduler.last_epoch == len(planned)
    return net


@pytest.mark.parametrize("order", ["zero first", "zero last", "zero model"])
@pytest.mark.parametrize("accumulate", [2, 3, 7, 50])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_accumulated_is_as_if_computed_at_once(order: str, accumulate: int, clip: float | None) -> None:
    once = trained(Options(clip_norm=clip), 1, order, weighted=False)
    parts = trained(Options(accumulate=accumulate, clip_norm=clip), accumulate, order, weighted=True)
    torch.testing.assert_close(parts.weight, once.weight)
    torch.testing.assert_close(parts.bias, once.bias)
    assert not torch.equal(once.weight, model().weight)


@pytest.mark.parametrize("order", ["zero first", "zero last"])
def test_a_plain_backward_is_right_for_equal_parts(order: str) -> None:
    once = trained(Options(), 1, order, weighted=False, batch=6)
    parts = trained(Options(accumulate=3), 3, order, weighted=False, batch=6)
    torch.testing.assert_close(parts.weight, once.weight)


def test_without_an_option_nothing_of_the_program_is_touched() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = optimizer.step
    Stepping(net, optimizer, None, Options())
    assert optimizer.step == step


def test_gradients_are_clipped_together() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = torch.cat([one.detach().flatten() for one in net.parameters()])
    stepping = Stepping(net, optimizer, None, Options(clip_norm=0.25))
    stepping.backward(loss_of(net, slice(None)))
    optimizer.step()
    after = torch.cat([one.detach().flatten() for one in net.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.25, rel=1e-5)


def micro_steps(options: Options, accumulate: int = 2) -> tuple[torch.nn.Linear, torch.optim.Optimizer, Stepping, Any]:
    """A model, and the shares of one batch."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    stepping = Stepping(net, optimizer, None, options)
    return net, optimizer, stepping, sampler.shares([np.arange(6)], accumulate=accumulate, rank=0, world_size=1)


def test_a_copy_of_the_model_may_forget_its_gradients() -> None:
    net, optimizer, stepping, (first, _) = micro_steps(Options(accumulate=2))
    with stepping.hand_out(first):
        stepping.backward(loss_of(net, first.indices))
        optimizer.step()
    average = copy.deepcopy(net)
    average.weight.grad = torch.ones(1, 3)
    average.zero_grad()
    net.zero_grad()
    assert average.weight.grad is None
    assert net.weight.grad is not None


@pytest.mark.parametrize("options", [Options(accumulate=2), Options(clip_norm=1.0)])
def test_a_closure_is_refused(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    _, optimizer, stepping, (first, _) = micro_steps(options)
    with stepping.hand_out(first), expect_refusal("a closure", capsys):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_program_that_clips_parts_of_a_gradient_is_refused(
    weighted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    net, optimizer, stepping, (first, _) = micro_steps(Options(accumulate=2))
    with stepping.hand_out(first):
        loss = loss_of(net, first.indices)
        stepping.backward(loss) if weighted else loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
        with expect_refusal("set clip_norm in the recipe", capsys):
            optimizer.step()


def test_a_batch_that_the_program_leaves_half_done_does_not_leak_into_the_next() -> None:
    net, optimizer, stepping, shares = micro_steps(Options(accumulate=2))
    for share in (shares[0], *shares):
        with stepping.hand_out(share):
            stepping.backward(loss_of(net, share.indices))
            optimizer.step()
    expected = model()
    loss_of(expected, slice(0, 6)).backward()
    assert expected.weight.grad is not None
    torch.testing.assert_close(net.weight, expected.weight - 0.1 * expected.weight.grad)


class TestHalfPrecision:
    def stepping(self) -> tuple[torch.nn.Linear, torch.optim.Optimizer, Stepping]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, optimizer, Stepping(net, optimizer, None, Options(precision="fp16", accumulate=2))

    def test_a_scaled_loss_gives_the_same_step(self) -> None:
        once = trained(Options(), 1, "zero first", weighted=False)
        scaled = trained(Options(precision="fp16", accumulate=3), 3, "zero first", weighted=True)
        torch.testing.assert_close(scaled.weight, once.weight, rtol=1e-4, atol=1e-5)

    def test_a_loss_that_nobody_scaled_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        net, optimizer, _ = self.stepping()
        loss_of(net, slice(None)).backward()
        with expect_refusal("run.backward(loss)", capsys):
            optimizer.step()

    def test_a_program_that_clips_scaled_gradients_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        stepping = Stepping(net, optimizer, None, Options(precision="fp16"))
        for clips in (False, True):
            optimizer.zero_grad()
            stepping.backward(loss_of(net, slice(None)))
            if not clips:
                optimizer.step()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with expect_refusal("set clip_norm in the recipe", capsys):
            optimizer.step()

    def test_a_step_with_an_overflow_is_left_out_and_the_scale_goes_down(self) -> None:
        net, optimizer, stepping = self.stepping()
        before = net.weight.detach().clone()
        stepping.backward(loss_of(net, slice(None)) * float("inf"))
        optimizer.step()
        assert torch.equal(net.weight, before)
        assert stepping.scaler is not None
        assert stepping.scaler.get_scale() < 65536.0


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    accumulate=st.integers(1, 9),
    world_size=st.integers(1, 5),
)
def test_shares_cover_every_batch_once(sizes: list[int], accumulate: int, world_size: int) -> None:
    edges = np.cumsum([0, *sizes])
    planned = [np.arange(start, end) for start, end in itertools.pairwise(edges)]
    ranks = [
        sampler.shares(planned, accumulate=accumulate, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert len({len(shares) for shares in ranks}) == 1, "all processes make the same number of micro-steps"
    assert all(len(share.indices) > 0 for shares in ranks for share in shares)
    covered = np.concatenate([np.array([], dtype=int), *(share.indices for shares in ranks for share in shares)])
    kept = [batch for batch in planned if len(batch) >= world_size]
    assert sorted(covered.tolist()) == sorted(int(one) for batch in kept for one in batch)
    assert sum(share.last for share in ranks[0]) == len(kept)
    total = sum(share.weight for shares in ranks for share in shares) / world_size
    assert total == pytest.approx(len(kept)), "averaged over the processes, a batch's weights make one"
