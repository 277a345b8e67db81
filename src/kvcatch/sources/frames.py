"""Readings over time: merging the engines of one page, increases between pages, quantiles of histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from kvcatch.sources.readings import EngineKey, Histogram, Reading

Frame = dict[EngineKey, Reading]

_SUMS = (
    "running", "waiting", "waiting_for_blocks", "waiting_other", "usable_blocks", "active_blocks",
    "active_tokens", "queries", "hits", "preemptions", "prompt_tokens", "generation_tokens",
    "evicted_tokens", "generation_rate", "prompt_rate", "max_running", "load_bytes", "load_seconds", "store_bytes",
    "store_seconds", "drafts",
)  # fmt: skip
_HISTOGRAMS = ("ttft", "tpot", "queue", "e2e", "request_prompt_tokens", "request_generation_tokens",
               "remote_bytes", "remote_seconds", "block_lifetime")  # fmt: skip
#: counters that fall only when the engine was started again
_COUNTERS = ("queries", "hits", "preemptions", "prompt_tokens", "generation_tokens")


def merged(readings: Sequence[Reading]) -> Reading:
    """Several engines as one: sums where every engine knows the figure, None where one does not."""
    if len(readings) == 1:
        return readings[0]
    first = readings[0]
    out = Reading(key=EngineKey(first.key.instance, first.key.model, "all"), kind=first.kind)
    for name in _SUMS:
        setattr(out, name, _sum(getattr(reading, name) for reading in readings))
    for name in _HISTOGRAMS:
        setattr(out, name, _sum_histograms([getattr(reading, name) for reading in readings]))
    sizes = {reading.block_size for reading in readings}
    out.block_size = sizes.pop() if len(sizes) == 1 else None
    out.unix_seconds = first.unix_seconds
    if out.active_blocks is not None and out.usable_blocks:
        out.usage_ratio = out.active_blocks / out.usable_blocks
    if out.queries and out.hits is not None:
        out.hit_ratio = out.hits / out.queries
    out.config = first.config
    out.unknown = tuple(sorted({name for reading in readings for name in reading.unknown}))
    out.warnings = tuple(dict.fromkeys(text for reading in readings for text in reading.warnings))
    return out


def _sum(values: Iterable[Any]) -> Any:
    total: Any = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _sum_histograms(parts: list[Histogram | None]) -> Histogram | None:
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or len({part.bounds for part in known}) != 1:
        return None
    return Histogram(
        sum(part.observations for part in known),
        sum(part.total for part in known),
        known[0].bounds,
        tuple(sum(column) for column in zip(*(part.heights for part in known), strict=True)),
    )


def restarted(before: Reading, after: Reading) -> bool:
    """True when a counter fell: the engine was started again between the two readings."""
    for name in _COUNTERS:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and new < old:
            return True
    return False


def increase(before: Reading | None, after: Reading, name: str) -> float | None:
    """How much a counter grew; after a restart its whole new value. None when unknown."""
    new = getattr(after, name)
    old = getattr(before, name) if before is not None else None
    if new is None or old is None:
        return None
    return float(new) if before is not None and restarted(before, after) else float(new - old)


def grown(before: Histogram | None, after: Histogram | None) -> Histogram | None:
    """What a histogram gained; the whole of it when there is nothing comparable before."""
    if after is None or before is None or before.bounds != after.bounds:
        return after
    if before.observations > after.observations:
        return after
    return Histogram(
        after.observations - before.observations,
        after.total - before.total,
        after.bounds,
        tuple(new - old for new, old in zip(after.heights, before.heights, strict=True)),
    )


def mean(histogram: Histogram | None) -> float | None:
    """Mean of the observations, None without any."""
    if histogram is None or histogram.observations <= 0:
        return None
    return histogram.total / histogram.observations


def quantile(histogram: Histogram | None, share: float) -> float | None:
    """Quantile by linear interpolation inside its bucket, as PromQL's ``histogram_quantile``.

    None without observations, or when it lies beyond the last finite bound.
    """
    if histogram is None or histogram.observations <= 0:
        return None
    rank = share * histogram.observations
    low_bound = low_height = 0.0
    for bound, height in zip(histogram.bounds, histogram.heights, strict=True):
        if height >= rank:
            if bound == float("inf"):
                return None
            inside = height - low_height
            return low_bound + (bound - low_bound) * ((rank - low_height) / inside if inside else 0.0)
        low_bound, low_height = bound, height
    return None


def largest(readings: Iterable[Reading], field: Callable[[Reading], int | None]) -> int | None:
    """The largest known value, None when no reading knows it."""
    known = [value for reading in readings if (value := field(reading)) is not None]
    return max(known) if known else None


def stuck_gauges(readings: Sequence[Reading]) -> bool:
    """True when work certainly ran but every gauge stood at zero on every page.

    Little's law: the mean number of requests in the engine is the summed time of those that finished over
    the time that passed. One or more on average, yet none ever seen running on four pages: the gauge is not
    fed. Without that histogram: tokens were generated between all of six pages, never one request running.
    """
    if len(readings) < 4 or any(reading.running != 0 or reading.usage_ratio for reading in readings):
        return False
    first, last = readings[0], readings[-1]
    if first.e2e is None or last.e2e is None:
        tokens = [reading.generation_tokens for reading in readings]
        return len(tokens) >= 6 and all(
            old is not None and new is not None and new > old for old, new in pairwise(tokens)
        )
    if first.unix_seconds is None or last.unix_seconds is None or last.unix_seconds <= first.unix_seconds:
        return False
    spent = grown(first.e2e, last.e2e)
    return spent is not None and spent.total / (last.unix_seconds - first.unix_seconds) >= 1.0
