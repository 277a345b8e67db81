"""How many more requests of a given size the engine takes before one has to wait.

The admission rule is vLLM's: ``KVCacheManager.allocate_slots`` with ``full_sequence_must_fit`` (the default
since 0.24, ``scheduler_reserve_full_isl``) admits a waiting request when the blocks of its whole prompt,
plus the watermark when anything runs, fit in the blocks nobody holds; cached blocks count as free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from kvcatch.analysis.future import Running, fits_beside, running_requests
from kvcatch.events import EngineInfo, KVGroup
from kvcatch.results import Headroom, Pool, Queues, RequestView, Snapshot

#: seconds between an answer and the start of a request that was sent on its account
SOON_SECONDS = 0.05
#: the same in steps, where nothing is known of the engine's pace
SOON_STEPS = 32


def snapshot_headroom(
    info: EngineInfo, snapshot: Snapshot, size: tuple[int, int], within_seconds: float = SOON_SECONDS
) -> Headroom:
    """``headroom`` of the state in a snapshot, for requests that start within so many seconds."""
    pace = snapshot.latency.step_seconds
    steps = math.ceil(within_seconds / pace) if pace else SOON_STEPS if within_seconds else 0
    return headroom(
        info, snapshot.pool, snapshot.queues, *size, requests=snapshot.requests, delay_steps=steps,
        committed_blocks=committed_blocks(info, snapshot.requests),
    )  # fmt: skip


def blocks_for(tokens: int, info: EngineInfo) -> int | None:
    """Pool blocks that one request of ``tokens`` tokens holds over all KV groups.

    None when a group is not modelled (Mamba, cross attention). Full attention: ceil(tokens / block size).
    Sliding and chunked groups recycle blocks and are capped at the engine's own reservation, the most they
    ever hold (``SlidingWindowSpec`` and ``ChunkedLocalAttentionSpec.max_admission_blocks_per_request``).
    """
    if tokens <= 0:
        return 0
    groups = info.groups or (KVGroup(kind="full", layers=0, block_size=info.block_size),)
    held = [_group_blocks(tokens, group, info) for group in groups]
    return None if None in held else sum(block for block in held if block is not None)


def least_blocks(tokens: int, info: EngineInfo) -> int:
    """Blocks below which no request of ``tokens`` tokens can run: one for each group that is not modelled.

    All groups take block numbers from the one pool, so small blocks of one group count like large ones of another.
    """
    return sum(group_demand(tokens, info))


def group_demand(tokens: int, info: EngineInfo) -> tuple[int, ...]:
    """``least_blocks`` group by group."""
    groups = info.groups or (KVGroup(kind="full", layers=0, block_size=info.block_size),)
    return tuple(_group_blocks(tokens, group, info) or 1 for group in groups)


def longest_that_fits(info: EngineInfo) -> int | None:
    """The most tokens of one request whose ``least_blocks`` the whole pool holds; None when sizes are unknown."""
    sizes = [group.block_size for group in info.groups] or [info.block_size]
    if not info.usable_blocks or min(sizes) <= 0:
        return None
    low, high = 0, info.usable_blocks * max(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        if least_blocks(middle, info) <= info.usable_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _group_blocks(tokens: int, group: KVGroup, info: EngineInfo) -> int | None:
    if group.block_size <= 0:
        return None
    whole = -(-tokens // group.block_size)
    if group.kind in {"full", "mla"}:
        return whole
    if (
        group.kind not in {"sliding", "chunked"}
        or group.window is None
        or info.max_num_batched_tokens is None
    ):
        return None
    # Two batches are in flight under async scheduling, and both keep their tokens until they settle.
    in_flight = info.max_num_batched_tokens * (2 if info.async_scheduling else 1)
    kept = group.window + in_flight - (1 if group.kind == "sliding" else 0)
    if info.max_model_len is not None:
        kept = min(kept, info.max_model_len)
    cap = -(-kept // group.block_size) + (1 if group.kind == "sliding" else 0)
    return min(whole, cap)


def headroom(
    info: EngineInfo,
    pool: Pool,
    queues: Queues,
    prompt_tokens: int,
    output_tokens: int,
    *,
    committed_blocks: int = 0,
    requests: Iterable[RequestView] | None = None,
    delay_steps: int = 0,
) -> Headroom:
    """How many more requests of this size are admitted at once and also reach their full length.

    Args:
        info: the engine's configuration.
        pool: blocks now; None counts give an unknown answer.
        queues: requests now.
        prompt_tokens: tokens of one prompt, without prefix hits (the careful case).
        output_tokens: tokens one request generates, at least 1.
        committed_blocks: blocks that requests already running will still take; 0 asks about this moment.
        requests: the engine's requests. When the lengths of all running ones are known, what they take and
            give back over time is followed step by step, and ``committed_blocks`` is not used.
        delay_steps: the new requests may start any number of steps from now up to this.

    Returns:
        ``limit`` says what binds: ``blocks`` | ``watermark`` | ``max_num_seqs`` | ``max_model_len`` |
        ``pool`` (never fits, even alone) | ``queue`` (its head waits for blocks and nobody overtakes it).
    """
    future = running_requests(info, requests) if requests is not None else None
    size = (prompt_tokens, output_tokens)
    answer = _count(info, pool, queues, size, committed_blocks, future, delay_steps)
    count, limit = answer if answer is not None else (None, None)
    return Headroom(requests=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens, limit=limit)


def _count(
    info: EngineInfo,
    pool: Pool,
    queues: Queues,
    size: tuple[int, int],
    committed: int,
    future: list[Running] | None,
    delay: int,
) -> tuple[int, str] | None:
    prompt, output = size[0], max(1, size[1])
    if info.max_model_len is not None and prompt + output > info.max_model_len:
        return 0, "max_model_len"
    at_admission = blocks_for(prompt, info)
    # The last generated token is returned but never attended to, so it needs no slot.
    at_peak = blocks_for(prompt + output - 1, info)
    if at_admission is None or at_peak is None or pool.num_blocks is None or pool.active_blocks is None:
        return None
    if at_peak > info.usable_blocks:
        return 0, "pool"
    if queues.waiting_for_blocks:
        return 0, "queue"
    unheld = max(0, pool.num_blocks - pool.active_blocks)
    free = unheld if future is not None else max(0, unheld - committed)
    running = queues.running or 0
    watermark = int((info.watermark_free_ratio or 0.0) * info.num_blocks)
    fits = free // at_peak if at_peak else 0
    if future:
        usable = pool.num_blocks
        new = (prompt, output)
        fits = fits_beside(future, lambda n: blocks_for(n, info) or 0, unheld, usable, new, info, delay)
    counts = {"blocks": fits}
    admitted = _admitted(free, at_admission, watermark, running)
    if admitted < counts["blocks"]:
        counts["watermark"] = admitted
    if info.max_num_seqs is not None:
        ahead = running + (queues.waiting_other or 0) + (queues.held or 0)
        counts["max_num_seqs"] = max(0, info.max_num_seqs - ahead)
    limit = min(counts, key=lambda name: counts[name])
    return counts[limit], limit


def _admitted(free: int, blocks: int, watermark: int, running: int) -> int:
    """Requests of ``blocks`` blocks admitted in turn; the first on an idle engine skips the watermark."""
    if blocks == 0 or blocks > free:
        return 0
    count = 0
    if running == 0:
        count, free = 1, free - blocks
    return count + max(0, free - watermark) // blocks


def committed_blocks(info: EngineInfo, requests: Iterable[RequestView]) -> int:
    """Blocks that running requests will still take if each generates its ``max_tokens``; 0 where unknown."""
    total = 0
    for view in requests:
        if view.status != "running" or view.prompt_tokens is None or view.num_blocks is None:
            continue
        longest = view.prompt_tokens + (view.max_tokens or 0)
        if info.max_model_len is not None:
            longest = min(longest, info.max_model_len)
        total += max(0, (blocks_for(longest - 1, info) or 0) - view.num_blocks)
    return total


def typical_size(requests: Iterable[RequestView]) -> tuple[int, int] | None:
    """Median prompt and output tokens of the requests seen, None when no length is known.

    Finished requests speak for the output; without any, ``max_tokens`` or what was generated so far does.
    """
    known = [view for view in requests if view.prompt_tokens]
    if not known:
        return None
    done = [view.output_tokens for view in known if view.finish_reason and view.output_tokens]
    outputs = done or [view.max_tokens or view.output_tokens or 1 for view in known]
    return round(median(view.prompt_tokens or 0 for view in known)), max(1, round(median(outputs)))
