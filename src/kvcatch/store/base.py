"""The ``Capture`` interface: one engine's record, whatever it was read from.

Files, live recorders, ``/metrics`` pages and logs all answer these questions; a weaker source returns
``None`` or an empty answer for what it cannot know and names it in ``loss.unknown``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from kvcatch.events import EngineInfo
from kvcatch.results import LossView, RequestView, Snapshot

Columns = dict[str, npt.NDArray[Any]]

#: columns of ``samples()``; one row per recorded step (or per scrape). Counts are per step, not totals.
SAMPLE_COLUMNS = (
    "unix_ns",  # end of the step, wall clock
    "step",
    "schedule_ns",  # time inside schedule()
    "step_ns",  # from a schedule() to its own update_from_output()
    "interval_ns",  # between two update_from_output(), 0 after an idle gap
    "running",
    "waiting",  # all waiting requests
    "deferred",  # of these: not waiting for blocks (remote KV, grammar, LoRA, ...)
    "held",  # kept back by kvcatch's scheduler
    "active_blocks",
    "cached_blocks",
    "free_blocks",
    "held_tokens",  # tokens in active blocks, shared blocks once
    "prefill_tokens",
    "decode_tokens",
    "queried_tokens",  # admitted prefix lookups
    "hit_tokens",
    "evicted_blocks",
    "preemptions",
    "recomputed_tokens",
    "bound",  # index into BOUNDS
)

#: which limit bound the step, in the order of the ``bound`` column
BOUNDS = ("none", "blocks", "max_num_seqs", "token_budget", "deferred")


class Capture(ABC):
    """One engine's record."""

    target: str
    info: EngineInfo

    @abstractmethod
    def refresh(self) -> None:
        """Take in what was written since the last call; never blocks for longer than one read."""

    @abstractmethod
    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        """The newest state. Latencies and maxima cover the last ``window_seconds``."""

    @abstractmethod
    def samples(self, start: int | None = None, stop: int | None = None) -> Columns:
        """Columns named in SAMPLE_COLUMNS for wall-clock nanoseconds in [start, stop)."""

    @abstractmethod
    def requests(self) -> list[RequestView]:
        """Every request seen, finished ones included, in order of arrival."""

    @abstractmethod
    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Every record as a dictionary with ``kind`` and ``unix_ns``, in order."""

    @property
    @abstractmethod
    def loss(self) -> LossView:
        """What is missing."""

    def counters(self) -> dict[str, float]:
        """Totals of the whole record that no row has; empty where the source cannot count them.

        records: read so far. missed_compulsory_tokens, missed_capacity_tokens: computed prompt tokens of finished
        requests, by whether the record had seen their content before. transfer_TIER_DIRECTION_bytes and _seconds: moved
        between the device and ``offload`` or ``remote``.
        """
        return {}

    def close(self) -> None:  # noqa: B027 (most captures hold nothing)
        """Release files and sockets."""
