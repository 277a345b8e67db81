"""Findings about the evidence itself: KVC501 to KVC504."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcatch.analysis.evidence import Case
from kvcatch.analysis.layout_facts import setting
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Finding
from kvcatch.sources import frames
from kvcatch.units import human_bytes, human_count, human_ratio, human_seconds

#: what a page of a vLLM engine must tell, with the names it has had
_EXPECTED = {
    "usage_ratio": "vllm:kv_cache_usage_perc (vllm:gpu_cache_usage_perc before 0.10)",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}


def metric_missing(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC501: a series without which load is unknown."""
    if case.kind != "metrics" or case.pages is None or case.pages[1].kind != "vllm":
        return
    missing = [name for name in _EXPECTED if getattr(case.pages[1], name) is None]
    if not missing:
        return
    refused = [text for text in case.loss.warnings if ":" in text][:5]
    severity = "warning" if {"usage_ratio", "running", "waiting"} & set(missing) else "info"
    yield found(
        "KVC501", severity, f"not on the page: {', '.join(name.replace('_', ' ') for name in missing)}",
        *(fact(f"{_EXPECTED[name]} is missing") for name in missing), *(fact(f"refused {text}") for text in refused),
    )  # fmt: skip


def metric_stuck(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC502: running and usage at zero on every page while tokens flow."""
    series = case.series
    if case.kind != "metrics" or series is None:
        return
    usage, running = series.get("usage"), series.get("running")
    tokens = (series.total("decode_tokens") or 0.0) + (series.total("prefill_tokens") or 0.0)
    zero = [name for name, values in (("usage", usage), ("running requests", running))
            if values is not None and not np.nan_to_num(values).any()]  # fmt: skip
    # Two pages may both fall between short requests.
    if len(series.unix) < 3 or tokens < limits.stuck_tokens or len(zero) < 2:
        return
    yield found(
        "KVC502", "warning", f"{' and '.join(zero)} stand at zero while {human_count(tokens)} tokens were processed",
        fact(f"{human_count(tokens)} tokens between the first and the last page", tokens, "tokens"),
        fact(f"{len(series.unix)} pages, all with zero", len(series.unix), "pages"),
    )  # fmt: skip


def capture_loss(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC503: dropped records, or a hook that failed."""
    loss = case.loss
    if not loss.dropped_records and not loss.hook_errors and not loss.dropped_bytes:
        return
    evidence = []
    if loss.dropped_records:
        evidence.append(
            fact(f"{human_count(loss.dropped_records)} records lost", loss.dropped_records, "records")
        )
    if loss.dropped_bytes:
        evidence.append(
            fact(
                f"{human_bytes(loss.dropped_bytes)} overwritten before they were read",
                loss.dropped_bytes,
                "bytes",
            )
        )
    if loss.hook_errors:
        evidence.append(
            fact(f"{loss.hook_errors} hook error(s): recording stopped there", loss.hook_errors, "errors")
        )
    title = "recording stopped after an error in a hook" if loss.hook_errors else "the record has gaps"
    yield found("KVC503", "warning", title, *evidence)


def lifetimes_polluted(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC504: the engine's block lifetimes count blocks that never were in the prefix cache."""
    if all(
        setting(name, case.info, case.log) == "True" for name in ("kv_cache_metrics", "disable_log_stats")
    ):
        yield found(
            "KVC504", "warning", "block lifetimes are collected and never taken: the engine's memory grows",
            fact("--kv-cache-metrics together with --disable-log-stats"),
            cause="Evictions are kept in a list that only the log statistics empty, and those are switched off.",
            remedy="Leave out --kv-cache-metrics, or --disable-log-stats.",
        )  # fmt: skip
    page = case.pages[1] if case.pages is not None else None
    seen = page.block_lifetime if page is not None else None
    if page is None or seen is None or seen.observations < limits.lifetimes:
        return
    half = frames.quantile(seen, 0.5)
    evidence = [
        fact(f"{human_count(seen.observations)} block lifetimes recorded, half of them under {human_seconds(half)}",
             half, "seconds"),
    ]  # fmt: skip
    size, usable = page.block_size, page.usable_blocks
    many = False
    if case.info.prefix_caching is False:
        many = True
        evidence.append(fact("prefix caching is off: none of these blocks was cached"))
    elif size and usable and page.prompt_tokens is not None and page.generation_tokens is not None:
        filled = (page.prompt_tokens - (page.hits or 0) + page.generation_tokens) / size
        if filled < usable:
            many = True
            evidence.append(
                fact(f"{human_count(filled)} blocks were filled so far and the pool has {human_count(usable)}: nothing "
                     "cached can have been evicted yet", filled, "blocks")
            )  # fmt: skip
    sizes = [
        part for part in (page.request_prompt_tokens, page.request_generation_tokens) if part is not None
    ]
    if size and sizes and sizes[0].observations:
        tokens = (sum(part.total for part in sizes) - (page.hits or 0)) / sizes[0].observations
        each = max(1, -(-int(tokens) // size))
        many |= 1 / each >= limits.lost_share
        evidence.append(
            fact(f"about one block in {human_count(each)} is the last, partly filled one of a request and never cached "
                 f"({human_ratio(1 / each, 0)})", 1 / each, "ratio")
        )  # fmt: skip
    # One odd block among hundreds does not move the histogram.
    if many:
        yield found("KVC504", "info", "short block lifetimes on this page are not to be trusted", *evidence)
