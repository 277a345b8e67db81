"""A hand-made Capture for views and verbs: a pool of 100 blocks of 16 tokens that three tenants share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvcatch.events import EngineInfo
from kvcatch.results import (
    Efficiency,
    GroupView,
    Latency,
    LossView,
    Pool,
    Preemption,
    Prefix,
    Queues,
    RankView,
    RequestView,
    Snapshot,
    TenantView,
)
from kvcatch.store.base import SAMPLE_COLUMNS, Capture, Columns

ARRIVAL = 1_764_439_200.0  # 2025-11-29 18:00:00 UTC


def request(name: str, tenant: str, blocks: int, **more: Any) -> RequestView:
    """One request that fills its blocks to the last token but one."""
    base: dict[str, Any] = {
        "request_id": name,
        "engine_request_id": f"cmpl-{name}-0-0011aabb",
        "status": "running",
        "tags": {"tenant": tenant},
        "num_blocks": blocks,
        "shared_blocks": 0,
        "num_tokens": max(0, blocks * 16 - 1),
        "prompt_tokens": 64,
        "output_tokens": 16,
        "cached_tokens": 32,
        "num_preemptions": 0,
        "recomputed_tokens": 0,
        "age_seconds": 2.5,
        "arrival_unix_seconds": ARRIVAL,
        "queue_seconds": 0.25,
        "ttft_seconds": 0.5,
    }
    return RequestView(**{**base, **more})


def snapshot(**changes: Any) -> Snapshot:
    """60 active, 25 cached, 15 free; one request holds 40 of them."""
    now = time.time()
    base: dict[str, Any] = {
        "target": "live:4242",
        "engine": "vllm",
        "engine_version": "0.32.0",
        "model": "tiny-llama",
        "pid": 4242,
        "unix_seconds": now,
        "data_age_seconds": 0.2,
        "step": 4076,
        "bound_by": "blocks",
        "pool": Pool(
            num_blocks=100, active_blocks=60, cached_blocks=25, free_blocks=15, block_size=16,
            active_tokens=930, block_bytes=1 << 20, active_blocks_max=72,
        ),
        "groups": (GroupView(kind="full", layers=4, block_size=16, page_bytes=1 << 18),),
        "queues": Queues(running=3, waiting_for_blocks=0, waiting_other=1, running_max=5),
        "prefix": Prefix(queried_tokens=1000, hit_tokens=452, hit_ratio=0.452),
        "preemption": Preemption(preemptions=7, recomputes=7, recomputed_tokens=1204),
        "efficiency": Efficiency(block_utilization_ratio=930 / 960, internal_fragmentation_ratio=30 / 960),
        "latency": Latency(
            ttft_seconds=0.5, ttft_p95_seconds=0.9, tpot_seconds=0.012, output_tokens_per_second=1204.0
        ),
        "requests": (
            request("chat-1", "acme", 12),
            request("long-doc", "umbrella", 40, num_preemptions=2, recomputed_tokens=900),
            request("chat-2", "acme", 8, status="preempted"),
            request("queued-9", "initech", 0, status="waiting", ttft_seconds=None),
        ),
        "tenants": (
            TenantView(tenant="acme", num_blocks=20, share_ratio=0.2, running=2, waiting=0),
            TenantView(tenant="umbrella", num_blocks=40, share_ratio=0.4, running=1, waiting=0),
        ),
        "ranks": (
            RankView(
                tp_rank=0, pp_rank=0, dp_rank=0, device="cpu", memory_total_bytes=8 << 30,
                memory_used_bytes=2 << 30,
            ),
        ),
    }  # fmt: skip
    return Snapshot(**{**base, **changes})


class FakeCapture(Capture):
    """Answers with what it was given; raises ``broken`` when that is set."""

    def __init__(self, state: Snapshot | None = None, events: list[dict[str, Any]] | None = None) -> None:
        self.state = state if state is not None else snapshot()
        self.target = self.state.target
        self.info = EngineInfo(num_blocks=101, block_size=16, max_num_seqs=64, model=self.state.model)
        self.records = events or []
        self.broken: Exception | None = None
        self.rows: list[dict[str, int]] = []
        self.refreshed = 0
        self.closed = False

    def refresh(self) -> None:
        self.refreshed += 1
        if self.broken is not None:
            raise self.broken

    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        return msgspec.structs.replace(self.state, unix_seconds=time.time())

    def samples(self, start: int | None = None, stop: int | None = None) -> Columns:
        rows = [
            row
            for row in self.rows
            if (start is None or row["unix_ns"] >= start) and (stop is None or row["unix_ns"] < stop)
        ]
        return {name: np.array([row.get(name, 0) for row in rows], dtype=np.int64) for name in SAMPLE_COLUMNS}

    def requests(self) -> list[RequestView]:
        return list(self.state.requests)

    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        for record in self.records:
            if start is not None and record["unix_ns"] < start:
                continue
            if stop is not None and record["unix_ns"] >= stop:
                continue
            yield record

    @property
    def loss(self) -> LossView:
        return self.state.loss

    def counters(self) -> dict[str, float]:
        return {
            "records": 7, "missed_compulsory_tokens": 48, "missed_capacity_tokens": 32,
            "transfer_offload_load_bytes": 4096, "transfer_offload_load_seconds": 0.5,
        }  # fmt: skip

    def close(self) -> None:
        self.closed = True
