"""Rebuilding the engine's state from records: the reader's half of the recorder's contract."""

from __future__ import annotations

import json
from array import array
from typing import Any

from kvcatch.store import layout as L
from kvcatch.store.records import text_at

WAITING, RUNNING, PREEMPTED, DECODING, FINISHED = "waiting", "running", "preempted", "decoding", "finished"
#: the writer queues no more chains than this (capture.recorder.MAX_QUEUED_CHAINS)
MAX_CLOSING = 4096
_STATES = (WAITING, RUNNING, PREEMPTED, DECODING)


def u64(payload: list[int], index: int) -> int:
    """Two words, low first."""
    return payload[index] | payload[index + 1] << 32


class Request:
    """One request as recorded. Times are monotonic nanoseconds of the engine, 0 = not yet."""

    __slots__ = (
        "added",
        "arrival",
        "base",
        "blocks",
        "cached_tokens",
        "decision",
        "finish",
        "first",
        "key",
        "lora",
        "max_tokens",
        "node",
        "num_hashes",
        "output_tokens",
        "preempt_events",
        "preemptions",
        "priority",
        "prompt_tokens",
        "queried_tokens",
        "reason",
        "recomputed_tokens",
        "rid",
        "salt",
        "scheduled",
        "state",
        "tags",
        "unseen",
    )  # fmt: skip

    def __init__(self, rid: int, key: str, tags: dict[str, str]) -> None:
        self.rid = rid
        self.key = key
        self.tags = tags
        self.state = WAITING
        self.arrival = self.added = self.scheduled = self.first = self.finish = 0
        self.prompt_tokens = self.max_tokens = self.priority = 0
        self.num_hashes: int | None = None
        self.unseen = 0  # blocks of its prompt that no earlier request of this epoch had
        self.salt = self.lora = 0
        self.base = 0  # computed tokens; while decoding: minus the step counter, so that a step costs nothing
        self.output_tokens = 0
        self.cached_tokens = 0
        self.queried_tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.blocks: list[list[int]] = []
        self.reason = ""
        self.node = 0
        self.decision = ""
        self.preempt_events: list[tuple[int, int, int, int, int]] = []


class State:
    """Applies records in order. After a SAMPLE record everything equals the engine after that step."""

    def __init__(self, keep_rows: int = 0, keep_finished: int = 0) -> None:
        """keep_rows, keep_finished: how much history to hold, 0 = all."""
        self.requests: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.keep_rows = keep_rows
        self.keep_finished = keep_finished
        self.rows = array("I")
        self.row: list[int] = []
        self.refs: dict[int, int] = {}
        self.ticks = 0
        self.joining: list[Request] = []
        self.pending_new: list[Request] = []
        self.totals: dict[str, int] = dict.fromkeys(L.TOTALS, 0)
        self.closing: dict[int, Request] = {}  # finished, but the hashes of generated blocks follow
        self.segment = 0
        self.partial = False
        self.need_totals = True  # running totals are taken from the first segment seen, and after a loss
        self.nodes: dict[int, tuple[int, int]] = {}  # node -> (parent node, 64-bit hash)
        self.next_node = 1
        self.epoch = 0
        self.evicted_ids: list[int] = []
        self.notes: list[str] = []
        self.wall_offsets: list[tuple[int, int]] = []  # (monotonic, wall) pairs seen
        self.unknown_records = 0
        self.records = 0
        self.block_size = 0  # tokens a hash covers; 0 = unknown, and then nothing is said about misses
        self.missed: dict[str, int] = {"compulsory": 0, "capacity": 0}  # tokens of finished requests
        self._apply = {
            L.SEGMENT: self._segment, L.ARRIVE: self._arrive, L.REFRESH: self._refresh, L.NEW: self._new,
            L.RESUME: self._resume, L.BLOCKS: self._blocks, L.DROP: self._drop, L.REPLACE: self._replace,
            L.TOKENS: self._tokens, L.COMPUTED: self._computed, L.SCHEDULED: self._scheduled,
            L.PREEMPT: self._preempt, L.FIRST: self._first, L.FINISH: self._finish, L.CHAIN: self._chain,
            L.DECISION: self._decision, L.EPOCH: self._epoch, L.SAMPLE: self._sample, L.EVICT: self._evict, L.NOTE: self._note,
        }  # fmt: skip

    def jump(self) -> None:
        """Records were lost: what is known of live requests is no longer true until each is refreshed."""
        self.partial = True
        self.need_totals = True
        self.requests.clear()
        self.refs.clear()
        self.joining.clear()
        self.pending_new.clear()
        self.nodes.clear()
        self.next_node = 1

    def apply(self, kind: int, aux: int, payload: list[int]) -> None:
        """One record. Requests that are not known (yet) are passed over and counted."""
        if kind == L.REFRESHED:
            # A round that began before an older segment says nothing about this reader's window.
            if payload and payload[0] == self.segment & L.UNKNOWN:
                self.partial = False
            return
        self.records += 1
        handler = self._apply.get(kind)
        if handler is not None:
            handler(aux, payload)

    def computed_tokens(self, request: Request) -> int:
        """Tokens whose KV is in the request's blocks (scheduled so far)."""
        return request.base + self.ticks if request.state == DECODING else request.base

    @property
    def in_flight(self) -> int:
        """Scheduled batches whose output had not come back at the last row."""
        return self.row[27] if len(self.row) > 27 else 0

    def num_tokens(self, request: Request) -> int:
        """Prompt and output tokens: of a decoding request its computed tokens and the one just sampled."""
        if request.state == DECODING:
            return max(request.prompt_tokens, self.computed_tokens(request) + 1 - self.in_flight)
        return request.prompt_tokens + request.output_tokens

    # -- records --------------------------------------------------------------------------------------

    def _segment(self, aux: int, payload: list[int]) -> None:
        self.segment = u64(payload, 0)
        self.wall_offsets.append((u64(payload, 2), u64(payload, 4)))
        if not self.need_totals:
            return
        self.need_totals = False
        self.partial = self.partial or self.segment > 0
        for index, name in enumerate(L.TOTALS):
            if 6 + 2 * index + 1 < len(payload):
                self.totals[name] = u64(payload, 6 + 2 * index)

    def _describe(self, rid: int, payload: list[int], index: int) -> Request:
        key, tags = f"#{rid}", {}
        try:
            decoded = json.loads(text_at(payload, index))
            key, tags = str(decoded[0]), {str(k): str(v) for k, v in decoded[1].items()}
        except (ValueError, IndexError, AttributeError, TypeError):
            pass  # a damaged text leaves the request without a name, not the capture without the request
        return Request(rid, key, tags)

    def _arrive(self, aux: int, payload: list[int]) -> None:
        request = self._describe(payload[0], payload, 13)
        request.arrival, request.added = u64(payload, 1), u64(payload, 3)
        request.prompt_tokens, request.max_tokens = payload[5], payload[6]
        request.priority = payload[7] if payload[7] < 1 << 31 else payload[7] - (1 << 32)
        request.num_hashes = None if payload[8] == L.UNKNOWN else payload[8]
        request.salt, request.lora = u64(payload, 9), u64(payload, 11)
        self.requests[request.rid] = request
        self.totals["arrived"] += 1

    def _refresh(self, aux: int, payload: list[int]) -> None:
        rid = payload[0]
        request = self.requests.get(rid) or self._describe(rid, payload, 19)
        self.requests[rid] = request
        self._release(request)
        request.arrival, request.added = u64(payload, 1), u64(payload, 3)
        request.scheduled, request.first = u64(payload, 5), u64(payload, 7)
        request.prompt_tokens, request.max_tokens = payload[9], payload[10]
        request.priority = payload[11] if payload[11] < 1 << 31 else payload[11] - (1 << 32)
        request.state = _STATES[payload[12] & 3]
        request.base = payload[13] - (self.ticks if request.state == DECODING else 0)
        request.output_tokens = payload[14]
        request.queried_tokens, request.cached_tokens = payload[15], payload[16]
        request.preemptions, request.recomputed_tokens = payload[17], payload[18]

    def _new(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        if request is None:
            return
        request.cached_tokens, request.queried_tokens = payload[1], payload[2]
        request.base = payload[1]
        request.state = RUNNING
        self.pending_new.append(request)

    def _resume(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        if request is None:
            return
        self._release(request)
        request.base = payload[1]
        request.state = RUNNING
        self.totals["resumes"] += 1

    def _blocks(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        if request is None:
            return
        blocks = request.blocks
        while len(blocks) <= aux:
            blocks.append([])
        ids = payload[1:]
        blocks[aux] += ids
        refs = self.refs
        for block in ids:
            if block:
                refs[block] = refs.get(block, 0) + 1

    def _drop(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        if request is None or len(request.blocks) <= aux:
            return
        ids = request.blocks[aux]
        start, count = payload[1], payload[2]
        self._unref(ids[start : start + count])
        ids[start : start + count] = [0] * len(ids[start : start + count])

    def _replace(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        if request is None:
            return
        while len(request.blocks) <= aux:
            request.blocks.append([])
        self._unref(request.blocks[aux])
        request.blocks[aux] = []
        self._blocks(aux, payload)

    def _tokens(self, aux: int, payload: list[int]) -> None:
        requests = self.requests
        for index in range(0, len(payload) - 1, 2):
            request = requests.get(payload[index])
            if request is None:
                continue
            tokens = payload[index + 1]
            if request.state == DECODING:
                request.base += (tokens & ~L.DONE) - 1
            else:
                request.base += tokens & ~L.DONE
                if tokens & L.DONE:
                    self.joining.append(request)

    def _computed(self, aux: int, payload: list[int]) -> None:
        for index in range(0, len(payload) - 1, 2):
            request = self.requests.get(payload[index])
            if request is not None:
                request.base = payload[index + 1] - (self.ticks if request.state == DECODING else 0)

    def _scheduled(self, aux: int, payload: list[int]) -> None:
        self.ticks += 1
        start = u64(payload, 2)
        for request in self.pending_new:
            request.scheduled = start
        self.pending_new.clear()
        for request in self.joining:
            if request.state == RUNNING:
                request.state = DECODING
                request.base -= self.ticks
        self.joining.clear()

    def _preempt(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        self.totals["preemptions"] += 1
        if request is None:
            return
        request.output_tokens = max(0, self.num_tokens(request) - request.prompt_tokens)
        self._release(request)
        request.base = 0
        request.state = PREEMPTED
        request.preemptions += 1
        request.preempt_events.append((u64(payload, 6), payload[1], payload[3], payload[4], payload[5]))

    def _first(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        if request is not None:
            request.first = u64(payload, 1)

    def _finish(self, aux: int, payload: list[int]) -> None:
        request = self.requests.pop(payload[0], None)
        self.totals["finished"] += 1
        self.totals["output_tokens"] += payload[2]
        if request is None:
            return
        request.reason = L.FINISH_REASONS[payload[1]] if payload[1] < len(L.FINISH_REASONS) else "unknown"
        request.base, request.output_tokens = payload[3], payload[2]
        request.preemptions, request.recomputed_tokens = payload[4], payload[5]
        request.finish = u64(payload, 6)
        self._release(request)
        self._misses(request)
        request.state = FINISHED
        self.finished.append(request)
        self.closing[request.rid] = request
        if len(self.closing) > MAX_CLOSING:
            del self.closing[next(iter(self.closing))]
        if self.keep_finished and len(self.finished) > 2 * self.keep_finished:
            del self.finished[: -self.keep_finished]

    def _misses(self, request: Request) -> None:
        """Prompt tokens that were computed: content seen before that was not in the cache (any more), and the rest.

        The last token of a prompt is always computed, so at most the blocks before it could have hit.
        """
        if request.num_hashes is None or not self.block_size or not request.queried_tokens:
            return
        reusable = (request.prompt_tokens - 1) // self.block_size
        seen = max(0, min(request.num_hashes - request.unseen, reusable)) * self.block_size
        missed = max(0, request.queried_tokens - request.cached_tokens)
        capacity = min(missed, max(0, seen - request.cached_tokens))
        self.missed["capacity"] += capacity
        self.missed["compulsory"] += missed - capacity

    def _chain(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0]) or self.closing.get(payload[0])
        node = payload[1]
        for index in range(3, len(payload) - 1, 2):
            self.nodes[self.next_node] = (node, payload[index] | payload[index + 1] << 32)
            node = self.next_node
            self.next_node += 1
        if request is not None:
            request.node = node
            start = payload[2]
            prompt = request.num_hashes or 0
            request.unseen += max(0, min(prompt, start + (len(payload) - 3) // 2) - start)

    def _decision(self, aux: int, payload: list[int]) -> None:
        request = self.requests.get(payload[0])
        if request is not None:
            request.decision = text_at(payload, 1).decode(errors="replace")

    def _epoch(self, aux: int, payload: list[int]) -> None:
        self.nodes.clear()
        self.next_node = 1
        self.epoch += 1

    def _evict(self, aux: int, payload: list[int]) -> None:
        self.evicted_ids = payload

    def _note(self, aux: int, payload: list[int]) -> None:
        self.notes.append(text_at(payload, 0).decode(errors="replace"))

    def _sample(self, aux: int, payload: list[int]) -> None:
        if len(payload) < len(L.ROW):
            self.unknown_records += 1
            return
        self.row = payload
        totals = self.totals
        totals["steps"] = payload[0]
        totals["prefill_tokens"] += payload[14]
        totals["decode_tokens"] += payload[15]
        totals["queried_tokens"] += payload[16]
        totals["hit_tokens"] += payload[17]
        totals["evicted_blocks"] += payload[18]
        totals["recomputed_tokens"] += payload[20]
        rows = self.rows
        rows.extend(payload[: len(L.ROW)])
        if self.keep_rows and len(rows) > 2 * self.keep_rows * len(L.ROW):
            del rows[: -self.keep_rows * len(L.ROW)]

    # -- blocks ---------------------------------------------------------------------------------------

    def _unref(self, ids: list[int]) -> None:
        refs = self.refs
        for block in ids:
            if block:
                left = refs.get(block, 1) - 1
                if left:
                    refs[block] = left
                else:
                    refs.pop(block, None)

    def _release(self, request: Request) -> None:
        for ids in request.blocks:
            self._unref(ids)
        request.blocks = []


def tags_of(request: Request) -> dict[str, Any]:
    """The tags with the tenant always named; ``-`` when the source said nothing."""
    return {"tenant": request.tags.get("tenant", "-"), **request.tags}
