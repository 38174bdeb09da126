"""The agent and real programs on a folder as the store: real processes, real signals, equal weights."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from gpucost.jobstore import Command, Control, Live
from gpucost.reasons import Reason
from tests.system.nodes import Job, Node, nodes, small, steps_since_resumed, training

__all__ = ["nodes", "small"]

DIGITS = Path(__file__).parents[2] / "include" / "programs" / "digits"


def test_killed_at_random_moments_the_weights_end_bit_for_bit_the_same(tmp_path: Path, nodes: list[Node]) -> None:
    arguments = ("--epochs", "9", "--step-delay-ms", "10")
    whole = Job(tmp_path, "whole", DIGITS, *arguments, every_steps=20)
    killed = Job(tmp_path, "killed", DIGITS, *arguments, every_steps=20)
    chance = random.Random(20261130)
    nodes.append(reference := whole.start())

    for moment in ("training", "any", "training", "training", "any", "training"):
        nodes.append(node := killed.start())
        if moment == "training":  # Somewhere in a step or a save, at least one save further than the attempt before.
            assert node.wait_for(steps_since_resumed(chance.randint(21, 45)))
            time.sleep(chance.uniform(0.0, 0.1))
        else:  # Anywhere from the agent's start on: fetching, importing, restoring, first steps.
            time.sleep(chance.uniform(0.0, 4.0))
        node.power_off()
        _gone(node)

    nodes.append(node := killed.start())
    expected, got = reference.end(), node.end()
    resumed = [progress.resumed_step for node in nodes[2:] if (progress := node.workdir.progress())]
    assert len([step for step in resumed if step]) >= 4
    assert (expected.reason, got.reason) == (Reason.COMPLETED, Reason.COMPLETED)
    assert got.step == expected.step == 9 * 23
    assert got.weights_digest == expected.weights_digest
    assert got.results == expected.results
    assert got.results["accuracy"] > 0.9
    assert _losses(whole, range(1, 2)) == _losses(killed, range(1, killed.attempts + 1))


def _gone(node: Node) -> None:
    until = time.monotonic() + 5
    while (left := node.processes()) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []


def _losses(job: Job, attempts: range) -> dict[int, float]:
    """Step -> loss, the newest attempt's word for each step. Killed attempts may not have sent their last lines."""
    return {
        point.step: point.values["loss"]
        for number in attempts
        for _, points in job.store.metrics(number)
        for point in points
        if "loss" in point.values and point.step % 50 == 0 and point.step > 150
    }


def test_sigterm_loses_no_step_and_the_next_attempt_goes_on_there(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("30")
    nodes.append(first := job.start())
    first.wait_for(lambda progress: progress.step >= 30)
    began = time.monotonic()
    first.process.send_signal(signal.SIGTERM)
    record = first.end()
    assert time.monotonic() - began < 15
    assert record.reason is Reason.INTERRUPTED
    assert record.step >= 30
    assert record.saved_step == record.step
    assert first.process.returncode == 75

    nodes.append(second := job.start())
    finished = second.end()
    assert finished.reason is Reason.COMPLETED
    assert finished.step == 300
    beat = Live(job.objects).read(second.lease)
    assert beat is not None
    assert (beat.resumed_step, beat.step, beat.exited) == (record.step, 300, Reason.COMPLETED)

    nodes.append(undisturbed := small("30", name="undisturbed").start())
    assert undisturbed.end().weights_digest == finished.weights_digest


def test_a_zombie_commits_nothing_and_ends(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("10000", every_steps=20)
    nodes.append(zombie := job.start())
    zombie.wait_for(lambda progress: (progress.saved_step or 0) >= 20)
    job.store.claim(2)
    before = job.store.head().checkpoints
    record = zombie.end(seconds=30)
    assert record.reason is Reason.FENCED
    assert zombie.process.returncode == 76
    assert job.store.head().checkpoints == before
    assert job.store.head().fence == 2


def test_control_object_saves_then_stops(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("10000")
    nodes.append(node := job.start())
    node.wait_for(training)
    job.store.ask(1, Control(sequence=1, command=Command.SAVE, why="a look"))
    node.wait_for(lambda progress: progress.saved_step is not None)
    saved = node.workdir.progress()
    node.wait_for(lambda progress: progress.step > (saved.step if saved else 0) + 20)
    job.store.ask(1, Control(sequence=2, command=Command.SAVE_AND_STOP, why="budget"))
    record = node.end()
    assert record.reason is Reason.STOPPED
    assert "budget" in record.message
    assert record.saved_step == record.step > (saved.step if saved else 0)
    assert len(job.store.head().checkpoints) == 2


def test_an_expired_node_saves_and_ends_itself(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("10000")
    nodes.append(node := job.start(lives=timedelta(seconds=12)))
    record = node.end()
    assert record.reason is Reason.EXPIRED
    assert (record.saved_step or 0) == record.step


def test_a_store_that_is_away_is_told_by_exit_code_and_message(small: Callable[..., Job], nodes: list[Node]) -> None:
    job = small("1")
    (job.folder / "file").write_text("where a folder should be")
    job.url = (job.folder / "file").as_uri()
    nodes.append(node := job.start())
    assert node.process.wait(30) == 74
    assert "store_unreachable" in (job.folder / "agent-1.log").read_text()
