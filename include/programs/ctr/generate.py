"""Make clicks in Criteo's layout, of any size, of which the best possible AUC is known.

    python generate.py clicks.tsv --rows 1000000 --seed 1

Each row's features are drawn first; then its true probability of a click follows from what can be read in the row:
numbers, categories (few that are frequent, many that are rare: Zipf's law), pairs of categories, missing values.
The label is drawn from that probability, so no model can rank rows better than the probability itself does. Its AUC
and log loss over the rows that are held out are printed and written to `best.json` beside the data.

The same seed makes the same bytes (with the same version of numpy). Memory does not grow with the rows, but for nine
bytes for each one that is held out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from clicks import COLUMNS
from sklearn.metrics import log_loss, roc_auc_score

CHUNK = 50_000
SPREAD, LEVEL = 1.35, -1.5
"""Standard deviation and mean of the true logits: an AUC of about 0.8 where a quarter of the rows are clicks."""

SIZES = [1500, 500, 20_000, 20_000, 300, 20, 10_000, 600, 3, 20_000, 5000, 20_000, 3000]
SIZES += [26, 10_000, 20_000, 10, 4000, 2000, 4, 20_000, 15, 15, 20_000, 80, 10_000]
"""Categories of each field; about Criteo's, where the largest are cut."""
MISSING_NUMBERS = [0.45, 0, 0.17, 0.17, 0.03, 0.25, 0.05, 0, 0.05, 0.45, 0.05, 0.79, 0.17]
MISSING_CATEGORIES = {3: 0.05, 4: 0.05, 6: 0.16, 12: 0.05, 16: 0.05, 19: 0.41, 20: 0.41, 21: 0.05, 22: 0.8}
MISSING_CATEGORIES |= {24: 0.05, 25: 0.41, 26: 0.41}
"""Share of rows where a field is missing; for categories by the field's number."""
PAIRS = [(6, 9), (14, 17), (22, 23), (9, 20), (6, 17), (20, 23)]
"""Category fields, by number, whose values act together."""


@dataclass
class Rows:
    """Features of n rows.

    Args:
        numbers: float64 (n, 13), whole; NaN where missing.
        categories: int64 (n, 26), from 1 for the most frequent one; 0 where missing.
    """

    numbers: np.ndarray
    categories: np.ndarray


class Truth:
    """How features are distributed, and how they make a click likely; all drawn from the seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self.centres, self.spreads = rng.uniform(0.5, 6, 13), rng.uniform(0.5, 1.5, 13)
        self.centres[1] = 1.0
        self.slopes, self.waves, self.if_missing = rng.normal(0, [[0.35], [0.2], [0.2]], (3, 13))
        self.frequencies = [np.cumsum(np.arange(1, size + 1) ** -1.3) for size in SIZES]
        # Where most categories are rare their effects are small: nobody could learn them from a million rows.
        self.effects = [
            rng.normal(0, 0.3 if size <= 100 else 0.15 if size <= 1000 else 0.06, size + 1) for size in SIZES
        ]
        self.factors = [[rng.normal(0, 0.45, (SIZES[field - 1] + 1, 2)) for field in pair] for pair in PAIRS]
        self.mean, self.scale = 0.0, 1.0
        logits = self.logits(self.features(100_000, rng))
        self.mean, self.scale = logits.mean() - LEVEL * logits.std() / SPREAD, logits.std() / SPREAD

    def features(self, rows: int, rng: np.random.Generator) -> Rows:
        """Draw the features of so many rows."""
        numbers = np.floor(np.exp(self.centres + self.spreads * rng.standard_normal((rows, 13))))
        numbers[:, 1] -= 2  # I2 is negative now and then, as in Criteo's data
        numbers[rng.random((rows, 13)) < MISSING_NUMBERS] = np.nan
        draws = rng.random((rows, 26))
        categories = np.stack(
            [1 + np.searchsorted(sums, draw * sums[-1]) for sums, draw in zip(self.frequencies, draws.T, strict=True)],
            axis=1,
        )
        for field, share in MISSING_CATEGORIES.items():
            categories[rng.random(rows) < share, field - 1] = 0
        return Rows(numbers, categories)

    def logits(self, rows: Rows) -> np.ndarray:
        """The true log odds (n) of a click."""
        u = (np.sign(rows.numbers) * np.log1p(np.abs(rows.numbers)) - self.centres) / self.spreads
        by_number = self.slopes * u + self.waves * np.sin(2 * u)
        total = np.where(np.isnan(u), self.if_missing, by_number).sum(axis=1)
        for effect, category in zip(self.effects, rows.categories.T, strict=True):
            total += effect[category]
        for pair, (left, right) in zip(PAIRS, self.factors, strict=True):
            a, b = (rows.categories[:, field - 1] for field in pair)
            total += (left[a] * right[b]).sum(axis=1)
        return (total - self.mean) / self.scale


def names() -> list[list[str]]:
    """What is written for each category of each field: nothing for a missing one, else 8 hexadecimal digits."""
    # An odd factor makes no two of a field equal.
    return [
        ["", *(f"{(category * 2654435761 + 97 * field) % 2**32:08x}" for category in range(1, size + 1))]
        for field, size in enumerate(SIZES, start=1)
    ]


def lines(rows: Rows, labels: np.ndarray, written: list[list[str]], separator: str) -> str:
    """The rows as text."""
    # In a CSV made by pandas, a column with missing values has decimals, and one without has none.
    decimals = [".0" if separator == "," and share else "" for share in MISSING_NUMBERS]
    columns = [map(str, labels.tolist())]
    for values, end in zip(rows.numbers.T.tolist(), decimals, strict=True):
        columns.append("" if value != value else f"{value:.0f}{end}" for value in values)
    for categories, text in zip(rows.categories.T.tolist(), written, strict=True):
        columns.append(map(text.__getitem__, categories))
    return "".join(separator.join(row) + "\n" for row in zip(*columns, strict=True))


def generate(path: Path, rows: int, *, seed: int, held_out: float = 0.1, layout: str = "tsv") -> dict[str, float]:
    """Write the file, and tell the AUC and log loss that are the best possible on its last rows."""
    truth, written = Truth(seed), names()
    separator = "," if layout == "csv" else "\t"
    first_held_out = rows - round(rows * held_out)
    probabilities, clicks = [], []
    with path.open("w", newline="") as file:
        if layout == "csv":
            file.write(",".join(COLUMNS) + "\n")
        for begin in range(0, rows, CHUNK):
            rng = np.random.default_rng([seed, 1, begin])
            features = truth.features(min(CHUNK, rows - begin), rng)
            probability = 1 / (1 + np.exp(-truth.logits(features)))
            labels = (rng.random(len(probability)) < probability).astype(np.int8)
            file.write(lines(features, labels, written, separator))
            kept = slice(max(0, first_held_out - begin), None)
            probabilities.append(probability[kept].copy())
            clicks.append(labels[kept].copy())
    probability, click = np.concatenate(probabilities), np.concatenate(clicks)
    return {"auc": roc_auc_score(click, probability), "log_loss": log_loss(click, probability)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="the file to write; .csv: with a header, else tab-separated without")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", type=float, default=0.1, help="the last part of the rows, as train.py has it")
    args = parser.parse_args()
    layout = "csv" if args.path.suffix == ".csv" else "tsv"
    best = generate(args.path, args.rows, seed=args.seed, held_out=args.held_out, layout=layout)
    best = {"rows": args.rows, "seed": args.seed, "held_out": args.held_out, **best}
    args.path.with_name("best.json").write_text(json.dumps(best, indent=2) + "\n")
    print(json.dumps(best))


if __name__ == "__main__":
    main()
