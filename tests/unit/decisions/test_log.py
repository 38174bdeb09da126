"""The decision log: written once, read in the order of review."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpucost.db.engine import Database
from gpucost.decisions.log import DecisionLog, DecisionState
from tests.fakes.rows import job_row

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[DecisionLog]:
    database = Database(f"sqlite:///{tmp_path}/gpucost.db")
    database.migrate()
    with database.transaction() as session:
        session.add_all([job_row("job", NOW), job_row("other", NOW)])
    yield DecisionLog(database)
    database.close()


def record(log: DecisionLog, title: str = "Bought on demand", **changes: Any) -> int:
    facts: dict[str, Any] = {
        "why": "spot would miss the deadline by 2 h",
        "options": [{"pool": "b", "cost": "1.5"}],
        "author": "gpucost",
        "now": NOW,
        "job": "job",
    }
    return log.record(title, **(facts | changes))


def test_what_is_recorded_is_read_back(log: DecisionLog) -> None:
    review = NOW + timedelta(days=7)
    number = record(log, review_at=review, reviewer="ann")
    (decision,) = log.open_decisions()
    assert decision.id == number
    assert (decision.title, decision.job, decision.author) == ("Bought on demand", "job", "gpucost")
    assert decision.options == ({"pool": "b", "cost": "1.5"},)
    assert (decision.at, decision.review_at, decision.reviewer) == (NOW, review, "ann")
    assert decision.state is DecisionState.OPEN


def test_one_compromise_of_one_job_is_recorded_once(log: DecisionLog) -> None:
    first = record(log)
    assert record(log, now=NOW + timedelta(hours=1)) == first
    others = {
        record(log, job="other"),
        record(log, title="Cut the batch"),
        record(log, job=None),
        record(log, job=None),
    }
    assert len(others | {first}) == 5


def test_a_reviewed_or_closed_decision_is_open_no_more(log: DecisionLog) -> None:
    one, two = record(log), record(log, title="Cut the batch")
    log.move(one, DecisionState.REVIEWED, "ann", review_at=NOW + timedelta(days=30))
    log.move(two, DecisionState.CLOSED, "bob")
    assert log.open_decisions() == []
    assert (log.get(one).state, log.get(one).reviewer) == (DecisionState.REVIEWED, "ann")
    assert log.get(one).review_at == NOW + timedelta(days=30)
    assert log.get(two).state is DecisionState.CLOSED


def test_the_soonest_review_comes_first_and_those_without_one_last(log: DecisionLog) -> None:
    record(log, title="no date")
    record(log, title="late", review_at=NOW + timedelta(days=9))
    record(log, title="soon", review_at=NOW + timedelta(days=1), job="other")
    assert [decision.title for decision in log.open_decisions()] == ["soon", "late", "no date"]
    assert [decision.title for decision in log.open_decisions(job="other")] == ["soon"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": " "}, "title"),
        ({"title": "x" * 201}, "title: got 201"),
        ({"why": ""}, "why"),
        ({"author": ""}, "author"),
    ],
)
def test_an_empty_or_endless_field_is_named(log: DecisionLog, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(log, **changes)


def test_what_does_not_exist_is_named(log: DecisionLog) -> None:
    with pytest.raises(LookupError, match="'nobody'"):
        record(log, job="nobody")
    with pytest.raises(LookupError, match="decision: 99"):
        log.move(99, DecisionState.CLOSED, "ann")
