"""Requests one after the other on a pool that evicts the proven prefixes of chosen tenants last.

The order of eviction is made by the very functions that the scheduler plugin calls on vLLM's own pool
(``kvcatch.policy.keeper``, ``KVCATCH_PROTECT``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.policy.keeper import Keeper
from kvcatch.policy.protect import Protection
from kvcatch.simulator.blockpool import Block, BlockPool
from kvcatch.simulator.pool import REMOVED, STORED

Array = npt.NDArray[Any]
#: vLLM's smallest default of ``max_num_batched_tokens``; how a prompt is cut does not change what is evicted
TOKEN_BUDGET = 2048


def floored_pool(
    ids: Array, offsets: Array, prompt: Array, output: Array, tenants: Sequence[str], num_ids: int,
    num_blocks: int, block_size: int, floors: Mapping[str, float],
) -> tuple[Array, Array]:  # fmt: skip
    """Blocks hit by each request (-1: it can never fit and was left out) and the totals, as ``serial_pool`` gives them.

    Args:
        ids, offsets, num_ids: blocks of the prompts.
        prompt, output: tokens of each request.
        tenants: name of each request's tenant.
        num_blocks: of the pool, the null block included.
        block_size: tokens.
        floors: tenant -> share of the usable blocks, ``*`` for every other.
    """
    pool = BlockPool(num_blocks)
    keeper = Keeper(pool, [block_size], Protection(floors, num_blocks - 1), TOKEN_BUDGET)
    names = [number.to_bytes(4, "little") for number in range(num_ids)]
    hits = np.zeros(len(prompt), np.int32)
    for request, (length, made) in enumerate(zip(prompt.tolist(), output.tolist(), strict=True)):
        # The last generated token never gets its key and value computed.
        tokens = length + max(made, 1) - 1
        if -(-tokens // block_size) > num_blocks - 1:
            hits[request] = -1
            continue
        chain = [names[number] for number in ids[offsets[request] : offsets[request + 1]].tolist()]
        hits[request] = _serve(pool, keeper, chain, length, tokens, block_size, tenants[request])
    totals = np.zeros(2, np.int64)
    totals[STORED], totals[REMOVED] = pool.num_stored, pool.num_removed
    return hits, totals


def _serve(
    pool: BlockPool, keeper: Keeper, chain: Sequence[bytes], length: int, tokens: int, size: int, tenant: str
) -> int:
    """One request from its first step to its last; returns the blocks it hit."""
    keeper.before_step(0)
    held: list[Block] = []
    for name in chain[: (length - 1) // size]:
        block = pool.get_cached_block(name)
        if block is None:
            break
        held.append(block)
    hit = len(held)
    pool.touch(held)
    done = hit * size
    while done < tokens:
        # A prompt is computed in chunks, then one token a step: only those that begin a block take anything.
        step = min(TOKEN_BUDGET, length - done) if done < length else min(size - done % size, tokens - done)
        held += pool.get_new_blocks(-(-(done + step) // size) - len(held))
        if done == hit * size and hit:
            keeper.admitted(tenant, [held[:hit]])
        keeper.after_step(step, 1)
        for index in range(max(hit, done // size), (done + step) // size):
            # What is generated is cached as well, but no prompt of the trace asks for it.
            pool.cache_block(held[index], chain[index] if index < length // size else b"made")
        done += step
        keeper.before_step(1)
    pool.free_blocks(reversed(held))
    return hit
