"""The curves over time: utilisation with TTFT, queues, preemptions, hit ratio, fragmentation, throughput."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcatch.store.columns import Recording
from kvcatch.views.html.thin import Floats, Ints, Slices, numbers

#: points of a curve at most; a screen has fewer columns
POINTS = 1200


def curves(recording: Recording, samples: dict[str, Any], rows: Ints) -> dict[str, Any]:
    """Columns of the charts that share the time axis; times are milliseconds from the first row.

    Args:
        recording: the record.
        samples: its rows in the span of the report, at least one.
        rows: requests that lived in it.
    """
    info = recording.info
    unix = samples["unix_ns"]
    slices = Slices(unix, POINTS)
    active = _most(samples, "active_blocks", "active_max")
    top = slices.row_of_highest(active)
    shown = np.minimum(active[top], info.usable_blocks or np.inf)
    cached = np.minimum(samples["cached_blocks"][top], np.maximum(0, (info.usable_blocks or 0) - shown))
    held, slots = samples["held_tokens"].astype(np.float64), samples["active_blocks"] * float(info.block_size)
    with np.errstate(divide="ignore", invalid="ignore"):
        empty = np.where((held >= 0) & (slots > 0), 1 - held / slots, np.nan)
    queried, hit = slices.total(samples["queried_tokens"]), slices.total(samples["hit_tokens"])
    seconds = np.where(samples["interval_ns"] > 0, samples["interval_ns"], samples["step_ns"]) / 1e9
    busy = slices.total(seconds)
    outputs = slices.total(samples["decode_tokens"].astype(np.float64) + samples["completed"])
    first, wait = first_tokens(recording, rows, int(unix[0]))
    return {
        "x": milliseconds(unix[top], int(unix[0])),
        "active": numbers(shown),
        "active_low": numbers(slices.lowest(samples["active_blocks"])),
        "cached": numbers(cached),
        "running": numbers(slices.highest(_most(samples, "running", "running_max"))),
        "waiting": numbers(slices.highest(_most(samples, "waiting", "waiting_max"))),
        "preemptions": numbers(slices.total(samples["preemptions"])),
        "recomputed": numbers(slices.total(samples["recomputed_tokens"])),
        "evicted": numbers(slices.total(samples["evicted_blocks"])),
        "hit_ratio": numbers(np.divide(hit, queried, out=np.full(len(hit), np.nan), where=queried > 0)),
        "empty": numbers(_highest_known(slices, empty)),
        "output_rate": numbers(np.divide(outputs, busy, out=np.full(len(busy), np.nan), where=busy > 0)),
        "step": numbers(slices.highest(samples["step_max_ns"]) / 1e9),
        "ttft_x": first,
        "ttft": wait,
    }


def _most(samples: dict[str, Any], name: str, maximum: str) -> Floats:
    values: Floats = np.maximum(samples[name], samples.get(maximum, samples[name])).astype(np.float64)
    return values


def _highest_known(slices: Slices, values: Floats) -> Floats:
    high = slices.highest(np.where(np.isnan(values), -1.0, values))
    result: Floats = np.where(high < 0, np.nan, high)
    return result


def milliseconds(unix_ns: Ints, start: int) -> list[int]:
    """Whole milliseconds from the start of the report."""
    result: list[int] = ((unix_ns - start) // 1_000_000).tolist()
    return result


def first_tokens(recording: Recording, rows: Ints, start: int) -> tuple[list[int], list[float | int | None]]:
    """When first tokens came and how long they had taken: the longest wait of each slice of time."""
    requests = recording.requests
    rows = rows[requests.first[rows] > 0]
    if not len(rows):
        return [], []
    rows = rows[np.argsort(requests.first[rows], kind="stable")]
    unix = requests.first[rows] + recording.wall_offset
    wait = (requests.first[rows] - requests.arrival[rows]) / 1e9
    top = Slices(unix, POINTS).row_of_highest(wait)
    return milliseconds(unix[top], start), numbers(wait[top])
