"""Demand for KV blocks: what is held now plus what waits, as a share of the pool."""

from __future__ import annotations

from kvcatch.analysis.headroom import blocks_for
from kvcatch.events import EngineInfo
from kvcatch.results import Snapshot


def claimed_blocks(info: EngineInfo, snapshot: Snapshot, typical_prompt: int | None = None) -> int | None:
    """Active blocks plus the blocks that everything not running needs to be computed up to where it is.

    A waiting request counts its whole prompt, a preempted one also what it had generated (it recomputes
    both). Prefix hits are not deducted. Without a list of requests, every waiting one counts as
    ``typical_prompt`` tokens. None when the pool, or the size of something that waits, is unknown.
    """
    active = snapshot.pool.active_blocks
    if active is None:
        return None
    if snapshot.requests:
        queued = [view for view in snapshot.requests if view.status in ("waiting", "preempted", "held")]
        sizes = [view.num_tokens or view.prompt_tokens for view in queued]
    else:
        waiting = _waiting(snapshot)
        if waiting is None:
            return None
        sizes = [typical_prompt] * waiting
    total = active
    for tokens in sizes:
        blocks = None if tokens is None else blocks_for(tokens, info)
        if blocks is None:
            return None
        total += blocks
    return total


def committed_ratio(info: EngineInfo, snapshot: Snapshot, typical_prompt: int | None = None) -> float | None:
    """``claimed_blocks`` over usable blocks; may exceed 1. None when unknown."""
    blocks = claimed_blocks(info, snapshot, typical_prompt)
    usable = snapshot.pool.num_blocks
    return blocks / usable if blocks is not None and usable else None


def _waiting(snapshot: Snapshot) -> int | None:
    queues = snapshot.queues
    if queues.waiting is not None:
        return queues.waiting
    if queues.waiting_for_blocks is None:
        return None
    return queues.waiting_for_blocks + (queues.waiting_other or 0) + (queues.held or 0)
