"""What the block pool alone knows: which free blocks still hold a prefix, and which lose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcatch.capture.hooks import Hooks
from kvcatch.store import layout as L

_RESET = (L.RESET | 1 << 16).to_bytes(4, "little")


class _NoCode:
    co_names = ()


class PoolWatch:
    """Counts the cached blocks of one pool in O(1) a call, from hooks on the pool."""

    def __init__(self, pool: Any, out: bytearray, fail: Callable[[], None]) -> None:
        """out: where a cleared cache is recorded; fail: called in an except block when a hook of ours raised."""
        self.pool = pool
        self.out = out
        self.fail = fail
        self.caching = bool(getattr(pool, "enable_caching", True))
        self.active = False
        self.cached = 0  # free blocks with a hash
        self.evicted: list[int] = []  # blocks that lost their hash since the list was last taken
        self.freed = False  # blocks came back since this was last set to False
        self.recount = False
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
        queue = self.pool.free_block_queue

        def get_new_blocks(num_blocks: int, *args: Any) -> Any:
            cached = self.cached
            if cached and not (self.partial_first and queue.num_free_blocks - cached >= num_blocks):
                try:
                    self._taken(queue.fake_free_list_head.next_free_block, num_blocks)
                except Exception:  # noqa: BLE001 (nothing of ours may reach the engine)
                    self.fail()
            return original(num_blocks, *args)

        return get_new_blocks

    def _taken(self, block: Any, num_blocks: int) -> None:
        """These blocks from the head of the free queue are about to be used anew: those with a hash lose it."""
        for _ in range(num_blocks if self.active else 0):
            if block is None:
                break
            if block.block_hash is not None:
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
        caching = self.caching

        def free_blocks(ordered_blocks: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = ordered_blocks if type(ordered_blocks) is list else list(ordered_blocks)
            result = original(blocks, *args, **kwargs)
            if self.active:
                try:
                    self.freed = True
                    if caching:
                        self.cached += len(
                            [
                                1
                                for b in blocks
                                if b.ref_cnt == 0 and b.block_hash is not None and not b.is_null
                            ]
                        )
                except Exception:  # noqa: BLE001 (nothing of ours may reach the engine)
                    self.fail()
            return result

        return free_blocks

    def _reset_prefix_cache(self, original: Any) -> Any:
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
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
