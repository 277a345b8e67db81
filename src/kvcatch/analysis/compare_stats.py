"""Differences between two runs with their uncertainty: a block bootstrap and a verdict.

Requests that follow each other share a queue, so they are not independent: blocks of neighbours are drawn, not single
requests (Künsch, "The jackknife and the bootstrap for general stationary observations", Annals of Statistics 1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: error probability of all intervals of one comparison together
FAMILY_ERROR = 0.01
_MOST_BLOCKS, _LEAST_BLOCKS, _BLOCK = 16, 4, 8
#: observations beyond a quantile below which its spread cannot be judged
_TAIL = 10
_ROUNDS = 400
_QUANTILE_ROUNDS = 200


@dataclass(frozen=True, eq=False)
class Draws:
    """What was observed, in order. The statistic is sum(top) / sum(bottom), or a quantile of ``top``."""

    top: Floats
    bottom: Floats | None = None
    quantile: float | None = None

    @property
    def value(self) -> float | None:
        """The statistic, None when nothing was observed."""
        if not len(self.top):
            return None
        if self.quantile is not None:
            return float(np.quantile(self.top, self.quantile))
        under = float(len(self.top)) if self.bottom is None else float(self.bottom.sum())
        return float(self.top.sum()) / under if under else None


@dataclass(frozen=True)
class Known:
    """A value from a summary. error: its standard error, 0 where it is exact, None where nobody knows."""

    value: float | None
    error: float | None = None


Estimate = Draws | Known


@dataclass(frozen=True)
class Difference:
    """b - a. error: standard error, None when unknown; freedom: degrees of freedom of that error."""

    a: float
    b: float
    error: float | None
    freedom: int

    @property
    def value(self) -> float:
        """b - a."""
        return self.b - self.a

    def interval(self, error_probability: float) -> tuple[float, float] | None:
        """Two-sided interval; None when the error is unknown."""
        if self.error is None:
            return None
        half = self.error * t_quantile(1 - error_probability / 2, self.freedom)
        return self.value - half, self.value + half


@dataclass(frozen=True)
class Noise:
    """What changes between runs of one configuration. range: the largest difference that was seen between two of them.

    bound: the difference that two more runs exceed in 5 % of all cases: t(n - 1) * s * sqrt(2), with the standard
    deviation s of n runs; infinite for two runs, which may agree by accident.
    """

    range: float
    bound: float

    def floor(self, assumed: float) -> float:
        """The smallest difference that counts: wider than assumed when seen, sharper only when enough runs say so."""
        return max(self.range, min(assumed, self.bound))

    def or_wider(self, other: Noise | None) -> Noise:
        """The larger of both in each number."""
        return self if other is None else Noise(max(self.range, other.range), max(self.bound, other.bound))


def noise_of(differences: Sequence[float], runs: int) -> Noise:
    """Noise from the differences of every two of ``runs`` runs (at least two)."""
    if runs == 2:
        return Noise(max(map(abs, differences)), math.inf)
    # The variance of n values is the sum of the squared differences of their pairs over n (n - 1).
    deviation = math.sqrt(sum(value * value for value in differences) / (runs * (runs - 1)))
    return Noise(max(map(abs, differences)), t_quantile(0.975, runs - 1) * deviation * math.sqrt(2))


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 2 degrees, above by Fisher's expansion (Abramowitz and Stegun 26.7.5)."""
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    v = float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / v + second / v**2 + third / v**3 + fourth / v**4


def difference(a: Estimate, b: Estimate, *, paired: bool = False, seed: int = 0) -> Difference | None:
    """b - a with its standard error; None when a side has no value.

    Args:
        a: the first run.
        b: the second run.
        paired: row i of both is the same request, so both are drawn together.
        seed: of the random numbers; the same input gives the same answer.
    """
    if a.value is None or b.value is None:
        return None
    rng = np.random.default_rng(seed)
    if paired and isinstance(a, Draws) and isinstance(b, Draws) and len(a.top) == len(b.top):
        blocks = _blocks(a)
        if blocks is None:
            return Difference(a.value, b.value, None, 0)
        picks = _picks(rng, blocks, a.quantile)
        error = float(np.std(_replicates(b, blocks, picks) - _replicates(a, blocks, picks), ddof=1))
        return Difference(a.value, b.value, error * _unbias(blocks), blocks - 1)
    errors = [_error(side, rng) for side in (a, b)]
    if any(error is None for error, _ in errors):
        return Difference(a.value, b.value, None, 0)
    return Difference(
        a.value, b.value, math.hypot(*(error or 0.0 for error, _ in errors)), min(free for _, free in errors)
    )


def _error(side: Estimate, rng: np.random.Generator) -> tuple[float | None, int]:
    if isinstance(side, Known):
        return side.error, 1000
    blocks = _blocks(side)
    if blocks is None:
        return None, 0
    drawn = _replicates(side, blocks, _picks(rng, blocks, side.quantile))
    return float(np.std(drawn, ddof=1)) * _unbias(blocks), blocks - 1


def _blocks(side: Draws) -> int | None:
    """Into how many blocks of neighbours; None when there are too few observations for any."""
    count = len(side.top)
    if side.quantile is not None and count * (1 - side.quantile) < _TAIL:
        return None
    blocks = min(_MOST_BLOCKS, count // _BLOCK)
    return blocks if blocks >= _LEAST_BLOCKS else None


def _unbias(blocks: int) -> float:
    """The spread of n drawn blocks is that of n - 1 degrees of freedom."""
    return math.sqrt(blocks / (blocks - 1))


def _picks(rng: np.random.Generator, blocks: int, quantile: float | None) -> npt.NDArray[np.int64]:
    rounds = _ROUNDS if quantile is None else _QUANTILE_ROUNDS
    return rng.integers(0, blocks, (rounds, blocks))


def _replicates(side: Draws, blocks: int, picks: npt.NDArray[np.int64]) -> Floats:
    edges = np.linspace(0, len(side.top), blocks + 1).astype(np.int64)
    if side.quantile is not None:
        parts = [side.top[low:high] for low, high in pairwise(edges)]
        return np.array(
            [np.quantile(np.concatenate([parts[at] for at in pick]), side.quantile) for pick in picks]
        )
    top = np.add.reduceat(side.top, edges[:-1])
    under = (
        np.diff(edges).astype(np.float64) if side.bottom is None else np.add.reduceat(side.bottom, edges[:-1])
    )
    below = under[picks].sum(axis=1)
    result: Floats = np.divide(top[picks].sum(axis=1), below, out=np.zeros(len(picks)), where=below > 0)
    return result


def verdict(change: Difference, error_probability: float, floor: float, better: str) -> str:
    """better | worse | different | equal | inconclusive.

    equal: the whole interval is within the floor. better or worse (``different`` where neither direction is good): the
    interval leaves out zero and the difference is above the floor.

    Args:
        change: the difference.
        error_probability: of its interval.
        floor: the smallest difference that counts, absolute.
        better: up | down | "" for a metric without a good direction.
    """
    interval = change.interval(error_probability)
    if interval is None:
        return "inconclusive"
    low, high = interval
    if -floor <= low and high <= floor:
        return "equal"
    if (low > 0 or high < 0) and abs(change.value) > floor:
        if not better:
            return "different"
        return "better" if (change.value > 0) == (better == "up") else "worse"
    return "inconclusive"
