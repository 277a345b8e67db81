"""What engines expose on ``/metrics`` by themselves: every quantity with every name it has had."""

from __future__ import annotations

import msgspec


class EngineSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity and every name it has had. ``names``: newest first; the first that is usable counts.

    kind: gauge | counter | histogram. check: count (a whole number) | ratio (0 to 1) | number | seconds.
    Names are written with ``:`` turned into ``_`` and without ``_total``, so both spellings match.
    """

    quantity: str
    kind: str
    check: str
    names: tuple[str, ...]


ENGINE_SERIES: tuple[EngineSeries, ...] = (
    EngineSeries(
        quantity="running",
        kind="gauge",
        check="count",
        names=("vllm_num_requests_running", "sglang_num_running_reqs", "trtllm_num_requests_running"),
    ),
    EngineSeries(
        quantity="waiting",
        kind="gauge",
        check="count",
        names=("vllm_num_requests_waiting", "sglang_num_queue_reqs", "trtllm_num_requests_waiting"),
    ),
    EngineSeries(
        quantity="waiting_by_reason",
        kind="gauge",
        check="count",
        names=("vllm_num_requests_waiting_by_reason",),
    ),
    EngineSeries(quantity="swapped", kind="gauge", check="count", names=("vllm_num_requests_swapped",)),
    EngineSeries(
        quantity="usage",
        kind="gauge",
        check="ratio",
        names=(
            "vllm_kv_cache_usage_perc",
            "vllm_gpu_cache_usage_perc",
            "sglang_token_usage",
            "trtllm_kv_cache_utilization",
        ),
    ),
    EngineSeries(quantity="cpu_usage", kind="gauge", check="ratio", names=("vllm_cpu_cache_usage_perc",)),
    EngineSeries(
        quantity="queries",
        kind="counter",
        check="count",
        names=("vllm_prefix_cache_queries", "vllm_gpu_prefix_cache_queries"),
    ),
    EngineSeries(
        quantity="hits",
        kind="counter",
        check="count",
        names=("vllm_prefix_cache_hits", "vllm_gpu_prefix_cache_hits", "sglang_cached_tokens"),
    ),
    EngineSeries(
        quantity="hit_rate",
        kind="gauge",
        check="ratio",
        names=("vllm_gpu_prefix_cache_hit_rate", "sglang_cache_hit_rate"),
    ),
    EngineSeries(
        quantity="preemptions",
        kind="counter",
        check="count",
        names=("vllm_num_preemptions", "sglang_num_retracted_requests"),
    ),
    EngineSeries(
        quantity="prompt_tokens",
        kind="counter",
        check="count",
        names=("vllm_prompt_tokens", "sglang_prompt_tokens"),
    ),
    EngineSeries(
        quantity="generation_tokens",
        kind="counter",
        check="count",
        names=("vllm_generation_tokens", "sglang_generation_tokens"),
    ),
    EngineSeries(quantity="evicted_tokens", kind="counter", check="count", names=("sglang_evicted_tokens",)),
    EngineSeries(quantity="load_bytes", kind="counter", check="count", names=("vllm_kv_offload_load_bytes",)),
    EngineSeries(
        quantity="load_seconds", kind="counter", check="number", names=("vllm_kv_offload_load_time",)
    ),
    EngineSeries(
        quantity="store_bytes", kind="counter", check="count", names=("vllm_kv_offload_store_bytes",)
    ),
    EngineSeries(
        quantity="store_seconds", kind="counter", check="number", names=("vllm_kv_offload_store_time",)
    ),
    EngineSeries(
        quantity="remote_bytes", kind="histogram", check="number", names=("vllm_nixl_bytes_transferred",)
    ),
    EngineSeries(
        quantity="remote_seconds", kind="histogram", check="seconds", names=("vllm_nixl_xfer_time_seconds",)
    ),
    EngineSeries(quantity="used_tokens", kind="gauge", check="count", names=("sglang_num_used_tokens",)),
    EngineSeries(
        quantity="capacity_tokens", kind="gauge", check="count", names=("sglang_max_total_num_tokens",)
    ),
    EngineSeries(quantity="max_running", kind="gauge", check="count", names=("sglang_max_running_requests",)),
    EngineSeries(
        quantity="generation_rate",
        kind="gauge",
        check="number",
        names=("vllm_avg_generation_throughput_toks_per_s", "sglang_gen_throughput"),
    ),
    EngineSeries(
        quantity="prompt_rate", kind="gauge", check="number", names=("vllm_avg_prompt_throughput_toks_per_s",)
    ),
    EngineSeries(
        quantity="ttft",
        kind="histogram",
        check="seconds",
        names=("vllm_time_to_first_token_seconds", "sglang_time_to_first_token_seconds"),
    ),
    EngineSeries(
        quantity="tpot",
        kind="histogram",
        check="seconds",
        names=(
            "vllm_inter_token_latency_seconds",
            "vllm_time_per_output_token_seconds",
            "sglang_inter_token_latency_seconds",
            "sglang_time_per_output_token_seconds",
        ),
    ),
    EngineSeries(
        quantity="queue",
        kind="histogram",
        check="seconds",
        names=("vllm_request_queue_time_seconds", "vllm_time_in_queue_requests", "sglang_queue_time_seconds"),
    ),
    EngineSeries(
        quantity="e2e",
        kind="histogram",
        check="seconds",
        names=("vllm_e2e_request_latency_seconds", "sglang_e2e_request_latency_seconds"),
    ),
    EngineSeries(
        quantity="request_prompt_tokens",
        kind="histogram",
        check="number",
        names=("vllm_request_prompt_tokens", "sglang_prompt_tokens_histogram"),
    ),
    EngineSeries(
        quantity="request_generation_tokens",
        kind="histogram",
        check="number",
        names=("vllm_request_generation_tokens", "sglang_generation_tokens_histogram"),
    ),
    EngineSeries(quantity="drafts", kind="counter", check="count", names=("vllm_spec_decode_num_drafts",)),
    EngineSeries(
        quantity="block_lifetime",
        kind="histogram",
        check="seconds",
        names=("vllm_kv_block_lifetime_seconds",),
    ),
    EngineSeries(
        quantity="config",
        kind="gauge",
        check="number",
        names=("vllm_cache_config_info", "sglang_cache_config_info"),
    ),
)

#: engine metrics that dashboards and rules may name (as vLLM exposes them today), beside those above
ENGINE_EXPOSED: frozenset[str] = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:time_to_first_token_seconds_sum",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_generation_tokens_bucket",
        "vllm:request_success_total",
        "vllm:kv_block_lifetime_seconds_bucket",
        "vllm:kv_block_idle_before_evict_seconds_bucket",
        "vllm:kv_block_reuse_gap_seconds_bucket",
    }
)
