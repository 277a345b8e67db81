"""Typed answers: frozen, JSON-able, units in the names. ``None`` means unknown, never zero."""

from __future__ import annotations

from typing import Any

import msgspec


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every answer."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, numbers and strings, ready for JSON."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


class Pool(Result, frozen=True):
    """Blocks of the pool by state. active + cached + free = num_blocks (the null block is not counted).

    step_blocks: taken since by the step that is being computed; these are among the blocks of the requests already.
    """

    num_blocks: int | None = None
    active_blocks: int | None = None
    cached_blocks: int | None = None
    free_blocks: int | None = None
    block_size: int | None = None
    active_tokens: int | None = None
    block_bytes: int | None = None
    active_blocks_max: int | None = None
    cached_blocks_max: int | None = None
    watermark_utilization_ratio: float | None = None
    watermark_source: str = "assumed"
    utilization_ratio: float | None = None  # active / num_blocks, where only the ratio is known
    step_blocks: int | None = None


class Queues(Result, frozen=True):
    """Requests by where they are. ``held`` = kept back by kvcatch's own scheduler or gateway."""

    running: int | None = None
    waiting_for_blocks: int | None = None
    waiting_other: int | None = None
    held: int | None = None
    running_max: int | None = None
    waiting_max: int | None = None
    waiting: int | None = None  # all that wait, also where the reasons are unknown


class Prefix(Result, frozen=True):
    """Prefix-cache lookups of admitted requests, in tokens."""

    queried_tokens: int | None = None
    hit_tokens: int | None = None
    hit_ratio: float | None = None


class Preemption(Result, frozen=True):
    """Preemptions since the start of the capture and what they cost."""

    preemptions: int | None = None
    recomputes: int | None = None
    recomputed_tokens: int | None = None


class Efficiency(Result, frozen=True):
    """How well held blocks are filled.

    block_utilization_ratio = held tokens / (active blocks x block size), shared blocks counted once;
    internal_fragmentation_ratio = 1 - that.
    """

    block_utilization_ratio: float | None = None
    internal_fragmentation_ratio: float | None = None
    internal_fragmentation_ratio_max: float | None = None


class Latency(Result, frozen=True):
    """Latencies of requests finished (TTFT: first token seen) in the recent window."""

    ttft_seconds: float | None = None
    ttft_p95_seconds: float | None = None
    tpot_seconds: float | None = None
    queue_seconds: float | None = None
    output_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    schedule_seconds: float | None = None
    step_seconds: float | None = None
    step_seconds_max: float | None = None
    window_seconds: float | None = None


class Headroom(Result, frozen=True):
    """What still fits before something waits: requests of (prompt, output) size, and the limit that binds."""

    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    limit: str | None = None


class RequestView(Result, frozen=True):
    """One request as the engine holds it. num_blocks counts shared blocks too, shared_blocks only those."""

    request_id: str
    engine_request_id: str
    status: str
    tags: dict[str, str] = {}
    num_blocks: int | None = None
    shared_blocks: int | None = None
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    num_preemptions: int | None = None
    recomputed_tokens: int | None = None
    age_seconds: float | None = None
    arrival_unix_seconds: float | None = None
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    finish_reason: str | None = None
    max_tokens: int | None = None
    decision: str | None = None  # the last word of kvcatch's scheduler about this request, and why


class TenantView(Result, frozen=True):
    """One tenant: blocks held (shared blocks counted for each holder), requests, hits."""

    tenant: str
    num_blocks: int | None = None
    share_ratio: float | None = None
    running: int | None = None
    waiting: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None
    preemptions: int | None = None


class RankView(Result, frozen=True):
    """One worker rank and its device. On CPU the process memory plays the card."""

    tp_rank: int | None = None
    pp_rank: int | None = None
    dp_rank: int | None = None
    device: str | None = None
    pid: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_peak_bytes: int | None = None
    kv_cache_bytes: int | None = None
    other_processes_bytes: int | None = None
    step_seconds: float | None = None
    step_seconds_max: float | None = None


class GroupView(Result, frozen=True):
    """One KV cache group."""

    kind: str
    layers: int | None = None
    block_size: int | None = None
    page_bytes: int | None = None
    window_tokens: int | None = None


class LossView(Result, frozen=True):
    """What is missing from the record: never silently zero."""

    dropped_records: int = 0
    dropped_bytes: int = 0
    hook_errors: int = 0
    sampled_steps: int = 1
    unknown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Evidence(Result, frozen=True):
    """One quoted number behind a finding."""

    text: str
    value: float | None = None
    unit: str | None = None
    source: str | None = None


class Finding(Result, frozen=True):
    """One explained problem. ``severity`` = critical | warning | info; ``anchor`` points into the runbook."""

    code: str
    severity: str
    title: str
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    remedy: str = ""
    anchor: str = ""
    request_id: str | None = None
    tenant: str | None = None
    unix_seconds: float | None = None


class Snapshot(Result, frozen=True):
    """The state of one engine at one moment: what ``top --once --json`` prints."""

    schema_version: int = 1
    kvcatch_version: str | None = None
    target: str = ""
    state: str = "live"  # connecting | live | idle | stale | disconnected | ended
    source: str = "recorder"  # recorder | capture | scrape
    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    pid: int | None = None
    dp_rank: int | None = None
    unix_seconds: float | None = None
    data_age_seconds: float | None = None
    step: int | None = None
    bound_by: str | None = None
    pool: Pool = Pool()
    groups: tuple[GroupView, ...] = ()
    queues: Queues = Queues()
    prefix: Prefix = Prefix()
    preemption: Preemption = Preemption()
    efficiency: Efficiency = Efficiency()
    latency: Latency = Latency()
    headroom: Headroom = Headroom()
    requests: tuple[RequestView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    ranks: tuple[RankView, ...] = ()
    loss: LossView = LossView()
    findings: tuple[Finding, ...] = ()
