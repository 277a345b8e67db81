"""A test that may be looked at after every observation: betting against "the mean is at most m".

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B 86, 2024). A gambler who
bets a predictable fraction on every observation cannot grow the stake when the hypothesis holds, so by Ville's
inequality the stake ever reaches 1/error with a probability of at most ``error``, however often one looks.
"""

from __future__ import annotations

import math


class Bet:
    """The stake of one gambler.

    limit: the mean under test, above 0 and below 1. above: True bets that the mean is above it, False that it is
    below. Observations lie in 0..1 and need not be independent: only their conditional mean counts.
    """

    #: share of the stake that one observation can lose at most
    CAUTION = 0.5

    def __init__(self, limit: float, *, above: bool) -> None:
        if not 0.0 < limit < 1.0:
            raise ValueError("limit must lie between 0 and 1")
        self.limit, self.above = limit, above
        self.log_stake = self.log_most = 0.0
        self.count = 0
        self._sum = 0.0
        # The variance starts at limit squared: any start is valid, this one bets soon when values are of its size.
        self._squares = limit * limit

    def add(self, value: float) -> None:
        """One observation. Raises ValueError outside of 0..1."""
        if not 0.0 <= value <= 1.0:
            raise ValueError("an observation lies outside of 0..1")
        sign = 1.0 if self.above else -1.0
        worst = self.limit if self.above else 1.0 - self.limit
        mean = (self.limit + self._sum) / (1 + self.count)
        gain = sign * (mean - self.limit)
        variance = self._squares / (1 + self.count)
        fraction = min(max(0.0, gain / (variance + gain * gain)), self.CAUTION / worst)
        self.log_stake += math.log1p(fraction * sign * (value - self.limit))
        self.log_most = max(self.log_most, self.log_stake)
        self.count += 1
        self._sum += value
        mean = (self.limit + self._sum) / (1 + self.count)
        self._squares += (value - mean) ** 2

    def decided(self, error: float) -> bool:
        """Whether the stake ever reached 1 / ``error``."""
        return self.log_most >= -math.log(error)
