"""One folder is one cloud, with one market."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpucost.rehearsal.folder import FolderTaken, StateFolder
from gpucost.rehearsal.market.file import load_market
from gpucost.rehearsal.market.market import from_file
from gpucost.rehearsal.market.traces import from_traces
from gpucost.rehearsal.whole import write_whole
from tests.fakes.rehearsal import ORIGIN

SMALL = Path(__file__).resolve().parents[3] / "include/market/small.json"


def changed(tmp_path: Path, change: Any) -> str:
    document = json.loads(SMALL.read_text())
    change(document)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(document))
    return from_file(load_market(path), ORIGIN).fingerprint


def test_a_folder_is_one_cloud_at_a_time_and_the_same_every_time(tmp_path: Path) -> None:
    first = StateFolder(tmp_path / "state")
    with pytest.raises(FolderTaken, match="use another --state-dir"):
        StateFolder(tmp_path / "state")
    first.write_endpoint("http://127.0.0.1:5050")
    first.release()
    again = StateFolder(tmp_path / "state")
    assert (again.cloud_id, again.earlier_port()) == (first.cloud_id, 5050)
    assert StateFolder(tmp_path / "other").cloud_id != first.cloud_id
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_what_was_bought_in_one_market_is_not_billed_by_another(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.settle_market("one", "the first", used=False)
    folder.settle_market("two", "the second", used=False)
    folder.settle_market("two", "the second, renamed", used=True)
    with pytest.raises(ValueError, match=r"market: got another one \(the third\).*HOME_FOLDER"):
        folder.settle_market("three", "the third", used=True)


def test_a_fingerprint_tells_prices_and_not_names(tmp_path: Path) -> None:
    same = from_file(load_market(SMALL), ORIGIN).fingerprint
    assert changed(tmp_path, lambda d: d.update(label="another name")) == same
    others = [
        changed(tmp_path, lambda d: d.update(seed=d["seed"] + 1)),
        changed(tmp_path, lambda d: d["pools"][0]["spot"].update(usd_per_hour="0.0001")),
        changed(tmp_path, lambda d: d["pools"][0]["capacity"].update(spot=99)),
    ]
    assert len({same, *others}) == 4


def test_traces_from_another_offset_are_another_market(tmp_path: Path) -> None:
    trace = {
        "metadata": {
            "gap_seconds": 600,
            "zone": "us-east-1a",
            "gpu": "V100",
            "count": 1,
            "instance_type": "p3.2xlarge",
            "on_demand_usd_per_hour": 3.06,
        },
        "data": [1, 0] * 10,
        "prices": [0.9] * 20,
    }
    (tmp_path / "a.json").write_text(json.dumps(trace))

    def made(offset_h: float, capacity: int) -> str:
        return from_traces(tmp_path, ORIGIN, timedelta(hours=offset_h), capacity, 2).fingerprint

    assert made(0, 4) == made(0, 4)
    assert len({made(0, 4), made(1, 4), made(0, 5)}) == 3
    before = made(0, 4)
    (tmp_path / "a.json").write_text(json.dumps({**trace, "prices": [0.8] * 20}))
    assert made(0, 4) != before


@pytest.mark.parametrize("content", ["[]", "{}", '{"cloud_id": 3}', "\x00", ""])
def test_an_identity_that_is_none_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "cloud.json").write_text(content)
    with pytest.raises(ValueError, match=r"state_dir: .*cloud\.json.*use another --state-dir"):
        StateFolder(tmp_path)


def test_a_file_is_there_whole_and_for_its_owner_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    write_whole(path, "first")
    write_whole(path, b"second")
    assert path.read_text() == "second"
    assert path.stat().st_mode & 0o077 == 0

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "third")
    assert path.read_text() == "second"
