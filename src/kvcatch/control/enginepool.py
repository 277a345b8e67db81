"""The engine's own block arithmetic and block sharing, read once per admission, never per step."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np

from kvcatch.policy.blocks import BlockTable, IntArray
from kvcatch.policy.timeline import Plan


def block_table(manager: Any, max_tokens: int, lookahead: int = 0) -> BlockTable:
    """Blocks a fresh request of n tokens needs, asked from the engine for every group at once.

    manager: vLLM's ``KVCacheManager``. Sliding-window and chunked groups answer with their admission cap,
    Mamba groups with their states: the numbers ``allocate_slots`` itself compares with the free blocks.
    """
    coordinator = manager.coordinator
    ask = coordinator.get_num_blocks_to_allocate
    known = inspect.signature(ask).parameters
    empty = tuple(() for _ in coordinator.single_type_managers)
    fixed = {
        "request_id": "kvcatch-block-table",
        "new_computed_blocks": empty,
        "num_encoder_tokens": 0,
        "total_computed_tokens": 0,
        "num_local_computed_tokens": 0,
        "apply_admission_cap": True,
    }
    arguments = {name: value for name, value in fixed.items() if name in known}

    def count(tokens: int) -> int:
        tokens += lookahead
        last = {"num_tokens": tokens, "num_tokens_main_model": tokens, "prefill_end": tokens}
        return int(ask(**arguments, **{name: value for name, value in last.items() if name in known}))

    sizes = [int(group.block_size) for group in coordinator.single_type_managers]
    return BlockTable.sampled(count, 1 if lookahead else math.gcd(*sizes), max_tokens)


class Sharing:
    """Until which step running requests hold each block by plan, so that shared prefixes count once.

    Works for one KV group with prefix caching; otherwise every request is counted in full (safe).
    """

    def __init__(self, manager: Any) -> None:
        groups = manager.coordinator.single_type_managers
        self._manager = manager
        self.on = bool(getattr(manager, "enable_caching", False)) and len(groups) == 1
        self._held = groups[0].req_to_blocks
        self._until: IntArray = np.zeros(manager.block_pool.num_gpu_blocks if self.on else 0, dtype=np.int64)
        self._marks: dict[str, tuple[IntArray, int]] = {}

    def hits(self, request: Any) -> IntArray | None:
        """Last planned steps of the blocks in use that a waiting request would share; None without any."""
        if not self.on or request.num_computed_tokens or getattr(request, "skip_reading_prefix_cache", False):
            return None
        found = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        ids = [block.block_id for block in found[0][0] if block.ref_cnt > 0 and not block.is_null]
        return self._until[ids] if ids else None

    def shared(self, request_id: str) -> IntArray | None:
        """The same for a request that has just got its blocks."""
        if not self.on:
            return None
        ids = [block.block_id for block in self._held.get(request_id, ()) if block.ref_cnt > 1]
        return self._until[ids] if ids else None

    def mark(self, request_id: str, plan: Plan) -> None:
        """``request_id`` holds its blocks as planned: others may lean on that."""
        if not self.on:
            return
        blocks = self._held.get(request_id, ())
        ids = np.fromiter((block.block_id for block in blocks), dtype=np.int64, count=len(blocks))
        alone = np.fromiter((block.ref_cnt == 1 for block in blocks), dtype=bool, count=len(blocks))
        self._until[ids] = np.where(alone, plan.end, np.maximum(self._until[ids], plan.end))
        self._marks[request_id] = (ids, plan.end)

    def leave(self, request_id: str) -> int:
        """The request is gone: nobody may lean on its plan any more. Returns its blocks that others still hold."""
        mark = self._marks.pop(request_id, None)
        if mark is None:
            return 0
        ids, end = mark
        over = self._until[ids] <= end
        self._until[ids[over]] = 0
        return len(ids) - int(np.count_nonzero(over))
