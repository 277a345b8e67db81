"""Limits that cannot be overshot: reserve the most a request can use, settle what it used, give back the rest.

Because a request never uses more than it reserved, the sum charged never passes a bucket, whatever runs at once.
A bucket refills evenly: ``limit`` units per window, at most ``limit`` saved up. All arithmetic is in integer
micro-units and microseconds, so that memory and Redis count alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Want:
    """What one request takes from one bucket.

    limit: units per window, or units at once when ``window`` is 0 (held until released).
    window: seconds. amount: units, at most what the request can use.
    """

    bucket: str
    limit: int
    window: int
    amount: int


@dataclass(frozen=True, slots=True)
class Denied:
    """No. retry_seconds: when the bucket will hold enough, None when it never will or nobody knows."""

    want: Want
    retry_seconds: float | None
    never: bool = False


class Limits(Protocol):
    """Reservations under a key, all or nothing."""

    async def reserve(self, key: str, wants: Iterable[Want]) -> Denied | None:
        """Take everything wanted, or nothing and say what was short."""

    async def settle(self, key: str, used: dict[str, int]) -> None:
        """The request under ``key`` is done: charge ``used`` per bucket, give back the rest. Once per key."""

    async def close(self) -> None:
        """Let go of connections."""


class MemoryLimits:
    """Limits of one process. ``clock`` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[int, int]] = {}  # bucket -> (micro-units left, microseconds)
        self._held: dict[str, int] = {}
        self._reserved: dict[str, list[Want]] = {}

    async def reserve(self, key: str, wants: Iterable[Want]) -> Denied | None:
        """Take everything wanted, or nothing and say what was short."""
        wants = list(wants)
        now = int(self._clock() * MICRO)
        for want in wants:
            denied = self._short(want, now)
            if denied is not None:
                return denied
        for want in wants:
            if want.window:
                level = self._level(want, now)
                self._levels[want.bucket] = (level - want.amount * MICRO, now)
            else:
                self._held[want.bucket] = self._held.get(want.bucket, 0) + want.amount
        self._reserved[key] = wants
        return None

    async def settle(self, key: str, used: dict[str, int]) -> None:
        """Charge what was used, give back the rest; a key that is not known is ignored."""
        now = int(self._clock() * MICRO)
        for want in self._reserved.pop(key, ()):
            if want.window:
                spare = want.amount - min(want.amount, used.get(want.bucket, want.amount))
                full = want.limit * MICRO
                self._levels[want.bucket] = (min(full, self._level(want, now) + spare * MICRO), now)
            else:
                left = self._held[want.bucket] - want.amount
                if left:
                    self._held[want.bucket] = left
                else:
                    del self._held[want.bucket]

    async def close(self) -> None:
        """Nothing to let go of."""

    def left(self, want: Want) -> int:
        """Whole units left in the bucket of ``want`` now."""
        if want.window:
            return max(0, self._level(want, int(self._clock() * MICRO)) // MICRO)
        return want.limit - self._held.get(want.bucket, 0)

    @property
    def reservations(self) -> int:
        """Keys not settled yet."""
        return len(self._reserved)

    def _level(self, want: Want, now: int) -> int:
        full = want.limit * MICRO
        level, then = self._levels.get(want.bucket, (full, now))
        return min(full, level + (now - then) * want.limit // want.window)

    def _short(self, want: Want, now: int) -> Denied | None:
        if want.amount > want.limit:
            return Denied(want, None, never=True)
        if not want.window:
            return Denied(want, None) if self._held.get(want.bucket, 0) + want.amount > want.limit else None
        missing = want.amount * MICRO - self._level(want, now)
        if missing <= 0:
            return None
        microseconds = -(-missing * want.window // want.limit)
        return Denied(want, microseconds / MICRO)
