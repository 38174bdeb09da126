"""Where in an epoch is the run? So many samples of its order are done, however the batches are cut.

A recipe may cut batches differently on the next GPU, in other sizes or in more micro-steps. What counts is then which
samples the program has had, so that none is lost or comes twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from gpucost.training.program import sampler
from gpucost.training.program.sampler import Share
from gpucost.training.ranks import Ranks


@dataclass(frozen=True)
class Cut:
    """How an epoch is cut.

    Args:
        samples: in the epoch.
        batch: samples of a batch.
        accumulate: micro-steps of a batch.
        scaled: whether gradients between micro-steps are scaled, for fp16.
    """

    samples: int
    batch: int
    accumulate: int
    scaled: bool

    def shares(self, begin: int, ranks: Ranks, *, seed: int, epoch: int, shuffle: bool, drop_last: bool) -> list[Share]:
        """This process's shares of the epoch, but for the first `begin` samples of its order."""
        planned = sampler.batches(
            self.samples, self.batch, seed=seed, epoch=epoch, shuffle=shuffle, drop_last=drop_last, begin=begin
        )
        return sampler.shares(
            planned,
            accumulate=self.accumulate,
            rank=ranks.rank,
            world_size=ranks.size,
            whole=min(self.batch, self.samples),
        )


@dataclass
class Position:
    """How far the program is in an epoch.

    Args:
        begin: samples of the epoch's order that were done when it was last cut anew.
        given: shares that the program has been given since.
        cut: how it is cut; None: no batch has been asked for.
    """

    begin: int = 0
    given: int = 0
    cut: Cut | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Self:
        """What `saved` gave."""
        return cls(saved["begin"], saved["given"], None if saved["cut"] is None else Cut(**saved["cut"]))

    def saved(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def recut(self, cut: Cut, ranks: Ranks, **order: Any) -> bool:
        """Cut what is left of the epoch in this way; whether it was cut in another way before.

        A batch that is not complete begins again then.

        Args:
            cut: the new way.
            ranks: the processes.
            order: seed, epoch, shuffle, drop_last; see `Cut.shares`.
        """
        before, self.cut = self.cut, cut
        if before is None or before == cut:
            return False
        shares = before.shares(self.begin, ranks, **order)
        batches = sum(share.last for share in shares[: self.given])
        everything = self.given >= len(shares)
        self.begin = cut.samples if everything else min(self.begin + batches * before.batch, cut.samples)
        self.given = 0
        return True
