"""What happens to each request, as records: arrival, admission, blocks, tokens, preemption, finish."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from itertools import compress
from struct import Struct
from typing import Any

from kvcatch.capture.chains import Chains
from kvcatch.capture.live import PREEMPTED, RUNNING, WAITING, Slot
from kvcatch.capture.ring import RingWriter
from kvcatch.capture.tags import describe
from kvcatch.store import layout as L
from kvcatch.store.layout import UNKNOWN

MAX_DECISIONS_PER_STEP = 16
#: sums since the previous row, by position
PREFILL, DECODE, QUERIED, HIT, EVICTED, PREEMPTIONS, RECOMPUTED, COMPLETED = range(8)
NO_SUMS = [0] * 8

# Records with a fixed shape; the layout is in store/layout.py.
_pack_arrive = Struct("<2IQQ4IQQ").pack
_pack_new = Struct("<4I").pack
_pack_resume = Struct("<3I").pack
_pack_first = Struct("<2IQ").pack
_pack_preempt = Struct("<7IQ").pack
_pack_finish = Struct("<7IQ").pack
_ONE_BLOCK = L.BLOCKS | 3 << 16
_ARRIVE_WORDS = 14


class RequestLog:
    """Follows the requests of one scheduler through its outputs and appends what changed to ``out``."""

    def __init__(
        self, scheduler: Any, ring: RingWriter, groups: list[tuple[str, int]],
        mono: Callable[[], int], wall: Callable[[], int],
    ) -> None:  # fmt: skip
        """groups: (kind, block size) per KV cache group; clocks in nanoseconds."""
        self.scheduler = scheduler
        self.ring = ring
        self.mono = mono
        self.wall = wall
        self.managers = list(getattr(scheduler.kv_cache_manager.coordinator, "single_type_managers", ()))
        pool = scheduler.kv_cache_manager.block_pool
        self.free_queue = pool.free_block_queue
        self.caching = bool(getattr(pool, "enable_caching", True))
        self.group_tokens = [size if kind != "mamba" else 0 for kind, size in groups]
        self.attention_groups = sum(1 for size in self.group_tokens if size)
        self.single = self.group_tokens[0] if len(groups) == 1 else 0
        config = getattr(scheduler, "vllm_config", None)
        self.speculative = getattr(config, "speculative_config", None) is not None
        self.out = bytearray()  # the records of this step
        self.slots: dict[str, Slot] = {}
        self.prefilling: dict[str, Slot] = {}
        self.awaiting: list[Slot] = []
        self.next_rid = 1
        self.reasons: dict[Any, int] = {}
        self.in_schedule = False
        self.resync = False
        self.computed_total = 0
        self.span_total = 0
        self.sums = list(NO_SUMS)
        self.totals = [0] * len(L.TOTALS)
        self.chains = Chains()

    def _arrive(self, request: Any, now: int, wall: int) -> None:
        """A request that was first seen at these two times."""
        # The wall clock may have been stepped since the front end stamped the arrival.
        age = wall - int(request.arrival_time * 1e9)
        arrival = now - age if 0 <= age < 86_400_000_000_000 else now
        rid = self.next_rid
        self.next_rid = rid + 1
        self.slots[request.request_id] = Slot(rid, request, arrival, now)
        hashes = getattr(request, "block_hashes", None) or ()
        text, salt, lora = describe(request)
        body = L.text_bytes(text)
        self.out += _pack_arrive(
            L.ARRIVE | (_ARRIVE_WORDS + len(body) // 4) << 16, rid, arrival, now, request.num_prompt_tokens,
            min(request.max_tokens or 0, UNKNOWN), getattr(request, "priority", 0) & UNKNOWN,
            len(hashes) if self.caching else UNKNOWN, salt, lora,
        )  # fmt: skip
        self.out += body
        self.totals[1] += 1
        self._queue_chain(rid, hashes)

    def _adopt(self, key: str) -> Slot:
        """A request that was there before the hooks."""
        self._arrive(self.scheduler.requests[key], self.mono(), self.wall())
        return self.slots[key]

    def _resume(self, slot: Slot, cached_tokens: int) -> None:
        if slot.state == RUNNING:
            # A streaming session goes on: what it had computed is in the total already.
            self.span_total -= slot.span
            self.resync = True
        slot.span = 0
        slot.windows.clear()
        self.out += _pack_resume(L.RESUME | 3 << 16, slot.rid, cached_tokens)
        self.totals[4] += 1

    def _before_preempt(self, request: Any) -> tuple[Slot, int, int, int]:
        slot = self.slots.get(request.request_id) or self._adopt(request.request_id)
        reached = request.num_computed_tokens
        slot.high_water = max(slot.high_water, reached)
        held = sum(
            1
            for manager in self.managers
            for block in manager.req_to_blocks.get(request.request_id, ())
            if not block.is_null
        )
        return slot, reached, held, self.free_queue.num_free_blocks

    def _after_preempt(self, request: Any, before: tuple[Slot, int, int, int]) -> None:
        slot, reached, held, free = before
        freed = self.free_queue.num_free_blocks - free
        cause, beneficiary = 2, 0
        if self.in_schedule:
            cause = 1
            # schedule() is two frames up (ours is between): its local names the request that needed blocks.
            other = sys._getframe(2).f_locals.get("request")
            needy = self.slots.get(getattr(other, "request_id", ""))
            beneficiary = needy.rid if needy is not None else 0
        if slot.state == RUNNING:
            self.computed_total -= reached
            self.span_total -= slot.span
        slot.span = 0
        slot.windows.clear()
        slot.state = PREEMPTED
        self.prefilling.pop(request.request_id, None)
        self.out += _pack_preempt(
            L.PREEMPT | 9 << 16, slot.rid, reached, held, max(0, freed), cause, beneficiary, self.mono()
        )
        self.sums[PREEMPTIONS] += 1
        self.totals[3] += 1

    def _admitted(self, new_requests: Any, known: Any, start: int) -> None:
        """A step with new or resumed requests: what they got, and the blocks of the others."""
        slots, sums = self.slots, self.sums
        for new in new_requests:
            key = new.req_id
            slot = slots.get(key) or self._adopt(key)
            cached_tokens = new.num_computed_tokens
            if slot.state == WAITING:
                slot.sched_mono = start
                slot.hit = cached_tokens
                slot.queried = slot.req.num_tokens
                sums[QUERIED] += slot.queried
                sums[HIT] += cached_tokens
                self.out += _pack_new(L.NEW | 4 << 16, slot.rid, cached_tokens, slot.queried)
                self._joins(key, slot, cached_tokens)
            else:
                # Model Runner V2 sends a resumed request as new, with its whole block list.
                self._resume(slot, cached_tokens)
                self._joins(key, slot, cached_tokens)
            self._blocks(slot, new.block_ids)
        resumed = known.resumed_req_ids
        if resumed:
            reached = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
            for key in filter(resumed.__contains__, known.req_ids):
                slot = slots.get(key) or self._adopt(key)
                self._resume(slot, reached[key])
                self._joins(key, slot, reached[key])
        self._gained(known)

    def _gained(self, known: Any) -> None:
        """The blocks that running requests got: most got none, the others one more for their next tokens."""
        slots = self.slots
        new_ids = known.new_block_ids
        pairs = zip(compress(known.req_ids, new_ids), filter(None, new_ids), strict=True)
        size = self.single
        if not size:
            for key, per_group in pairs:
                self._blocks(slots.get(key) or self._adopt(key), per_group)
            return
        words: list[int] = []
        gained = 0
        for key, (ids,) in pairs:
            slot = slots.get(key) or self._adopt(key)
            if len(ids) == 1:
                words += (_ONE_BLOCK, slot.rid, ids[0])
                slot.span += size
                gained += size
            else:
                self._blocks(slot, (ids,))
        self.span_total += gained
        if words:
            self.out += array("I", words)

    def _joins(self, key: str, slot: Slot, cached_tokens: int) -> None:
        self.computed_total += cached_tokens
        slot.state = RUNNING
        self.prefilling[key] = slot

    def _blocks(self, slot: Slot, per_group: Any) -> None:
        span = 0
        for group, ids in enumerate(per_group):
            if ids:
                self._ids(L.BLOCKS, group, (slot.rid,), ids)
                span += len(ids) * self.group_tokens[group]
        slot.span += span
        self.span_total += span

    def _tokens(self, scheduled: dict[str, int], total: int, running: list[Any]) -> int:
        """Write who got how many tokens, when not everyone got one; returns the prefill tokens of this step."""
        slots, prefilling = self.slots, self.prefilling
        prefill = recomputed = 0
        in_prefill = len(prefilling)
        pairs: list[int] = []
        for key, slot in list(prefilling.items()):
            tokens = scheduled.get(key)
            if tokens is None:
                continue
            request = slot.req
            reached = request.num_computed_tokens
            prefill += tokens
            if slot.high_water > reached - tokens:
                again = min(reached, slot.high_water) - (reached - tokens)
                recomputed += again
                slot.recomputed += again
            if reached >= request.num_tokens:
                del prefilling[key]
                self.sums[COMPLETED] += 1
                pairs += (slot.rid, tokens | L.DONE)
                if not slot.first:
                    self.awaiting.append(slot)
            else:
                pairs += (slot.rid, tokens)
        if total - prefill != len(running) - in_prefill or self.speculative:
            done = {pairs[i] for i in range(0, len(pairs), 2)}
            for request in running:
                key = request.request_id
                slot = slots.get(key) or self._adopt(key)
                tokens = scheduled.get(key, 0)
                if tokens != 1 and slot.rid not in done and key not in prefilling:
                    pairs += (slot.rid, tokens)
        if pairs:
            self._ids(L.TOKENS, 0, (), pairs)
        self.sums[PREFILL] += prefill
        self.sums[RECOMPUTED] += recomputed
        return prefill

    def _first_tokens(self, now: int) -> None:
        still = []
        for slot in self.awaiting:
            if slot.req.num_output_tokens > 0:
                slot.first = True
                slot.first_mono = now
                self.out += _pack_first(L.FIRST | 4 << 16, slot.rid, now)
            elif slot.req.request_id in self.slots:
                still.append(slot)
        self.awaiting = still

    def _finished(self, now: int, keys: Iterable[str]) -> None:
        totals = self.totals
        for key in keys:
            slot = self.slots.pop(key, None)
            if slot is None:
                continue
            request = slot.req
            if slot.state == RUNNING:
                self.computed_total -= request.num_computed_tokens
                self.span_total -= slot.span
            self.prefilling.pop(key, None)
            outputs = request.num_output_tokens
            if not slot.first and outputs > 0:
                slot.first_mono = now
                self.out += _pack_first(L.FIRST | 4 << 16, slot.rid, now)
            self.out += _pack_finish(
                L.FINISH | 9 << 16, slot.rid, self._reason(request.get_finished_reason()), outputs,
                request.num_computed_tokens, request.num_preemptions, slot.recomputed, now,
            )  # fmt: skip
            totals[2] += 1
            totals[11] += outputs
            # Blocks filled by generated tokens were hashed on the way.
            self._queue_chain(slot.rid, getattr(request, "block_hashes", None))

    def _reason(self, reason: Any) -> int:
        """The number of a finish reason, looked up once for each."""
        code = self.reasons.get(reason)
        if code is None:
            text = str(reason)
            code = L.FINISH_REASONS.index(text) if text in L.FINISH_REASONS else 0
            self.reasons[reason] = code
        return code

    # -- pieces ---------------------------------------------------------------------------------------

    def _ids(self, kind: int, aux: int, prefix: tuple[int, ...], ids: list[int]) -> None:
        L.put_ids(self.out, kind, aux, prefix, ids)

    def _held_blocks(self, key: str, rid: int) -> None:
        """The whole block lists of one request."""
        for group, manager in enumerate(self.managers):
            ids = [block.block_id for block in manager.req_to_blocks.get(key, ())]
            if ids:
                self._ids(L.BLOCKS, group, (rid,), ids)

    def _queue_chain(self, rid: int, hashes: Any) -> None:
        if hashes and self.caching and not self.chains.add(rid, hashes):
            self.ring.count_dropped(1)

    def _write_computed(self) -> None:
        pairs: list[int] = []
        for request in self.scheduler.running:
            slot = self.slots.get(request.request_id)
            if slot is not None:
                pairs += (slot.rid, request.num_computed_tokens)
        self.computed_total = sum(pairs[1::2])
        if pairs:
            self._ids(L.COMPUTED, 0, (), pairs)

    def _write_decisions(self, decisions: list[Any]) -> None:
        """What kvcatch's own scheduler decided about a request and why; only when it changed."""
        for _, key, decision, reason in decisions[:MAX_DECISIONS_PER_STEP]:
            slot = self.slots.get(key)
            if slot is None or slot.decision == (decision, reason):
                continue
            slot.decision = (decision, reason)
            text = L.text_bytes(f"{decision}: {reason}".encode()[:200])
            self.out += array("I", (L.DECISION | (2 + len(text) // 4) << 16, slot.rid))
            self.out += text
