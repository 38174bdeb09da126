"""Train a model of clicks on advertisements: DCN-v2 on data in Criteo's layout, of any size.

    python generate.py clicks.tsv --rows 1000000
    python train.py --data clicks.tsv

The model is the deep and cross network of Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons
for Web-scale Learning to Rank Systems" (WWW 2021). It is chosen over DeepFM (Guo et al., 2017), whose crosses are
of pairs only: each cross layer raises the degree by one, weighs all features at once, and is one matrix product.

A resumed run ends with the same weights, bit for bit on CPU. Several processes share batches and evaluation.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist
from clicks import Batch, Clicks
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, Subset, default_convert

from gpucost.training import checkpointed, device, prepare, replicated, steps_per_epoch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="+", required=True, help="files or folders: TSV, or CSV with a header")
    parser.add_argument("--held-out", default="0.1", help="the last part of the rows, or a file of its own")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=0.004, help="highest learning rate of the schedule")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="of embeddings; keeps rare ones small")
    parser.add_argument("--buckets", type=int, default=10_000, help="embeddings per category field")
    parser.add_argument("--width", type=int, default=8, help="numbers per embedding")
    parser.add_argument("--workers", type=int, default=1, help="processes that read data, per training process")
    return parser.parse_args()


class CrossNetwork(nn.Module):
    """DCN-v2: crosses and a deep part side by side, over numbers and embedded fields.

    Args:
        embeddings: rows of the table that all fields share.
        width: numbers per embedding.
        crosses: cross layers.
        hidden: sizes of the deep part's layers.
    """

    def __init__(self, embeddings: int, width: int, crosses: int = 2, hidden: tuple[int, ...] = (128, 64)) -> None:
        super().__init__()
        size = 13 + 39 * width
        self.embedding = nn.Embedding(embeddings, width)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.crosses = nn.ModuleList(nn.Linear(size, size) for _ in range(crosses))
        layers = [(nn.Linear(before, after), nn.ReLU()) for before, after in zip((size, *hidden), hidden, strict=False)]
        self.deep = nn.Sequential(*(module for layer in layers for module in layer))
        self.head = nn.Linear(size + hidden[-1], 1)

    def forward(self, numbers: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        """Logits (n) of a click, for numbers (n, 13) and rows of the table (n, 39)."""
        x0 = torch.cat([numbers, self.embedding(fields).flatten(1)], dim=1)
        x = x0
        for cross in self.crosses:
            x = x0 * cross(x) + x
        return self.head(torch.cat([x, self.deep(x0)], dim=1)).squeeze(1)


def split(data: Clicks, held_out: str) -> tuple[Dataset[Batch], Dataset[Batch]]:
    """What is trained on, and what is held out: the last part of the rows, or another file."""
    try:
        kept = len(data) - round(len(data) * float(held_out))
    except ValueError:
        return data, Clicks([held_out], buckets=data.buckets)
    return Subset(data, range(kept)), Subset(data, range(kept, len(data)))


@torch.no_grad()
def evaluate(network: nn.Module, held_out: Dataset[Batch], workers: int) -> dict[str, float]:
    """AUC and log loss. Each process scores its share; all get the same numbers."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = Subset(held_out, range(rank, len(held_out), processes))
    network.eval()
    scores, labels = [], []
    for numbers, fields, clicked in DataLoader(share, 8192, num_workers=workers, collate_fn=default_convert):
        scores.append(network(numbers.to(device()), fields.to(device())).float().sigmoid().cpu().numpy())
        labels.append(clicked.numpy())
    network.train()
    shares = [(np.concatenate(scores), np.concatenate(labels))]
    if processes > 1:
        shares *= processes
        dist.all_gather_object(shares, shares[rank])
    score, label = (np.concatenate(parts) for parts in zip(*shares, strict=True))
    return {"auc": float(roc_auc_score(label, score)), "log_loss": float(log_loss(label, score))}


def main() -> None:
    args = parse_arguments()
    prepare()
    data = Clicks(args.data, buckets=args.buckets)
    train, held_out = split(data, args.held_out)
    network = CrossNetwork(data.embeddings, args.width).to(device())
    model = replicated(network)
    # Without decay, embeddings of rare values are learned by heart in the second epoch, and the AUC falls.
    others = [one for name, one in network.named_parameters() if name != "embedding.weight"]
    decayed = {"params": network.embedding.parameters(), "weight_decay": args.weight_decay}
    optimizer = torch.optim.Adam([decayed, {"params": others}], fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=args.lr,
        epochs=args.epochs,
        steps_per_epoch=steps_per_epoch(len(train), args.batch_size),
    )
    with checkpointed(model, optimizer, scheduler=scheduler, epochs=args.epochs) as run:
        for _epoch in run.epochs():
            batches = run.batches(train, args.batch_size, num_workers=args.workers, collate_fn=default_convert)
            for numbers, fields, clicked in batches:
                logits = model(numbers.to(device()), fields.to(device()))
                loss = F.binary_cross_entropy_with_logits(logits, clicked.to(device()))
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.step(loss=loss)
            run.extra["results"] = evaluate(network, held_out, args.workers)
            run.log(**run.extra["results"])
        run.finish(run.extra["results"])


if __name__ == "__main__":
    main()
