"""Exact simulation of the block pool for requests that come one after the other, in numba.

``serial_pool`` follows vLLM's block pool block by block (rules: ``kvcatch.simulator.blockpool``);
``plain_lru`` is least-recently-used over the ids of the trace, without an engine's rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.simulator.jit import compiled

Array = npt.NDArray[Any]

# Places in the totals that ``serial_pool`` returns: blocks that got a hash, blocks that lost it.
STORED, REMOVED = range(2)

_UNINDEXED = -2  # hash of a generated block: cached, but no prompt of the trace asks for it


@compiled
def serial_pool(
    ids: Array, offsets: Array, prompt: Array, output: Array, num_ids: int, num_blocks: int, block_size: int,
    append_all: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Serve the requests one at a time. ``append_all``: free queue of vLLM 0.12, which has no head inserts.

    Returns the blocks hit by each request (-1: it can never fit and was left out) and the totals.
    """
    null, tail = 0, num_blocks
    after = np.empty(num_blocks + 1, np.int32)
    before = np.empty(num_blocks + 1, np.int32)
    for block in range(num_blocks):
        after[block] = block + 1
        before[block + 1] = block
    after[tail] = null
    before[null] = tail
    hash_of = np.full(num_blocks, -1, np.int32)
    # Blocks that hold one id, the one stored first at the front.
    first = np.full(num_ids, -1, np.int32)
    copy_after = np.full(num_blocks, -1, np.int32)
    held = np.empty(num_blocks, np.int32)
    hits = np.zeros(len(prompt), np.int32)
    totals = np.zeros(2, np.int64)
    for request in range(len(prompt)):
        start = offsets[request]
        length = prompt[request]
        # The last generated token never gets its key and value computed.
        tokens = length + max(output[request], 1) - 1
        slots = (tokens + block_size - 1) // block_size
        if slots > num_blocks - 1:
            hits[request] = -1
            continue
        limit = (length - 1) // block_size
        hit = 0
        while hit < limit:
            block = first[ids[start + hit]]
            if block < 0:
                break
            held[hit] = block
            hit += 1
        for index in range(hit):
            block = held[index]
            left, right = before[block], after[block]
            after[left] = right
            before[right] = left
        hits[request] = hit
        for index in range(hit, slots):
            block = after[null]
            right = after[block]
            after[null] = right
            before[right] = null
            held[index] = block
            old = hash_of[block]
            if old != -1:
                totals[REMOVED] += 1
                if old >= 0:
                    if first[old] == block:
                        first[old] = copy_after[block]
                    else:
                        walk = first[old]
                        while copy_after[walk] != block:
                            walk = copy_after[walk]
                        copy_after[walk] = copy_after[block]
                    copy_after[block] = -1
                hash_of[block] = -1
        full = length // block_size
        hashed = tokens // block_size
        for index in range(hit, full):
            block = held[index]
            key = ids[start + index]
            hash_of[block] = key
            walk = first[key]
            if walk < 0:
                first[key] = block
            else:
                while copy_after[walk] >= 0:
                    walk = copy_after[walk]
                copy_after[walk] = block
        for index in range(max(full, hit), hashed):
            hash_of[held[index]] = _UNINDEXED
        totals[STORED] += hashed - hit
        # The last block is freed first; without a hash it goes to the head of the queue.
        top = slots
        if slots > hashed:
            block = held[slots - 1]
            if append_all:
                left, right = before[tail], tail
            else:
                left, right = null, after[null]
            after[left] = block
            before[block] = left
            after[block] = right
            before[right] = block
            top = slots - 1
        left = before[tail]
        for index in range(top - 1, -1, -1):
            block = held[index]
            after[left] = block
            before[block] = left
            left = block
        after[left] = tail
        before[tail] = left
    return hits, totals


@compiled
def plain_lru(ids: Array, offsets: Array, num_ids: int, capacity: int) -> tuple[Array, int]:
    """Match the leading resident ids of each request, then touch or insert all its ids in order.

    Returns the ids hit by each request and the number evicted.
    """
    oldest, newest = num_ids, num_ids + 1
    after = np.full(num_ids + 2, -1, np.int32)
    before = np.full(num_ids + 2, -1, np.int32)
    after[oldest] = newest
    before[newest] = oldest
    hits = np.zeros(len(offsets) - 1, np.int32)
    used = 0
    evicted = 0
    for request in range(len(offsets) - 1):
        start, stop = offsets[request], offsets[request + 1]
        at = start
        while at < stop and after[ids[at]] >= 0:
            at += 1
        hits[request] = at - start
        for at in range(start, stop):
            key = ids[at]
            if after[key] >= 0:
                left, right = before[key], after[key]
                after[left] = right
                before[right] = left
            elif used < capacity:
                used += 1
            else:
                victim = after[oldest]
                right = after[victim]
                after[oldest] = right
                before[right] = oldest
                after[victim] = -1
                evicted += 1
            left = before[newest]
            after[left] = key
            before[key] = left
            after[key] = newest
            before[newest] = key
    return hits, evicted
