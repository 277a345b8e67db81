"""Exact reuse distances of a workload's blocks: the room that would have kept each of them.

The stack distance of least-recently-used caching (Mattson et al., "Evaluation techniques for storage hierarchies",
IBM Systems Journal 1970), with the rules of vLLM's block pool: a request frees its last block first, so its head
stays longest. Requests are taken one after the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcatch.workload import Workload

Ints = npt.NDArray[np.int64]

#: room for a block that no earlier request had
NEVER = np.iinfo(np.int64).max


def needed_room(workload: Workload, block_size: int, order: Ints | None = None) -> tuple[Ints, Ints]:
    """Usable blocks from which on each block of each prompt would have been a hit.

    Args:
        workload: the requests.
        block_size: tokens a block.
        order: permutation in which the requests are served; None: as they stand.

    Returns:
        (room, offsets): ``room[offsets[i]:offsets[i + 1]]`` belongs to the full blocks of request i of the
        workload; NEVER where no earlier request in that order had the block.
    """
    view = workload.blocks(block_size)
    prompt = workload.prompt_tokens
    held = prompt + np.maximum(workload.output_tokens, 1) - 1
    full = prompt // block_size
    keep = held // block_size
    take = -(-held // block_size)
    floor = int(take.max(initial=1))
    offsets = np.zeros(len(workload) + 1, np.int64)
    np.cumsum(full, out=offsets[1:])
    room = np.full(int(offsets[-1]), NEVER, np.int64)
    served = np.arange(len(workload)) if order is None else order
    count = len(served)
    owner = [-1] * view.num_ids  # place of the request that used the id last
    tree = [0] * (count + 1)  # Fenwick tree over places: blocks that each request is still the last user of
    live = partial_before = 0
    ids_of = [view.ids[view.offsets[row] : view.offsets[row] + full[row]].tolist() for row in served]
    for place in range(count):
        row = int(served[place])
        ids = ids_of[place]
        end, at, deepest, fresh = len(ids), 0, count, bool(keep[row] > len(ids))
        while at < end:
            who = owner[ids[at]]
            if who < 0:
                fresh = True
                break
            stop = at + 1
            while stop < end and owner[ids[stop]] == who:
                stop += 1
            newer, walk = live + at, who + 1
            while walk > 0:
                newer -= tree[walk]
                walk -= walk & -walk
            spare = 1 if who < partial_before else 0
            first = int(offsets[row]) + at
            room[first : first + stop - at] = np.maximum(
                floor, newer + spare + np.arange(1, stop - at + 1, dtype=np.int64)
            )
            live -= stop - at
            walk = who + 1
            while walk <= count:
                tree[walk] -= stop - at
                walk += walk & -walk
            deepest, at = who, stop
        for identity in ids:
            owner[identity] = place
        kept = int(keep[row])
        live += kept
        walk = place + 1
        while walk <= count:
            tree[walk] += kept
            walk += walk & -walk
        if take[row] > keep[row]:
            partial_before = place
        elif fresh:
            partial_before = 0
        else:
            partial_before = min(partial_before, deepest + 1)
    return room, offsets


def hits_at(workload: Workload, block_size: int, usable: int | None, order: Ints | None = None) -> Ints:
    """Tokens hit by each request with so many usable blocks (None: no limit), requests one after the other."""
    room, offsets = needed_room(workload, block_size, order)
    hit = np.zeros(len(workload), np.int64)
    limit = NEVER - 1 if usable is None else usable
    reusable = (workload.prompt_tokens - 1) // block_size
    for row in range(len(workload)):
        mine = room[offsets[row] : offsets[row] + reusable[row]]
        missed = np.flatnonzero(mine > limit)
        hit[row] = int(missed[0]) if len(missed) else len(mine)
    return hit * block_size


def grouped(workload: Workload, block_size: int, window_seconds: float) -> Ints:
    """The order in which requests of one window that share a prefix stand together, else as they arrive."""
    view = workload.blocks(block_size)
    window = (
        np.floor(workload.arrival_seconds / window_seconds)
        if window_seconds > 0
        else np.arange(len(workload))
    )
    keys = [
        (window[row], tuple(view.ids[view.offsets[row] : view.offsets[row + 1]].tolist()), row)
        for row in range(len(workload))
    ]
    return np.array([key[2] for key in sorted(keys)], np.int64)
