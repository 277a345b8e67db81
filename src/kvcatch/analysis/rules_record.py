"""Findings about the evidence itself: KVC501 to KVC503."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcatch.analysis.evidence import Case
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Finding
from kvcatch.units import human_bytes, human_count

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
