"""What the recorder remembers of each live request, and how it describes them anew in every segment."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcatch.capture.tags import describe
from kvcatch.store import layout as L
from kvcatch.store.layout import UNKNOWN

WAITING, RUNNING, PREEMPTED, DECODING = range(4)
REFRESHES_PER_STEP = 2
_REFRESH = struct.Struct("<2I4Q10I")


class Slot:
    """What the recorder remembers of one live request."""

    __slots__ = (
        "added", "arrival", "decision", "first", "first_mono", "high_water", "hit", "queried", "recomputed", "req", "rid", "sched_mono",
        "span", "state", "windows",
    )  # fmt: skip

    def __init__(self, rid: int, req: Any, arrival: int, added: int) -> None:
        self.rid = rid
        self.req = req
        self.arrival = arrival
        self.added = added
        self.decision: tuple[str, str] | None = None
        self.state = WAITING
        self.span = 0  # tokens that the block lists of attention groups could hold
        self.high_water = 0  # highest computed position before a preemption
        self.sched_mono = 0
        self.first_mono = 0
        self.first = False
        self.hit = 0
        self.queried = 0
        self.recomputed = 0
        self.windows: dict[int, Any] = {}  # per windowed group: next list index that may turn null


class Describer:
    """Describes every live request after a segment began, a few per step, so that a reader can start there."""

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()
        self.segment = -1  # the segment that is being described; -1: none

    def begin(self, segment: int, keys: Any) -> None:
        """A segment began while these requests lived."""
        self.segment = segment
        self.waiting.clear()
        self.waiting.extend(keys)

    def write(
        self,
        out: bytearray,
        slots: dict[str, Slot],
        prefilling: dict[str, Slot],
        blocks: Callable[[str, int], None],
    ) -> None:
        """The next few requests; ``blocks`` writes the block lists of one (its key, its number)."""
        for _ in range(min(REFRESHES_PER_STEP, len(self.waiting))):
            key = self.waiting.popleft()
            slot = slots.get(key)
            if slot is not None:
                self._request(out, slot, key in prefilling)
                blocks(key, slot.rid)
        if not self.waiting:
            out += struct.pack("<2I", L.REFRESHED | 2 << 16, self.segment & UNKNOWN)
            self.segment = -1

    def _request(self, out: bytearray, slot: Slot, in_prefill: bool) -> None:
        request = slot.req
        state = DECODING if slot.state == RUNNING and not in_prefill else slot.state
        text = L.text_bytes(describe(request)[0])
        out += _REFRESH.pack(
            L.REFRESH | (_REFRESH.size + len(text)) // 4 << 16, slot.rid, slot.arrival, slot.added, slot.sched_mono,
            slot.first_mono, request.num_prompt_tokens, min(request.max_tokens or 0, UNKNOWN),
            getattr(request, "priority", 0) & UNKNOWN, state, request.num_computed_tokens, request.num_output_tokens,
            slot.queried, slot.hit, request.num_preemptions, slot.recomputed,
        )  # fmt: skip
        out += text
