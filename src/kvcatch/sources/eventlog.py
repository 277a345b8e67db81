"""The KV event stream as a ``Capture``: which blocks hold reusable prefixes, and what was evicted when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from kvcatch import __version__
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.results import LossView, Pool, RequestView, Snapshot
from kvcatch.sources.kvevents import KVEvent, KVEventSource
from kvcatch.store.base import SAMPLE_COLUMNS, Capture, Columns

PREFIX = "kvevents:"
NEVER_KNOWN = (
    "requests", "tenants", "queues", "active_blocks", "cached_blocks", "free_blocks", "latency", "bound_by",
)  # fmt: skip
#: events kept; the oldest go first
KEEP_EVENTS = 1_000_000


class KVEventCapture(Capture):
    """Blocks with a hash, as the events tell them. Whether a request still uses one, they do not say."""

    def __init__(self, target: str, source: KVEventSource, keep: int = KEEP_EVENTS) -> None:
        self.target = target
        self.info = EngineInfo(adapter="kvevents", unknown=NEVER_KNOWN)
        self.hashed: set[tuple[str | None, int | None, bytes | int]] = set()
        self._source = source
        self._events: deque[KVEvent] = deque(maxlen=keep)
        self._lost_events = 0

    def refresh(self) -> None:
        """Take in what has arrived; missing batches are asked for again."""
        for event in self._source.poll():
            self._take(event)

    def _take(self, event: KVEvent) -> None:
        if len(self._events) == self._events.maxlen:
            self._lost_events += 1
        self._events.append(event)
        keys = {(event.medium, event.group, key) for key in event.hashes}
        if event.kind == "stored":
            self.hashed |= keys
        elif event.kind == "removed":
            self.hashed -= keys
        else:
            self.hashed.clear()
        if event.block_size and not self.info.block_size:
            self.info = EngineInfo(adapter="kvevents", unknown=NEVER_KNOWN, block_size=event.block_size)

    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        """Time and block size of the newest event; the pool itself is not in the stream."""
        newest = self._events[-1] if self._events else None
        return Snapshot(
            kvcatch_version=__version__,
            target=self.target,
            state="live" if newest is not None else "connecting",
            source="scrape",
            engine="vllm",
            unix_seconds=newest.unix_seconds if newest is not None else None,
            pool=Pool(block_size=self.info.block_size or None),
            loss=self.loss,
        )

    def samples(self, start: int | None = None, stop: int | None = None) -> Columns:
        """One row per batch of events; only evictions are known."""
        batches: dict[int, tuple[int, int]] = {}
        for event in self._events:
            unix_ns = round(event.unix_seconds * 1e9)
            if (start is None or unix_ns >= start) and (stop is None or unix_ns < stop):
                gone = len(event.hashes) if event.kind == "removed" else 0
                batches[event.sequence] = (unix_ns, batches.get(event.sequence, (0, 0))[1] + gone)
        columns: Columns = {name: np.full(len(batches), np.nan) for name in SAMPLE_COLUMNS}
        columns["unix_ns"] = np.array([row[0] for row in batches.values()], dtype=np.int64)
        columns["step"] = np.array(list(batches), dtype=np.int64)
        columns["evicted_blocks"] = np.array([row[1] for row in batches.values()], dtype=np.float64)
        return columns

    def requests(self) -> list[RequestView]:
        """Empty: events name blocks, not requests."""
        return []

    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Every event; hashes as hexadecimal text."""
        for event in self._events:
            unix_ns = round(event.unix_seconds * 1e9)
            if (start is None or unix_ns >= start) and (stop is None or unix_ns < stop):
                yield {
                    "kind": event.kind,
                    "unix_ns": unix_ns,
                    "sequence": event.sequence,
                    "hashes": [_hex(key) for key in event.hashes],
                    "parent": None if event.parent is None else _hex(event.parent),
                    "num_tokens": event.num_tokens,
                    "block_size": event.block_size,
                    "medium": event.medium,
                    "group": event.group,
                }

    @property
    def loss(self) -> LossView:
        """Batches that neither the stream nor the replay endpoint gave, named one by one."""
        gaps = self._source.gaps
        warnings = tuple(f"batches {gap.first} to {gap.last} are lost" for gap in gaps)
        lost = sum(gap.batches for gap in gaps) + self._lost_events
        return LossView(dropped_records=lost, unknown=NEVER_KNOWN, warnings=warnings)

    def close(self) -> None:
        """Leave the stream."""
        self._source.close()


def _hex(key: bytes | int) -> str:
    return key.hex() if isinstance(key, bytes) else f"{key & (1 << 64) - 1:x}"


def open_kvevents(target: str) -> KVEventCapture:
    """``kvevents:tcp://host:5557?replay=tcp://host:5558&topic=kv``. Raises KVCatchError for a bad address."""
    address, _, query = target.removeprefix(PREFIX).partition("?")
    options = {name: values[-1] for name, values in parse_qs(query).items()}
    unknown = set(options) - {"replay", "topic"}
    if unknown:
        raise KVCatchError(f"{target}: unknown option {sorted(unknown)[0]!r}.", "Known are replay and topic.")
    source = KVEventSource(address, options.get("replay"), options.get("topic", ""))
    return KVEventCapture(target, source)
