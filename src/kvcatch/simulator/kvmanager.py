"""Prefix lookup and block allocation of the embedded engine (vLLM 0.32, ``KVCacheManager``): one group of full attention."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from kvcatch.simulator.blockpool import Block, BlockPool
from kvcatch.simulator.requests import Request


class GroupManager:
    """Blocks held by each request in one KV group (full attention)."""

    def __init__(self, block_pool: BlockPool, block_size: int) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        self.req_to_blocks: defaultdict[str, list[Block]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}


class Coordinator:
    """Holder of the group managers; one here."""

    def __init__(self, manager: GroupManager) -> None:
        self.single_type_managers = (manager,)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[list[Block]], int]:
        """Cached blocks of the longest prefix of at most so many tokens, per group, and their tokens."""
        (manager,) = self.single_type_managers
        hit: list[Block] = []
        for block_hash in itertools.islice(block_hashes, max_cache_hit_length // manager.block_size):
            block = manager.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hit.append(block)
        return (hit,), len(hit) * manager.block_size

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: tuple[Sequence[Block]]
    ) -> int:
        """Blocks out of the free queue for a request to hold ``num_tokens`` tokens, its idle hits included."""
        (manager,), (hit,) = self.single_type_managers, new_computed_blocks
        have = len(manager.req_to_blocks.get(request_id, ())) + len(hit)
        return max(_ceil(num_tokens, manager.block_size) - have, 0) + sum(block.ref_cnt == 0 for block in hit)


class KVCacheManager:
    """Looks up prefixes and allocates blocks for requests (vLLM 0.32, ``KVCacheManager``)."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool, watermark: float) -> None:
        self.block_pool = BlockPool(num_blocks, enable_caching)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.manager = GroupManager(self.block_pool, block_size)
        self.coordinator = Coordinator(self.manager)
        self.watermark_blocks = int(watermark * num_blocks)

    def get_computed_blocks(self, request: Request) -> list[Block]:
        """The longest cached prefix that leaves at least the last token to compute."""
        if not self.enable_caching:
            return []
        (hit,), _ = self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return hit

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Sequence[Block] = (),
        *,
        admission: bool,
        busy: bool = False,
    ) -> list[Block] | None:
        """Blocks for ``num_new_tokens`` more tokens, or None when they do not fit.

        At admission the whole sequence must fit now, plus the watermark while other requests run.
        """
        ask = self.coordinator.get_num_blocks_to_allocate
        computed = request.num_computed_tokens + len(hit) * self.block_size
        reserve = self.watermark_blocks if admission and busy else 0
        free = self.block_pool.get_num_free_blocks()
        if admission and ask(request.request_id, request.num_tokens, (hit,)) + reserve > free:
            return None
        needed = ask(request.request_id, computed + num_new_tokens, (hit,))
        if needed + reserve > free:
            return None
        needed -= sum(block.ref_cnt == 0 for block in hit)
        blocks = self.manager.req_to_blocks[request.request_id]
        if admission:
            if self.enable_caching:
                self.block_pool.touch(hit)
            blocks.extend(hit)
            self.manager.num_cached_block[request.request_id] = len(hit)
        new = self.block_pool.get_new_blocks(needed) if needed else []
        blocks.extend(new)
        self.cache_blocks(request, min(computed + num_new_tokens, request.num_tokens))
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of a request's first ``num_tokens`` tokens findable."""
        if not self.enable_caching:
            return
        start = self.manager.num_cached_block[request.request_id]
        full = num_tokens // self.block_size
        blocks = self.manager.req_to_blocks[request.request_id]
        for index in range(start, full):
            self.block_pool.cache_block(blocks[index], request.block_hashes[index])
        self.manager.num_cached_block[request.request_id] = max(start, full)

    def free(self, request: Request) -> None:
        """Give up a request's blocks, its last block first."""
        blocks = self.manager.req_to_blocks.pop(request.request_id, [])
        self.manager.num_cached_block.pop(request.request_id, None)
        self.block_pool.free_blocks(reversed(blocks))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of all blocks that a request holds, per group."""
        return ([block.block_id for block in self.manager.req_to_blocks[request_id]],)


def _ceil(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
