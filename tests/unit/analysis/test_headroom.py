"""Headroom against hand counts of vLLM's admission rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.analysis.headroom import blocks_for, committed_blocks, headroom, typical_size
from kvcatch.events import EngineInfo, KVGroup
from kvcatch.results import Headroom, Pool, Queues, RequestView


def info(**changes: object) -> EngineInfo:
    base: dict[str, object] = {"num_blocks": 101, "block_size": 16, "max_num_seqs": 64}
    return EngineInfo(**{**base, **changes})  # type: ignore[arg-type]


def pool(free: int, cached: int = 0) -> Pool:
    return Pool(num_blocks=100, active_blocks=100 - free - cached, cached_blocks=cached, free_blocks=free)


def test_prompt_and_output_share_blocks_and_the_last_token_needs_none():
    # 16 + 17 tokens hold 32 slots = 2 blocks (the 33rd token is only returned); 10 free blocks: 5 requests.
    answer = headroom(info(), pool(7, cached=3), Queues(running=4, waiting_for_blocks=0), 16, 17)
    assert answer == Headroom(requests=5, prompt_tokens=16, output_tokens=17, limit="blocks")
    assert headroom(info(), pool(7, cached=3), Queues(running=4), 16, 18).requests == 3  # 3 blocks each


def test_watermark_keeps_blocks_free_at_admission():
    # int(0.1 * 101) = 10 blocks stay free: (30 - 10) // 4 = 5 admissions of 64 tokens; without it 7.
    engine = info(watermark_free_ratio=0.1)
    assert headroom(engine, pool(30), Queues(running=1), 64, 1) == Headroom(
        requests=5, prompt_tokens=64, output_tokens=1, limit="watermark"
    )
    assert headroom(info(), pool(30), Queues(running=1), 64, 1).requests == 7


def test_an_idle_engine_takes_the_first_request_without_watermark():
    # 60 blocks each, 100 free, 90 to keep free: the first is admitted, the second is not.
    engine = info(watermark_free_ratio=0.9)
    assert headroom(engine, pool(100), Queues(running=0), 960, 1).requests == 1
    assert headroom(engine, pool(100), Queues(running=1), 960, 1).requests == 0


@pytest.mark.parametrize(
    ("engine", "queues", "size", "expected"),
    [
        (info(max_num_seqs=8), Queues(running=6), (16, 1), (2, "max_num_seqs")),
        (info(max_num_seqs=8), Queues(running=6, waiting_other=5), (16, 1), (0, "max_num_seqs")),
        (info(max_model_len=1024), Queues(running=0), (1000, 25), (0, "max_model_len")),
        (info(), Queues(running=0), (1601, 1), (0, "pool")),
        (info(), Queues(running=3, waiting_for_blocks=1), (16, 1), (0, "queue")),
    ],
)
def test_the_limit_that_binds_is_named(engine, queues, size, expected):
    answer = headroom(engine, pool(100), queues, *size)
    assert (answer.requests, answer.limit) == expected


def test_unknown_pool_or_group_gives_an_unknown_answer():
    assert headroom(info(), Pool(), Queues(), 16, 16).requests is None
    mamba = info(groups=(KVGroup(kind="mamba", layers=4, block_size=16),))
    assert headroom(mamba, pool(100), Queues(), 16, 16).limit is None


def test_sliding_group_is_capped_at_the_engines_reservation():
    # window 128, 64 tokens in flight: ceil((127 + 64) / 16) + 1 = 13 blocks, beside 64 of full attention.
    groups = (
        KVGroup(kind="full", layers=2, block_size=16),
        KVGroup(kind="sliding", layers=2, block_size=16, window=128),
    )
    assert blocks_for(1024, info(groups=groups, max_num_batched_tokens=64)) == 64 + 13
    assert blocks_for(16, info(groups=groups, max_num_batched_tokens=64)) == 2


@given(st.integers(0, 100), st.integers(1, 600), st.integers(1, 600), st.floats(0, 0.5), st.integers(0, 3))
def test_more_free_blocks_or_smaller_requests_never_fit_fewer(free, prompt, output, watermark, running):
    engine = info(watermark_free_ratio=watermark)
    count = headroom(engine, pool(free), Queues(running=running), prompt, output).requests
    larger = headroom(engine, pool(free), Queues(running=running), prompt + 16, output).requests
    more = headroom(engine, pool(min(100, free + 1)), Queues(running=running), prompt, output).requests
    assert larger <= count <= more
    held = blocks_for(prompt + output - 1, engine)
    assert count * held <= free


def test_typical_size_prefers_finished_outputs():
    def view(prompt: int, output: int, reason: str | None = None) -> RequestView:
        return RequestView(
            request_id="r", engine_request_id="r", status="running", prompt_tokens=prompt,
            output_tokens=output, finish_reason=reason,
        )  # fmt: skip

    assert typical_size([view(100, 2), view(300, 40, "stop"), view(200, 60, "length")]) == (200, 50)
    assert typical_size([view(100, 2)]) == (100, 2)
    assert typical_size([]) is None


def test_running_requests_keep_what_they_may_still_need():
    def view(status: str, prompt: int, most: int | None, held: int) -> RequestView:
        return RequestView(
            request_id="r", engine_request_id="r", status=status, prompt_tokens=prompt, max_tokens=most,
            num_blocks=held,
        )  # fmt: skip

    # 100 + 61 tokens need 160 slots = 10 blocks, 7 are held: 3 more. The others: unknown, full, waiting.
    views = [
        view("running", 100, 61, 7),
        view("running", 64, None, 4),
        view("running", 16, 1, 1),
        view("waiting", 99, 9, 0),
    ]
    assert committed_blocks(info(), views) == 3
    assert committed_blocks(info(max_model_len=128), views) == 1
    answer = headroom(info(), pool(20), Queues(running=3), 32, 1, committed_blocks=3)
    assert answer.requests == 8  # (20 - 3) // 2
