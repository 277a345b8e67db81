"""The metric catalogue: what kvcatch exports, and under which names engines export theirs.

One table feeds exporter, dashboards, alert rules, scraper and docs; tests compare them all.
"""

from __future__ import annotations

import msgspec

#: labels of every per-engine series; ``target`` tells several engines in one exporter apart
ENGINE_LABELS = ("target", "model_name", "engine")


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One exported metric. kind: gauge | counter | info. ``labels`` come after ``ENGINE_LABELS``.

    ``scraped`` is True when a plain ``/metrics`` page (no recorder) is enough to fill it.
    ``exporter`` is the process that serves it: serve | gateway.
    """

    name: str
    kind: str
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    per_engine: bool = True
    scraped: bool = False
    exporter: str = "serve"

    @property
    def family(self) -> str:
        """The name as prometheus_client wants it: counters without ``_total``."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label name, in exposition order."""
        return (*ENGINE_LABELS, *self.labels) if self.per_engine else self.labels


def _gauge(name: str, help_: str, *labels: str, unit: str = "", scraped: bool = False) -> Metric:
    return Metric(name=name, kind="gauge", help=help_, labels=labels, unit=unit, scraped=scraped)


def _counter(name: str, help_: str, *labels: str, unit: str = "", scraped: bool = False) -> Metric:
    return Metric(name=name, kind="counter", help=help_, labels=labels, unit=unit, scraped=scraped)


def _gateway_gauge(name: str, help_: str, *labels: str, unit: str = "") -> Metric:
    return Metric(
        name=name, kind="gauge", help=help_, labels=labels, unit=unit, per_engine=False, exporter="gateway"
    )


CATALOGUE: tuple[Metric, ...] = (
    # --- the pool -----------------------------------------------------------------------------------
    _gauge(
        "kvcatch_kv_cache_blocks",
        "KV blocks by state: active (referenced), cached (reusable, evictable), free. Sums to the capacity.",
        "tier",
        "state",
        unit="blocks",
        scraped=True,
    ),
    _gauge(
        "kvcatch_kv_cache_peak_blocks",
        "Most blocks in this state at any step of the last minute.",
        "tier",
        "state",
        unit="blocks",
        scraped=True,
    ),
    _gauge(
        "kvcatch_kv_cache_capacity_blocks",
        "Usable KV blocks: all but vLLM's null block.",
        "tier",
        unit="blocks",
        scraped=True,
    ),
    _gauge("kvcatch_kv_cache_block_size_tokens", "Tokens one block holds.", unit="tokens", scraped=True),
    _gauge("kvcatch_kv_cache_bytes", "KV cache memory by block state.", "tier", "state", unit="bytes"),
    _gauge(
        "kvcatch_kv_cache_tokens",
        "Tokens held in active blocks, shared ones once.",
        "tier",
        "state",
        unit="tokens",
    ),
    _gauge(
        "kvcatch_internal_fragmentation_ratio",
        "Share of active token slots that hold no token: 1 - held tokens / (active blocks x block size).",
        unit="ratio",
    ),
    # --- demand and limits --------------------------------------------------------------------------
    _gauge(
        "kvcatch_committed_ratio",
        "Active blocks plus blocks that waiting prompts need, over usable blocks; above 1 not all fit.",
        unit="ratio",
        scraped=True,
    ),
    _gauge(
        "kvcatch_watermark_ratio",
        "Safe share of usable blocks in use; source says whether it was measured, assumed or has expired.",
        "source",
        unit="ratio",
        scraped=True,
    ),
    _gauge(
        "kvcatch_headroom_requests",
        "More requests of the recent typical size that fit before one waits or is preempted.",
        unit="requests",
        scraped=True,
    ),
    _gauge(
        "kvcatch_headroom_limit",
        "1 for the limit that stops the next request after the headroom is used.",
        "limit",
        scraped=True,
    ),
    _gauge(
        "kvcatch_requests_waiting",
        "Waiting requests by what they wait for: blocks or other (remote KV, grammar, LoRA).",
        "reason",
        unit="requests",
        scraped=True,
    ),
    _gauge(
        "kvcatch_requests_held", "Requests kept back by kvcatch's own scheduler or gateway.", unit="requests"
    ),
    # --- steps --------------------------------------------------------------------------------------
    _counter(
        "kvcatch_steps_total",
        "Engine steps recorded, by the limit that bound the step.",
        "bound",
        unit="steps",
    ),
    _counter("kvcatch_step_seconds_total", "Time of recorded steps, schedule to update.", unit="seconds"),
    _counter("kvcatch_schedule_seconds_total", "Time inside the scheduler.", unit="seconds"),
    _counter(
        "kvcatch_scheduled_tokens_total",
        "Tokens scheduled, recomputed ones included, by phase: prefill or decode.",
        "phase",
        unit="tokens",
    ),
    # --- eviction, reuse, recomputation -------------------------------------------------------------
    _counter(
        "kvcatch_kv_block_evictions_total",
        "Cached blocks whose contents were dropped to make room.",
        "tier",
        "reason",
        unit="blocks",
    ),
    _counter(
        "kvcatch_prefix_cache_queried_tokens_total",
        "Prompt tokens of admitted requests looked up in the prefix cache; retries are not counted.",
        unit="tokens",
    ),
    _counter("kvcatch_prefix_cache_hit_tokens_total", "Of those, tokens found.", unit="tokens"),
    _counter(
        "kvcatch_prefix_cache_missed_tokens_total",
        "Prompt tokens of finished requests that were computed. capacity: content seen before in this record that was "
        "not (or not yet) in the cache; compulsory: all others.",
        "cause",
        unit="tokens",
    ),
    _counter("kvcatch_preemptions_total", "Requests preempted.", unit="requests"),
    _counter(
        "kvcatch_preemption_recomputed_tokens_total",
        "Tokens computed again because their request was preempted.",
        unit="tokens",
    ),
    # --- transfers between tiers --------------------------------------------------------------------
    _counter(
        "kvcatch_kv_transfer_bytes_total",
        "KV cache moved between the device and another tier, as the engine's connectors count it.",
        "tier",
        "direction",
        unit="bytes",
        scraped=True,
    ),
    _counter(
        "kvcatch_kv_transfer_seconds_total",
        "Time of those transfers; they overlap, so it may exceed the clock.",
        "tier",
        "direction",
        unit="seconds",
        scraped=True,
    ),
    # --- tenants (top K by blocks, the rest is "other") ---------------------------------------------
    _gauge(
        "kvcatch_tenant_blocks",
        "Blocks held by a tenant; shared blocks count for each holder.",
        "tenant",
        unit="blocks",
    ),
    _gauge("kvcatch_tenant_requests", "Requests of a tenant.", "tenant", "status", unit="requests"),
    # --- cards and ranks ----------------------------------------------------------------------------
    _gauge(
        "kvcatch_device_memory_bytes",
        "Memory of the card of a rank by owner: kv_cache, engine_other, other_processes, free.",
        "device",
        "tp_rank",
        "pp_rank",
        "dp_rank",
        "owner",
        unit="bytes",
    ),
    _gauge(
        "kvcatch_device_memory_peak_bytes",
        "Peak of the memory the engine used on this rank's card.",
        "device",
        "tp_rank",
        "pp_rank",
        "dp_rank",
        unit="bytes",
    ),
    _gauge(
        "kvcatch_rank_step_seconds",
        "Model execution time of the newest step on this rank.",
        "device",
        "tp_rank",
        "pp_rank",
        "dp_rank",
        unit="seconds",
    ),
    _gauge(
        "kvcatch_binding_device",
        "1 for the rank whose card has least memory left: it limits the KV cache of all ranks.",
        "device",
        "tp_rank",
        "pp_rank",
        "dp_rank",
    ),
    # --- findings -----------------------------------------------------------------------------------
    _gauge(
        "kvcatch_findings",
        "Findings open now, by code; the code is the runbook anchor.",
        "code",
        "severity",
        scraped=True,
    ),
    # --- the gateway --------------------------------------------------------------------------------
    Metric(
        name="kvcatch_gateway_decisions_total",
        kind="counter",
        unit="requests",
        help="Requests by what the gateway decided and why.",
        labels=("outcome", "reason"),
        per_engine=False,
        exporter="gateway",
    ),
    _gateway_gauge("kvcatch_gateway_requests_waiting", "Requests held at the gateway now.", unit="requests"),
    _gateway_gauge(
        "kvcatch_gateway_requests_in_flight",
        "Requests of this gateway at the engine now.",
        "upstream",
        unit="requests",
    ),
    _gateway_gauge(
        "kvcatch_gateway_planned_blocks",
        "KV blocks that requests in flight hold together at their planned full size.",
        "upstream",
        unit="blocks",
    ),
    _gateway_gauge(
        "kvcatch_gateway_limit_blocks",
        "KV blocks that requests of this gateway may plan for: usable less reserve and foreign load.",
        "upstream",
        unit="blocks",
    ),
    _gateway_gauge("kvcatch_gateway_upstream_up", "1 when the engine answers.", "upstream"),
    _gateway_gauge(
        "kvcatch_gateway_degraded",
        "1 when the engine's state is unknown or too old, so that the gateway's own ledger decides alone.",
        "upstream",
    ),
    Metric(
        name="kvcatch_gateway_mirror_requests_total",
        kind="counter",
        unit="requests",
        help="Requests chosen for the mirror by what became of them: copied, compared, dropped, failed and so on.",
        labels=("outcome",),
        per_engine=False,
        exporter="gateway",
    ),
    _gateway_gauge("kvcatch_gateway_mirror_active", "1 while requests are copied to a candidate engine."),
    _gateway_gauge(
        "kvcatch_gateway_mirror_stopped",
        "1 for the reason that ended the mirror: errors, verdict or files.",
        "reason",
    ),
    # --- kvcatch itself -----------------------------------------------------------------------------
    _gauge("kvcatch_up", "1 when the target answered with data that could be read.", scraped=True),
    _gauge(
        "kvcatch_last_sample_timestamp_seconds",
        "Wall clock time of the newest data of this target.",
        unit="seconds",
        scraped=True,
    ),
    _gauge(
        "kvcatch_scrape_duration_seconds",
        "Time the last read of this target took.",
        unit="seconds",
        scraped=True,
    ),
    _gauge(
        "kvcatch_unknown_series",
        "Quantities this target does not give, or gives in a form that had to be rejected.",
        scraped=True,
    ),
    _counter("kvcatch_capture_events_total", "Records read from the engine's recorder.", unit="records"),
    _counter(
        "kvcatch_capture_dropped_records_total",
        "Records lost because the reader was slower than the ring.",
        unit="records",
    ),
    _counter(
        "kvcatch_capture_hook_errors_total", "Errors of kvcatch's own hooks inside the engine.", unit="errors"
    ),
    _gauge(
        "kvcatch_engine_info",
        "Constant 1; the labels describe the engine.",
        "engine_kind",
        "engine_version",
        "source",
        "state",
        scraped=True,
    ),
    Metric(
        name="kvcatch_build_info",
        kind="gauge",
        help="Constant 1; the labels describe this exporter.",
        labels=("version",),
        per_engine=False,
    ),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Where a board turns yellow, a rule fires and a finding opens. Ratios are 0 to 1."""

    assumed_watermark_ratio: float = 0.85
    usage_warning_ratio: float = 0.90
    usage_critical_ratio: float = 0.95
    waiting_warning: int = 50
    hit_ratio_warning: float = 0.30
    preemptions_per_second_warning: float = 1.0
    recomputed_share_warning: float = 0.10
    ttft_p99_warning_seconds: float = 10.0
    ttft_p99_critical_seconds: float = 30.0
    fragmentation_warning_ratio: float = 0.40
    tenant_share_warning_ratio: float = 0.50
    committed_target_ratio: float = 0.85
    stale_seconds: float = 60.0


THRESHOLDS = Thresholds()
