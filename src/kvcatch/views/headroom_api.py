"""``/v1/headroom``: what still fits, engine by engine, as JSON for routers, schedulers and autoscalers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from kvcatch import __version__
from kvcatch.analysis.headroom import SOON_SECONDS, snapshot_headroom
from kvcatch.results import Headroom
from kvcatch.views.targets import Observation

SCHEMA_VERSION = 1

_COUNT = {"type": ["integer", "null"], "minimum": 0}
_RATIO = {"type": ["number", "null"], "minimum": 0}
_TEXT = {"type": ["string", "null"]}

#: JSON Schema (draft 2020-12) of one engine; the order is the order of the answer
_ENGINE: dict[str, dict[str, Any]] = {
    "target": {"type": "string", "description": "what kvcatch serve was pointed at"},
    "model_name": _TEXT,
    "engine": {"type": "string", "description": "the engine label: data parallel rank, 0 without"},
    "engine_version": _TEXT,
    "state": {"enum": ["connecting", "live", "idle", "stale", "disconnected", "ended"]},
    "source": {"enum": ["recorder", "capture", "scrape"]},
    "unix_seconds": {"type": ["number", "null"], "description": "wall clock of the data"},
    "data_age_seconds": {"type": ["number", "null"], "minimum": 0},
    "requests": {**_COUNT, "description": "more requests of this size that fit; null = unknown, not 0"},
    "limit": {**_TEXT, "description": "what stops the next one: blocks, watermark, max_num_seqs, queue, ..."},
    "prompt_tokens": {**_COUNT, "description": "the size asked about, or the typical size seen"},
    "output_tokens": _COUNT,
    "usable_blocks": _COUNT,
    "active_blocks": _COUNT,
    "cached_blocks": _COUNT,
    "free_blocks": _COUNT,
    "block_size": _COUNT,
    "available_tokens": {**_COUNT, "description": "token slots in blocks that nobody references"},
    "utilization_ratio": {**_RATIO, "maximum": 1, "description": "active over usable blocks"},
    "committed_ratio": {**_RATIO, "description": "active plus waiting demand over usable; may exceed 1"},
    "watermark_ratio": {**_RATIO, "description": "safe share of usable blocks in use"},
    "watermark_source": {"enum": ["assumed", "measured", "expired"]},
    "running": _COUNT,
    "waiting_for_blocks": _COUNT,
    "waiting_other": _COUNT,
    "held": _COUNT,
    "preemptions": _COUNT,
}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "kvcatch headroom",
    "type": "object",
    "additionalProperties": False,
    "required": ["schema_version", "kvcatch_version", "unix_seconds", "engines"],
    "properties": {
        "schema_version": {"const": SCHEMA_VERSION},
        "kvcatch_version": {"type": "string"},
        "unix_seconds": {"type": "number"},
        "engines": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": list(_ENGINE),
                "properties": _ENGINE,
            },
        },
    },
}


def document(
    observations: Iterable[Observation],
    size: tuple[int, int] | None = None,
    target: str | None = None,
    within_seconds: float = SOON_SECONDS,
) -> dict[str, Any]:
    """The answer. ``size`` = (prompt, output) tokens to ask about; without it each engine's typical size.

    The requests asked about start within ``within_seconds``.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kvcatch_version": __version__,
        "unix_seconds": time.time(),
        "engines": [
            _engine(seen, size, within_seconds) for seen in observations if target in (None, seen.target)
        ],
    }


def _engine(seen: Observation, size: tuple[int, int] | None, within_seconds: float) -> dict[str, Any]:
    snapshot = seen.snapshot
    pool, queues = snapshot.pool, snapshot.queues
    room = seen.headroom if size is None else snapshot_headroom(seen.info, snapshot, size, within_seconds)
    if snapshot.state not in ("live", "idle"):
        # Old numbers would let a router send work to an engine that may be full or gone.
        room = Headroom(prompt_tokens=room.prompt_tokens, output_tokens=room.output_tokens)
    usable, active = pool.num_blocks, pool.active_blocks
    idle = usable - active if usable is not None and active is not None else None
    utilization = active / usable if active is not None and usable else pool.utilization_ratio
    values: dict[str, Any] = {
        "target": seen.target,
        "model_name": snapshot.model,
        "engine": seen.engine,
        "engine_version": snapshot.engine_version,
        "state": snapshot.state,
        "source": snapshot.source,
        "unix_seconds": snapshot.unix_seconds,
        "data_age_seconds": snapshot.data_age_seconds,
        "requests": room.requests,
        "limit": room.limit,
        "prompt_tokens": room.prompt_tokens,
        "output_tokens": room.output_tokens,
        "usable_blocks": pool.num_blocks,
        "active_blocks": pool.active_blocks,
        "cached_blocks": pool.cached_blocks,
        "free_blocks": pool.free_blocks,
        "block_size": pool.block_size,
        "available_tokens": idle * pool.block_size if idle is not None and pool.block_size else None,
        "utilization_ratio": utilization,
        "committed_ratio": seen.committed_ratio,
        "watermark_ratio": seen.watermark_ratio,
        "watermark_source": seen.watermark_source,
        "running": queues.running,
        "waiting_for_blocks": queues.waiting_for_blocks,
        "waiting_other": queues.waiting_other,
        "held": queues.held,
        "preemptions": snapshot.preemption.preemptions,
    }
    return {name: values[name] for name in _ENGINE}
