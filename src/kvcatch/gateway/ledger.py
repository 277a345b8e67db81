"""What the requests in flight hold and will hold, per engine: the numbers admission decides on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvcatch.gateway.curve import MARGIN, SLOTS, demand_curve
from kvcatch.policy.blocks import BlockTable, IntArray

#: half-life of the estimate of load that is not ours, in seconds
FOREIGN_HALF_LIFE = 2.0
#: what other gateways hold is believed so long without asking, in seconds
FRESH_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class Entry:
    """One admitted request. Sizes in tokens, blocks where the name says so.

    prompts: tokens of each prompt. weight: sequences per prompt (``n``). strict: output tokens it may reach.
    planned: output tokens to plan for (a quantile of what similar requests gave, at most strict).
    produced: output tokens seen so far per sequence, None = unknown, which counts as full size all the time.
    """

    key: str
    tenant: str
    prompts: tuple[int, ...]
    weight: int
    strict: int
    planned: int
    long: bool = False
    produced: int | None = None
    blocks: int = 0  # at its full planned size
    strict_blocks: int = 0  # at the size it may reach
    queued_at: float = 0.0
    request_id: str = ""
    observed: list[str] = field(default_factory=list)  # reasons it would have been held for

    @property
    def total_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompts, default=0)


def kv_tokens(prompt: int, output: int) -> int:
    """KV slots of one sequence at its end: the last generated token is returned but never attended to."""
    return prompt + max(0, output - 1)


def full_blocks(entry: Entry, blocks: BlockTable, output: int) -> int:
    """Blocks of all sequences of a request at their full size."""
    return entry.weight * sum(blocks[kv_tokens(prompt, output)] for prompt in entry.prompts)


@dataclass(frozen=True, slots=True)
class Others:
    """What the other gateways hold on an engine, as the shared ledger said at ``at`` (time.monotonic).

    curve: blocks per slot (``gateway.curve``). held, planned: blocks now and at full size. requests: how many.
    """

    curve: IntArray
    held: int
    planned: int
    requests: int
    at: float

    @classmethod
    def nobody(cls) -> Others:
        """No other gateway holds anything."""
        return cls(np.zeros(SLOTS, dtype=np.int64), 0, 0, 0, float("-inf"))


class Ledger:
    """Requests in flight on one engine.

    usable_blocks: all but the null block. reserve_ratio: share kept free for what nobody planned.
    others: None = no other gateway shares this engine. budget: blocks that our own requests may plan for at full
    size, None = no such limit.
    """

    def __init__(self, blocks: BlockTable, usable_blocks: int, reserve_ratio: float) -> None:
        self.blocks = blocks
        self.usable = usable_blocks
        self.reserve_ratio = reserve_ratio
        self.entries: dict[str, Entry] = {}
        self.foreign = 0.0
        self.others: Others | None = None
        self.budget: int | None = None
        self._foreign_at: float | None = None

    @property
    def limit(self) -> int:
        """Blocks that our requests may plan for."""
        return int((1 - self.reserve_ratio) * self.usable - self.foreign + 1e-9)

    def size(self, entry: Entry) -> None:
        """Fill in the blocks of an entry for this engine's layout."""
        entry.blocks = full_blocks(entry, self.blocks, entry.planned)
        entry.strict_blocks = full_blocks(entry, self.blocks, entry.strict)

    def add(self, entry: Entry) -> None:
        """Count a request in."""
        self.entries[entry.key] = entry

    def remove(self, key: str) -> Entry | None:
        """Count a request out; None when it was not in."""
        return self.entries.pop(key, None)

    @property
    def busy(self) -> bool:
        """Whether anybody known holds blocks here."""
        return bool(self.entries) or (self.others is not None and self.others.requests > 0)

    @property
    def load(self) -> int:
        """Blocks planned at full size by all gateways, and what is in use besides."""
        others = self.others.planned if self.others is not None else 0
        return self.planned_blocks() + others + round(self.foreign)

    def held_blocks(self, entries: Iterable[Entry] | None = None) -> int:
        """Blocks our requests (or these) hold now, as far as their progress is known (else their prompt)."""
        table = self.blocks
        return sum(
            entry.weight * sum(table[prompt + (entry.produced or 0)] for prompt in entry.prompts)
            for entry in (self.entries.values() if entries is None else entries)
        )

    def planned_blocks(self) -> int:
        """Blocks our requests hold together at full planned size."""
        return sum(entry.blocks for entry in self.entries.values())

    def observe_active(self, active_blocks: int, now: float) -> None:
        """The engine reports blocks in use: what we cannot explain is somebody else's (smoothed)."""
        known = self.held_blocks() + (self.others.held if self.others is not None else 0)
        extra = max(0, active_blocks - known)
        if self._foreign_at is None:
            self.foreign = float(extra)
        else:
            keep = 0.5 ** (max(0.0, now - self._foreign_at) / FOREIGN_HALF_LIFE)
            self.foreign = keep * self.foreign + (1 - keep) * extra
        self._foreign_at = now

    def forget_foreign(self) -> None:
        """Nothing is known about others: the ledger alone decides."""
        self.foreign, self._foreign_at = 0.0, None

    def full(self, entry: Entry, strict: bool) -> int:
        """Blocks of an entry at the size planned for it, or (strict) that it may reach."""
        return entry.strict_blocks if strict else entry.blocks

    def over_budget(self, entry: Entry, strict: bool) -> bool:
        """Whether this request is too much for the share that we keep to while nobody speaks for the others."""
        if self.budget is None:
            return False
        ours = sum(self.full(one, strict) for one in self.entries.values())
        return ours + self.full(entry, strict) > self.budget

    def curve(self, entries: Iterable[Entry], strict: bool = False) -> IntArray:
        """Blocks per slot that these requests may hold, while each advances by 0 to ``MARGIN`` steps."""
        entries = list(entries)
        flat = sum(self.full(one, strict) for one in entries if strict or one.produced is None)
        curve = np.full(SLOTS, flat, dtype=np.int64)
        rows = [r for one in entries if not strict and one.produced is not None for r in _rows(one, MARGIN)]
        if rows:
            held, total, steps, weight = (
                np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
            )
            curve += demand_curve(held, total, steps, weight, self.blocks)
        return curve

    def peak_with(self, entry: Entry | None, strict: bool = False) -> int:
        """The most blocks the requests in flight and ``entry`` will hold together.

        strict: every request at the size it may reach, whenever that is: holds however they progress.
        Otherwise each advances one token per step; one whose progress is unknown counts at full size.
        """
        entries = list(self.entries.values())
        if entry is not None:
            entries.append(entry)
        if self.others is not None:
            # Exactly what the shared ledger will say; what is known of the others may be too old to refuse by.
            ours = self.curve(entries, strict)
            late = time.monotonic() - self.others.at > FRESH_SECONDS
            return int((ours if late else plus(ours, self.others.curve)).max())
        if strict:
            return sum(one.strict_blocks for one in entries)
        together = sum(one.blocks for one in entries)
        if entry is not None and together <= self.limit:
            return together  # an upper bound that fits: no need to look closer
        flat = sum(one.blocks for one in entries if one.produced is None)
        rows = [row for one in entries if one.produced is not None for row in _rows(one)]
        if not rows:
            return flat
        held, total, steps, weight = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
        return flat + peak_blocks(held, total, steps, weight, self.blocks)


def plus(one: IntArray, other: IntArray) -> IntArray:
    """The sum of two curves; slots that one of them lacks are empty."""
    long, short = (one, other) if len(one) >= len(other) else (other, one)
    total = long.copy()
    total[: len(short)] += short
    return total


def _rows(entry: Entry, margin: int = 0) -> list[tuple[int, int, int, int]]:
    """(held, total, steps to go, sequences) of every prompt of an entry, at most ``margin`` steps from now."""
    produced = entry.produced or 0
    end = max(entry.planned, min(produced + margin + 1, entry.strict))
    left = max(0, end - 1 - produced)
    return [(prompt + produced, kv_tokens(prompt, end), left, entry.weight) for prompt in entry.prompts]


def peak_blocks(
    held: IntArray, total: IntArray, steps: IntArray, weight: IntArray, blocks: BlockTable
) -> int:
    """``policy.demand.peak`` over arrays: usage only grows between two departures, so look just at those."""
    values, top = blocks.values, blocks.max_tokens
    departures = np.unique(steps)
    worst = 0
    for low in range(0, len(departures), 256):
        part = departures[low : low + 256, None]
        at = np.minimum(np.minimum(held[None, :] + part, total[None, :]), top)
        present = steps[None, :] >= part
        worst = max(worst, int(((values[at] * weight) * present).sum(axis=1).max()))
    return worst
