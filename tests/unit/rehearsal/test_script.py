"""Interruptions at a job's progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpucost.rehearsal.interruptions.script import ProgressReader, Rule, Script, load_rules


def test_a_rule_fires_as_often_as_it_says_and_for_its_jobs_only() -> None:
    script = Script([Rule(job="digits-*", step=300, times=2)])
    assert script.fire("digits-1", 299) is None
    assert script.fire("letters", 300) is None
    assert script.fire(None, 300) is None
    assert script.fire("digits-1", 300) is not None
    assert script.concerns("digits-2")
    assert script.fire("digits-2", 450) is not None
    assert not script.concerns("digits-2")
    assert script.fire("digits-1", 1000) is None


def test_rules_fire_in_the_order_they_were_given() -> None:
    script = Script([Rule(job="a", step=10, event="notice")])
    script.add([Rule(job="a", step=20, event="no-notice")])
    first, second = script.fire("a", 25), script.fire("a", 25)
    assert first is not None
    assert second is not None
    assert (first.step, second.step) == (10, 20)


def test_progress_is_found_anywhere_below_the_folder_and_never_goes_back(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path, search_every=1)
    assert reader.step() is None
    below = tmp_path / "work/run"
    below.mkdir(parents=True)
    progress = below / "progress.json"
    progress.write_text('{"step": 1')
    assert reader.step() is None, "a torn file is not a step"
    progress.write_text(json.dumps({"step": 7, "epoch": 0, "at": "2026-11-30T16:00:00Z"}))
    assert reader.step() == 7
    replacement = below / "progress.part"
    replacement.write_text(json.dumps({"step": 12, "epoch": 1, "at": "2026-11-30T16:00:01Z"}))
    replacement.replace(progress)
    assert reader.step() == 12
    progress.unlink()
    assert reader.step() == 12


def test_a_wrong_rules_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rules": [{"job": "a", "step": 300, "event": "no-notice", "times": 1}]}))
    assert load_rules(path) == [Rule(job="a", step=300)]
    path.write_text(json.dumps({"rules": [{"job": "a", "stop": 300}]}))
    with pytest.raises(ValueError, match="stop"):
        load_rules(path)
    with pytest.raises(ValueError, match="cannot read"):
        load_rules(tmp_path / "none.json")


def test_rules_and_shots_are_there_again_after_a_restart(tmp_path: Path) -> None:
    path, rule = tmp_path / "script.json", Rule(job="a", step=10, times=2)
    first = Script([rule], kept_in=path)
    first.add([Rule(job="b", step=1)])
    assert first.fire("a", 10)
    again = Script([rule], kept_in=path)
    assert [one["left"] for one in again.as_json()] == [1, 1]
    assert again.fire("a", 10)
    assert not again.fire("a", 10)
    assert not Script([rule], kept_in=path).fire("a", 10), "the second shot is remembered, too"
