"""Start-up logs of every era: what they say, what does not add up, and what the engine gets wrong.

Figures are those of public threads; the case numbers stand beside them. The sentences are the engine's own
(``vllm/v1/worker/gpu_worker.py`` and its predecessors).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.errors import KVCatchError
from kvcatch.planner.bootlog import BootLog, Correction, read_boot_log
from kvcatch.planner.catalogue import find_model
from kvcatch.planner.shape import model_shape
from kvcatch.units import GIB, MIB

DATA = Path(__file__).resolve().parents[2] / "data/plan_boot_logs"

V064 = """\
INFO 11-21 worker.py:232] Loading model weights took 14.9888 GB
INFO 11-21 worker.py] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB \
peak_torch_memory=17.06GiB memory_usage_post_profile=15.35GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB \
gpu_memory_utilization=0.90
INFO 11-21 distributed_gpu_executor.py:57] # GPU blocks: 1952, # CPU blocks: 2048
INFO 11-21 distributed_gpu_executor.py:61] Maximum concurrency for 20000 tokens per request: 1.56x
"""
V065 = """\
INFO 12-13 19:54:18 worker.py:243] Memory profiling results:
INFO 12-13 19:54:18 worker.py:243] total_gpu_memory     79.22GiB
INFO 12-13 19:54:18 worker.py:243] gpu_memory_utilization       0.90
INFO 12-13 19:54:18 worker.py:243] the current vLLM instance can use    71.29GiB
INFO 12-13 19:54:18 worker.py:243] model weights take   14.96GiB
INFO 12-13 19:54:18 worker.py:243] non_torch_memory     1.79GiB
INFO 12-13 19:54:18 worker.py:243] PyTorch activation peak memory       1.26GiB
INFO 12-13 19:54:18 worker.py:243] available_kv_cache_memory    53.29GiB
"""
V019 = """\
(APIServer pid=1) INFO 04-01 10:00:00 [utils.py:299] vLLM API server version 0.19.0
(EngineCore pid=2) INFO 04-01 10:00:09 [core.py:105] Initializing a V1 LLM engine (v0.19.0) with config: \
model='Qwen/Qwen2.5-7B-Instruct', dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=1, \
pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, enable_prefix_caching=True
(EngineCore pid=2) INFO 04-01 10:00:20 [gpu_model_runner.py:4566] Model loading took 14.25 GiB memory and 5.1 seconds
(EngineCore pid=2) DEBUG 04-01 10:00:40 [gpu_worker.py:400] Initial free memory: 78.68 GiB; Requested memory: \
0.950000 (util), 75.23 GiB
(EngineCore pid=2) DEBUG 04-01 10:00:40 [gpu_worker.py:411] Memory profiling takes 11.30 seconds. Total non KV \
cache memory: 16.7GiB; torch peak memory increase: 2.21GiB; non-torch forward increase memory: 0.24GiB; weights \
memory: 14.25GiB.
(EngineCore pid=2) INFO 04-01 10:00:40 [gpu_worker.py:436] Available KV cache memory: 58.53 GiB
(EngineCore pid=2) INFO 04-01 10:00:41 [kv_cache_utils.py:1319] GPU KV cache size: 1,095,968 tokens
(EngineCore pid=2) INFO 04-01 10:00:41 [kv_cache_utils.py:1324] Maximum concurrency for 16,384 tokens per request: 66.89x
(EngineCore pid=2) INFO 04-01 10:00:50 [gpu_model_runner.py] Graph capturing finished in 8 secs, took 0.87 GiB
(EngineCore pid=2) INFO 04-01 10:00:50 [gpu_worker.py] CUDA graph pool memory: 0.87 GiB (actual), 0.61 GiB \
(estimated), difference: 0.26 GiB (29.9%).
(EngineCore pid=2) DEBUG 04-01 10:00:51 [gpu_worker.py:590] Free memory on device (78.68/79.19 GiB) on startup. \
Desired GPU memory utilization is (0.95, 75.23 GiB). Actual usage is 14.25 GiB for weight, 2.21 GiB for peak \
activation, 0.24 GiB for non-torch memory, and 0.87 GiB for CUDAGraph memory. Replace gpu_memory_utilization config \
with `--kv-cache-memory=61761756160` (57.52 GiB) to fit into requested memory, or `--kv-cache-memory=65462803456` \
(60.97 GiB) to fully utilize gpu memory. Current kv cache memory in use is 58.53 GiB.
"""


def correction(log: BootLog, code: str) -> Correction:
    return next(item for item in log.corrections if item.code == code)


def gib(value: int | None) -> float:
    assert value is not None
    return round(value / GIB, 2)


def test_v0_profile_line() -> None:  # case A1
    log = read_boot_log(V064)
    assert {name: gib(size) for name, size in log.parts_bytes.items()} == {
        "weights": 14.99,
        "activation_peak": 2.07,  # 17.06 of the whole peak are weights too
        "non_torch": 0.35,
        "kv_cache": 3.81,
    }
    assert (log.num_gpu_blocks, log.num_cpu_blocks, log.max_concurrency) == (1952, 2048, 1.56)
    assert log.starts
    assert abs(log.identity_error_bytes or GIB) < 0.01 * GIB  # 23.58 x 0.9 - 17.06 - 0.35 = 3.81
    assert log.took_most == "weights"
    assert not log.corrections


def test_v0_table() -> None:  # case A22
    log = read_boot_log(V065)
    assert {name: gib(size) for name, size in log.parts_bytes.items()} == {
        "weights": 14.96,
        "activation_peak": 1.26,
        "non_torch": 1.79,
        "kv_cache": 53.29,
    }
    assert abs(log.identity_error_bytes or GIB) < 0.02 * GIB  # prints 53.29 for 53.28


def test_v1_debug_log_with_every_part() -> None:  # case A118
    log = read_boot_log(V019)
    assert (log.version, log.model, log.max_model_len) == ("0.19.0", "Qwen/Qwen2.5-7B-Instruct", 16384)
    assert (log.kv_cache_tokens, log.max_concurrency) == (1_095_968, 66.89)
    rank = log.ranks[0]
    assert (gib(rank.total_bytes), gib(rank.free_bytes), gib(rank.requested_bytes)) == (79.19, 78.68, 75.23)
    assert (gib(rank.graphs_bytes), gib(rank.graphs_estimate_bytes)) == (0.87, 0.61)
    assert {name: gib(size) for name, size in log.parts_bytes.items()} == {
        "weights": 14.25,
        "activation_peak": 2.21,
        "non_torch": 0.24,
        "cuda_graphs": 0.87,  # outside the budget before 0.21
        "kv_cache": 58.53,
    }
    assert abs(log.identity_error_bytes or GIB) < 0.02 * GIB
    assert log.settings["enable_prefix_caching"] is True
    assert log.took_most == "kv_cache"
    assert not log.corrections


def test_pipeline_refusal_compares_all_layers_with_one_stage() -> None:  # cases A16 and A17
    sentence = (
        "(EngineCore_DP0 pid=1094) ValueError: To serve at least one request with the models's max seq len ({}), ({} GiB "
        "KV cache is needed, which is larger than the available KV cache memory ({} GiB). Based on the available memory, "
        "the estimated maximum model length is {}."
    )
    config = "Initializing a V1 LLM engine (v0.15.2rc1) with config: model='x', pipeline_parallel_size={},\n"
    text = (
        config.format(2) + "VLLM_PP_LAYER_PARTITION=16,32\n" + sentence.format(262144, "24.0", "3.18", 34736)
    )
    log = read_boot_log(text)
    assert log.starts is False
    fixed = correction(log, "pipeline-estimate")
    assert "34736" in fixed.printed
    # 16 of 48 layers: 3.18 GiB hold 104,032 to 104,352 tokens.
    tokens = int(fixed.corrected.split()[1].replace(",", ""))
    assert 104_032 <= tokens <= 104_352
    assert "does not fit" in fixed.corrected
    even = read_boot_log(config.format(8) + sentence.format(202752, "71.16", "28.57", 81392))
    assert "202,752 fits" in correction(even, "pipeline-estimate").corrected
    newer = config.format(2).replace("0.15.2rc1", "0.17.0")
    assert not read_boot_log(newer + sentence.format(262144, "24.0", "3.18", 34736)).corrections


def test_negative_hint_counts_the_graphs_twice() -> None:  # case A71
    text = (
        "INFO vLLM API server version 0.29.1\n"
        "INFO CUDA graph pool memory: 63.99 GiB (actual), 57.45 GiB (estimated), difference: 6.54 GiB (10.2%).\n"
        "DEBUG Free memory on device (175.81/178.35 GiB) on startup. Desired GPU memory utilization is (0.92, 164.08 GiB). "
        "Actual usage is 58.44 GiB for consumed memory (weights + non-torch), 62.33 GiB for peak activation, and 63.99 GiB "
        "for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=-22366042685` (-20.83 GiB) to "
        "fit into requested memory, or `--kv-cache-memory=-9771050598` (-9.1 GiB) to fully utilize gpu memory.\n"
    )
    fixed = correction(read_boot_log(text), "negative-hint")
    # 164.08 - (58.44 + 4.88 + 63.99) - 0.15 = 36.62; to fill the card 175.81 - 127.31 - 0.15 = 48.35.
    assert "36.62 GiB" in fixed.corrected
    assert "48.35 GiB" in fixed.corrected


def test_derived_token_line_of_hybrids() -> None:  # case A41: 260,006 or 1,077,542 tokens in the same memory
    text = (
        "INFO vLLM API server version 0.27.0\n"
        "INFO [config.py:228] Setting attention block size to 1600 tokens to ensure that attention page size is >= mamba "
        "page size.\n"
        "INFO [kv_cache_utils.py:1710] GPU KV cache size: 1,077,542 tokens, Maximum concurrency for 262,144 tokens per "
        "request: 4.11x\n"
    )
    log = read_boot_log(text)
    assert log.block_size == 1600
    assert "4.11 requests of 262,144" in correction(log, "derived-token-figure").corrected
    older = read_boot_log(text.replace("0.27.0", "0.19.0"))
    assert not older.corrections


def test_first_rank_printed_another_binds() -> None:  # cases A63 and A27
    lines = "".join(
        f"INFO GPU KV cache size: {tokens:,} tokens\nINFO Maximum concurrency for 8,192 tokens per request: {x}x\n"
        for tokens, x in ((169_216, 20.66), (162_528, 19.84), (166_272, 20.30), (168_960, 20.62))
    )
    log = read_boot_log(lines)
    assert log.max_concurrency == 19.84
    assert correction(log, "another-rank-binds").corrected == "162,528 tokens on #1"
    # One rank prints 8.69 GiB, but the tokens are worth 7.46: the driver's card binds.
    config = find_model("Qwen2.5-14B-Instruct")
    assert config is not None
    text = (
        "INFO Initializing a V0 LLM engine (v0.7.2) with config: model='DeepSeek-R1-Distill-Qwen-14B', "
        "tensor_parallel_size=2,\n"
        "INFO worker.py:267] the current vLLM instance can use total_gpu_memory (23.65GiB) x gpu_memory_utilization (0.98) = "
        "23.18GiB\n"
        "INFO worker.py:267] model weights take 13.95GiB; non_torch_memory takes 0.25GiB; PyTorch activation peak memory "
        "takes 0.19GiB; the rest of the memory reserved for KV Cache is 8.69GiB.\n"
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV "
        "cache (81536).\n"
    )
    bound = correction(read_boot_log(text, model_shape("distill", config)), "another-rank-binds")
    assert "8.69 GiB" in bound.printed
    assert "7.46 GiB" in bound.corrected


def test_named_ranks_keep_their_own_figures() -> None:
    text = (
        "(Worker_TP0 pid=11) INFO [gpu_worker.py:462] Available KV cache memory: 21.28 GiB\n"
        "(Worker_TP1 pid=12) INFO [gpu_worker.py:462] Available KV cache memory: 20.11 GiB\n"
        "(EngineCore pid=9) INFO [kv_cache_utils.py:1710] GPU KV cache size: 420,592 tokens\n"
    )
    log = read_boot_log(text)
    assert [rank.rank for rank in log.ranks] == ["Worker_TP0", "Worker_TP1"]
    assert log.binding_rank == "Worker_TP1"
    assert correction(log, "another-rank-binds").corrected == "20.11 GiB on Worker_TP1"


def test_card_in_use_and_other_processes() -> None:  # cases A67 and A68
    refused = (
        "ValueError: Free memory on device (59.32/79.15 GiB) on startup is less than desired GPU memory utilization (0.9, "
        "71.24 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    log = read_boot_log(refused + "\n")
    assert log.starts is False
    assert "0.749" in correction(log, "card-in-use").corrected
    crowded = (
        "INFO vLLM API server version 0.6.4\nINFO Memory profiling results: total_gpu_memory=79.15GiB "
        "initial_memory_usage=68.01GiB peak_torch_memory=9.50GiB memory_usage_post_profile=68.10GiB "
        "non_torch_memory=0.35GiB kv_cache_size=-61.70GiB gpu_memory_utilization=0.20\n"
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"
    )
    found = correction(read_boot_log(crowded), "other-processes-counted")
    assert "68.01 GiB" in found.corrected
    assert "15.83 GiB" in found.corrected


def test_figures_of_another_utilization_are_caught() -> None:  # case A76: a table row says 0.9, it was 0.95
    text = (
        "INFO vLLM API server version 0.11.0\nINFO Available KV cache memory: 3.33 GiB\n"
        "INFO Free memory on device (78.70/79.18 GiB) on startup. Desired GPU memory utilization is (0.9, 71.26 GiB). Actual "
        "usage is 64.38 GiB for weight, 7.38 GiB for peak activation, 0.13 GiB for non-torch memory, and 1.00 GiB for "
        "CUDAGraph memory.\n"
    )
    assert "0.95" in correction(read_boot_log(text), "utilization-mismatch").corrected


def test_sampler_warm_up_out_of_memory() -> None:  # case B54
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.19 GiB of "
        "which 552.50 MiB is free. Including non-PyTorch memory, this process has 78.64 GiB memory in use. Of the allocated "
        "memory 74.91 GiB is allocated by PyTorch, with 626.00 MiB allocated in private pools (e.g., CUDA Graphs), and 1.78 "
        "GiB is reserved by PyTorch but unallocated.\n"
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.\n"
    )
    log = read_boot_log(text)
    assert log.starts is False
    assert log.out_of_memory is not None
    assert log.out_of_memory["asked_bytes"] == 786 * MIB
    assert "max_num_seqs 512" in correction(log, "sampler-warm-up").corrected


def test_every_line_of_every_era_is_read() -> None:
    skipped = []
    for row in json.loads((DATA / "line_formats.json").read_text()):
        try:
            read_boot_log(row["line"] + "\n")
        except KVCatchError:
            skipped.append(row["logger"])
    # Lines of a running server, not of a start-up.
    assert skipped == ["metrics.py:486", "metrics.py:502", "loggers.py:335"]


@pytest.mark.parametrize(
    ("name", "tokens", "concurrency"),
    [("xpu_ci.log", 14_161_280, 1728.67), ("cpu_0.32.log", 8192, 4.0), ("dsv4_gb10.log", 240_104, 7.33)],
)
def test_whole_logs(name: str, tokens: int, concurrency: float) -> None:
    log = read_boot_log(DATA / name)
    assert (log.kv_cache_tokens, log.max_concurrency) == (tokens, concurrency)
    text = "\n".join(log.lines())
    assert f"{tokens:,} tokens" in text
    assert log.to_dict()["kv_cache_tokens"] == tokens


def test_several_start_ups_in_one_file_and_a_given_pool() -> None:
    assert read_boot_log(DATA / "dsv4_gb10.log").start_ups == 4
    assert read_boot_log(DATA / "cpu_0.32.log").ranks[0].given_kv_bytes == GIB


def test_bad_input() -> None:
    with pytest.raises(KVCatchError, match="no start-up line"):
        read_boot_log("hello\nworld\n")
    with pytest.raises(KVCatchError, match="no such file"):
        read_boot_log("nowhere.log")


@given(st.text(max_size=400), st.sampled_from(V019.splitlines()))
def test_garbage_around_a_line_never_breaks_the_reader(noise: str, line: str) -> None:
    try:
        log = read_boot_log(f"{noise}\n{line[: len(noise)]}\n{line}\n{noise}")
    except KVCatchError:
        return
    assert log.lines()
    assert all(size > 0 for size in log.parts_bytes.values())
