"""The statistics of ``quality``: pure functions of numbers, each checked by hand in the tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: rounds of every bootstrap and permutation
ROUNDS = 2000


class Interval(NamedTuple):
    """A mean with its interval. ``units`` = independent pieces that were drawn from."""

    value: float
    low: float
    high: float
    units: int


def lower_kl(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """KL divergence of q from p in nats, from the few log-probabilities that a server returns.

    Tokens that both sides know are one bin each, everything else is one more. Merging bins can only lower a
    divergence, so this is a lower bound of the whole one; it is 0 when both sides are the same.

    Args:
        p: token -> log-probability under the reference.
        q: the same under the candidate.
    """
    shared = p.keys() & q.keys()
    total, rest_p, rest_q = 0.0, 1.0, 1.0
    for token in sorted(shared):
        a, b = p[token], q[token]
        mass = math.exp(a)
        if mass > 0.0:
            total += mass * (a - b)
        rest_p -= mass
        rest_q -= math.exp(b)
    # What is left of 1 after rounding is no evidence of anything.
    if rest_p > 1e-9:
        total += rest_p * math.log(rest_p / max(rest_q, 1e-9))
    return max(0.0, total)


def bootstrap(groups: Sequence[Sequence[float]], *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Mean over all values, with a percentile interval that draws whole groups (documents) again and again.

    Neighbouring positions of a document share their context, so they are not independent; documents are. A single
    document is cut into blocks of 32 positions instead.
    """
    parts = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not parts:
        raise ValueError("no values")
    if len(parts) == 1:
        whole = parts[0]
        parts = [whole[at : at + 32] for at in range(0, len(whole), 32)]
    sums = np.array([part.sum() for part in parts])
    sizes = np.array([float(len(part)) for part in parts])
    value = float(sums.sum() / sizes.sum())
    if len(parts) == 1 or np.ptp(sums / sizes) == 0.0:
        return Interval(value, value, value, len(parts))
    picks = np.random.default_rng(seed).integers(0, len(parts), (ROUNDS, len(parts)))
    means = sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, min(value, float(low)), max(value, float(high)), len(parts))


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """P(at least ``successes`` of ``trials``) when each succeeds with ``chance``."""
    if successes <= 0:
        return 1.0
    return min(
        1.0,
        sum(
            math.comb(trials, k) * chance**k * (1.0 - chance) ** (trials - k)
            for k in range(successes, trials + 1)
        ),
    )


def clopper_pearson(successes: int, trials: int, error: float) -> tuple[float, float]:
    """The exact interval of a probability; each side is wrong with at most ``error`` / 2."""
    if trials == 0:
        return 0.0, 1.0

    def solve(goal: float, tail: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if binomial_tail(tail, trials, middle) < goal:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    low = 0.0 if successes == 0 else solve(error / 2, successes)
    high = 1.0 if successes == trials else solve(1 - error / 2, successes + 1)
    return low, high


def mcnemar(lost: int, won: int) -> float:
    """Two-sided exact p that answers change in both directions alike.

    Args:
        lost: questions that only the baseline answers.
        won: questions that only the candidate answers.
    """
    changed = lost + won
    return min(1.0, 2.0 * binomial_tail(max(lost, won), changed, 0.5)) if changed else 1.0


def net_loss(lost: int, won: int, trials: int, error: float = 0.05) -> tuple[float, float]:
    """Interval of (lost - won) / trials from two exact ones; conservative, and never empty for 0 changes."""
    lost_low, lost_high = clopper_pearson(lost, trials, error)
    won_low, won_high = clopper_pearson(won, trials, error)
    return lost_low - won_high, lost_high - won_low


def ranks(values: Sequence[float]) -> Floats:
    """Ranks from 1, ties share their mean rank."""
    array = np.asarray(values, dtype=np.float64)
    order = np.argsort(array, kind="stable")
    result = np.empty(len(array))
    result[order] = np.arange(1.0, len(array) + 1)
    for value in np.unique(array):
        same = array == value
        result[same] = result[same].mean()
    return result


def trend(length: Sequence[float], loss: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Spearman's rank correlation of loss with length, and the one-sided p (by permutation) that it does not grow.

    A constant side has no trend: (0, 1).
    """
    x, y = ranks(length) - (len(length) + 1) / 2, ranks(loss) - (len(loss) + 1) / 2
    scale = math.sqrt(float((x**2).sum() * (y**2).sum()))
    if scale == 0.0:
        return 0.0, 1.0
    observed = float((x * y).sum())
    rng = np.random.default_rng(seed)
    above = sum(float((x * rng.permutation(y)).sum()) >= observed - 1e-9 for _ in range(ROUNDS))
    return observed / scale, (above + 1) / (ROUNDS + 1)


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings; ties count for neither, 0 when a side is constant."""
    signs_a = np.sign(np.subtract.outer(np.asarray(a, float), np.asarray(a, float)))
    signs_b = np.sign(np.subtract.outer(np.asarray(b, float), np.asarray(b, float)))
    scale = math.sqrt(float((signs_a**2).sum() * (signs_b**2).sum()))
    return float((signs_a * signs_b).sum()) / scale if scale else 0.0


def questions_needed(baseline_ratio: float, loss: float, error: float = 0.01, power: float = 0.8) -> int:
    """Questions after which a loss of that size would be found with ``power`` (exact McNemar, losses only).

    Args:
        baseline_ratio: share that the baseline answers.
        loss: share of the questions that the candidate loses, above 0.
        error: p below which a difference counts.
        power: probability of finding it.
    """
    share = min(loss, baseline_ratio)
    # With no wins the exact p is 2 * 0.5 ** lost.
    losses = math.ceil(1 - math.log2(error))
    for trials in range(losses, 100_000):
        if binomial_tail(losses, trials, share) >= power:
            return trials
    return 100_000
