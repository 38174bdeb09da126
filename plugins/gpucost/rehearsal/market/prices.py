"""Spot prices that a seeded generator makes: the same file and the same origin always give the same prices."""

from __future__ import annotations

import math
import random
from datetime import datetime, timedelta
from decimal import Decimal

from gpucost.clock import floor_second
from gpucost.rehearsal.market.file import Moves
from gpucost.rehearsal.market.series import PricePoint, SeasonalPrices

PRICE_STEP = Decimal("0.0001")
"""Spot prices have four significant decimals, as DescribeSpotPriceHistory shows them."""

MIN_CHANGE_S = 300.0
"""Two changes of one pool lie at least this far apart, in rehearsal seconds."""

SEASON = timedelta(days=30)
"""Prices are made in pieces of this length, so that no price costs a walk through all the time before it."""


class GeneratedPrices(SeasonalPrices):
    """The spot price of one pool over time.

    The logarithm of price / base makes a random step at each change and is pulled back towards zero, so that
    prices wander around the base; times between changes are exponential. Each season has its own generator and
    begins anew from where prices are in the long run.

    Args:
        base: the price to wander around, US dollars per instance-hour.
        ceiling: never above this: the on-demand list price.
        moves: how often and how far it moves.
        start: the first change point; earlier times have no price.
        seed: makes the series repeatable.
    """

    def __init__(self, *, base: Decimal, ceiling: Decimal, moves: Moves, start: datetime, seed: str) -> None:
        super().__init__(start, SEASON)
        self._base = base
        self._ceiling = ceiling
        self._moves = moves
        self._seed = seed

    def _made(self, index: int) -> list[PricePoint]:
        moment = self.start + index * SEASON
        # no change so late that the first of the next season would come too soon after it
        end = moment + SEASON - timedelta(seconds=MIN_CHANGE_S)
        chance = random.Random(f"{self._seed}/{index}" if index else self._seed)  # noqa: S311 (prices, not secrets)
        mean_s = self._moves.mean_hours_between_changes * 3600
        keep = 1.0 - self._moves.reversion
        # later seasons begin as far from the base as prices are in the long run: the deviation of this process
        level = chance.gauss(0.0, self._moves.relative_step / math.sqrt(1.0 - keep**2)) if index else 0.0
        points = [PricePoint(moment, self._price(level))]
        while True:
            gap = max(MIN_CHANGE_S, chance.expovariate(1.0) * mean_s)
            moment = floor_second(moment + timedelta(seconds=gap))
            if moment > end:
                return points
            level = keep * level + chance.gauss(0.0, self._moves.relative_step)
            price = self._price(level)
            if price != points[-1].price:
                points.append(PricePoint(moment, price))

    def _price(self, level: float) -> Decimal:
        price = (self._base * Decimal(math.exp(level))).quantize(PRICE_STEP)
        return min(max(price, PRICE_STEP), self._ceiling)
