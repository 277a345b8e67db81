"""Peak future block demand and the shadow step: the reference definitions, written for reading.

``peak`` is past-future scheduling (LightLLM, arXiv 2507.10150) counted in blocks; ``shadow`` is the
reservation of EASY backfilling (Lifka 1995; Mu'alem and Feitelson 2001) on blocks instead of processors.
``timeline`` answers the same questions fast enough for an engine step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcatch.policy.blocks import BlockTable


class Demand(NamedTuple):
    """One request: tokens held now, tokens it will hold at most, and steps until it leaves.

    ``steps`` may exceed ``total - held``: a prefill in progress or a pipeline holds blocks without growing.
    """

    held: int
    total: int
    steps: int


def usage(demands: Sequence[Demand], blocks: BlockTable, after: int) -> int:
    """Blocks held ``after`` steps from now if every request advances one token per step."""
    return sum(blocks[min(d.held + after, d.total)] for d in demands if d.steps >= after)


def peak(demands: Sequence[Demand], blocks: BlockTable) -> int:
    """The most blocks these requests will ever hold together.

    max over k of the sum over requests that stay at least as long as request k of
    blocks(min(held + steps_k, total)): usage only grows between two departures, so it is largest at one.
    """
    return max((usage(demands, blocks, d.steps) for d in demands), default=0)


class Shadow(NamedTuple):
    """When a blocked request can start at the latest, and what is spare beside it at that moment."""

    steps: int
    extra_blocks: int


def shadow(running: Sequence[Demand], head: Demand, blocks: BlockTable, limit: int) -> Shadow | None:
    """The first step at which ``head`` could start and never meet more than ``limit`` blocks in use.

    None when it does not fit even alone. ``extra_blocks``: what others may hold for good from that step on
    without touching the head's peak.
    """
    if blocks[head.total] > limit:
        return None
    last = max((d.steps for d in running), default=-1) + 1
    for start in range(last + 1):
        worst = max(
            usage(running, blocks, start + after) + blocks[min(head.held + after, head.total)]
            for after in range(head.steps + 1)
        )
        if worst <= limit:
            return Shadow(start, limit - worst)
    raise AssertionError("an empty pool takes a request that fits alone")
