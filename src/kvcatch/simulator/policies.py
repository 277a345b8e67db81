"""Eviction orders other than the engine's, by a priority per cached id.

A cached id has one integer priority; the smallest is evicted first and the id that became evictable earlier
breaks ties. Every policy is a rule for that integer (``POLICIES``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.simulator.jit import compiled

Array = npt.NDArray[Any]

#: name -> what is evicted first
POLICIES = {
    "lru": "the least recently used block, as vLLM does",
    "lru-append": "as vLLM 0.12: like lru, blocks without content are not reused first",
    "floors": "blocks outside the floors of tenants, then the least recent, as the scheduler plugin does",
    "fifo": "the block that was stored first",
    "lfu": "the block used least often while cached, then the least recent",
    "length": "the block deepest in its prompt (Mooncake's LengthAwareCache), then the least recent",
    "priority": "blocks of unpinned tenants before those of pinned ones, then the least recent",
    "protect": "blocks beyond the protected prefix before those inside, then the least recent",
    "belady": "the block whose next use is farthest away: the bound, it knows the future",
}
#: name -> what makes an engine evict so; the others exist in the simulation only, as bounds
RUNNABLE = {
    "lru": "vLLM",
    "lru-append": "vLLM 0.12",
    "floors": "KVCatchScheduler with KVCATCH_PROTECT",
}
_FIFO, _LFU, _LENGTH, _PRIORITY, _PROTECT, _BELADY, _LRU = range(7)
_CODES = {
    "fifo": _FIFO, "lfu": _LFU, "length": _LENGTH, "priority": _PRIORITY, "protect": _PROTECT,
    "belady": _BELADY, "lru": _LRU,
}  # fmt: skip


def check_policy(name: str) -> str:
    """The name if it is known. Raises KVCatchError with the known ones otherwise."""
    if name not in POLICIES:
        raise KVCatchError(f"unknown policy {name!r}.", f"Known: {', '.join(POLICIES)}.")
    return name


def policy_hits(
    name: str,
    ids: Array,
    offsets: Array,
    num_ids: int,
    capacity: int,
    *,
    limit: Array,
    used: Array,
    keep: Array,
    room: Array,
    pinning: bool,
    rank: Array,
    protected: int,
) -> tuple[Array, int]:
    """Blocks hit by each request and blocks evicted under a policy.

    Args:
        name: one of ``POLICIES`` except the engine's own, which ``serial_pool`` simulates exactly.
        ids, offsets, num_ids: blocks of the prompts.
        capacity: usable blocks.
        limit: leading blocks of each request that may hit.
        used: leading blocks that are referenced and stored under their ids.
        keep: blocks of each request that stay cached, generated ones included.
        room: blocks that each request needs while it runs.
        pinning: blocks of the request that runs cannot be evicted and those that do not fit at all are left
            out (hits -1), as in an engine; False: ids are inserted one by one, evicting when full.
        rank: of each request's tenant, higher is kept longer (``priority``).
        protected: leading blocks of a prompt that are kept longer (``protect``).
    """
    code = _CODES[name]
    future = _next_use(ids, offsets, num_ids) if code == _BELADY else np.zeros(1, np.int32)
    return _run(
        code, ids, offsets, num_ids, capacity, limit, used, keep, room, pinning, rank, protected, future
    )


@compiled
def _next_use(ids: Array, offsets: Array, num_ids: int) -> Array:
    """For each reference the request that uses the id next; the number of requests when none does."""
    never = len(offsets) - 1
    upcoming = np.full(num_ids, never, np.int32)
    future = np.empty(len(ids), np.int32)
    for request in range(never - 1, -1, -1):
        for at in range(offsets[request], offsets[request + 1]):
            future[at] = upcoming[ids[at]]
            upcoming[ids[at]] = request
    return future


@compiled
def _push(keys: Array, ties: Array, names: Array, size: int, key: int, tie: int, name: int) -> int:
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if keys[up] < key or (keys[up] == key and ties[up] <= tie):
            break
        keys[at], ties[at], names[at] = keys[up], ties[up], names[up]
        at = up
    keys[at], ties[at], names[at] = key, tie, name
    return size + 1


@compiled
def _pop(keys: Array, ties: Array, names: Array, size: int) -> int:
    """Drop the smallest entry; returns the new size."""
    size -= 1
    key, tie, name = keys[size], ties[size], names[size]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        right = down + 1
        if right < size and (
            keys[right] < keys[down] or (keys[right] == keys[down] and ties[right] < ties[down])
        ):
            down = right
        if key < keys[down] or (key == keys[down] and tie <= ties[down]):
            break
        keys[at], ties[at], names[at] = keys[down], ties[down], names[down]
        at = down
    keys[at], ties[at], names[at] = key, tie, name
    return size


@compiled
def _run(
    code: int, ids: Array, offsets: Array, num_ids: int, capacity: int, limit: Array, used: Array, keep: Array,
    room: Array, pinning: bool, rank: Array, protected: int, future: Array,
) -> tuple[Array, int]:  # fmt: skip
    requests = len(offsets) - 1
    extra = 0
    for request in range(requests):
        extra += keep[request] - used[request]
    total = num_ids + extra  # generated blocks get ids of their own, used once
    stamp = np.zeros(total, np.int64)  # tie of the valid heap entry, 0: not cached, -1: cached and pinned
    weight = np.zeros(total, np.int64)  # insertion order, use count or rank, as the policy needs
    room_for = 2 * capacity + 1024
    keys = np.empty(room_for, np.int64)
    ties = np.empty(room_for, np.int64)
    names = np.empty(room_for, np.int32)
    size = 0
    cached = 0
    clock = 0
    evicted = 0
    generated = num_ids
    hits = np.zeros(requests, np.int32)
    for request in range(requests):
        start = offsets[request]
        if pinning and room[request] > capacity:
            hits[request] = -1
            continue
        at = 0
        while at < limit[request] and stamp[ids[start + at]] != 0:
            at += 1
        hits[request] = at
        prompt_blocks = used[request]
        spare = room[request] - keep[request] if pinning else 0
        if pinning:
            for place in range(prompt_blocks):
                if stamp[ids[start + place]] > 0:
                    stamp[ids[start + place]] = -1
        for step in range(keep[request]):
            if step < prompt_blocks:
                name = ids[start + step]
            else:
                name = generated + step - prompt_blocks
            known = stamp[name] != 0
            if not known:
                while cached + 1 + spare > capacity:
                    entry = names[0]
                    valid = stamp[entry] == ties[0]
                    size = _pop(keys, ties, names, size)
                    if valid:
                        stamp[entry] = 0
                        cached -= 1
                        evicted += 1
                cached += 1
                stamp[name] = -1
            if code == _FIFO:
                if not known:
                    weight[name] = clock
            elif code == _LFU:
                weight[name] = weight[name] + 1 if known else 1
            elif code == _PRIORITY:
                weight[name] = max(weight[name], rank[request]) if known else rank[request]
            if not pinning:
                clock += 1
                key = _key(
                    code, weight[name], step, protected, future[start + step] if code == _BELADY else 0
                )
                stamp[name] = clock
                size = _push(keys, ties, names, size, key, clock, name)
                size = _compact(keys, ties, names, size, stamp)
            elif not known and code == _FIFO:
                clock += 1
        if pinning:
            # A request that ends frees its last block first.
            while cached + spare > capacity:
                entry = names[0]
                valid = stamp[entry] == ties[0]
                size = _pop(keys, ties, names, size)
                if valid:
                    stamp[entry] = 0
                    cached -= 1
                    evicted += 1
            for step in range(keep[request] - 1, -1, -1):
                if step < prompt_blocks:
                    name = ids[start + step]
                    ahead = future[start + step] if code == _BELADY else 0
                else:
                    name = generated + step - prompt_blocks
                    ahead = requests
                clock += 1
                stamp[name] = clock
                key = _key(code, weight[name], step, protected, ahead)
                size = _push(keys, ties, names, size, key, clock, name)
                size = _compact(keys, ties, names, size, stamp)
        generated += keep[request] - prompt_blocks
    return hits, evicted


@compiled
def _key(code: int, weight: int, place: int, protected: int, future: int) -> int:
    if code == _LENGTH:
        return -place
    if code == _PROTECT:
        return 1 if place < protected else 0
    if code == _BELADY:
        return -(future << 24) - place
    if code == _LRU:
        return 0
    return weight


@compiled
def _compact(keys: Array, ties: Array, names: Array, size: int, stamp: Array) -> int:
    """Drop outdated entries once the heap is full."""
    if size < len(keys) - 1:
        return size
    count = 0
    for at in range(size):
        if stamp[names[at]] == ties[at]:
            key, tie, name = keys[at], ties[at], names[at]
            count = _push(keys, ties, names, count, key, tie, name)
    return count
