"""Attribution against real vLLM runs (tests/data/vllm_cpu_runs) and an independent simulation of the pool."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvcatch.analysis.prefix import Lookups, Parts, PrefixReport, explain
from kvcatch.analysis.prefix_log import from_log
from kvcatch.analysis.prefix_reuse import hits_at
from kvcatch.simulator.whatif import sweep

RUNS = Path(__file__).parents[2] / "data" / "vllm_cpu_runs"
TABLE = {row["run"]: row for row in json.loads((RUNS / "runs.json").read_text())}


@cache
def explained(run: str) -> tuple[Lookups, PrefixReport, Parts]:
    row = TABLE[run]
    path = RUNS / run / "requests.jsonl.gz"
    look = from_log(path, block_size=row["block_size"], usable=row["usable_blocks"])
    return look, *explain(look, run, "log")


@pytest.mark.parametrize("run", TABLE)
def test_every_missed_token_has_one_cause(run):
    _, report, parts = explained(run)
    # The engine's own counters.
    assert report.queried_tokens == TABLE[run]["prefix_cache_queries"]
    assert report.hit_tokens == TABLE[run]["prefix_cache_hits"]
    assert sum(cause.tokens for cause in report.causes) == report.missed_tokens
    assert all((tokens >= 0).all() for tokens in parts.by_cause.values())


@pytest.mark.parametrize("run", [name for name in TABLE if "serial" in name])
def test_reuse_distances_predict_every_hit_of_the_engine(run):
    look, _, _ = explained(run)
    assert (hits_at(look.workload, look.block_size, look.usable) == look.hit).all()


def test_evicted_tokens_come_back_in_the_engine_at_the_larger_size():
    _, small, parts = explained("conv_serial_b128_bs32")
    _, large, _ = explained("conv_serial_b1024_bs32")
    rooms = parts.room[parts.evicted_blocks]
    # What the small run names as kept by the large run's 1,023 usable blocks is what the engine then hit.
    assert 32 * int((rooms <= 1023).sum()) == large.hit_tokens - small.hit_tokens == 4000


@pytest.mark.parametrize("run", ["conv_serial_b128_bs32", "syn_serial_b512_bs32", "conv_serial_b512_bs64"])
def test_the_room_named_wins_what_was_said(run):
    look, report, _ = explained(run)
    assert len(report.gains) == 4
    for gain in report.gains:
        (simulated,) = sweep(look.workload, [gain.num_blocks], [look.block_size], ["lru"])
        assert simulated.hit_tokens - report.hit_tokens == gain.won_tokens
    # All of the evicted ones, at the largest.
    assert report.gains[-1].won_tokens == report.tokens("evicted") + report.tokens("order")


def test_larger_blocks_lose_to_misalignment():
    # The same requests with blocks of 32 and of 64 tokens.
    _, fine, _ = explained("conv_serial_b1024_bs32")
    _, coarse, _ = explained("conv_serial_b512_bs64")
    assert fine.tokens("first_seen") == coarse.tokens("first_seen")
    assert coarse.tokens("misaligned") == 17461
    assert fine.tokens("misaligned") == 149
    # What is no longer reusable in blocks of 64 is exactly what moved to "misaligned".
    reusable = [row.hit_tokens + row.tokens("evicted") + row.tokens("order") for row in (fine, coarse)]
    assert reusable[0] - reusable[1] == 17461 - 149


def test_shared_beginnings_by_hand():
    look, _, parts = explained("conv_serial_b128_bs32")
    rows = [list(ids) for ids in np.split(look.workload.segment_ids, look.workload.offsets[1:-1])]
    seen: set[int] = set()
    for row, ids in enumerate(rows[:200]):
        head = 0
        while head < len(ids) and ids[head] in seen:
            head += 1
        start = look.workload.offsets[row]
        assert parts.shared[row] == look.workload.segment_tokens[start : start + head].sum()
        seen.update(ids)
