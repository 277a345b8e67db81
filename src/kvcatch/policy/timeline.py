"""Planned block demand of running requests per future step, kept up to date in O(changes).

    blocks
      N |--------------------------------------------- limit
        |      ____               reserved for the head
        |  ___/    |________.....................
        | /   running      |____
        +------------------------------------------> steps
         now            S = shadow step

In absolute steps the curve does not move while requests advance as planned, so a step in which nothing
starts, ends or stalls costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcatch.policy.blocks import BlockTable, IntArray

_GROW = 4096


@dataclass(slots=True)
class Plan:
    """What one request will hold: ``blocks(min(first + k, total))`` at step ``start + k``.

    It stays ``tail`` steps after it has reached ``total``. flat: it holds blocks(total) all the time (its
    speed is unknown, as with speculative decoding). credit: blocks per step somebody else already counts
    (shared prefix), aligned with the curve's slots.
    """

    start: int
    first: int
    total: int
    tail: int = 0
    flat: bool = False
    credit: IntArray | None = None

    @property
    def end(self) -> int:
        """The last step at which it holds blocks."""
        return self.start + max(0, self.total - self.first) + self.tail


class Timeline:
    """Sum of plans over absolute steps, ``width`` steps per slot.

    With width 1 the sum is exact; with more, each plan counts its largest value within the slot, so the
    sum is never too small.
    """

    def __init__(self, blocks: BlockTable, width: int = 1) -> None:
        self.blocks = blocks
        self.width = width
        self._base = 0
        self._sum = np.zeros(_GROW, dtype=np.int64)

    def curve(self, plan: Plan) -> IntArray:
        """Blocks per slot from the plan's first slot to its last. Do not write to it."""
        values = self.blocks.values
        top = min(plan.total, self.blocks.max_tokens)
        first = min(plan.first, top)
        offset = plan.start % self.width
        slots = (offset + plan.end - plan.start) // self.width + 1
        if plan.flat:
            curve = np.full(slots, values[top])
        elif self.width == 1:
            grown = values[first : top + 1]
            if slots == len(grown):
                curve = grown
            else:
                curve = np.empty(slots, dtype=np.int64)
                size = min(slots, len(grown))
                curve[:size] = grown[:size]
                curve[size:] = values[top]
        else:
            at = first - offset + self.width - 1 + np.arange(slots, dtype=np.int64) * self.width
            curve = values[np.minimum(at, top)]
        return curve if plan.credit is None else curve - plan.credit

    def add(self, plan: Plan, sign: int = 1) -> None:
        """Count a plan in (sign 1) or out again (sign -1)."""
        curve = self.curve(plan)
        low = plan.start // self.width - self._base
        if low < 0:
            curve, low = curve[-low:], 0
        high = low + len(curve)
        if high > len(self._sum):
            self._sum = np.concatenate([self._sum, np.zeros(high + _GROW - len(self._sum), dtype=np.int64)])
        if sign > 0:
            self._sum[low:high] += curve
        else:
            self._sum[low:high] -= curve

    def advance(self, step: int) -> None:
        """Forget slots before ``step``; called once per step, moves memory once per 4,096 slots."""
        passed = step // self.width - self._base
        if passed > _GROW:
            moved = np.zeros_like(self._sum)
            kept = self._sum[passed:]
            moved[: len(kept)] = kept
            self._sum = moved
            self._base += passed

    def at(self, step: int) -> int:
        """Planned blocks at ``step``."""
        slot = step // self.width - self._base
        return int(self._sum[slot]) if 0 <= slot < len(self._sum) else 0

    def peak_with(self, plan: Plan) -> int:
        """The most blocks in use while ``plan`` runs beside everything counted in."""
        curve = self.curve(plan)
        low = plan.start // self.width - self._base
        window = self._sum[low : low + len(curve)]
        together = int((window + curve[: len(window)]).max()) if len(window) else 0
        return together if len(window) == len(curve) else max(together, int(curve[len(window) :].max()))

    def shadow(self, plan: Plan, limit: int) -> int | None:
        """The first step >= plan.start at which the plan could start and never meet more than ``limit``.

        None when it does not fit even alone. Exact for a growing plan: from the last violation at slot x,
        every start that would still have grown too far by x is skipped.
        """
        curve = self.curve(plan)
        if int(curve.max()) > limit:
            return None
        low = plan.start // self.width - self._base
        room = limit - self._sum[low:]
        start = 0
        while True:
            window = room[start : start + len(curve)]
            late = np.flatnonzero(curve[: len(window)] > window)
            if len(late) == 0:
                return max(plan.start, (start + low + self._base) * self.width)
            x = start + int(late[-1])
            # At x the plan may have grown by at most `age` slots; -1: it may not have started by then.
            age = int(np.searchsorted(curve, room[x], side="right")) - 1
            start = x - age if age >= 0 else x + 1

    def first_below(self, step: int, blocks: int) -> int | None:
        """The first step from ``step`` on with at most ``blocks`` planned; None when that is negative."""
        if blocks < 0:
            return None
        low = max(0, step // self.width - self._base)
        free = self._sum[low:] <= blocks
        slot = int(np.argmax(free)) if free.any() else len(free)
        return max(step, (slot + low + self._base) * self.width)
