"""Rows that a table needs before another one may refer to them; only what a test cares about is given."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gpucost.db.tables import JobRow


def job_row(key: str, at: datetime, **changes: Any) -> JobRow:
    """A job begun at `at`."""
    facts: dict[str, Any] = {
        "dag_id": "d",
        "run_id": key,
        "task_id": "t",
        "map_index": -1,
        "generation": 1,
        "owner": "o",
        "tries_allowed": 0,
        "name": "n",
        "project": "p",
        "team": "t",
        "spec": {},
        "created_at": at,
        "deadline": at,
    }
    return JobRow(key=key, **(facts | changes))
