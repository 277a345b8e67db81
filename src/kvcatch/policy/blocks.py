"""Blocks a request of n tokens holds, as a table: every KV layout looks the same to the policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class BlockTable:
    """Blocks held at 0, 1, ... ``max_tokens`` tokens; never decreasing.

    One full-attention group of block size B holds ceil(n / B); groups add up; a sliding window or a
    Mamba state stops growing. The table hides which of these an engine uses.
    """

    def __init__(self, values: IntArray) -> None:
        if len(values) == 0 or np.any(np.diff(values) < 0):
            raise ValueError("a block table needs at least one value and must not decrease")
        self.values = np.asarray(values, dtype=np.int64)
        self.max_tokens = len(values) - 1

    def __getitem__(self, tokens: int) -> int:
        """Blocks at ``tokens``; beyond the table's end the last value holds (the engine stops there)."""
        return int(self.values[min(tokens, self.max_tokens)])

    @classmethod
    def uniform(cls, block_size: int, max_tokens: int) -> BlockTable:
        """ceil(n / block_size): one group of full attention."""
        return cls((np.arange(max_tokens + 1, dtype=np.int64) + block_size - 1) // block_size)

    @classmethod
    def sampled(cls, count: Callable[[int], int], step: int, max_tokens: int) -> BlockTable:
        """Ask ``count(n)`` once per ``step`` tokens; ``step`` must divide every group's block size.

        Between two multiples of every block size the count cannot change, so one question per step is exact.
        """
        values = np.zeros(max_tokens + 1, dtype=np.int64)
        for low in range(1, max_tokens + 1, step):
            values[low : low + step] = count(low)
        return cls(np.maximum.accumulate(values))
