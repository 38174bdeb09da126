"""What `checkpointed` promises to a program, in one process."""

from __future__ import annotations

import math
import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpucost.clock import ClockSpec, SpecClock
from gpucost.jobstore import Command, ExitRecord, MetricPoint, Phase
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.recipe import Recipe
from gpucost.training import checkpointed, outage, prepare, weights_digest
from gpucost.training.program import randomness
from gpucost.training.program.keeping import Fenced, Stopped
from gpucost.training.program.loop import Run
from gpucost.training.program.reporting import Reporter
from gpucost.training.workdir import EXIT_STORE, Request, Workdir
from tests.fakes.node import Node

EPOCHS, SAMPLES, BATCH = 3, 10, 3
STEPS = EPOCHS * 4


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


class Killed(BaseException):
    """Stands for the power going off."""


def train(after_step: Callable[[Run], None] = lambda run: None, **options: Any) -> tuple[str, list[float]]:
    """A training whose every part is random; returns the digest and the losses of its last epoch."""
    prepare()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    data = torch.rand(SAMPLES, 4)
    losses: list[float] = []
    with checkpointed(model, optimizer, epochs=EPOCHS, scheduler=scheduler, log_every=1, **options) as run:
        for _ in run.epochs():
            noise = run.rng("noise").random((SAMPLES, 4), dtype=np.float32)
            losses = run.extra.setdefault(f"losses {run.epoch}", [])
            for batch in run.batches(SAMPLES, BATCH):
                optimizer.zero_grad()
                luck = torch.rand(1) + random.random() + np.random.rand()
                inputs = data[batch] + torch.from_numpy(noise)[batch] + luck
                loss = model(inputs.float()).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                run.step(loss=loss)
                after_step(run)
            scheduler.step()
        run.finish({"loss": losses[-1]})
    return weights_digest(model), losses


def kill_at(step: int) -> Callable[[Run], None]:
    def after_step(run: Run) -> None:
        if run.steps == step:
            raise Killed

    return after_step


def points(workdir: Workdir) -> list[MetricPoint]:
    return [MetricPoint.model_validate_json(line) for line in workdir.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[float]]]:
    """What the run that nothing interrupts ends with."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        Node(tmp_path_factory.mktemp("undisturbed"), monkeypatch)
        yield train()


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("every_steps", [1, 4, 5])
def test_killed_after_any_step_the_resumed_run_ends_the_same(
    node: Node, undisturbed: tuple[str, list[float]], step: int, every_steps: int
) -> None:
    node.every_steps = every_steps
    node.attempt(1)
    with pytest.raises(Killed):
        train(kill_at(step))
    workdir = node.attempt(2)
    assert train() == undisturbed
    result = workdir.result()
    assert result is not None
    assert (result.status, result.step, result.weights_digest) == ("finished", STEPS, undisturbed[0])
    progress = workdir.progress()
    assert progress is not None
    assert progress.resumed_step == step - step % every_steps


def test_a_recipe_that_helps_less_than_hoped_is_remarked(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.recipe = Recipe(nccl_timeout_seconds=60)
    node.attempt(1)
    train()
    assert "gpucost: recipe: nccl_timeout_seconds: one process trains alone" in capfd.readouterr().err


class TestAccumulation:
    """One batch of 3 samples in 3 micro-steps; the last batch of an epoch has 1 sample, so 1 micro-step."""

    @pytest.fixture
    def accumulating(self, node: Node) -> Node:
        node.recipe = Recipe(accumulate=3, clip_norm=0.5)
        node.attempt(1)
        return node

    @pytest.fixture
    def whole(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            node = Node(tmp_path_factory.mktemp("whole"), monkeypatch)
            node.recipe = Recipe(accumulate=3, clip_norm=0.5)
            node.attempt(1)
            return train()

    def test_steps_are_counted_by_whole_batches(self, accumulating: Node) -> None:
        _, losses = train()
        assert len(losses) == SAMPLES
        result = accumulating.workdir.result()
        assert result is not None
        assert result.step == STEPS

    @pytest.mark.parametrize("micro", range(1, 31, 2))
    def test_stopped_between_micro_steps_no_sample_is_lost(
        self, accumulating: Node, whole: tuple[str, list[float]], micro: int
    ) -> None:
        done = 0

        def stop(run: Run) -> None:
            nonlocal done
            done += 1
            if done == micro - 1:
                accumulating.workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))

        if micro == 1:
            accumulating.workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))
        with pytest.raises(Stopped):
            train(stop)
        assert done == micro - 1
        accumulating.attempt(2)
        assert train(count := Count()) == whole
        assert done + count.calls + (micro > 1) == EPOCHS * SAMPLES

    def test_a_mere_save_waits_for_the_end_of_the_step(self, accumulating: Node) -> None:
        done, saved = 0, []

        def ask(run: Run) -> None:
            nonlocal done
            done += 1
            if done == 1:
                accumulating.workdir.ask(Request(sequence=1, command=Command.SAVE))
            progress = accumulating.workdir.progress()
            saved.append(progress.saved_step if progress else None)

        train(ask)
        assert saved[:4] == [None, None, 1, 1]


def test_a_stopped_run_leaves_no_process_that_loads_data(node: Node) -> None:
    """Python would wait for each of them at its exit, up to ten seconds, while the node's time runs out."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(64, 1))

    def run_until_stopped() -> None:
        with checkpointed(model, optimizer, epochs=2) as run:
            for _ in run.epochs():
                batches = run.batches(data, 2, num_workers=2)  # a name, which the traceback keeps
                for (batch,) in batches:
                    run.backward(model(batch).sum())
                    optimizer.step()
                    if run.steps == 3:
                        assert len(multiprocessing.active_children()) == 2
                        node.workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))
                    run.step()

    with pytest.raises(Stopped) as stopped:
        run_until_stopped()
    assert multiprocessing.active_children() == []
    assert stopped.traceback, "which holds the frames of the loop, as at a program's end"


class Unreadable(torch.utils.data.Dataset[torch.Tensor]):
    """Data of which one sample cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40:
            raise ValueError("line 40 is no row")
        return torch.ones(1)


def test_data_that_cannot_be_read_ends_the_program_with_its_workers(node: Node) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run_until_it_fails() -> None:
        with checkpointed(model, optimizer, epochs=1) as run:
            for _ in run.epochs():
                batches = run.batches(Unreadable(), 2, num_workers=2)
                for _batch in batches:
                    run.step()

    with pytest.raises(ValueError, match="line 40 is no row") as failed:
        run_until_it_fails()
    assert multiprocessing.active_children() == []
    assert failed.traceback, "which holds the loader"


class Count:
    """Counts the steps and micro-steps that come back to the loop."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, run: Run) -> None:
        self.calls += 1


def test_it_saves_when_due_and_at_the_end(node: Node) -> None:
    saved: list[tuple[int, int | None]] = []

    def look(run: Run) -> None:
        progress = node.workdir.progress()
        saved.append((run.steps, progress.saved_step if progress else None))

    train(look)
    assert dict(saved)[4] is None
    assert dict(saved)[5] == 5
    assert dict(saved)[9] == 5
    assert dict(saved)[10] == 10
    assert [node.store.manifest(key).step for key in node.store.head().checkpoints] == [12, 10]


def test_a_request_to_save_is_met_once_at_the_next_step(node: Node) -> None:
    saved: list[int | None] = []

    def ask(run: Run) -> None:
        progress = node.workdir.progress()
        saved.append(progress.saved_step if progress else None)
        if run.steps == 6:
            node.workdir.ask(Request(sequence=1, command=Command.SAVE))

    train(ask)
    assert saved == [None] * 4 + [5, 5, 7, 7, 7, 10, 10, 10]
    assert len(points(node.workdir)) == STEPS


@pytest.mark.parametrize("how", ["request", "signal"])
def test_a_request_to_stop_loses_no_step(node: Node, how: str) -> None:
    def ask(run: Run) -> None:
        if run.steps == 6 and how == "request":
            node.workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP, why="notice"))
        elif run.steps == 6:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        train(ask)
    assert stopped.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    result = node.workdir.result()
    assert result is not None
    assert (result.status, result.step, result.saved_step) == ("stopped", 7, 7)
    assert node.store.manifest(node.store.head().checkpoints[0]).step == 7


def test_asked_to_stop_before_the_first_step_it_does_not_begin(node: Node) -> None:
    node.workdir.ask(Request(sequence=1, command=Command.SAVE_AND_STOP))
    with pytest.raises(Stopped):
        train()
    result = node.workdir.result()
    assert result is not None
    assert (result.step, result.saved_step) == (0, None)


def test_a_fenced_run_ends_without_saving(node: Node) -> None:
    def overtake(run: Run) -> None:
        if run.steps == 3:
            node.store.claim(2)

    with pytest.raises(Fenced) as fenced:
        train(overtake)
    assert fenced.value.code == 76
    assert node.store.head().checkpoints == ()
    result = node.workdir.result()
    assert result is not None
    assert result.status == "fenced"


def test_training_goes_on_while_the_store_is_away(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put = Objects.put

    def broken(self: Objects, key: str, data: bytes) -> None:
        if "000000000005-" in key:
            raise ConnectionError("connection refused")
        put(self, key, data)

    monkeypatch.setattr(Objects, "put", broken)
    train()
    assert [node.store.manifest(key).step for key in node.store.head().checkpoints] == [12, 10]
    assert "step 5 could not be saved; training goes on: connection refused" in capsys.readouterr().err


def test_a_model_that_could_not_be_saved_is_not_finished(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Objects, key: str, data: bytes) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(Objects, "put", broken)
    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == EXIT_STORE
    assert node.workdir.result() is None


def test_a_store_that_is_away_at_the_start_is_told_apart(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Objects, key: str) -> tuple[bytes, str]:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(outage, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(Objects, "get_with_etag", broken)
    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == EXIT_STORE


def test_a_checkpoint_of_other_things_is_refused(node: Node) -> None:
    train()
    node.attempt(2)
    model = torch.nn.Linear(1, 1)
    run = checkpointed(model, torch.optim.SGD(model.parameters()), epochs=1)
    with pytest.raises(ValueError, match="the checkpoint holds"):
        run.__enter__()


def test_a_loss_that_is_no_number_is_told_as_it_is(node: Node) -> None:
    reporter = Reporter(node.workdir, SpecClock())
    reporter.metrics(3, {"loss": float("nan"), "lr": 0.1})
    reporter.progress(Phase.TRAINING, 3, 0, float("inf"))
    (point,) = points(node.workdir)
    assert math.isnan(point.values["loss"])
    assert point.values["lr"] == 0.1
    progress = node.workdir.progress()
    assert progress is not None
    assert progress.loss == math.inf


def test_results_that_are_no_numbers_reach_the_exit_record_as_they_are(node: Node) -> None:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, math.nan)
    with checkpointed(model, torch.optim.SGD(model.parameters()), epochs=1) as run:
        run.finish({"loss": torch.tensor(math.nan), "best": math.inf, "worst": -math.inf})
    result = node.workdir.result()
    assert result is not None
    assert result.weights_digest == weights_digest(model)
    node.store.write_exit(ExitRecord(attempt=1, reason=Reason.COMPLETED, at=datetime.now(UTC), results=result.results))
    record = node.store.exit_record(1)
    assert record is not None
    assert math.isnan(record.results["loss"])
    assert (record.results["best"], record.results["worst"]) == (math.inf, -math.inf)


def test_rates_are_told_per_second_of_the_jobs_clock(tmp_path: Path) -> None:
    real = [100.0]
    moment = datetime(2026, 11, 30, tzinfo=UTC)
    clock = SpecClock(ClockSpec(origin_real=moment, origin=moment, speed=60))
    workdir = Workdir(tmp_path)
    reporter = Reporter(workdir, clock, real=lambda: real[0])
    reporter.progress(Phase.TRAINING, 0, 0)
    real[0] += 2
    reporter.progress(Phase.TRAINING, 120, 0)
    progress = workdir.progress()
    assert progress is not None
    assert progress.steps_per_second == pytest.approx(1.0)  # 60 real steps per second, at 60 times the speed.


def test_steps_that_were_restored_do_not_count_as_speed(tmp_path: Path) -> None:
    real = [100.0]
    workdir = Workdir(tmp_path)
    reporter = Reporter(workdir, SpecClock(), real=lambda: real[0])
    for seconds, phase, step in ((0, Phase.RESTORING, 0), (1, Phase.TRAINING, 150), (2, Phase.TRAINING, 160)):
        real[0] += seconds
        reporter.progress(phase, step, 0)
    progress = workdir.progress()
    assert progress is not None
    assert progress.steps_per_second == pytest.approx(5.0)


def test_outside_gpucost_it_goes_on_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("GPUCOST_WORKDIR", "GPUCOST_JOB", "GPUCOST_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "checkpoints"
    expected = train(folder=None)
    with pytest.raises(Killed):
        train(kill_at(7), folder=folder, every_steps=3)
    assert train(folder=folder, every_steps=3) == expected
    assert "going on from step 6" in capsys.readouterr().err


def test_random_generators_come_back_exactly() -> None:
    def draw() -> tuple[float, ...]:
        return (
            torch.rand(1).item(),
            torch.randn(1).item(),
            float(np.random.rand()),
            float(np.random.randn()),
            random.random(),
            random.gauss(0, 1),
        )

    randomness.seed_everything(5)
    draw()  # Leaves half of a pair of normal numbers in each generator that makes them in pairs.
    saved = randomness.capture()
    expected = [draw(), draw()]
    randomness.seed_everything(6)
    randomness.restore(saved)
    assert [draw(), draw()] == expected
