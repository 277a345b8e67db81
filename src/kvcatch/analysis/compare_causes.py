"""Symptom, likely cause, action: KVC401 to KVC406 from what got worse and what was changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcatch.analysis.compare_drift import Drift
from kvcatch.analysis.rules import fact, found, worst_first
from kvcatch.results import Finding
from kvcatch.units import human_count, human_ratio, human_seconds


class _Row(NamedTuple):
    code: str
    metrics: tuple[str, ...]  # any of these being worse is the symptom
    symptom: str
    cause: str
    action: str
    blamed: tuple[str, ...]  # settings that can do it


_ADMISSION = (
    "num_blocks", "num_gpu_blocks", "gpu_memory_utilization", "kv_cache_memory_bytes", "cache_dtype", "kv_cache_dtype",
    "max_num_seqs", "watermark", "watermark_free_ratio", "max_num_batched_tokens", "scheduler_reserve_full_isl", "policy",
    "scheduler", "max_model_len", "engine_version",
)  # fmt: skip
_TABLE = (
    _Row("KVC402", ("kv_capacity_tokens",), "the pool holds fewer tokens",
         "More memory goes elsewhere, or a token takes more.",
         "Compare the start-up logs (Available KV cache memory); kvcatch plan shows where it went.",
         ("num_blocks", "num_gpu_blocks", "gpu_memory_utilization", "kv_cache_memory_bytes", "cache_dtype",
          "kv_cache_dtype", "block_bytes", "groups", "max_num_batched_tokens", "tensor_parallel_size", "enforce_eager",
          "VLLM_CPU_KVCACHE_SPACE", "engine_version")),
    _Row("KVC401", ("preemptions_per_request", "recomputed_share"), "more preemption and recomputation",
         "Requests are admitted that the pool cannot let grow: less room, or other admission rules.",
         "Look at preemptions beside KV use; keep blocks free at admission (--watermark), lower --max-num-seqs.",
         _ADMISSION),
    _Row("KVC404", ("hit_ratio",), "prefix reuse was lost",
         "Prefix caching is off, its unit grew, or prefixes are evicted earlier.",
         "Look at the hit ratio and at the prefixes: kvcatch prefix says why each token was missed.",
         ("enable_prefix_caching", "prefix_caching", "block_size", "hash_block_size", "prefix_caching_hash_algo",
          "num_blocks", "num_gpu_blocks", "mamba_cache_mode", "engine_version")),
    _Row("KVC406", ("block_utilization_ratio",), "more blocks for the same tokens",
         "Blocks are larger than what requests put into them.",
         "Look at fragmentation and block utilisation; use a smaller --block-size.",
         ("block_size", "mamba_block_size", "groups", "disable_hybrid_kv_cache_manager", "engine_version")),
    _Row("KVC403", ("queue_seconds", "waiting_requests"), "requests queue longer",
         "Fewer requests run at a time, or each step takes longer.",
         "Look at the waiting queue and at which limit binds (kvcatch doctor); raise the limit named below.",
         ("max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
          "enable_chunked_prefill", *_ADMISSION)),
)  # fmt: skip


def explain(metrics: Mapping[str, Any], changed: Sequence[Drift]) -> tuple[Finding, ...]:
    """The findings of a comparison, the most severe first.

    Args:
        metrics: name -> ``compare.Metric``.
        changed: settings that differ.
    """
    findings = []
    for row in _TABLE:
        worse = [
            metrics[name] for name in row.metrics if name in metrics and metrics[name].verdict == "worse"
        ]
        if not worse:
            continue
        blamed = [one for one in changed if one.name.rpartition(".")[2] in row.blamed]
        blamed.sort(key=lambda one: row.blamed.index(one.name.rpartition(".")[2]))
        findings.append(
            found(
                row.code,
                "warning",
                row.symptom + ": " + said(worse[0]),
                *(fact(f"{one.name}: {said(one)}", one.difference, one.unit or None) for one in worse),
                *(fact(f"{one.name} was {one.a}, is {one.b}") for one in blamed[:4]),
                cause=f"{blamed[0].name} changed from {blamed[0].a} to {blamed[0].b}. {row.cause}" if blamed else row.cause,
                remedy=_remedy(row, blamed),
            )
        )  # fmt: skip
    if changed:
        hurt = any(one.verdict == "worse" for one in metrics.values())
        restore = " ".join(one.restore for one in changed if one.restore and one.restore.startswith("--"))
        findings.append(
            found(
                "KVC405",
                "warning" if hurt else "info",
                f"{len(changed)} setting{'s differ' if len(changed) > 1 else ' differs'}: "
                + ", ".join(one.name for one in changed[:6]),
                *(fact(f"{one.name}: {one.a} before, {one.b} now") for one in changed),
                cause="A flag was changed, or a default of another version, machine or load.",
                remedy=f"Restore with: {restore}" if restore else "",
            )
        )
    return worst_first(findings)


def _remedy(row: _Row, blamed: Sequence[Drift]) -> str:
    restore = next((one.restore for one in blamed if one.restore), None)
    return f"{row.action} Restore with: {restore}" if restore else row.action


def said(metric: Any) -> str:
    """Before, now and the difference of one metric, for people."""
    return f"{number(metric.a, metric.unit)} before, {number(metric.b, metric.unit)} now"


def number(value: float | None, unit: str) -> str:
    """A metric's value in the unit people read."""
    if unit == "ratio":
        return human_ratio(value)
    if unit == "seconds":
        return human_seconds(value) if value is None or value >= 0 else "-" + human_seconds(-value)
    if value is None or abs(value) >= 100:
        return human_count(value)
    return f"{value:.3g}"
