"""Train a small convolutional network on scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels).

Runs anywhere (`python train.py`), and under gpucost goes on after every interruption as if there had been
none. Copy it: what gpucost needs is `prepare`, `checkpointed`, and the four calls of `run`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gpucost.training import checkpointed, prepare

HELD_OUT = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003, help="highest learning rate of the schedule")
    parser.add_argument(
        "--step-delay-ms", type=float, default=0.0, help="sleep per step: a stand-in for a heavier model"
    )
    return parser.parse_args()


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 1, 8, 8) with values from 0 to 1, and labels (n), in an order that is always the same."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.tensor(digits.images[order], dtype=torch.float32, device=device).unsqueeze(1) / 16
    return images, torch.tensor(digits.target[order], device=device)


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


def shifted(images: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Each image (n, 1, 8, 8) moved by its (rows, columns), -1 to 1 pixel; blank comes in from outside."""
    padded = F.pad(images, (1, 1, 1, 1))
    rows, columns = (shifts.T[:, :, None] + torch.arange(1, 9, device=images.device)).unbind()
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[sample, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(right)


def main() -> None:
    args = parse_arguments()
    prepare()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = load(device)
    train_images, train_labels = images[HELD_OUT:], labels[HELD_OUT:]
    steps_per_epoch = -(-len(train_images) // args.batch_size)

    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=steps_per_epoch
    )
    with checkpointed(model, optimizer, scheduler=scheduler, epochs=args.epochs) as run:
        for _epoch in run.epochs():
            shifts = torch.from_numpy(run.rng("shifts").integers(-1, 2, size=(len(train_images), 2))).to(device)
            for batch in run.batches(len(train_images), args.batch_size):
                loss = F.cross_entropy(model(shifted(train_images[batch], shifts[batch])), train_labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                time.sleep(args.step_delay_ms / 1000)
                run.step(loss=loss)
            run.log(accuracy=accuracy(model, images[:HELD_OUT], labels[:HELD_OUT]))
        run.finish({"accuracy": accuracy(model, images[:HELD_OUT], labels[:HELD_OUT])})


if __name__ == "__main__":
    main()
