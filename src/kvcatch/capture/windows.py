"""KV cache groups that give blocks back, or exchange them, inside ``allocate_slots()`` without saying so."""

from __future__ import annotations

import struct
from typing import Any

from kvcatch.capture.live import Slot
from kvcatch.store import layout as L

_DROP = struct.Struct("<4I").pack


class Windows:
    """Compares the block lists of sliding, chunked and state groups with what was last written."""

    def __init__(self, managers: list[Any], kinds: list[str]) -> None:
        self.managers = managers
        self.sliding = [g for g, kind in enumerate(kinds) if kind in ("sliding", "chunked")]
        self.replaced = [g for g, kind in enumerate(kinds) if kind in ("mamba", "other")]

    def scan_sliding(self, out: bytearray, running: list[Any], slots: dict[str, Slot]) -> None:
        """Blocks that left a window: list entries that became the null block."""
        for request in running:
            key = request.request_id
            slot = slots.get(key)
            if slot is None:
                continue
            for group in self.sliding:
                blocks = self.managers[group].req_to_blocks.get(key, ())
                start = index = slot.windows.get(group, 0)
                while index < len(blocks) and blocks[index].is_null:
                    index += 1
                if index > start:
                    out += _DROP(L.DROP | group << 8 | 4 << 16, slot.rid, start, index - start)
                    slot.windows[group] = index

    def scan_replaced(self, out: bytearray, running: list[Any], slots: dict[str, Slot]) -> None:
        """State groups whose whole list changed."""
        for request in running:
            slot = slots.get(request.request_id)
            if slot is None:
                continue
            for group in self.replaced:
                ids = [b.block_id for b in self.managers[group].req_to_blocks.get(request.request_id, ())]
                if ids != slot.windows.get(group):
                    slot.windows[group] = ids
                    L.put_ids(out, L.REPLACE, group, (slot.rid,), ids or [0])
