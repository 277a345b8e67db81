"""Future block demand in 64 slots: curves of requests add up, and no slot says less than what is really held.

    slot      0        1        2   ...   31 | 32 ...           63
    steps  0..15   16..31   32..47      ..511 | each 1.3 x longer, to the longest context

A slot counts everybody who may still be there at its first step, at the size reached after its last one and
``MARGIN`` steps of progress more. So a curve stays true while each of its requests has advanced by 0 to ``MARGIN``
steps, whatever the others did: gateways need not announce every token.
"""

from __future__ import annotations

import numpy as np

from kvcatch.policy.blocks import BlockTable, IntArray

SLOTS = 64
#: steps of progress that a curve covers
MARGIN = 32
_FINE, _WIDTH, _LONGEST = 32, 16, 1 << 21


def _edges() -> IntArray:
    fine = np.arange(_FINE, dtype=np.int64) * _WIDTH
    ratio = (_LONGEST / (_FINE * _WIDTH)) ** (1 / (SLOTS - _FINE))
    coarse = np.round(_FINE * _WIDTH * ratio ** np.arange(SLOTS - _FINE + 1)).astype(np.int64)
    return np.concatenate([fine, coarse])


#: first step of every slot, and the end of the last. Part of what gateways of all versions agree on.
EDGES = _edges()


def demand_curve(
    held: IntArray, total: IntArray, steps: IntArray, weight: IntArray, blocks: BlockTable
) -> IntArray:
    """Blocks per slot of requests that hold ``held`` tokens now, ``total`` at most, and leave after ``steps``."""
    values, top = blocks.values, blocks.max_tokens
    grown = held[None, :] + (EDGES[1:, None] - 1 + MARGIN)
    # The last slot has no end: what lasts longer counts at full size.
    grown[-1] = total
    at = np.minimum(np.minimum(grown, total[None, :]), top)
    present = steps[None, :] >= EDGES[:-1, None]
    curve: IntArray = (values[at] * weight * present).sum(axis=1)
    return curve
