"""Train a small convolutional network on scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels).

Runs anywhere (`python train.py`, gpucost being on PYTHONPATH), and under gpucost goes on after every interruption
as if there had been none. Copy it: what gpucost needs is `prepare`, `replicated`, `checkpointed`, and the calls of
`run`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset, default_convert

from gpucost.training import checkpointed, device, generator, prepare, replicated, steps_per_epoch

HELD_OUT = 360

Batch = tuple[torch.Tensor, torch.Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003, help="highest learning rate of the schedule")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, per training process")
    parser.add_argument(
        "--step-delay-ms", type=float, default=0.0, help="sleep per step: a stand-in for a heavier model"
    )
    return parser.parse_args()


def load() -> Batch:
    """Images (n, 1, 8, 8) with values from 0 to 1, and labels (n), in an order that is always the same."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.tensor(digits.images[order], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target[order])


class Shifted(Dataset[Batch]):
    """Images that are moved by -1 to 1 pixel in each direction, anew in each epoch; blank comes in from outside.

    How far is a function of (seed, epoch, index): the same in a resumed run, whichever worker process loads the image.

    Args:
        images: (n, 1, 8, 8).
        labels: (n).
        seed: of the shifts.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, seed: int) -> None:
        self.padded, self.labels, self.seed = F.pad(images, (1, 1, 1, 1)), labels, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the shifts, a row (rows, columns) per image; `run.batches` calls it."""
        # A generator for each image (index=...) suits what cannot be drawn at once; this is a hundred times quicker.
        random = generator(self.seed, epoch, stream="shifts")
        self.shifts = torch.from_numpy(random.integers(0, 3, size=(len(self), 2)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch, which is quicker than one by one; the loader's collate_fn must then leave it as it is."""
        chosen = torch.as_tensor(indices)
        rows, columns = (self.shifts[chosen].T[:, :, None] + torch.arange(8)).unbind()
        images = self.padded[chosen[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
        return images.unsqueeze(1), self.labels[chosen]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Called by all processes: batch normalization then has the same statistics, and the result is the same."""
    model.eval()
    right = (model(images.to(device())).argmax(dim=1) == labels.to(device())).float().mean()
    model.train()
    return float(right)


def main() -> None:
    args = parse_arguments()
    prepare()
    images, labels = load()
    held_out = images[:HELD_OUT], labels[:HELD_OUT]
    train = Shifted(images[HELD_OUT:], labels[HELD_OUT:], seed=torch.initial_seed())  # the job's: prepare() has set it

    model = replicated(network().to(device()))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=args.lr,
        epochs=args.epochs,
        steps_per_epoch=steps_per_epoch(len(train), args.batch_size),
    )
    with checkpointed(model, optimizer, scheduler=scheduler, epochs=args.epochs) as run:
        for _epoch in run.epochs():
            batches = run.batches(train, args.batch_size, num_workers=args.workers, collate_fn=default_convert)
            for inputs, targets in batches:
                loss = F.cross_entropy(model(inputs.to(device())), targets.to(device()))
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                time.sleep(args.step_delay_ms / 1000)
                run.step(loss=loss)
            run.log(accuracy=accuracy(model, *held_out))
        run.finish({"accuracy": accuracy(model, *held_out)})


if __name__ == "__main__":
    main()
