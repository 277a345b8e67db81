"""Engines of unusual layout in good health: hybrids, drafts, windows, residency metrics. No warning for any."""

from __future__ import annotations

from typing import Any

import pytest
import rule_pages as pages

from kvcatch.analysis.doctor import diagnose
from kvcatch.analysis.evidence import Case, from_scrape
from kvcatch.analysis.evidence_log import from_log
from kvcatch.events import EngineInfo, KVGroup
from kvcatch.results import Pool, Queues, RequestView, Snapshot
from kvcatch.sources.failures import parse_failures
from kvcatch.sources.logs import LogCapture

ALIGN = {"mamba_cache_mode": "align", "mamba_block_size": "528", "kv_cache_size_tokens": "500000"}


def page(running: int, usage: float, prompts: int, hits: int, **more: Any) -> dict[str, Any]:
    return {
        "num_requests_running": running, "num_requests_waiting": 0, "kv_cache_usage_perc": usage,
        "prompt_tokens_total": prompts, "generation_tokens_total": prompts // 5, "prefix_cache_queries_total": prompts,
        "prefix_cache_hits_total": hits, "num_preemptions_total": 0, "block_size": 528, "num_gpu_blocks": 1000, **more,
    }  # fmt: skip


HEALTHY: dict[str, list[dict[str, Any]]] = {
    "a hybrid that hits alone and in company": [
        page(1 if n < 6 else 9, 0.3, 40_000 * n, 15_000 * n, config=ALIGN) for n in range(12)
    ],
    "a hybrid in all mode whose first prompts were new": [
        page(1 if n < 6 else 9, 0.3, 40_000 * n, 15_000 * max(0, n - 6), config=ALIGN | {"mamba_cache_mode": "all"})
        for n in range(12)
    ],
    # 475,000 of 500,000 tokens alive at 97 %: its states hold 2 %.
    "a hybrid nearly full of tokens": [
        page(9, 0.97, 400_000, 100_000, config=ALIGN, generation_tokens_total=75_000)
    ],
    # Two prompts of 100,000 tokens, the second in the middle of its prefill: 1 first token, 2 running.
    "a hybrid in the middle of a prefill": [
        page(2, 0.96, 100_000, 10_000, config=ALIGN, time_to_first_token=1, num_preemptions_total=1)
    ],
    "drafts with short prompts": [
        page(4, 0.4, 900_000, 500_000, block_size=16, spec_decode_num_drafts_total=9000, finished=1000, mean_prompt=900,
             mean_output=100)
    ],
    # 6,000 of 8,000 tokens hit in steps of 1,536 with a block given back: nothing near a whole step is lost.
    "drafts with a large unit that still hit": [
        page(4, 0.4, 8_000_000, 6_144_000, spec_decode_num_drafts_total=9000, finished=1000, mean_prompt=8000,
             mean_output=100, config={"cache_hit_alignment_tokens": "1536"}, block_size=128)
    ],
    "residency metrics of a busy engine": [
        page(4, 0.6, 8_000_000, 4_000_000, block_size=16, lifetimes={"1": 5, "60": 900, "600": 1000})
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_page_gives_no_warning(name: str) -> None:
    found = diagnose(from_scrape(pages.capture(HEALTHY[name]))).findings
    assert [one for one in found if one.severity != "info"] == []
    assert not {"KVC201", "KVC302"} & {one.code for one in found}


def test_a_hybrids_log_with_a_full_pool_of_tokens_gives_no_warning() -> None:
    """50,000 tokens a line fill a pool of 400,000 to 100 % after eight lines; nothing else holds any."""
    lines = [
        "INFO 08-01 10:00:00 [config.py:228] Setting attention block size to 528 tokens to ensure that attention page size",
        "INFO 08-01 10:00:40 [kv_cache_utils.py:1087] GPU KV cache size: 400,000 tokens",
    ]
    lines += [
        f"INFO 11-29 16:{10 + n}:00 [loggers.py:335] Engine 000: Avg prompt throughput: {5000.0 if n else 0.0} tokens/s, Avg "
        f"generation throughput: 10.0 tokens/s, Running: {n} reqs, Waiting: 0 reqs, GPU KV cache usage: {12.2 * n:.1f}%, "
        "Prefix cache hit rate: 10.0%"
        for n in range(9)
    ]
    found = diagnose(
        from_log(LogCapture("log", lines, 1_764_439_200.0), parse_failures(lines, year=2025))
    ).findings
    assert [one for one in found if one.severity != "info"] == []


@pytest.mark.parametrize("prompt", [1000, 30_000, 120_000])
def test_long_prompts_fit_into_windows_and_states(prompt: int) -> None:
    """Windows stop growing: 120,000 tokens take 7,500 + 640 + 1 of 10,000 blocks."""
    groups = (
        KVGroup(kind="full", layers=10, block_size=16),
        KVGroup(kind="sliding", layers=10, block_size=16, window=1024),
        KVGroup(kind="mamba", layers=10, block_size=16),
    )
    info = EngineInfo(num_blocks=10_001, block_size=16, groups=groups, max_num_batched_tokens=8192)
    waiting = RequestView(engine_request_id="r-0", request_id="r", status="waiting", prompt_tokens=prompt)
    moment = Snapshot(
        pool=Pool(num_blocks=10_000, active_blocks=5000, block_size=16, utilization_ratio=0.5),
        queues=Queues(running=3, waiting=1), requests=[waiting],
    )  # fmt: skip
    found = diagnose([Case(target="w", kind="moment", info=info, moment=moment)]).findings
    assert [one for one in found if one.severity != "info"] == []
