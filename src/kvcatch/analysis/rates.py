"""Windows over sample columns: peaks, rates and binned curves. Pure functions, no I/O."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.store.base import Columns

Array = npt.NDArray[Any]


def binned_max(
    times: Array, values: Array, start: int, stop: int, bins: int, *, carry: bool = False
) -> list[float | None]:
    """The maximum of ``values`` in each of ``bins`` equal slices of [start, stop); None where there is none.

    Peaks are the subject, so a curve is thinned by its maximum, never by its mean.

    Args:
        times: when each value was taken, in the unit of start and stop, any order.
        values: the values; NaN is left out.
        start: first instant of the first bin.
        stop: end of the last bin; must be > start.
        bins: how many slices, at least 1.
        carry: an empty bin repeats the newest value before it (a state, not an event).
    """
    numbers = np.asarray(values, dtype=np.float64)
    when = np.asarray(times, dtype=np.int64)
    keep = ~np.isnan(numbers)
    when, numbers = when[keep], numbers[keep]
    order = np.argsort(when, kind="stable")
    when, numbers = when[order], numbers[order]
    edges = np.linspace(start, stop, bins + 1)
    cuts = np.searchsorted(when, edges, side="left")
    curve: list[float | None] = []
    for first, last in pairwise(cuts):
        if last > first:
            curve.append(float(numbers[first:last].max()))
        elif carry and first > 0:
            curve.append(float(numbers[first - 1]))
        else:
            curve.append(None)
    return curve


def utilization(columns: Columns, usable_blocks: int) -> Array:
    """Most of the usable blocks that were active since the sample before, 0–1; empty when that is unknown."""
    active = most(columns, "active_blocks")
    return active / usable_blocks if usable_blocks > 0 else np.zeros(0)


def most(columns: Columns, name: str) -> Array:
    """A column's values, or where the source records them its maxima since the sample before.

    ``active_blocks`` has ``active_max``, ``running`` and ``waiting`` have ``running_max`` and ``waiting_max``.
    """
    top = f"{name.removesuffix('_blocks')}_max"
    values = columns.get(top, columns.get(name))
    return np.zeros(0) if values is None else np.asarray(values, dtype=np.float64)


def peak(columns: Columns, name: str) -> float | None:
    """The largest value of one column with its maxima, None for an empty or unknown one."""
    values = most(columns, name)
    values = values[~np.isnan(values)]
    return float(values.max()) if len(values) else None
