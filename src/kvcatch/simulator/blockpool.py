"""The block pool of vLLM 0.32 in plain Python: the reference that the fast kernels are checked against.

Rules (``vllm/v1/core/block_pool.py``): block 0 is the null block; freed blocks without a hash go to the head
of the free queue and cached ones to its tail; taking a block evicts what it cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Block:
    """One KV block. ``block_hash`` is set while its content can serve a prefix hit."""

    __slots__ = ("block_hash", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None


class FreeQueue:
    """Doubly linked list of unreferenced blocks between two sentinels; the head is reused first."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.fake_free_list_head = Block(-1)
        self.fake_free_list_tail = Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0
        self.append_n(list(blocks))

    def popleft(self) -> Block:
        """Take the block that is next to be reused."""
        block = self.fake_free_list_head.next_free_block
        assert block is not None
        assert block is not self.fake_free_list_tail
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take one block out of the middle."""
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None
        assert after is not None
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Block) -> None:
        """Add one block at the tail: reused last."""
        self.append_n([block])

    def append_n(self, blocks: list[Block]) -> None:
        """Add at the tail: reused last."""
        before = self.fake_free_list_tail.prev_free_block
        assert before is not None
        self._insert_after(before, blocks)

    def prepend_n(self, blocks: list[Block]) -> None:
        """Add at the head: reused first, in the order given."""
        self._insert_after(self.fake_free_list_head, blocks)

    def _insert_after(self, before: Block, blocks: list[Block]) -> None:
        after = before.next_free_block
        assert after is not None
        for block in blocks:
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks += len(blocks)


class BlockPool:
    """All blocks, the queue of free ones, and the map from hash to cached blocks.

    Block 0 is the null block, so ``num_gpu_blocks - 1`` are usable. Two blocks may carry the same hash:
    the one stored first serves hits (vLLM 0.32, ``BlockHashToBlockMap.get_one_block``).
    """

    def __init__(self, num_gpu_blocks: int, enable_caching: bool = True) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.blocks = [Block(i) for i in range(num_gpu_blocks)]
        self.free_block_queue = FreeQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.cached: dict[bytes, dict[int, Block]] = {}
        self.num_stored = 0
        self.num_removed = 0

    def get_num_free_blocks(self) -> int:
        """Unreferenced blocks, cached ones included."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Referenced share of the usable blocks, 0 to 1."""
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        """The block that serves hits for this hash, or None."""
        copies = self.cached.get(block_hash)
        return next(iter(copies.values())) if copies else None

    def cache_block(self, block: Block, block_hash: bytes) -> None:
        """Give a full block its hash."""
        block.block_hash = block_hash
        self.cached.setdefault(block_hash, {})[block.block_id] = block
        self.num_stored += 1

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Take blocks from the head of the free queue; cached content in them is evicted."""
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"cannot take {num_blocks} blocks, {self.get_num_free_blocks()} are free")
        taken = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.block_hash is not None:
                copies = self.cached[block.block_hash]
                del copies[block.block_id]
                if not copies:
                    del self.cached[block.block_hash]
                block.block_hash = None
                self.num_removed += 1
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        """Reference blocks that were hit."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drop one reference each; unhashed blocks go to the head of the queue, cached ones to its tail."""
        plain: list[Block] = []
        cached: list[Block] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (plain if block.block_hash is None or not self.enable_caching else cached).append(block)
        self.free_block_queue.prepend_n(plain)
        self.free_block_queue.append_n(cached)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused while any block is referenced."""
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:
            return False
        for block in self.blocks:
            block.block_hash = None
        self.cached.clear()
        return True
