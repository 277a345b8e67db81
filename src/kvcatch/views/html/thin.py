"""Fewer points for a picture without losing a peak: minima, maxima and sums of equal slices of time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Slices:
    """Equal slices of a run's time, empty ones left out; with few rows every row is a slice of its own.

    Args:
        unix_ns: sorted times of the rows, at least one.
        most: how many slices at most.
    """

    def __init__(self, unix_ns: Ints, most: int) -> None:
        self.times = unix_ns
        count = len(unix_ns)
        if count <= most:
            self.starts = np.arange(count)
        else:
            span = max(1, int(unix_ns[-1] - unix_ns[0]))
            number = (unix_ns - unix_ns[0]) * most // (span + 1)
            self.starts = np.flatnonzero(np.diff(number, prepend=-1))
        self.ends = np.append(self.starts[1:], count)

    def __len__(self) -> int:
        return len(self.starts)

    def highest(self, values: Any) -> Floats:
        """The largest value of each slice."""
        return np.maximum.reduceat(np.asarray(values, np.float64), self.starts)

    def lowest(self, values: Any) -> Floats:
        """The smallest value of each slice."""
        return np.minimum.reduceat(np.asarray(values, np.float64), self.starts)

    def total(self, values: Any) -> Floats:
        """The sum of each slice."""
        return np.add.reduceat(np.asarray(values, np.float64), self.starts)

    def row_of_highest(self, values: Any) -> Ints:
        """The row at which each slice has its largest value, the first of several."""
        numbers = np.asarray(values, np.float64)
        slice_of = np.repeat(np.arange(len(self)), self.ends - self.starts)
        at_top = np.flatnonzero(numbers == self.highest(numbers)[slice_of])
        rows = at_top[np.flatnonzero(np.diff(slice_of[at_top], prepend=-1))]
        result: Ints = rows.astype(np.int64)
        return result


def log_histogram(
    values: Any, weights: Any = None, bins: int = 28, least: float = 1e-3
) -> dict[str, list[float]] | None:
    """Counts in slices of equal width on a log scale from ``least`` on, as ``{"edges": [...], "counts": [...]}``; None without values."""
    numbers = np.asarray(values, np.float64)
    if not len(numbers):
        return None
    low, high = max(float(numbers.min()), least), max(float(numbers.max()), least)
    edges = np.geomspace(low, max(high, low * 1.001) * 1.0001, bins + 1)
    counts, _ = np.histogram(np.maximum(numbers, low), edges, weights=weights)
    return {"edges": [float(f"{edge:.5g}") for edge in edges], "counts": [float(count) for count in counts]}


def numbers(values: Any, digits: int = 4) -> list[float | int | None]:
    """A column for JSON: so many significant digits, unknown values as None."""
    result: list[float | int | None] = []
    for value in np.asarray(values, np.float64).tolist():
        if math.isnan(value):
            result.append(None)
        elif value == int(value):
            result.append(int(value))
        else:
            result.append(float(f"{value:.{digits}g}"))
    return result
