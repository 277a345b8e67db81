"""Keeps protected cached blocks at the far end of a pool's eviction queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcatch.policy.protect import Protection


class Keeper:
    """Moves protected free blocks to the tail of ``pool.free_block_queue`` before evictions reach them.

    Costs nothing in most steps: after a move, as many blocks as stand in front can be taken before the next.
    The pool is vLLM's ``BlockPool`` or the simulator's: ``blocks`` with ``ref_cnt`` and ``block_hash``, and a
    ``free_block_queue`` with ``remove``, ``append`` and ``num_free_blocks``.
    """

    def __init__(
        self, pool: Any, block_sizes: Sequence[int], protection: Protection, token_budget: int
    ) -> None:
        self._pool = pool
        self._sizes = tuple(block_sizes)
        self._protection = protection
        self._per_step = sum(-(-token_budget // size) for size in self._sizes)

    def before_step(self, running: int) -> None:
        """Make sure that what a step with so many running requests may take stands in front of every protected block."""
        protection = self._protection
        if not len(protection) or protection.front >= self._per_step + running * len(self._sizes):
            return
        blocks, queue = self._pool.blocks, self._pool.free_block_queue
        ids = protection.alive(lambda block_id, content: blocks[block_id].block_hash == content)
        idle = [blocks[block_id] for block_id in ids if blocks[block_id].ref_cnt == 0]
        for block in idle:
            queue.remove(block)
            queue.append(block)
        protection.front = int(queue.num_free_blocks) - len(idle)

    def after_step(self, tokens: int, requests: int) -> None:
        """The step computed so many tokens of so many requests: at most these blocks were taken from the front."""
        # Tokens that begin in the middle of a block reach one block further; a draft's look-ahead one more.
        self._protection.front -= sum(-(-tokens // size) + 2 * requests for size in self._sizes)

    def admitted(self, tenant: str | None, hits: Iterable[Sequence[Any]]) -> None:
        """A request found these blocks of each KV group in the cache; None: they prove nothing for a tenant."""
        for group in hits:
            found = [(b.block_id, b.block_hash) for b in group if not b.is_null and b.block_hash is not None]
            self._protection.front -= len(found)
            if tenant is not None:
                self._protection.hit(tenant, found)
