"""Block-hash chains: which prefix each request shares with which, without repeating a hash."""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

from kvcatch.store import layout as L

#: hashes remembered so that a chain is written once; cleared when full (the writer's memory is bounded)
MAX_SEEN_HASHES = 1 << 17
MAX_QUEUED_CHAINS = 4096
MIN_HASHES_PER_STEP = 32
_HEAD = struct.Struct("<4I").pack
_EPOCH = struct.pack("<I", L.EPOCH | 1 << 16)


class Chains:
    """Chains wait here until a step has room for them; each is written from its first hash not yet seen."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, Any, int]] = deque()
        self.seen: dict[Any, int] = {}
        self.forget = False  # readers that lost the older segments need the hashes again

    def add(self, rid: int, hashes: Any) -> bool:
        """Queue the chain of a request; False when too many wait already."""
        if len(self.queue) >= MAX_QUEUED_CHAINS:
            return False
        self.queue.append((rid, hashes, len(hashes)))
        return True

    def write(self, out: bytearray, budget: int) -> None:
        """Append up to ``budget`` hashes of the queued chains."""
        seen, queue = self.seen, self.queue
        while queue and budget > 0:
            rid, hashes, stop = queue[0]
            if self.forget or len(seen) + budget > MAX_SEEN_HASHES:
                self.forget = False
                seen.clear()
                out += _EPOCH
            # A hash names its whole prefix, so known hashes are closed under prefixes. Most chains are all new.
            low = 0
            if hashes[0] in seen:
                low, high = 1, stop
                while low < high:
                    middle = (low + high + 1) // 2
                    if hashes[middle - 1] in seen:
                        low = middle
                    else:
                        high = middle - 1
            part = hashes[low : min(low + budget, stop)]
            take = len(part)
            out += _HEAD(L.CHAIN | (4 + 2 * take) << 16, rid, seen[hashes[low - 1]] if low else 0, low)
            if take:
                first = len(seen) + 1
                seen.update(zip(part, range(first, first + take), strict=True))
                out += hash_bytes(part)
            budget -= take
            if low + take >= stop:
                queue.popleft()


def hash_bytes(hashes: list[Any]) -> bytes:
    """Eight bytes of each block hash (bytes since 0.11, an int before)."""
    if isinstance(hashes[0], bytes):
        return b"".join([value[:8] for value in hashes])
    return b"".join([(hash(value) & (2**64 - 1)).to_bytes(8, "little") for value in hashes])
