"""Symptom, likely cause, action: KVC401 to KVC407 from what got worse and what was changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcatch.analysis.compare_drift import Drift
from kvcatch.analysis.layout_facts import whole
from kvcatch.analysis.rules import fact, found, worst_first
from kvcatch.events import EngineInfo
from kvcatch.results import Evidence, Finding
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
          "speculative", "method", "cache_hit_alignment_tokens", "prefix_match_unit", "mamba_cache_mode",
          "prefix_cache_retention_interval", "groups", "num_blocks", "num_gpu_blocks", "engine_version")),
    _Row("KVC406", ("block_utilization_ratio",), "more blocks for the same tokens",
         "Blocks are larger than what requests put into them.",
         "Look at fragmentation and block utilisation; use a smaller --block-size.",
         ("block_size", "mamba_block_size", "groups", "disable_hybrid_kv_cache_manager", "engine_version")),
    _Row("KVC403", ("queue_seconds", "waiting_requests"), "requests queue longer",
         "Fewer requests run at a time, or each step takes longer.",
         "Look at the waiting queue and at which limit binds (kvcatch doctor); raise the limit named below.",
         ("max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
          "enable_chunked_prefill", *_ADMISSION)),
    _Row("KVC407", ("ttft_seconds",), "first tokens come later",
         "Nobody queues longer: a prompt takes more steps, or each of its steps longer.",
         "Compare the steps per prompt before the version: give both runs the same --max-num-batched-tokens, then bisect.",
         ("max_num_batched_tokens", "max_num_scheduled_tokens", "enable_chunked_prefill", "long_prefill_token_threshold",
          "max_num_partial_prefills", "enforce_eager", "async_scheduling", "enable_prefix_caching", "prefix_caching",
          "VLLM_ATTENTION_BACKEND", "engine_version")),
)  # fmt: skip
#: findings that explain late first tokens by themselves
_LATE = {"KVC401", "KVC403", "KVC404"}


def explain(
    metrics: Mapping[str, Any], changed: Sequence[Drift], infos: Sequence[EngineInfo] = ()
) -> tuple[Finding, ...]:
    """The findings of a comparison, the most severe first.

    Args:
        metrics: name -> ``compare.Metric``.
        changed: settings that differ.
        infos: configurations of the first and the second run.
    """
    findings: list[Finding] = []
    for row in _TABLE:
        worse = [
            metrics[name] for name in row.metrics if name in metrics and metrics[name].verdict == "worse"
        ]
        if not worse or (row.code == "KVC407" and _LATE & {one.code for one in findings}):
            continue
        chunks = _chunks(metrics, infos) if row.code == "KVC407" else []
        blamed = [one for one in changed if one.name.rpartition(".")[2] in row.blamed]
        cause = row.cause
        if row.code == "KVC407" and "queue_seconds" not in metrics:
            cause = "A prompt takes more steps, or each of its steps longer; whether requests queue longer is not known here."
        blamed.sort(key=lambda one: row.blamed.index(one.name.rpartition(".")[2]))
        findings.append(
            found(
                row.code,
                "warning",
                row.symptom + ": " + said(worse[0]),
                *(fact(f"{one.name}: {said(one)}", one.difference, one.unit or None) for one in worse),
                *chunks,
                *(fact(f"{one.name} was {one.a}, is {one.b}") for one in blamed[:4]),
                cause=f"{blamed[0].name} changed from {blamed[0].a} to {blamed[0].b}. {cause}" if blamed else cause,
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


def _chunks(metrics: Mapping[str, Any], infos: Sequence[EngineInfo]) -> list[Evidence]:
    """Steps that the mean prompt takes, by the token budget of each run."""
    prompts = metrics.get("prompt_tokens")
    budgets = [info.max_num_batched_tokens or whole("max_num_batched_tokens", info) for info in infos]
    if prompts is None or not any(budgets):
        return []
    facts = []
    for when, size, budget in zip(("before", "now"), (prompts.a, prompts.b), budgets, strict=True):
        if budget and size:
            steps = math.ceil(size / budget)
            # Each running request takes a token of the budget, so a prompt of just its size spills over.
            more = math.ceil(size / max(1, budget - 1))
            beside = f", {more} beside running requests" if more > steps else ""
            facts.append(
                fact(f"{when} a prompt of {human_count(size)} tokens takes {steps} steps of {human_count(budget)}{beside}",
                     steps, "steps")
            )  # fmt: skip
    return facts


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
