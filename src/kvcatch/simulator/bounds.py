"""What could be hit at most: by another policy, by any order of the prompts, by content alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.results import Result
from kvcatch.simulator.whatif import default_block_size, shape, simulate
from kvcatch.workload import BlockView, Workload

Array = npt.NDArray[Any]


class Bound(Result, frozen=True):
    """One rung of the ladder; None where the trace cannot tell."""

    name: str
    meaning: str
    hit_blocks: int | None
    block_hit_ratio: float | None
    hit_tokens: int | None


def ladder(
    workload: Workload,
    *,
    num_blocks: int | None,
    block_size: int | None = None,
    engine_rules: bool = True,
) -> tuple[Bound, ...]:
    """Hits from today's policy up to what identical content would allow; each rung is at least the one before.

    The middle rungs: Belady's rule evicts the block whose next use is farthest, which is optimal, and because a
    prefix is never used later than what follows it, it never strands a block without its prefix. In the best
    order of the prompts every distinct block is computed once, whatever the pool holds.
    """
    size = block_size or default_block_size(workload)
    view = workload.blocks(size)
    today, best = (
        simulate(
            workload,
            num_blocks=num_blocks,
            block_size=size,
            policy=policy,
            engine_rules=engine_rules,
            view=view,
        )
        for policy in ("lru", "belady")
    )
    blocks = shape(workload, view, engine_rules)
    order = _seen_before(view.ids, view.offsets, blocks.limit, blocks.used)
    content = None
    if workload.content_ids is not None and size == workload.grain:
        content = _seen_before(workload.content_ids, view.offsets, blocks.limit, blocks.used)
    rows = (
        ("lru", "today's policy", today.hit_blocks),
        ("strict_prefix", "any eviction policy at this size", best.hit_blocks),
        ("any_order", "any order of the prompts, any size", order),
        ("content", "equal content at any place", content),
    )
    return tuple(_bound(name, meaning, hit, view) for name, meaning, hit in rows)


def _bound(name: str, meaning: str, hit: int | None, view: BlockView) -> Bound:
    return Bound(
        name=name,
        meaning=meaning,
        hit_blocks=hit,
        block_hit_ratio=None if hit is None or not len(view.ids) else hit / len(view.ids),
        hit_tokens=None if hit is None else hit * view.block_size,
    )


def _seen_before(ids: Array, offsets: Array, limit: Array, used: Array) -> int:
    """References that may hit, less one for each id that no other reference can bring in first."""
    place = np.arange(len(ids)) - np.repeat(offsets[:-1], np.diff(offsets))
    may_hit = place < np.repeat(limit, np.diff(offsets))
    stored = place < np.repeat(used, np.diff(offsets))
    size = int(ids.max(initial=-1)) + 1
    asked = np.bincount(ids[may_hit], minlength=size)
    brought = np.bincount(ids[stored], minlength=size)
    return int(np.minimum(asked, np.maximum(brought - 1, 0)).sum())
