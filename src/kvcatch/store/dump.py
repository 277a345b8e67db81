"""Records as dictionaries: what ``kvcatch parse`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvcatch.store import layout as L
from kvcatch.store.base import BOUNDS
from kvcatch.store.feeds import JUMP, Feed
from kvcatch.store.records import text_at
from kvcatch.store.state import u64

_FIELDS: dict[int, tuple[str, ...]] = {
    L.NEW: ("rid", "hit_tokens", "queried_tokens"),
    L.RESUME: ("rid", "hit_tokens"),
    L.DROP: ("rid", "start", "count"),
    L.PREEMPT: ("rid", "computed_tokens", "held_blocks", "freed_blocks", "cause", "beneficiary_rid"),
    L.FIRST: ("rid",),
    L.FINISH: ("rid", "reason", "output_tokens", "computed_tokens", "preemptions", "recomputed_tokens"),
    L.SCHEDULED: ("total_tokens", "num_requests"),
}
_OWN_TIME = {
    L.SEGMENT: 2,
    L.PREEMPT: 6,
    L.FIRST: 1,
    L.FINISH: 6,
    L.SCHEDULED: 2,
    L.ARRIVE: 3,
    L.SAMPLE: 1,
    L.RANK: 0,
}


def event_dicts(feed: Feed, wall_offset: int) -> Iterator[dict[str, Any]]:
    """Each record with ``kind``, ``source`` (0 engine core, then ranks) and ``unix_ns``.

    Records without a clock of their own carry the time of the last one that has it.
    """
    now = 0
    for source, kind, aux, payload in feed.records():
        if kind == JUMP:
            yield {"kind": "lost", "source": source, "unix_ns": now}
            continue
        try:
            if kind in _OWN_TIME:
                now = u64(payload, _OWN_TIME[kind]) + wall_offset
            yield {"kind": L.KIND_NAMES[kind], "source": source, "unix_ns": now, **_body(kind, aux, payload)}
        except IndexError:
            yield {
                "kind": L.KIND_NAMES.get(kind, str(kind)),
                "source": source,
                "unix_ns": now,
                "damaged": True,
            }


def _body(kind: int, aux: int, payload: list[int]) -> dict[str, Any]:
    if kind in _FIELDS:
        body: dict[str, Any] = dict(zip(_FIELDS[kind], payload, strict=False))
        if kind == L.PREEMPT:
            body["cause"] = L.CAUSES[payload[4]] if payload[4] < len(L.CAUSES) else "unknown"
        if kind == L.FINISH:
            body["reason"] = L.FINISH_REASONS[payload[1]] if payload[1] < len(L.FINISH_REASONS) else "unknown"
        if kind == L.DROP:
            body["group"] = aux
        return body
    if kind == L.SAMPLE:
        row = dict(zip(L.ROW, payload, strict=False))
        del row["mono_lo"], row["mono_hi"]
        named: dict[str, Any] = {
            **row,
            "bound": BOUNDS[row["bound"]] if row["bound"] < len(BOUNDS) else "unknown",
        }
        if named["held_tokens"] == L.UNKNOWN:
            named["held_tokens"] = None
        return named
    if kind in (L.BLOCKS, L.REPLACE):
        return {"rid": payload[0], "group": aux, "block_ids": payload[1:]}
    if kind == L.EVICT:
        return {"block_ids": payload}
    if kind in (L.TOKENS, L.COMPUTED):
        pairs = [[payload[i], payload[i + 1] & ~L.DONE] for i in range(0, len(payload) - 1, 2)]
        done = [payload[i] for i in range(0, len(payload) - 1, 2) if payload[i + 1] & L.DONE]
        return {"tokens": pairs, "prefill_done": done} if kind == L.TOKENS else {"computed": pairs}
    if kind == L.CHAIN:
        hashes = [f"{payload[i] | payload[i + 1] << 32:016x}" for i in range(3, len(payload) - 1, 2)]
        return {"rid": payload[0], "parent_node": payload[1], "start": payload[2], "hashes": hashes}
    if kind in (L.ARRIVE, L.REFRESH):
        return _request_body(kind, payload)
    if kind == L.RANK:
        return {k: v for k, v in zip(L.RANK_ROW, payload, strict=False) if k not in ("mono_lo", "mono_hi")}
    if kind == L.SEGMENT:
        totals = {
            name: u64(payload, 6 + 2 * i) for i, name in enumerate(L.TOTALS) if 7 + 2 * i < len(payload)
        }
        return {"number": u64(payload, 0), "wall_unix_ns": u64(payload, 4), **totals}
    if kind == L.NOTE:
        return {"text": text_at(payload, 0).decode(errors="replace")}
    if kind == L.DECISION:
        return {"rid": payload[0], "decision": text_at(payload, 1).decode(errors="replace")}
    return {}


def _request_body(kind: int, payload: list[int]) -> dict[str, Any]:
    text = text_at(payload, 13 if kind == L.ARRIVE else 19)
    try:
        name, tags = json.loads(text)
    except (ValueError, TypeError):
        name, tags = None, {}
    body = {"rid": payload[0], "engine_request_id": name, "tags": tags}
    if kind == L.ARRIVE:
        # From the front end's arrival time to the moment the engine core took the request.
        sizes = {"prompt_tokens": payload[5], "max_tokens": payload[6], "num_hashes": payload[8]}
        return {**body, **sizes, "frontend_ns": max(0, u64(payload, 3) - u64(payload, 1))}
    return {**body, "state": L.REQUEST_STATES[payload[12] & 3], "computed_tokens": payload[13]}
