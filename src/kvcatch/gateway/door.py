"""Admission: who goes to which engine now, who waits, and in what order the waiting go."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcatch.gateway.engine import Engine
from kvcatch.gateway.ledger import Entry
from kvcatch.gateway.refusal import Refusal
from kvcatch.policy.waiting import Job, VirtualTokens, WaitingLine

OBSERVE, BALANCED, STRICT = "observe", "balanced", "strict"
MODES = (OBSERVE, BALANCED, STRICT)

# Why a request is held, as in headers and metrics.
PEAK = "peak"  # the pool would overflow later
LONG_CONCURRENCY = "long-concurrency"
LONG_SHARE = "long-share"
TENANT_SHARE = "tenant-share"
TENANT_HOLD = "tenant-hold"
NO_ENGINE = "no-engine"

#: waiting requests looked at when something is released
CANDIDATES = 64
#: requests that may pass a blocked head, and seconds it is passed at most, before everybody waits for it
MAX_BYPASS = 64
#: departures that the drain rate is measured over
DEPARTURES = 64


@dataclass(frozen=True)
class Rules:
    """What the door enforces. Shares are of an engine's usable blocks, 0 to 1.

    long_enforced False: the long class is only watched. max_wait: seconds a request waits at most.
    aging: seconds after which a waiting request goes before shorter ones.
    """

    mode: str = OBSERVE
    long_tokens: int | None = None  # None: a quarter of the context or a sixteenth of the pool
    long_share: float = 0.5
    long_concurrency: int = 0  # 0: any number
    long_enforced: bool = False
    tenant_shares: tuple[tuple[str, float], ...] = ()
    max_wait: float = 30.0
    max_queue: int = 1024
    max_queued_tokens: int = 1 << 22
    aging: float = 5.0

    def share_of(self, tenant: str) -> float:
        """The share of the pool this tenant may hold; 1 without a rule."""
        shares = dict(self.tenant_shares)
        return shares.get(tenant, shares.get("*", 1.0))


@dataclass(eq=False)
class _Waiter:
    job: Job
    entry: Entry
    engines: Sequence[Engine]
    future: asyncio.Future[Engine]
    reason: str = PEAK


@dataclass(slots=True)
class _Place:
    """Where a request stands that may have to wait more than once. Times of the door's clock."""

    since: float
    until: float
    key: tuple[Any, ...] = ()


class Shared(Protocol):
    """What other gateways have a say in, after the door's own decision."""

    async def admit(self, entry: Entry, engine: Engine) -> bool:
        """Whether the request fits beside those of all gateways; then it counts."""

    def note(self, entry: Entry, engine: Engine) -> None:
        """Count a request in without asking."""

    def release(self, entry: Entry, engine: Engine) -> None:
        """A request is done or gone."""


class Door:
    """Admits requests of one process to its engines.

    ``on_free`` of a release looks at the waiting in fair order: aged first, then the tenant served least, then the
    smallest; nobody passes a head that has been passed often or has waited long.
    """

    def __init__(
        self, rules: Rules, clock: Callable[[], float] = time.monotonic, shared: Shared | None = None
    ) -> None:
        self.rules = rules
        self.shared = shared
        self.held: dict[str, float] = {}  # tenant -> clock time until which it is on hold
        self.line = WaitingLine(VirtualTokens())
        self._waiters: dict[str, _Waiter] = {}
        self._clock = clock
        self._queued_tokens = 0
        self._left: deque[tuple[float, int, bool]] = deque(maxlen=DEPARTURES)

    # ---- decisions -----------------------------------------------------------------------------------

    def long_threshold(self, engine: Engine) -> int:
        """Prompt tokens above which a request is long on this engine."""
        if self.rules.long_tokens is not None:
            return self.rules.long_tokens
        quarter = (engine.max_model_len or 1 << 30) // 4
        return max(1, min(quarter, engine.capacity_tokens // 16 or quarter))

    def reasons(self, entry: Entry, engine: Engine) -> list[tuple[str, bool]]:
        """Why this request would be held on this engine: (reason, whether the rules enforce it)."""
        rules, ledger = self.rules, engine.ledger
        if ledger is None:
            return []  # nothing is known about the pool yet: the engine's own queue decides
        found: list[tuple[str, bool]] = []
        if entry.long:
            others = [one for one in ledger.entries.values() if one.long]
            if rules.long_concurrency and len(others) >= rules.long_concurrency:
                found.append((LONG_CONCURRENCY, rules.long_enforced))
            blocks = sum(one.blocks for one in others) + entry.blocks
            if blocks > rules.long_share * ledger.usable:
                found.append((LONG_SHARE, rules.long_enforced))
        share = rules.share_of(entry.tenant)
        if share < 1:
            blocks = sum(one.blocks for one in ledger.entries.values() if one.tenant == entry.tenant)
            if blocks + entry.blocks > share * ledger.usable:
                found.append((TENANT_SHARE, True))
        strict = rules.mode == STRICT
        # One request alone may use the whole pool: else what fits only without a reserve would never run.
        full = ledger.busy and ledger.peak_with(entry, strict) > ledger.limit
        if full or ledger.over_budget(entry, strict):
            found.append((PEAK, rules.mode != OBSERVE))
        return found

    def never(self, entry: Entry, engine: Engine) -> Refusal | None:
        """Why no moment will ever come at which this request may start on this engine."""
        rules, ledger = self.rules, engine.ledger
        if ledger is None:
            return None
        share = rules.share_of(entry.tenant)
        for kind, part, enforced in (
            (LONG_SHARE, rules.long_share, entry.long and rules.long_enforced),
            (TENANT_SHARE, share, share < 1),
        ):
            most = int(part * ledger.usable)
            if enforced and entry.blocks > most:
                return Refusal(
                    413, kind,
                    f"This request needs up to {entry.blocks} KV blocks; its class may hold {most} of {ledger.usable}.",
                    code="request_too_large", details={"needed_blocks": entry.blocks, "limit_blocks": most},
                )  # fmt: skip
        return None

    def on_hold(self, tenant: str) -> float:
        """Seconds this tenant is still on hold; 0 when it is not."""
        until = self.held.get(tenant)
        if until is None:
            return 0.0
        left = until - self._clock()
        if left <= 0:
            del self.held[tenant]
        return max(0.0, left)

    # ---- coming and going ------------------------------------------------------------------------------

    async def enter(self, entry: Entry, engines: Sequence[Engine], priority: int = 0) -> Engine:
        """The engine this request goes to, after waiting if it must. Raises Refusal (413 or 503).

        Cancelling the caller takes the request out of the line.
        """
        refusals = [self._size(entry, engine) for engine in engines]
        open_to = [engine for engine, no in zip(engines, refusals, strict=True) if no is None]
        if not open_to:
            raise next(no for no in refusals if no is not None)
        self.line.virtual.arrive(entry.tenant)
        place = _Place(self._clock(), self._clock() + self.rules.max_wait)
        try:
            left = open_to
            while True:
                engine, reason = self._choose(entry, left) if left else (None, PEAK)
                due = self._due()
                if engine is not None and due is None:
                    head = self.line.first()
                    if head is not None:
                        head.passes += 1
                    engine = self._start(entry, engine)
                else:
                    engine = await self._wait(entry, open_to, priority, reason or PEAK, place)
                if await self._agreed(entry, engine):
                    return engine
                # Another gateway was faster: elsewhere, else in line, at the place of its arrival.
                left = [one for one in left if one is not engine]
        except BaseException:
            self.line.virtual.leave(entry.tenant)
            raise

    def leave(self, entry: Entry, engine: Engine, output_tokens: int) -> None:
        """A request is done or gone: its blocks are free, and those who waited for them may go."""
        if self.shared is not None:
            self.shared.release(entry, engine)
        if engine.ledger is not None and engine.ledger.remove(entry.key) is not None:
            self._left.append((self._clock(), entry.blocks, entry.long))
        self.line.virtual.serve(entry.tenant, 0, output_tokens)
        self.line.virtual.leave(entry.tenant)
        self.drain()

    def drain(self) -> None:
        """Let those go who may. Called on every departure and on every fresh reading of an engine."""
        while self._waiters:
            now = self._clock()
            due = self._due()
            if due is not None:
                if not self._try(due):
                    return
                continue
            head = self.line.first()
            assert head is not None
            if head.blocked_since is None:
                head.blocked_since = now
            if self._try(self._waiters[head.request_id]):
                continue
            for job in self.line.candidates(now, self.rules.aging, CANDIDATES):
                if self._try(self._waiters[job.request_id]):
                    head.passes += 1
                    break
            else:
                return

    def drain_seconds(self, blocks: int, long: bool = False) -> float:
        """Predicted seconds until ``blocks`` more blocks have been given back, by the recent departures.

        long: by the departures of long requests, which wait for each other.
        """
        left = [(when, count) for when, count, was_long in self._left if was_long or not long]
        if len(left) < 2:
            return 1.0
        span = self._clock() - left[0][0]
        freed = sum(count for _, count in left[1:])
        ahead = sum(w.entry.blocks for w in self._waiters.values() if w.entry.long or not long)
        return (blocks + ahead) * span / freed if freed else 1.0

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._waiters)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens in the line."""
        return self._queued_tokens

    # ---- inside ----------------------------------------------------------------------------------------

    async def _agreed(self, entry: Entry, engine: Engine) -> bool:
        """Whether the other gateways agree; if not, or if the client leaves meanwhile, it is taken out again."""
        if self.shared is None:
            return True
        if self.rules.mode == OBSERVE:
            self.shared.note(entry, engine)
            return True
        agreed = False
        try:
            agreed = await self.shared.admit(entry, engine)
        finally:
            if not agreed:
                self.shared.release(entry, engine)
                if engine.ledger is not None:
                    engine.ledger.remove(entry.key)
                self.line.virtual.serve(entry.tenant, -entry.total_prompt, 0)
        return agreed

    def _size(self, entry: Entry, engine: Engine) -> Refusal | None:
        if engine.ledger is not None:
            engine.ledger.size(entry)
        entry.long = entry.longest > self.long_threshold(engine)
        return self.never(entry, engine)

    def _choose(self, entry: Entry, engines: Sequence[Engine]) -> tuple[Engine | None, str]:
        """The emptiest engine that takes it, or why none does. Notes what would have been held."""
        reason = NO_ENGINE
        healthy = sorted((e for e in engines if e.healthy), key=lambda engine: engine.load)
        for engine in healthy:
            if engine.ledger is not None:
                engine.ledger.size(entry)
            entry.long = entry.longest > self.long_threshold(engine)
            found = self.reasons(entry, engine)
            enforced = [name for name, counts in found if counts]
            if not enforced:
                entry.observed = [name for name, _ in found]
                return engine, ""
            reason = enforced[0]
        return None, reason

    def _due(self) -> _Waiter | None:
        """The oldest request that waits for blocks, once it has earned that nobody passes it."""
        now = self._clock()
        for job in self.line:
            waiter = self._waiters[job.request_id]
            if waiter.reason == PEAK:
                late = now - job.queued_at > self.rules.max_wait / 2
                return waiter if late or job.passes >= MAX_BYPASS else None
        return None

    def _start(self, entry: Entry, engine: Engine) -> Engine:
        if engine.ledger is not None:
            engine.ledger.add(entry)
        self.line.virtual.serve(entry.tenant, entry.total_prompt, 0)
        return engine

    def _try(self, waiter: _Waiter) -> bool:
        if waiter.future.done():
            self._forget(waiter)
            return True
        engine, reason = self._choose(waiter.entry, waiter.engines)
        if engine is None:
            waiter.reason = reason
            return False
        self._forget(waiter)
        waiter.future.set_result(self._start(waiter.entry, engine))
        return True

    def _forget(self, waiter: _Waiter) -> None:
        if self._waiters.pop(waiter.job.request_id, None) is not None:
            self.line.remove(waiter.job)
            self._queued_tokens -= waiter.entry.total_prompt

    async def _wait(
        self, entry: Entry, engines: Sequence[Engine], priority: int, reason: str, place: _Place
    ) -> Engine:
        rules = self.rules
        if reason == NO_ENGINE:
            raise Refusal(503, NO_ENGINE, "No engine answers at the moment.", retry_seconds=5.0)
        tokens = entry.total_prompt
        by_class = reason in (LONG_CONCURRENCY, LONG_SHARE)
        wait = self.drain_seconds(entry.blocks, by_class)
        full = len(self._waiters) >= rules.max_queue or self._queued_tokens + tokens > rules.max_queued_tokens
        if full or wait > rules.max_wait:
            raise Refusal(
                503, "queue-full" if full else reason,
                "The line is full." if full else f"Held ({reason}), and the wait would be longer than allowed.",
                code="overloaded", retry_seconds=wait,
            )  # fmt: skip
        job = Job(
            request_id=entry.key, tokens=tokens, total=tokens + entry.planned, size=entry.blocks,
            prompt_tokens=tokens, max_output=entry.strict, priority=priority, tenant=entry.tenant,
            long=entry.long, queued_at=place.since, key=place.key or (priority, *self.line.next_key(front=False)),
        )  # fmt: skip
        place.key = job.key
        loop = asyncio.get_running_loop()
        waiter = _Waiter(job, entry, engines, loop.create_future(), reason)
        self._waiters[entry.key] = waiter
        self._queued_tokens += tokens
        self.line.add(job)
        try:
            async with asyncio.timeout(max(0.0, place.until - self._clock())):
                return await waiter.future
        except TimeoutError:
            if waiter.future.done() and not waiter.future.cancelled():
                return waiter.future.result()
            raise Refusal(
                503, waiter.reason, f"Held ({waiter.reason}) for {rules.max_wait:g} s, as long as allowed.",
                code="overloaded", retry_seconds=self.drain_seconds(entry.blocks, by_class),
            ) from None  # fmt: skip
        except asyncio.CancelledError:
            # It may have been started in the moment in which its client left.
            if waiter.future.done() and not waiter.future.cancelled():
                engine = waiter.future.result()
                if engine.ledger is not None:
                    engine.ledger.remove(entry.key)
                self.drain()
            raise
        finally:
            self._forget(waiter)
