"""States of engines that look like a published case and are another: the rule of that case must not speak."""

from __future__ import annotations

from typing import Any

import pytest
import rule_pages as pages

from kvcatch.analysis.doctor import diagnose
from kvcatch.analysis.evidence import Case, Holder, from_scrape
from kvcatch.analysis.rules_hybrid import state_pages
from kvcatch.analysis.thresholds import LIMITS
from kvcatch.events import EngineInfo, KVGroup
from kvcatch.results import Finding, Pool, Queues, Snapshot

#: the pool of the case with state pages: 328 usable blocks of 1,616 tokens
HYBRID: dict[str, Any] = {
    "block_size": 1616,
    "num_gpu_blocks": 329,
    "config": {"mamba_cache_mode": "align", "mamba_block_size": "1616", "kv_cache_size_tokens": "530081"},
}


def findings(sequence: list[dict[str, Any]]) -> dict[str, Finding]:
    return {one.code: one for one in diagnose(from_scrape(pages.capture(sequence))).findings}


def steady(
    running: int, waiting: int, usage: float, prompt: int, output: int, **more: Any
) -> list[dict[str, Any]]:
    """Twenty requests end between two pages; those that run have given half of their output."""
    rows = []
    for ended in range(0, 160, 20):
        tokens = (ended + running) * prompt
        row = {
            "num_requests_running": running, "num_requests_waiting": waiting, "kv_cache_usage_perc": usage,
            "prompt_tokens_total": tokens, "generation_tokens_total": ended * output + running * output // 2,
            "prefix_cache_queries_total": tokens, "prefix_cache_hits_total": tokens // 10, "num_preemptions_total": 0,
        }  # fmt: skip
        if ended:
            row |= {"finished": ended, "mean_prompt": prompt, "mean_output": output}
        rows.append(row | more)
    return rows


def test_short_requests_of_a_hybrid_pin_their_state_and_leave_none_behind() -> None:
    """500 tokens never reach a border of 1,616: each of 160 requests holds one state and one block of tokens."""
    found = findings(steady(160, 30, 0.98, 500, 100, **HYBRID))
    said = found["KVC302"]
    assert said.severity == "warning"
    # 160 of 328 blocks.
    assert "160 running requests pin 49%" in said.title
    assert said.evidence[0].value == 160
    assert "--mamba-block-size" not in said.remedy
    # A pool of 328 blocks cannot hold 311 requests of two blocks.
    assert "--max-num-seqs 311" not in found["KVC001"].remedy


def test_pinned_states_without_anybody_waiting_are_a_note() -> None:
    found = findings(steady(100, 0, 200 / 328, 500, 100, **HYBRID))
    assert found["KVC302"].severity == "info"
    assert [one for one in found.values() if one.severity != "info"] == []


def test_a_prompt_in_the_middle_of_its_prefill_is_no_state() -> None:
    """Two prompts fill the pool before their prefill ends; only 6,000 tokens of earlier ones are counted."""
    usage = (0.0, 0.3, 0.6, 0.9, 0.97, 0.98, 0.98)
    sequence = [
        {"num_requests_running": 2, "num_requests_waiting": int(used > 0.9), "kv_cache_usage_perc": used,
         "prompt_tokens_total": 1000 * number, "generation_tokens_total": 0, "num_preemptions_total": 0, **HYBRID}
        for number, used in enumerate(usage)
    ]  # fmt: skip
    assert "KVC302" not in findings(sequence)


@pytest.mark.parametrize(
    ("tokens", "blocks", "spoken"), [(500, 2, False), (15_000, 14, False), (17_000, 15, True)]
)
def test_recorded_requests_count_from_ten_states_on(tokens: int, blocks: int, spoken: bool) -> None:
    """17,000 tokens need 11 blocks of 1,616, so 4 of 15 are states; shorter requests say nothing of them."""
    groups = (
        KVGroup(kind="full", layers=12, block_size=1616),
        KVGroup(kind="mamba", layers=36, block_size=1616),
    )
    info = EngineInfo(
        num_blocks=330, block_size=1616, groups=groups, config={"cache": {"mamba_cache_mode": "align"}}
    )
    holder = Holder(request_id="a", tenant="t", blocks=blocks, share=blocks / 329, start=0.0, stop=9.0,
                    prompt_tokens=tokens, output_tokens=1, arrival=0.0, live=False)  # fmt: skip
    moment = Snapshot(pool=Pool(num_blocks=329, active_blocks=100), queues=Queues(running=1, waiting=0))
    case = Case(target="r", kind="recording", info=info, moment=moment, holders=(holder,))
    found = list(state_pages(case, LIMITS))
    assert bool(found) is spoken
    if spoken:
        assert found[0].evidence[0].value == 4


LIFETIMES = {"10": 50, "100": 5000, "1000": 9000}


@pytest.mark.parametrize(
    ("prompt", "output", "pool", "config", "spoken"),
    [
        # Blocks of 16. One odd block in 463: 8,200 tokens less 800 that hit (and the running ones' hits).
        (8000, 200, 1001, {}, False),
        # One in 7: 110 tokens less 10 that hit. 15,900 tokens filled 993 blocks of a pool of 500.
        (100, 10, 501, {}, True),
        # 1,182,000 tokens filled 73,875 blocks of a pool of 100,000: nothing cached was evicted.
        (8000, 200, 100_001, {}, True),
        (8000, 200, 1001, {"enable_prefix_caching": "False"}, True),
    ],
)
def test_lifetimes_are_doubted_only_where_odd_blocks_are_many(
    prompt: int, output: int, pool: int, config: dict[str, str], spoken: bool
) -> None:
    more: dict[str, Any] = {"lifetimes": LIFETIMES, "num_gpu_blocks": pool, "config": config}
    assert ("KVC504" in findings(steady(20, 0, 0.5, prompt, output, **more))) is spoken
