"""What the block pool alone knows: which free blocks still hold a prefix, and which lose it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kvcatch.capture.hooks import Hooks
from kvcatch.store import layout as L

_RESET = (L.RESET | 1 << 16).to_bytes(4, "little")


class _NoCode:
    co_names = ()


class PoolWatch:
    """Counts the cached blocks of one pool in O(1) a call, from hooks on the pool."""

    def __init__(
        self, pool: Any, out: bytearray, before: Callable[[], None], fail: Callable[[], None]
    ) -> None:
        """out: where a cleared cache is recorded; before: called before that; fail: called in an except block when a hook of ours raised."""
        self.pool = pool
        self.out = out
        self.before = before
        self.fail = fail
        self.caching = bool(getattr(pool, "enable_caching", True))
        self.active = False
        self.cached = 0  # free blocks with a hash
        self.evicted: list[int] = []  # blocks that lost their hash since the list was last taken
        self.freed = False  # blocks came back since this was last set to False
        self.recount = False
        # The field behind the property, where there is one: read without a call of Python code.
        known = pool.blocks[0]
        self.hash_of = attrgetter("_block_hash" if hasattr(known, "_block_hash") else "block_hash")
        # Since partial blocks go to the front of the free queue, hashed blocks are taken only after them all.
        self.partial_first = "prepend_n" in getattr(pool.free_blocks, "__code__", _NoCode).co_names

    def attach(self, hooks: Hooks) -> None:
        """Put the hooks on the pool and count once."""
        pool = self.pool
        if self.caching:
            hooks.add(pool, "get_new_blocks", self._get_new_blocks)
            hooks.add(pool, "touch", self._touch)
            for name in ("evict_blocks", "unpin_blocks"):
                if hasattr(pool, name):
                    hooks.add(pool, name, self._rare)
        hooks.add(pool, "free_blocks", self._free_blocks)
        hooks.add(pool, "reset_prefix_cache", self._reset_prefix_cache)
        self.cached = self._count() if self.caching else 0
        self.active = True

    def detach(self) -> None:
        """Nothing more to do, even for a hook that someone else wrapped and goes on calling."""
        self.active = False
        self.cached = 0

    def settle(self) -> int:
        """The cached blocks, counted anew after a call that the hooks cannot follow."""
        if self.recount:
            self.recount = False
            self.cached = self._count()
        return self.cached

    def _count(self) -> int:
        return len(
            [1 for b in self.pool.blocks if b.block_hash is not None and b.ref_cnt == 0 and not b.is_null]
        )

    def _get_new_blocks(self, original: Any) -> Any:
        queue, hash_of = self.pool.free_block_queue, self.hash_of

        def get_new_blocks(num_blocks: int, *args: Any) -> Any:
            try:
                if self.cached:
                    block = queue.fake_free_list_head.next_free_block
                    if num_blocks == 1:
                        # What nearly every step of a decoding request asks for: nothing but this one look.
                        if hash_of(block) is not None:
                            self.evicted.append(block.block_id)
                            self.cached -= 1
                    elif not (self.partial_first and queue.num_free_blocks - self.cached >= num_blocks):
                        self._taken(block, num_blocks)
            except Exception:  # noqa: BLE001 (nothing of ours may reach the engine)
                self.fail()
            return original(num_blocks, *args)

        return get_new_blocks

    def _taken(self, block: Any, num_blocks: int) -> None:
        """These blocks from the head of the free queue are about to be used anew: those with a hash lose it."""
        for _ in range(num_blocks):
            if block is None:
                break
            if self.hash_of(block) is not None:
                self.evicted.append(block.block_id)
                self.cached -= 1
            block = block.next_free_block

    def _touch(self, original: Any) -> Any:
        queue = self.pool.free_block_queue

        def touch(blocks: Any, *args: Any, **kwargs: Any) -> Any:
            # Only blocks that were free and cached leave the queue here: the difference is exact and O(1).
            before = queue.num_free_blocks
            result = original(blocks, *args, **kwargs)
            self.cached -= before - queue.num_free_blocks
            return result

        return touch

    def _free_blocks(self, original: Any) -> Any:
        queue, hash_of = self.pool.free_block_queue, self.hash_of
        caching, split = self.caching, self.partial_first

        def free_blocks(ordered_blocks: Any, *args: Any, **kwargs: Any) -> Any:
            if caching and not split:
                ordered_blocks = list(ordered_blocks)
            first, free = queue.fake_free_list_head.next_free_block, queue.num_free_blocks
            result = original(ordered_blocks, *args, **kwargs)
            if self.active:
                try:
                    self.freed = True
                    if caching and split:
                        # What has no hash went to the front of the queue, the rest to its end.
                        block, plain = queue.fake_free_list_head.next_free_block, 0
                        while block is not first and hash_of(block) is None:
                            plain += 1
                            block = block.next_free_block
                        self.cached += queue.num_free_blocks - free - plain
                    elif caching:  # the null block never has a hash
                        hashes = zip(map(hash_of, ordered_blocks), ordered_blocks, strict=True)
                        self.cached += len([1 for one, b in hashes if one is not None and b.ref_cnt == 0])
                except Exception:  # noqa: BLE001 (nothing of ours may reach the engine)
                    self.fail()
            return result

        return free_blocks

    def _reset_prefix_cache(self, original: Any) -> Any:
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            self.before()
            result = original(*args, **kwargs)
            if result and self.active:
                self.cached = 0
                self.out += _RESET
            return result

        return reset_prefix_cache

    def _rare(self, original: Any) -> Any:
        def rare(*args: Any, **kwargs: Any) -> Any:
            self.recount = True
            self.partial_first = False
            return original(*args, **kwargs)

        return rare
