"""Which cached blocks should be evicted last: proven shared prefixes of chosen tenants, within a floor each.

A block is proven when a request of the tenant found it in the cache. The policy only orders evictions: protected
blocks stay evictable, so no allocation fails that would have succeeded without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcatch.errors import KVCatchError

#: protected blocks of all tenants together, as a share of the pool
MOST_OF_POOL = 0.5


def parse_floors(text: str, source: str = "KVCATCH_PROTECT") -> dict[str, float]:
    """``chat=0.1,agents=0.2`` (``*`` = every other tenant) to shares of the pool. Raises KVCatchError naming ``source``."""
    floors: dict[str, float] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        tenant, _, share = part.partition("=")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not tenant or not 0 < value <= MOST_OF_POOL:
            raise KVCatchError(
                f"{source}: {part!r} is not TENANT=SHARE with a share above 0 and up to {MOST_OF_POOL}.",
                "Write for example chat=0.1,agents=0.2.",
            )
        floors[tenant] = value
    if sum(floors.values()) > MOST_OF_POOL:
        raise KVCatchError(
            f"{source}: the shares add up to {sum(floors.values()):g}, more than {MOST_OF_POOL}.",
            "Leave the rest of the pool to running requests.",
        )
    return floors


class Protection:
    """Protected blocks per floor, least recently hit first.

    front: how many unprotected free blocks are known to be evicted before the first protected one.
    """

    def __init__(self, floors: Mapping[str, float], usable_blocks: int) -> None:
        self._caps = {tenant: int(share * usable_blocks) for tenant, share in floors.items()}
        self._kept: dict[str, dict[int, Any]] = {tenant: {} for tenant in floors}
        self.front = 0

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def hit(self, tenant: str, blocks: Iterable[tuple[int, Any]]) -> None:
        """A request of ``tenant`` found (block id, content hash), first block of the prefix first."""
        name = tenant if tenant in self._caps else "*"
        kept = self._kept.get(name)
        if kept is None:
            return
        # The last block of a chain is the least useful: it goes in first and out first.
        for block_id, content in reversed(list(blocks)[: self._caps[name]]):
            kept.pop(block_id, None)
            kept[block_id] = content
        while len(kept) > self._caps[name]:
            del kept[next(iter(kept))]

    def alive(self, holds: Callable[[int, Any], bool]) -> list[int]:
        """Protected block ids, first to be evicted first; those that no longer hold their content are dropped."""
        found: list[int] = []
        for kept in self._kept.values():
            for block_id, content in list(kept.items()):
                if holds(block_id, content):
                    found.append(block_id)
                else:
                    del kept[block_id]
        return found
