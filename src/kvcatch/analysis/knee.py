"""Where latency bends: regression of log slowdown on demand with no breakpoint or one.

The breakpoint is a property of two slopes, so it does not move with the end of the sweep, as the knee of a normalised
curve does (Satopää et al., "Finding a 'Kneedle' in a haystack", ICDCSW 2011, is kept as a second opinion).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: candidates for the breakpoint
_GRID = 240
#: share of the observations, and their number, that must lie on each side of a breakpoint
_LEAST_SHARE, _LEAST = 0.04, 12
_DRAWS = 200
#: observations that are drawn together: neighbours share a queue
_BLOCK = 16
#: how far below the line with one breakpoint the line without must be, in BIC, to be believed
_MARGIN = 6.0
#: p95 slowdown that counts as bent, and the observations over which it is taken
SLOW = 2.0
_WINDOW = 40


@dataclass(frozen=True)
class Line:
    """y = level + slope * x + bend * max(0, x - at). at None: no breakpoint, bend 0."""

    at: float | None
    level: float
    slope: float
    bend: float
    error: float  # residual sum of squares


@dataclass(frozen=True)
class Knee:
    """The breakpoint with a 95 % interval, or None where the data show none.

    bic_gain: how much better one breakpoint explains the data than none; positive is better. draws: share of the
    bootstrap draws that showed a breakpoint.
    """

    value: float | None
    low: float | None
    high: float | None
    bic_gain: float
    draws: float
    line: Line


def find_knee(x: Floats, y: Floats, *, order: npt.NDArray[np.int64] | None = None, seed: int = 0) -> Knee:
    """The breakpoint of y over x.

    Args:
        x: demand.
        y: log slowdown.
        order: place of each observation in time, for the bootstrap; by default as given.
        seed: of the bootstrap.

    Returns:
        Value None when fewer than 3 * 12 observations are given or one line explains them as well.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = np.asarray(x[known], np.float64), np.asarray(y[known], np.float64)
    time = np.arange(len(x)) if order is None else np.argsort(np.argsort(order[known], kind="stable"))
    if len(x) < 3 * _LEAST or np.ptp(x) <= 0:
        return Knee(None, None, None, 0.0, 0.0, Line(None, float(y.mean()) if len(y) else 0.0, 0.0, 0.0, 0.0))
    by = np.argsort(x, kind="stable")
    x, y, time = x[by], y[by], time[by]
    grid = np.linspace(x[0], x[-1], _GRID + 2)[1:-1]
    weights = np.ones(len(x))
    plain, bent = _fit(x, y, weights, grid)
    gain = _bic(plain, len(x), 2) - _bic(bent, len(x), 4)
    if bent.at is None or gain < _MARGIN or bent.bend <= 0:
        return Knee(None, None, None, gain, 0.0, plain)
    rng = np.random.default_rng(seed)
    blocks = time * max(1, len(x) // _BLOCK) // len(x)
    count = int(blocks.max()) + 1
    found = []
    for _ in range(_DRAWS):
        drawn = np.bincount(rng.integers(0, count, count), minlength=count)[blocks].astype(np.float64)
        _, other = _fit(x, y, drawn, grid)
        if other.at is not None and other.bend > 0:
            found.append(other.at)
    if len(found) < _DRAWS // 2:
        return Knee(None, None, None, gain, len(found) / _DRAWS, plain)
    low, high = np.percentile(found, (2.5, 97.5))
    return Knee(bent.at, min(float(low), bent.at), max(float(high), bent.at), gain, len(found) / _DRAWS, bent)


def _bic(line: Line, count: int, parameters: int) -> float:
    """Bayesian information criterion with Gaussian errors."""
    return count * float(np.log(max(line.error, 1e-12) / count)) + parameters * float(np.log(count))


def _fit(x: Floats, y: Floats, weights: Floats, grid: Floats) -> tuple[Line, Line]:
    """The best line without and with a breakpoint, by weighted least squares; x is sorted.

    Sums over the observations right of each candidate give all normal equations at once.
    """
    total = weights.sum()
    mean_x, mean_y = (weights * x).sum() / total, (weights * y).sum() / total
    u, v = x - mean_x, y - mean_y
    sxx, sxy, syy = ((weights * part).sum() for part in (u * u, u * v, v * v))
    slope = sxy / sxx if sxx > 0 else 0.0
    plain = Line(None, float(mean_y - slope * mean_x), float(slope), 0.0, max(0.0, float(syy - slope * sxy)))
    knots = grid - mean_x
    start = np.searchsorted(x, grid, side="right")

    def right(values: Floats) -> Floats:
        """Sum of what lies right of each candidate."""
        sums: Floats = np.concatenate(([0.0], np.cumsum(values[::-1])))[::-1][start]
        return sums

    w, wu, wuu = right(weights), right(weights * u), right(weights * u * u)
    wv, wuv = right(weights * v), right(weights * u * v)
    # h = max(0, u - knot), its mean taken out.
    h = wu - knots * w
    hh = wuu - 2 * knots * wu + knots * knots * w - h * h / total
    hu, hv = wuu - knots * wu, wuv - knots * wv
    determinant = sxx * hh - hu * hu
    enough = max(_LEAST, _LEAST_SHARE * total)
    usable = (determinant > 1e-9 * sxx * np.maximum(hh, 1e-30)) & (w >= enough) & (total - w >= enough)
    if not usable.any():
        return plain, plain
    safe = np.where(usable, determinant, 1.0)
    bend = (sxx * hv - hu * sxy) / safe
    first = (hh * sxy - hu * hv) / safe
    error = np.where(usable & (bend > 0), syy - first * sxy - bend * hv, np.inf)
    best = int(np.argmin(error))
    if not np.isfinite(error[best]):
        return plain, plain
    at = float(grid[best] + _between(error, best) * (grid[1] - grid[0]))
    level = mean_y - first[best] * mean_x - bend[best] * h[best] / total
    return plain, Line(at, float(level), float(first[best]), float(bend[best]), max(0.0, float(error[best])))


def _between(error: Floats, best: int) -> float:
    """Where between its neighbours the minimum of a parabola through three errors lies, in steps."""
    if not 0 < best < len(error) - 1 or not np.isfinite(error[best - 1 : best + 2]).all():
        return 0.0
    left, middle, right = error[best - 1 : best + 2]
    curve = left - 2 * middle + right
    return float(np.clip(0.5 * (left - right) / curve, -0.5, 0.5)) if curve > 0 else 0.0


def kneedle(x: Floats, y: Floats) -> float | None:
    """The knee of the normalised curve through binned medians (Kneedle with S = 1); None for fewer than 8 bins."""
    by = np.argsort(x, kind="stable")
    x, y = x[by], y[by]
    parts = np.array_split(np.arange(len(x)), min(40, max(1, len(x) // 10)))
    if len(parts) < 8:
        return None
    middle = np.array([np.median(x[part]) for part in parts])
    height = np.maximum.accumulate(np.array([np.median(y[part]) for part in parts]))
    if np.ptp(middle) <= 0 or np.ptp(height) <= 0:
        return None
    u, v = (middle - middle[0]) / np.ptp(middle), (height - height[0]) / np.ptp(height)
    above = u - v
    best = int(np.argmax(above))
    return float(middle[best]) if above[best] > 1 / len(parts) else None


def slow_from(x: Floats, slowdown: Floats, limit: float = SLOW) -> float | None:
    """Demand from which the p95 of the slowdown, over neighbours in demand, stays at or above ``limit``.

    None when it is never reached. A single burst below does not count: it must not fall under the limit again
    over the next window.
    """
    by = np.argsort(x, kind="stable")
    x, slowdown = x[by], slowdown[by]
    if len(x) < _WINDOW:
        return None
    starts = np.arange(0, len(x) - _WINDOW + 1, _WINDOW // 4)
    p95 = np.array([np.percentile(slowdown[start : start + _WINDOW], 95) for start in starts])
    slow = p95 >= limit
    for place, start in enumerate(starts):
        if slow[place : place + 5].all():
            return float(np.median(x[start : start + _WINDOW]))
    return None
