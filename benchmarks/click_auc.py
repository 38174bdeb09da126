"""How near does the program on clicks come to the best AUC that is possible? Prints a Markdown table.

    PYTHONPATH=plugins python benchmarks/click_auc.py --rows 1000000

Makes clicks whose best AUC is known, trains `include/programs/ctr` on them as a user would (a process of its own, from
the file on disk, evaluation included), and beside it a peer on the same rows: scikit-learn's logistic regression by
stochastic gradient descent, over the same hashed fields, one epoch after another until its AUC falls. Seconds are those
of the whole process: imports, index, reading, training, evaluation. Other work on the machine shows in them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "include" / "programs" / "ctr"

PEER = """
import sys
import numpy as np
from clicks import Clicks
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, Subset, default_convert

path, workers = sys.argv[1], int(sys.argv[2])
data = Clicks([path])
kept = len(data) - round(len(data) * 0.1)

def loaded(rows):
    loader = DataLoader(Subset(data, rows), 20_000, num_workers=workers, collate_fn=default_convert)
    for numbers, fields, clicked in loader:
        n = len(fields)
        one_hot = (np.ones(n * 39, np.float32), fields.numpy().ravel(), np.arange(0, n * 39 + 1, 39))
        features = hstack([csr_matrix(one_hot, shape=(n, data.embeddings)), csr_matrix(numbers.numpy())]).tocsr()
        yield features, clicked.numpy()

model = SGDClassifier(loss="log_loss", alpha=1e-6, learning_rate="invscaling", eta0=0.05, power_t=0.25, average=True)
reached = 0.0
for epoch in range(10):
    for features, clicked in loaded(np.random.default_rng(epoch).permutation(kept)):
        model.partial_fit(features, clicked, classes=[0, 1])
    scored = [(model.decision_function(features), clicked) for features, clicked in loaded(range(kept, len(data)))]
    scores, labels = (np.concatenate(parts) for parts in zip(*scored))
    before, reached = reached, roc_auc_score(labels, scores)
    if reached < before + 0.0003:
        break
print(f"epoch {epoch + 1} auc {max(reached, before):.5f}")
"""


@dataclass(frozen=True)
class Reached:
    """What one of them came to.

    Args:
        auc: on the held-out rows.
        epochs: times that each row was seen.
        seconds: real, of the whole process.
    """

    auc: float
    epochs: int
    seconds: float


def main() -> None:
    """Make the data, run both, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="training processes")
    parser.add_argument("--workers", type=int, default=1, help="reading processes for each")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "clicks.tsv"
        _run(folder, str(PROGRAM / "generate.py"), str(file), "--rows", str(args.rows), "--seed", str(args.seed))
        best = json.loads((folder / "best.json").read_text())["auc"]
        arguments = ["--data", str(file), "--epochs", str(args.epochs), "--workers", str(args.workers)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
        start = torchrun if args.processes > 1 else []
        ours = _measured(folder, *start, str(PROGRAM / "train.py"), *arguments, epochs=args.epochs)
        peer = _measured(folder, "-c", PEER, str(file), str(args.workers))
    rows = args.rows
    lines = ["| model | rows | best AUC | reached | difference | seconds | rows/s |", "|---|---|---|---|---|---|---|"]
    for title, one in (("DCN-v2 (train.py)", ours), ("logistic regression (scikit-learn)", peer)):
        speed = 0.9 * rows * one.epochs / one.seconds
        lines.append(
            f"| {title}, {one.epochs} epochs | {rows:,} | {best:.4f} | {one.auc:.4f} | {best - one.auc:.4f} "
            f"| {one.seconds:.0f} | {speed:,.0f} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def _measured(folder: Path, *command: str, epochs: int | None = None) -> Reached:
    began = time.monotonic()
    said = _run(folder, *command)
    seconds = time.monotonic() - began
    (*_, auc) = re.findall(r"auc ([0-9.]+)", said)
    return Reached(float(auc), epochs or int(re.findall(r"epoch (\d+)", said)[-1]), seconds)


def _run(folder: Path, *command: str) -> str:
    path = os.pathsep.join([str(ROOT / "plugins"), str(PROGRAM)])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[:2]} failed:\n{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
