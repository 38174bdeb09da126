"""Interruptions at a job's progress."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpucost.rehearsal.interruptions.script import ProgressReader, Rule, Script, load_rules


def fired(script: Script, instance_id: str, job: str | None, step: int) -> str | None:
    """What the script lets happen to an instance."""
    happened: list[str] = []
    script.fire(instance_id, job, step, lambda kind: not happened.append(kind))  # type: ignore[func-returns-value]
    return happened[0] if happened else None


def test_a_rule_hits_as_many_instances_as_it_says_each_once_and_of_its_jobs_only() -> None:
    script = Script([Rule(job="digits-*", step=300, times=2)])
    assert fired(script, "i-1", "digits-1", 299) is None
    assert fired(script, "i-2", "letters", 300) is None
    assert fired(script, "i-3", None, 300) is None
    assert fired(script, "i-1", "digits-1", 300) == "no-notice"
    assert fired(script, "i-1", "digits-1", 301) is None, "once for this instance"
    assert not script.concerns("i-1", "digits-1")
    assert script.concerns("i-4", "digits-2")
    assert fired(script, "i-4", "digits-2", 450) == "no-notice"
    assert not script.concerns("i-5", "digits-2")
    assert fired(script, "i-5", "digits-1", 1000) is None


def test_rules_fire_in_the_order_they_were_given() -> None:
    script = Script([Rule(job="a", step=10, event="notice")])
    script.add([Rule(job="a", step=20, event="no-notice")])
    assert [fired(script, "i-1", "a", 25) for _ in range(3)] == ["notice", "no-notice", None]


def test_what_could_not_happen_costs_no_shot_and_holds_up_no_other_rule() -> None:
    script = Script([Rule(job="a", step=10, event="rebalance"), Rule(job="a", step=10, event="notice")])
    assert script.fire("i-1", "a", 10, lambda kind: kind != "rebalance")
    assert [one["left"] for one in script.as_json()] == [1, 0]
    assert fired(script, "i-2", "a", 10) == "rebalance"


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


def test_what_is_no_progress_file_is_no_step_and_no_harm(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path, search_every=1)
    for number, content in enumerate(["[" * 60_000, "[]", '{"step": "x"}', '{"step": null}', "7", ""]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "progress.json").write_text(content)
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/progress.json").symlink_to("progress.json")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/progress.json")
    assert reader.step() is None
    (tmp_path / "progress.json").write_text('{"step": 3}')
    assert reader.step() == 3


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
    assert fired(first, "i-1", "a", 10)
    again = Script([rule], kept_in=path)
    assert [one["left"] for one in again.as_json()] == [1, 1]
    assert not fired(again, "i-1", "a", 10), "whom it has hit is remembered, too"
    assert fired(again, "i-2", "a", 10)
    assert not fired(Script([rule], kept_in=path), "i-3", "a", 10)
