"""How long blocks stay in the cache, how far apart they are reused, and what more room would win."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcatch.analysis.prefix import Lookups
from kvcatch.store import layout as L
from kvcatch.store.columns import record_starts
from kvcatch.store.feeds import open_feed
from kvcatch.views.html.thin import Ints, log_histogram, numbers

_PIECE = 1 << 20


def residency(path: str, unix_ns: Ints) -> dict[str, Any] | None:
    """Histograms over evicted blocks: seconds since a request last took the block, and since the last one let it go.

    None when nothing was evicted.

    Args:
        path: the recording.
        unix_ns: times of its rows.
    """
    gains, evictions, ends = _changes(path)
    if not len(evictions) or not len(gains):
        return None
    last = len(unix_ns) - 1
    # What a request gained it lets go at its next preemption or finish.
    release = np.full(len(gains), last, np.int64)
    if len(ends):
        span = int(max(gains[:, 0].max(), ends[:, 0].max())) + 1
        ends = ends[np.lexsort((ends[:, 0], ends[:, 1]))]
        at = np.searchsorted(ends[:, 1] * span + ends[:, 0], gains[:, 1] * span + gains[:, 0])
        valid = at < len(ends)
        valid[valid] = ends[at[valid], 1] == gains[valid, 1]
        release[valid] = ends[at[valid], 0]
    # Within a step a block is evicted before it is given to a request.
    step = np.concatenate([evictions[:, 0] * 2, gains[:, 0] * 2 + 1])
    block = np.concatenate([evictions[:, 1], gains[:, 2]])
    let_go = np.concatenate([np.full(len(evictions), -1), release])
    order = np.lexsort((step, block))
    step, block, let_go = step[order], block[order], let_go[order]
    before = (np.append(-1, block[:-1]) == block) & (np.append(-1, let_go[:-1]) >= 0)
    # A step that never ended (the engine was killed in it) has no time.
    gone = np.flatnonzero((let_go < 0) & before & (step // 2 <= last))
    if not len(gone):
        return None
    when = unix_ns[step[gone] // 2]
    taken = unix_ns[step[gone - 1] // 2]
    # Several may share a block: the last one to let it go counts.
    segment = np.cumsum(np.append(0, (let_go[:-1] < 0) | (block[1:] != block[:-1])))
    latest = np.zeros(int(segment[-1]) + 1, np.int64)
    np.maximum.at(latest, segment, let_go)
    idle_from = unix_ns[np.minimum(latest[segment[gone - 1]], last)]
    return {
        "lifetime": log_histogram((when - taken) / 1e9),
        "idle": log_histogram(np.maximum(when - idle_from, 0) / 1e9),
        "evicted": len(gone),
    }


def _changes(path: str) -> tuple[Ints, Ints, Ints]:
    """Gains (step, rid, block), evictions (step, block) and releases (step, rid); a step is the row that ended it."""
    gains: list[Ints] = []
    evictions: list[Ints] = []
    ends: list[Ints] = []
    feed = open_feed(path)
    tail = np.zeros(0, np.uint32)
    done = 0
    for source, piece, _ in feed.raw(_PIECE):
        if source:
            continue
        if not len(piece):
            tail = tail[:0]
            continue
        words = np.concatenate([tail, piece]) if len(tail) else piece
        starts, used, trouble = record_starts(words)
        kinds, sizes = words[starts] & 0xFF, (words[starts] >> 16).astype(np.int64)
        step = done + np.cumsum(kinds == L.SAMPLE)
        for kind, into, skip in ((L.BLOCKS, gains, 2), (L.EVICT, evictions, 1)):
            chosen = (kinds == kind) & (sizes > skip)
            if not chosen.any():
                continue
            counts = sizes[chosen] - skip
            begin = np.repeat(starts[chosen] + skip, counts)
            inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            columns = [np.repeat(step[chosen], counts)]
            if kind == L.BLOCKS:
                columns.append(np.repeat(words[starts[chosen] + 1].astype(np.int64), counts))
            ids = words[begin + inner].astype(np.int64)
            columns.append(ids)
            into.append(np.column_stack(columns)[ids > 0])
        over = np.isin(kinds, (L.FINISH, L.PREEMPT))
        if over.any():
            ends.append(np.column_stack([step[over], words[starts[over] + 1].astype(np.int64)]))
        done = int(step[-1]) if len(step) else done
        tail = words[used:]
        if trouble:
            break
    feed.close()
    return _joined(gains, 3), _joined(evictions, 2), _joined(ends, 2)


def _joined(parts: list[Any], width: int) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros((0, width), np.int64)


def reuse(look: Lookups) -> dict[str, Any] | None:
    """Hit ratio for every capacity and how far apart blocks are reused, from one pass; None without any reuse.

    Requests are taken one after the other, so the curve is of prompts alone: concurrency shifts it to the right.
    """
    from kvcatch.simulator.curve import hit_curve

    if not look.caching or not len(look.workload):
        return None
    curve = hit_curve(look.workload, look.block_size)
    if not curve.hit_blocks[-1]:
        return None
    capacities = sorted({*curve.capacities(64), *([look.usable] if look.usable else [])})
    gained = np.diff(curve.hit_blocks, prepend=0)
    distances = np.flatnonzero(gained)
    return {
        "capacity": capacities,
        "hit_ratio": numbers([curve.ratio(one) for one in capacities]),
        "today": look.usable,
        "today_ratio": None if not look.usable else curve.ratio(look.usable),
        "most": curve.ratio(curve.saturated_at),
        "saturated_at": curve.saturated_at,
        "distance": log_histogram(distances, gained[distances]),
    }
