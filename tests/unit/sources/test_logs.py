"""Engine logs of every era: what each line states, and the series they form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcatch.errors import KVCatchError
from kvcatch.sources.logs import LogCapture, looks_like_log, open_log

DATA = Path(__file__).parents[2] / "data" / "vllm_logs"
LINES = [row["line"] for row in json.loads((DATA / "line_formats.json").read_text())]

#: what each line of the collection says, read by eye
SAYS: list[tuple[str, dict[str, str]]] = [
    ("# GPU blocks: 229", {"num_blocks": "229"}),
    ("# GPU blocks: 378", {"num_blocks": "378"}),
    ("17.9828 GB", {"weights_gib": "17.9828"}),
    ("kv_cache_size=3.81GiB", {"available_kv_gib": "3.81", "non_torch_gib": "0.35", "total_gpu_gib": "23.58"}),
    ("concurrency for 20000", {"max_concurrency": "1.56", "max_model_len": "20000"}),
    ("seq len (29000)", {"longest_that_fits": "23648"}),
    ("# GPU blocks: 1381", {"num_blocks": "1381"}),
    ("10.79x", {"max_concurrency": "10.79", "max_model_len": "2048"}),
    ("size: 2,042,016", {"kv_cache_tokens": "2042016"}),
    ("997.08x", {"max_concurrency": "997.08", "max_model_len": "2048"}),
    ("(39.38GiB)", {"total_gpu_gib": "39.38"}),
    ("weights take 34.43GiB", {"weights_gib": "34.43", "activation_gib": "2.51", "available_kv_gib": "0.13"}),
    ("2.31x", {"max_concurrency": "2.31", "max_model_len": "100000"}),
    ("(221000)", {"longest_that_fits": "122080"}),
    ("21.28 GiB", {"available_kv_gib": "21.28"}),
    ("420,586", {"kv_cache_tokens": "420586"}),
    ('msg="GPU KV cache size: 78,384', {"kv_cache_tokens": "78384"}),
    ("CPU KV cache size: 4,096", {"kv_cache_tokens": "4096", "max_concurrency": "2.00", "max_model_len": "2048"}),
    ("length is 2032", {"longest_that_fits": "2032"}),
    ("528 tokens", {"block_size": "528"}),
    ("#tokens: 367404", {"kv_cache_tokens": "367404"}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "facts"), SAYS)
def test_each_wording_of_each_era_is_understood(words: str, facts: dict[str, str]) -> None:
    (line,) = [line for line in LINES if words in line]
    got = LogCapture("x", [line], 0.0).facts
    assert {name: got.get(name) for name in facts} == facts


def test_periodic_lines_of_three_engines_read_alike() -> None:
    old, new = (line for line in LINES if "Avg prompt throughput" in line)
    first = LogCapture("x", [old], 0.0).rows[0]
    assert (first.running, first.waiting, first.swapped, first.usage_ratio) == (1, 0, 0, 0.0)
    assert first.generation_rate == 15.3
    second = LogCapture("x", [new], 0.0).rows[0]
    assert (second.engine, second.running, second.waiting) == ("0", 10, 15)
    assert (second.usage_ratio, second.hit_ratio) == (pytest.approx(0.945), pytest.approx(0.04))
    sglang = (
        "[2026-01-02 03:04:05] Decode batch, #running-req: 6, #full token: 2435072, full token usage: 0.92, "
        "swa token usage: 0.09, gen throughput (token/s): 24.33, #queue-req: 4"
    )
    third = LogCapture("x", [sglang], 0.0).rows[0]
    assert (third.running, third.waiting, third.tokens, third.usage_ratio) == (6, 4, 2_435_072, 0.92)
    assert third.generation_rate == 24.33


def test_new_parts_of_the_line_are_no_obstacle() -> None:
    """vLLM 0.33 adds deferred requests, stages of KV fetches and preemptions of the interval."""
    line = (
        "INFO 11-29 16:16:31 [loggers.py:335] Engine 003: Avg prompt throughput: 1.0 tokens/s, "
        "Avg generation throughput: 2.0 tokens/s, Running: 3 reqs, Waiting: 7 reqs, Deferred: 4 reqs, "
        "KV fetch: 1 waiting to start, 2 in progress, 1 completed waiting, Preemptions: 9, "
        "GPU KV cache usage: 55.5%, Prefix cache hit rate: 12.5%, MM cache hit rate: 1.0%"
    )
    row = LogCapture("x", [line], 0.0).rows[0]
    assert (row.engine, row.waiting, row.deferred, row.preempted) == ("3", 7, 4, 9)
    assert (row.usage_ratio, row.hit_ratio) == (pytest.approx(0.555), 0.125)


def test_a_whole_log_gives_the_run() -> None:
    """256 blocks of 32, 16 sequences; 20 periodic lines, their largest figures read by eye."""
    capture = open_log(str(DATA / "vllm_0.32.0_cpu_concurrent.log"))
    info = capture.info
    assert (info.engine_version, info.num_blocks, info.block_size) == ("0.32.0", 256, 32)
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len) == (16, 2048, 2048)
    assert info.prefix_caching is True
    samples = capture.samples()
    assert len(samples["unix_ns"]) == 20
    assert (np.diff(samples["unix_ns"]) > 0).all()
    assert samples["waiting"].max() == 25
    got = capture.snapshot(window_seconds=3600)
    assert got.pool.active_blocks_max == samples["active_blocks"].max() <= 255
    assert got.queues.running_max == samples["running"].max() == 14
    assert "ttft" in got.loss.unknown
    assert got.preemption.preemptions is None  # 0.32 does not print them


def test_sizes_over_workers_and_engines() -> None:
    capture = open_log(str(DATA / "vllm_2026-05_dsv4_gb10_kv_info.log"))
    assert capture.facts["kv_cache_tokens"] == "420586"
    assert capture.snapshot().pool.active_blocks is None
    assert capture.info.num_blocks == 0  # a hybrid model: tokens do not tell blocks


def test_data_parallel_engines_are_added_up() -> None:
    lines = [
        f"INFO 11-29 16:16:3{rank} Engine 00{rank}: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: "
        f"2.0 tokens/s, Running: {run} reqs, Waiting: {wait} reqs, GPU KV cache usage: {usage}%"
        for rank, run, wait, usage in ((0, 51, 117, 100.0), (1, 31, 108, 98.6))
    ]
    got = LogCapture("x", lines, 0.0).snapshot()
    assert (got.queues.running, got.queues.waiting, got.latency.output_tokens_per_second) == (82, 225, 4.0)
    assert got.pool.utilization_ratio == pytest.approx(0.993)


def test_v0_preemption_warnings_carry_the_total() -> None:
    line = (
        "WARNING 02-01 10:00:00 scheduler.py:1] Sequence group 221 is preempted by PreemptionMode.RECOMPUTE mode "
        "because there is not enough KV cache space. This can affect the end-to-end performance. "
        "total_num_cumulative_preemption=101"
    )
    assert LogCapture("x", [line], 0.0).preemptions == 101


def test_logs_are_told_from_pages_and_other_files(tmp_path: Path) -> None:
    assert looks_like_log((DATA / "vllm_0.32.0_cpu_concurrent.log").read_text()[:4000])
    assert looks_like_log((DATA / "vllm_0.1.dev13788_xpu_ci_excerpt.log").read_text())
    page = Path(__file__).parents[2] / "data" / "metrics" / "vllm_0.32.0_cpu_loaded.prom"
    assert not looks_like_log(page.read_text())
    other = tmp_path / "other.log"
    other.write_bytes(b"hello\n\xff\xfe\n")
    with pytest.raises(KVCatchError, match="no line of a vLLM"):
        open_log(str(other))
    with pytest.raises(KVCatchError, match="No such file"):
        open_log(str(tmp_path / "none"))
