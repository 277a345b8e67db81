"""Keeps protected cached blocks at the far end of the engine's eviction queue."""

from __future__ import annotations

from typing import Any

from kvcatch.policy.protect import Protection


class Keeper:
    """Moves protected free blocks to the tail of ``BlockPool.free_block_queue`` before evictions reach them.

    Costs nothing in most steps: after a move, as many blocks as stand in front can be taken before the next.
    """

    def __init__(self, manager: Any, protection: Protection, token_budget: int) -> None:
        self._groups = list(manager.coordinator.single_type_managers)
        self._pool = manager.block_pool
        self._protection = protection
        self._per_step = sum(-(-token_budget // int(group.block_size)) for group in self._groups)

    def admitted(self, request_id: str, tenant: str, cached_tokens: int) -> None:
        """A new request found ``cached_tokens`` of its prompt in the cache."""
        for group in self._groups:
            blocks = group.req_to_blocks.get(request_id, ())[: cached_tokens // group.block_size]
            hits = [(b.block_id, b.block_hash) for b in blocks if not b.is_null and b.block_hash is not None]
            self._protection.front -= len(hits)
            self._protection.hit(tenant, hits)

    def before_step(self, running: int) -> None:
        """Make sure that what this step may allocate stands in front of every protected block."""
        most = self._per_step + running * len(self._groups)
        if not len(self._protection):
            return
        if self._protection.front < most:
            blocks, queue = self._pool.blocks, self._pool.free_block_queue
            ids = self._protection.alive(lambda block_id, content: blocks[block_id].block_hash == content)
            idle = [blocks[block_id] for block_id in ids if blocks[block_id].ref_cnt == 0]
            for block in idle:
                queue.remove(block)
                queue.append(block)
            self._protection.front = int(queue.num_free_blocks) - len(idle)
        self._protection.front -= most
