"""Demand and latency of every request, from a recording or from pages of counters."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvcatch.analysis.headroom import blocks_for
from kvcatch.analysis.watermark import Floats, Ints, Observations
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.sources import frames
from kvcatch.sources.readings import Reading
from kvcatch.store.columns import Recording


def from_recording(
    recording: Recording, start_ns: int | None = None, stop_ns: int | None = None
) -> Observations:
    """Every request that arrived in a span of wall-clock time and got a first token.

    Raises KVCatchError when the pool's size is not recorded.
    """
    info, requests = recording.info, recording.requests
    usable = info.usable_blocks
    if not usable or not info.block_size:
        raise KVCatchError(
            f"{recording.target}: the pool's size is not recorded.", "Record with kvcatch run."
        )
    # A prompt's blocks over all groups; kinds that are not modelled count as full attention.
    sizes = {
        int(tokens): blocks_for(int(tokens), info) or -(-int(tokens) // info.block_size)
        for tokens in np.unique(requests.prompt_tokens)
    }
    need = np.array([sizes[int(tokens)] for tokens in requests.prompt_tokens], np.int64)
    mono = recording.samples["unix_ns"] - recording.wall_offset
    active = recording.samples["active_blocks"].astype(np.int64)
    never = np.iinfo(np.int64).max
    scheduled = np.where(requests.scheduled > 0, requests.scheduled, never)
    waits = _waiting(requests.arrival, scheduled, need)
    back = _preempted_waiting(recording)

    def demand(times: Ints) -> Floats:
        """Blocks held and needed at these times, over usable ones."""
        row = np.searchsorted(mono, times, side="right") - 1
        held = np.where(row >= 0, active[np.maximum(row, 0)], 0)
        total: Floats = (held + waits(times) + back(times)) / usable
        return total

    wall = requests.arrival + recording.wall_offset
    use = (requests.first > 0) & (requests.prompt_tokens > 0)
    use &= (wall >= (start_ns or 0)) & (wall < (stop_ns or never))
    order = np.flatnonzero(use)[np.argsort(requests.arrival[use], kind="stable")]
    arrival = requests.arrival[order]
    ends = np.sort(np.where(requests.finish > 0, requests.finish, never))
    present = np.searchsorted(np.sort(requests.arrival), arrival, side="left") - np.searchsorted(
        ends, arrival, side="right"
    )
    preempted = recording.preempted["time"]
    at = preempted + recording.wall_offset
    preempted = preempted[(at >= (start_ns or 0)) & (at < (stop_ns or never))]
    return Observations(
        committed=demand(arrival),
        ttft=(requests.first[order] - arrival) / 1e9,
        tokens=(requests.prompt_tokens - requests.cached_tokens)[order].astype(np.float64),
        idle=present <= 0,
        largest_ratio=float(need[order].max(initial=0)) / usable,
        preempted_at=demand(preempted) if len(preempted) else np.zeros(0),
        preemptions=len(preempted),
        free_ratio=info.watermark_free_ratio or None,
    )


class _Steps:
    """A sum of intervals [start, end) with weights, asked at any times."""

    def __init__(self, starts: Ints, ends: Ints, weights: Ints) -> None:
        times = np.concatenate([starts, ends])
        place = np.argsort(times, kind="stable")
        self._times = times[place]
        self._sums = np.concatenate(([0], np.cumsum(np.concatenate([weights, -weights])[place])))

    def __call__(self, times: Ints) -> Ints:
        found: Ints = self._sums[np.searchsorted(self._times, times, side="right")]
        return found


def _waiting(arrival: Ints, scheduled: Ints, need: Ints) -> _Steps:
    """Blocks that requests wait for, from arrival to the row of the step that gave them blocks."""
    return _Steps(arrival, np.maximum(arrival, scheduled), need)


def _preempted_waiting(recording: Recording) -> _Steps:
    """Blocks that preempted requests wait for: those they held, until they hold some again."""
    gone, holds = recording.preempted, recording.holds
    ends = np.full(len(gone["time"]), np.iinfo(np.int64).max)
    for row, (rid, time) in enumerate(zip(gone["rid"].tolist(), gone["time"].tolist(), strict=True)):
        first, last = np.searchsorted(holds.rid, [rid, rid + 1])
        later = np.flatnonzero((holds.time[first:last] > time) & (holds.blocks[first:last] > 0))
        if len(later):
            ends[row] = holds.time[first + later[0]]
        else:
            finished = recording.requests.finish[np.searchsorted(recording.requests.rid, rid)]
            ends[row] = finished or ends[row]
    return _Steps(gone["time"], ends, gone["held_blocks"])


def from_pages(target: str, info: EngineInfo, readings: list[Reading]) -> Observations:
    """Intervals between scrapes: demand at their end, mean TTFT of the first tokens within them.

    Raises KVCatchError when the pages lack utilisation, queue or TTFT.
    """
    usable, size = info.usable_blocks, info.block_size
    prompts = [
        frames.mean(frames.grown(a.request_prompt_tokens, b.request_prompt_tokens))
        for a, b in _pairs(readings)
    ]
    known = [value for value in prompts if value]
    typical = float(np.median(known)) if known else np.nan
    rows, preempted, total = [], [], 0.0
    for (before, after), prompt in zip(_pairs(readings), prompts, strict=True):
        latency = frames.mean(frames.grown(before.ttft, after.ttft))
        if latency is None or latency <= 0 or after.usage_ratio is None or after.waiting is None:
            continue
        waiting = 0.0
        if after.waiting:
            tokens = prompt or typical
            if not usable or not size or not np.isfinite(tokens):
                continue
            waiting = after.waiting * float(np.ceil(tokens / size)) / usable
        own = float(np.ceil((prompt or 0.0) / size)) / usable if usable and size else 0.0
        committed = after.usage_ratio + waiting + own
        rows.append((committed, latency, prompt or 0.0, not after.running and not after.waiting, own))
        grown = frames.increase(before, after, "preemptions")
        if grown:
            preempted.append(committed)
            total += grown
    if not rows:
        raise KVCatchError(
            f"{target}: no interval with utilisation, queue and TTFT.",
            "It takes vllm:kv_cache_usage_perc, vllm:num_requests_waiting and the TTFT histogram.",
        )
    table = np.array(rows, np.float64)
    return Observations(
        committed=table[:, 0], ttft=table[:, 1], tokens=table[:, 2], idle=table[:, 3] > 0,
        largest_ratio=float(table[:, 4].max()), preempted_at=np.array(preempted), preemptions=int(total),
        notes=["one observation per scrape: means of an interval hide short queues; a capture or --drive sees each request"],
    )  # fmt: skip


def _pairs(readings: list[Reading]) -> list[tuple[Reading, Reading]]:
    return [(before, after) for before, after in pairwise(readings) if not frames.restarted(before, after)]
