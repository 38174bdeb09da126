"""Generated clicks: the same seed makes the same bytes, and what is called the best AUC is that."""

from __future__ import annotations

from pathlib import Path

import clicks
import generate
import numpy as np
import pytest
from clicks import Clicks
from sklearn.metrics import log_loss, roc_auc_score

FACTOR = pow(2654435761, -1, 2**32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "CHUNK", 1000)


def read_back(file: Path) -> tuple[generate.Rows, np.ndarray]:
    """Features and labels as they stand in the file, by python's own means."""
    fields = [line.split("\t") for line in file.read_text().splitlines()]
    numbers = np.array([[float(text or "nan") for text in row[1:14]] for row in fields])
    categories = [
        [(int(text, 16) - 97 * field) * FACTOR % 2**32 if text else 0 for field, text in enumerate(row[14:], start=1)]
        for row in fields
    ]
    return generate.Rows(numbers, np.array(categories)), np.array([int(row[0]) for row in fields])


def test_the_same_seed_makes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    best = generate.generate(first, 2500, seed=1)
    assert generate.generate(again, 2500, seed=1) == best
    generate.generate(other, 2500, seed=2)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    assert len(first.read_bytes().splitlines()) == 2500


def test_a_longer_file_begins_like_a_shorter_one(tmp_path: Path) -> None:
    generate.generate(tmp_path / "short", 2000, seed=1)
    generate.generate(tmp_path / "long", 3000, seed=1)
    assert (tmp_path / "long").read_bytes().startswith((tmp_path / "short").read_bytes())


def test_the_best_is_that_of_the_probability_which_the_written_rows_have(tmp_path: Path) -> None:
    file = tmp_path / "clicks.tsv"
    best = generate.generate(file, 12_500, seed=3, held_out=0.8)
    rows, labels = read_back(file)
    probability = 1 / (1 + np.exp(-generate.Truth(3).logits(rows)))
    assert best["auc"] == pytest.approx(roc_auc_score(labels[2500:], probability[2500:]), abs=1e-12)
    assert best["log_loss"] == pytest.approx(log_loss(labels[2500:], probability[2500:]), abs=1e-9)
    # Labels are drawn from it: within four standard deviations, in all and among the likeliest tenth.
    for chosen in (np.ones(len(labels), bool), probability > np.quantile(probability, 0.9)):
        p, y = probability[chosen], labels[chosen]
        assert abs(y.sum() - p.sum()) < 4 * np.sqrt((p * (1 - p)).sum())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_best_is_like_what_is_reached_on_real_clicks(tmp_path: Path, seed: int) -> None:
    best = generate.generate(tmp_path / "clicks", 20_000, seed=seed, held_out=1.0)
    assert 0.77 < best["auc"] < 0.83
    rows, labels = read_back(tmp_path / "clicks")
    assert 0.2 < labels.mean() < 0.3
    assert (rows.numbers[:, 1] < 0).any()
    share = np.isnan(rows.numbers).mean(axis=0)
    assert share == pytest.approx(np.array(generate.MISSING_NUMBERS), abs=0.02)


def test_both_layouts_read_equal(tmp_path: Path) -> None:
    best = generate.generate(tmp_path / "a.tsv", 1500, seed=5)
    assert generate.generate(tmp_path / "b.csv", 1500, seed=5, layout="csv") == best
    tab, comma = (Clicks([tmp_path / name]).__getitems__(range(1500)) for name in ("a.tsv", "b.csv"))
    assert all((left == right).all() for left, right in zip(tab, comma, strict=True))
    header, first = (tmp_path / "b.csv").read_text().splitlines()[:2]
    assert header.split(",") == clicks.COLUMNS
    assert any(field.endswith(".0") for field in first.split(","))


def test_no_two_categories_of_a_field_are_written_alike() -> None:
    for written in generate.names():
        assert len(set(written)) == len(written)
