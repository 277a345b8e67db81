"""The engine's resolved configuration for the ring header, without paths, prompts or secrets."""

from __future__ import annotations

import dataclasses
import enum
import os
import platform
import re
import socket
from collections.abc import Mapping
from typing import Any

#: VLLM_* settings that explain behaviour; values of others may hold keys or paths
ENV_ALLOWED = (
    "VLLM_ATTENTION_BACKEND", "VLLM_USE_V1", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_KV_CACHE_LAYOUT", "VLLM_PLUGINS",
    "VLLM_LOGGING_LEVEL", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "OMP_NUM_THREADS",
    "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_DP_RANK", "VLLM_DP_SIZE", "PYTHONHASHSEED",
)  # fmt: skip

_FIELDS = {
    "cache": (
        "block_size", "gpu_memory_utilization", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks",
        "num_gpu_blocks_override", "sliding_window", "prefix_caching_hash_algo", "swap_space", "cpu_offload_gb",
        "mamba_block_size", "mamba_cache_mode", "mamba_cache_dtype", "kv_cache_memory_bytes", "watermark",
        "kv_sharing_fast_prefill", "calculate_kv_scales", "kv_offloading_size",
    ),
    "scheduler": (
        "max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_active_seqs", "policy",
        "enable_chunked_prefill", "chunked_prefill_enabled", "async_scheduling", "long_prefill_token_threshold",
        "max_num_partial_prefills", "scheduler_reserve_full_isl", "watermark", "max_num_queued_reqs",
        "max_num_queued_tokens", "disable_hybrid_kv_cache_manager", "stream_interval", "num_lookahead_slots",
    ),
    "parallel": (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank",
        "decode_context_parallel_size", "enable_expert_parallel", "distributed_executor_backend",
    ),
    "model": (
        "dtype", "max_model_len", "quantization", "enforce_eager", "seed", "runner_type", "max_logprobs",
        "skip_tokenizer_init",
    ),
}  # fmt: skip

#: words of a setting's name: its text may name files, people, machines or secrets
_PRIVATE = frozenset(
    [
        "model",
        "models",
        "tokenizer",
        "name",
        "names",
        "path",
        "paths",
        "dir",
        "dirs",
        "file",
        "files",
        "url",
        "endpoint",
        "host",
        "ip",
        "address",
        "addr",
        "uuid",
        "id",
        "ids",
        "key",
        "token",
        "secret",
        "password",
        "template",
        "plugin",
        "plugins",
        "config",
        "configs",
        "revision",
        "cls",
        "parser",
        "prefix",
        "runtime",
        "env",
        "user",
    ]
)
#: words of a setting's name: its value differs between two starts of the same thing
_FLEETING = frozenset(["port", "ports", "rank", "time", "pid", "uuid", "index"])
_WORD = re.compile(r"[A-Za-z0-9_.:+-]{1,48}")
_DEPTH = 3

_KINDS = (
    ("mamba", "mamba"), ("mla", "mla"), ("slidingwindow", "sliding"), ("chunkedlocal", "chunked"),
    ("cross", "cross"), ("fullattention", "full"), ("uniformtype", "full"),
)  # fmt: skip


def plain(value: Any) -> Any:
    """A JSON value: enums by value, classes and dtypes by name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, type):
        return value.__qualname__
    return str(value)[:200]


def settings(owner: Any, depth: int = _DEPTH) -> dict[str, Any]:
    """Every plain setting of a configuration object: numbers, truth values, lists of numbers and choices of one word.

    A default that nobody named is in it like any flag. Texts are kept only where they are a single word and the
    setting's name speaks of no file, person, machine or secret.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        words = set(field.name.lower().split("_"))
        if field.name.startswith("_") or words & _FLEETING or not hasattr(owner, field.name):
            continue
        value = getattr(owner, field.name)
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None or isinstance(value, (bool, int, float)):
            found[field.name] = value
        elif isinstance(value, str):
            if not words & _PRIVATE and _WORD.fullmatch(value):
                found[field.name] = value
        elif isinstance(value, (list, tuple)):
            if len(value) <= 128 and all(isinstance(one, (bool, int, float)) for one in value):
                found[field.name] = " ".join(map(str, value))
        elif depth > 1 and dataclasses.is_dataclass(value) and not isinstance(value, type):
            found[field.name] = settings(value, depth - 1)
    return found


def sections(config: Any) -> dict[str, dict[str, Any]]:
    """``section -> settings`` of the whole resolved configuration."""
    table: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        owner = getattr(config, field.name, None)
        if field.name.endswith("_config") and dataclasses.is_dataclass(owner):
            table[field.name.removesuffix("_config")] = settings(owner)
    for section, names in _FIELDS.items():
        owner = getattr(config, f"{section}_config")
        known = {key: plain(getattr(owner, key)) for key in names if hasattr(owner, key)}
        table[section] = table.get(section, {}) | known
    return table


def group_kind(spec: Any) -> str:
    """kind of a KV cache spec (events.KVGroup) from its class name; a sliding MLA is sliding."""
    name = type(spec).__name__.lower()
    if "slidingwindow" in name:
        return "sliding"
    return next((kind for part, kind in _KINDS if part in name), "other")


def kv_groups(kv_cache_config: Any) -> list[dict[str, Any]]:
    """KV cache groups as events.KVGroup fields."""
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        groups.append(
            {
                "kind": group_kind(spec),
                "layers": len(group.layer_names),
                "block_size": int(getattr(spec, "block_size", 0) or 0),
                "page_bytes": _page_bytes(spec),
                "window": plain(
                    getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
                ),
            }
        )
    return groups


def _page_bytes(spec: Any) -> int | None:
    try:
        return int(spec.page_size_bytes)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def block_bytes(groups: list[dict[str, Any]], kv_cache_config: Any) -> int | None:
    """Bytes of one block id on one rank: what the cache tensors hold, else layers of a group x page bytes."""
    tensors = getattr(kv_cache_config, "kv_cache_tensors", None)
    total = sum(int(tensor.size) for tensor in tensors) if tensors else 0
    if total and kv_cache_config.num_blocks:
        return total // int(kv_cache_config.num_blocks)
    sizes = [group["layers"] * group["page_bytes"] for group in groups if group["page_bytes"]]
    return max(sizes) if sizes else None


def dp_rank_of(parallel: Any) -> int:
    """Which of the data-parallel engines this is.

    Engines of a dense model are independent, and vLLM 0.24 and later gives each of them rank 0 of 1: only the index stays.
    """
    index = getattr(parallel, "data_parallel_index", None)
    return int(getattr(parallel, "data_parallel_rank", 0) if index is None else index) or 0


def engine_info(
    scheduler: Any, engine: str, version: str, adapter: str, kvcatch_version: str, env: Mapping[str, str]
) -> dict[str, Any]:
    """Fields of events.EngineInfo for a scheduler."""
    config = scheduler.vllm_config
    cache, sched = config.cache_config, config.scheduler_config
    parallel, model = config.parallel_config, config.model_config
    groups = kv_groups(scheduler.kv_cache_config)
    pool = scheduler.kv_cache_manager.block_pool
    name = getattr(model, "served_model_name", None) or getattr(model, "model", None)
    name = name[0] if isinstance(name, (list, tuple)) and name else name
    unknown = []
    if getattr(scheduler, "connector", None) is not None:
        unknown.append("blocks held by KV connector transfers")
    if not any(hasattr(scheduler, n) for n in ("deferred_waiting", "skipped_waiting")):
        unknown.append("deferred requests")
    watermark = getattr(sched, "watermark", None)
    return {
        "engine": engine,
        "engine_version": version,
        "kvcatch_version": kvcatch_version,
        "adapter": adapter,
        "model": os.path.basename(str(name).rstrip("/")) if name else None,
        "num_blocks": pool.num_gpu_blocks,
        "block_size": int(cache.block_size or 0) or (groups[0]["block_size"] if groups else 0),
        "hash_block_size": plain(getattr(pool, "hash_block_size", None)),
        "block_bytes": block_bytes(groups, scheduler.kv_cache_config),
        "kv_cache_dtype": plain(cache.cache_dtype),
        "groups": groups,
        "prefix_caching": bool(getattr(pool, "enable_caching", cache.enable_prefix_caching)),
        "max_model_len": plain(model.max_model_len),
        "max_num_seqs": plain(scheduler.max_num_running_reqs),
        "max_num_batched_tokens": plain(scheduler.max_num_scheduled_tokens),
        "watermark_free_ratio": float(watermark) if isinstance(watermark, (int, float)) else None,
        "policy": plain(sched.policy),
        "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        "async_scheduling": bool(getattr(sched, "async_scheduling", False)),
        "speculative": getattr(config, "speculative_config", None) is not None,
        "kv_connector": type(scheduler.connector).__name__ if getattr(scheduler, "connector", None) else None,
        "tp_size": int(parallel.tensor_parallel_size),
        "pp_size": int(parallel.pipeline_parallel_size),
        "dp_size": int(parallel.data_parallel_size),
        "dp_rank": dp_rank_of(parallel),
        "device": plain(getattr(getattr(config, "device_config", None), "device_type", None)),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "config": sections(config),
        "env": {key: env[key] for key in ENV_ALLOWED if key in env} | {"python": platform.python_version()},
        "unknown": unknown,
    }
