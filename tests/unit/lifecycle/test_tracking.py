"""MLflow gets every metric once, however often we are interrupted, and however often MLflow is away."""

from __future__ import annotations

from typing import Any

import pytest

from gpucost.capacity.lease import Attempt
from gpucost.db.engine import Database
from gpucost.jobstore import MetricPoint
from gpucost.lifecycle import tracking
from gpucost.lifecycle.jobs import Logged
from tests.fakes.rooms import START, TASK, World
from tests.fakes.tracker import FakeTracker


class Node:
    """Uploads metrics as attempt after attempt of one job."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.attempt = 0
        self.index = 0

    def begin(self) -> None:
        self.attempt, self.index = self.attempt + 1, 0
        self.world.services.leases.begin_attempt(Attempt(job=TASK.key, number=self.attempt, started_at=START))

    def upload(self, *steps: int, **values: float) -> None:
        """One chunk: the same values at each step."""
        points = [MetricPoint(step=step, at=self.world.clock.now(), values=values or {"loss": 1.0}) for step in steps]
        self.world.services.store(TASK.key).write_metrics(self.attempt, self.index, points)
        self.index += 1

    def forward(self) -> bool:
        return tracking.forward_metrics(self.world.services, TASK.key)


@pytest.fixture
def tracker() -> FakeTracker:
    return FakeTracker()


@pytest.fixture
def node(database: Database, tracker: FakeTracker) -> Node:
    world = World(database, tracker=tracker)
    world.begin()
    node = Node(world)
    node.begin()
    return node


def test_each_step_is_told_once_and_none_is_lost_while_mlflow_is_away(node: Node, tracker: FakeTracker) -> None:
    node.upload(1, 2)
    assert node.forward()
    assert node.forward()
    tracker.away = True
    node.upload(3, 4)
    assert not node.forward()
    tracker.away = False
    node.upload(5)
    assert node.forward()
    assert tracker.steps == [1, 2, 3, 4, 5]


def test_a_run_that_mlflow_did_not_open_at_the_start_is_opened_when_it_is_back(
    node: Node, tracker: FakeTracker
) -> None:
    tracker.away = True
    node.upload(1, 2)
    node.forward()
    assert node.world.services.jobs.tracked(TASK.key) == (None, Logged())
    tracker.away = False
    node.upload(3)
    node.forward()
    assert tracker.steps == [1, 2, 3]
    assert node.world.services.jobs.tracked(TASK.key) == (f"run of {TASK.key}", Logged(1, 1, {"loss": 3}))


def test_a_metric_of_the_same_step_in_a_later_piece_is_not_lost(node: Node, tracker: FakeTracker) -> None:
    node.upload(100, loss=0.5)
    node.forward()
    node.upload(100, accuracy=0.9)
    node.forward()
    assert tracker.points == [("loss", 100, 0.5), ("accuracy", 100, 0.9)]


def test_steps_that_a_resumed_attempt_does_again_are_told_once(node: Node, tracker: FakeTracker) -> None:
    node.upload(*range(1, 161), loss=1.0)
    node.upload(*range(161, 167), loss=1.0)
    node.forward()
    node.begin()
    node.upload(*range(151, 162), loss=2.0)
    node.upload(161, accuracy=0.9)
    node.forward()
    node.upload(*range(162, 171), loss=2.0)
    node.forward()
    loss = [(step, value) for name, step, value in tracker.points if name == "loss"]
    assert [step for step, _ in loss] == list(range(1, 171)), "each step once, and none is missing"
    assert [value for _, value in loss] == [1.0] * 166 + [2.0] * 4, "the first time counts"
    assert [point for point in tracker.points if point[0] == "accuracy"] == [("accuracy", 161, 0.9)]


def test_what_the_first_attempt_did_not_get_to_upload_comes_from_the_next(node: Node, tracker: FakeTracker) -> None:
    node.upload(1, 2)
    node.begin()
    node.upload(2, 3, 4)
    node.forward()
    assert tracker.steps == [1, 2, 3, 4]


def test_an_answer_that_was_lost_has_the_same_points_sent_again(
    node: Node, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.upload(1, 2)
    jobs = type(node.world.services.jobs)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "set_logged", _fail)
        with pytest.raises(OSError, match="killed"):
            node.forward()
    node.upload(3)
    node.forward()
    assert tracker.points == [("loss", 1, 1.0), ("loss", 2, 1.0)] + [("loss", step, 1.0) for step in (1, 2, 3)]


def _fail(*_: Any) -> None:
    raise OSError("killed before it was written down")


def test_only_new_pieces_are_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    get = node.world.objects.get

    def noted(key: str) -> bytes:
        read.append(key)
        return get(key)

    monkeypatch.setattr(node.world.objects, "get", noted)
    for step in range(1, 51):
        node.upload(step)
        node.forward()
    node.begin()
    node.upload(60)
    node.forward()
    assert len(read) == len(set(read)) == 51


def test_much_that_has_piled_up_is_sent_bit_by_bit_and_no_bit_twice(
    node: Node, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CHUNKS_AT_ONCE", 3)
    for step in range(1, 11):
        node.upload(step)
    answer = tracker.log_points

    def only_twice(*told: Any) -> Any:
        tracker.away = len(tracker.points) >= 6
        return answer(*told)

    monkeypatch.setattr(tracker, "log_points", only_twice)
    assert not node.forward()
    assert node.world.services.jobs.tracked(TASK.key)[1] == Logged(1, 5, {"loss": 6})
    monkeypatch.setattr(tracker, "log_points", answer)
    tracker.away = False
    assert node.forward()
    assert tracker.steps == list(range(1, 11))


def test_without_mlflow_nothing_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.begin()
    node = Node(world)
    node.begin()
    node.upload(1)
    monkeypatch.setattr(world.objects, "get", lambda key: pytest.fail(f"{key} was read"))
    assert node.forward()
