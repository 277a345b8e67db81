"""Observed capacities: 27 rows from public logs, 10 layouts that vLLM 0.32.0 computed itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_data import PLAN, config, llama

from kvcatch.planner import plan
from kvcatch.units import GIB

OBSERVED: dict[str, dict[str, Any]] = {
    row["id"]: row for row in json.loads((PLAN / "observed.json").read_text())["rows"]
}
LAYOUTS: list[dict[str, Any]] = json.loads((PLAN / "vllm_cpu_kv_layouts.json").read_text())["rows"]
LLAMA31_8B = llama(32, 32, 8, 128)
#: Shapes behind the rows that name a dense model: (layers, heads, KV heads, head size).
DENSE = {
    "rtx3090-llama31-8b-20k": (32, 32, 8, 128),
    "rtx3090-llama31-8b-29k": (32, 32, 8, 128),
    "pr12569-llama31-70b-w8a8": (80, 64, 8, 128),
    "fp8-2.31x": (48, 32, 4, 128),
    "fp8-221k-fail": (48, 32, 4, 128),
    "qwen3-1.7b-bf16": (28, 16, 8, 128),
    "qwen3-1.7b-fp8": (28, 16, 8, 128),
    "llama2-7b-229": (32, 32, 32, 128),
    "llama3-70b-378": (80, 64, 8, 128),
    "rtx4090-llama31-8b": (32, 32, 8, 128),
    "xpu-tiny-llama": (2, 4, 4, 64),
}


@pytest.mark.parametrize("name", sorted(DENSE))
def test_a_dense_row_is_reproduced(name: str) -> None:
    row = OBSERVED[name]
    tp = 2 if name == "llama3-70b-378" else 1
    options: dict[str, Any] = {
        "engine_version": "0.5.5" if "num_gpu_blocks" in row and "kv_tokens" not in row else "0.19.0",
        "block_size": row.get("block_size", 16),
        "max_model_len": row.get("max_model_len", 8192),
        "kv_cache_dtype": row.get("kv_cache_dtype", "auto"),
        "tensor_parallel_size": tp,
        "advise": False,
    }
    shape = llama(*DENSE[name])
    if name == "xpu-tiny-llama":
        # hmellor/tiny-random-LlamaForCausalLM: 2048 bytes a token.
        shape = llama(2, 4, 4, 64)
    found = plan(shape, **options)
    if "kv_bytes_per_token" in row:
        assert found.bytes_per_token_per_gpu == row["kv_bytes_per_token"]
    if "num_gpu_blocks" in row:
        exact = plan(shape, num_gpu_blocks_override=row["num_gpu_blocks"], **options)
        assert row.get("kv_tokens", exact.kv_cache_tokens) == exact.kv_cache_tokens
        if "max_concurrency" in row:
            assert f"{exact.max_concurrency:.2f}" == f"{row['max_concurrency']:.2f}"
        assert exact.starts is ("fails" not in row)
    if "kv_memory_gib" in row:
        low, high = (
            plan(shape, available_kv_bytes=int((row["kv_memory_gib"] + off) * GIB), **options)
            for off in (-0.005, 0.005)
        )
        if "kv_tokens" in row:
            # FreeToken's pages hold one token, vLLM's 16.
            assert low.kv_cache_tokens <= row["kv_tokens"] <= high.kv_cache_tokens + 15
        if "estimated_max_model_len" in row:
            assert (
                low.max_model_len_that_fits <= row["estimated_max_model_len"] <= high.max_model_len_that_fits
            )
            assert low.starts is False
            assert f"({row['needed_gib']:.2f} GiB KV cache is needed" in low.log_lines[-1]


def test_the_log_line_that_changed_from_blocks_to_tokens() -> None:
    row = OBSERVED["pr13596"]
    found = plan(
        llama(), num_gpu_blocks_override=row["num_gpu_blocks"], max_model_len=2048, engine_version="0.8.0"
    )
    assert (found.kv_cache_tokens, f"{found.max_concurrency:.2f}") == (row["kv_tokens"], "997.08")
    assert "GPU KV cache size: 2,042,016 tokens" in found.log_lines
    old = plan(
        llama(), num_gpu_blocks_override=row["num_gpu_blocks"], max_model_len=2048, engine_version="0.7.0"
    )
    assert old.log_lines[0].startswith("# cuda blocks: 127626")


def test_gpt_oss_prints_one_window_group_and_one_full_group() -> None:
    """36 layers of 2 x 8 x 64 x 2 B; two groups of 18, so tokens = blocks // 2 x 16 (before 0.21)."""
    row = OBSERVED["gpt-oss-120b"]
    low, high = (
        plan(
            config("openai--gpt-oss-120b"), available_kv_bytes=int((row["kv_memory_gib"] + off) * GIB),
            engine_version="0.19.0", max_model_len=131072, kv_cache_dtype="bfloat16", advise=False,
        )
        for off in (-0.005, 0.005)
    )  # fmt: skip
    assert low.bytes_per_token_in_window == row["kv_bytes_per_token"]
    assert low.kv_cache_tokens <= row["kv_tokens"] <= high.kv_cache_tokens


@pytest.mark.parametrize("name", [name for name in OBSERVED if name.startswith("dsv4-gb10")])
def test_deepseek_v4_prints_a_derived_figure(name: str) -> None:
    row = OBSERVED[name]
    # The log truncates the tokens and rounds the concurrency.
    assert abs(row["kv_tokens"] / row["max_model_len"] - row["max_concurrency"]) <= 0.0051
    found = plan(
        config("deepseek-ai--DeepSeek-V4-Flash"), available_kv_bytes=int(row["kv_memory_gib"] * GIB),
        max_model_len=row["max_model_len"], tensor_parallel_size=2, advise=False,
    )  # fmt: skip
    assert found.kv_cache_tokens == int(found.max_concurrency * row["max_model_len"])


def test_deepseek_v4_refuses_what_the_thread_saw_refused() -> None:
    row = OBSERVED["dsv4-flash-30k"]
    found = plan(
        config("deepseek-ai--DeepSeek-V4-Flash"), available_kv_bytes=1 * GIB, max_model_len=row["max_model_len"],
        tensor_parallel_size=2, kv_cache_dtype="fp8", advise=False,
    )  # fmt: skip
    assert found.starts is False
    assert 0 < found.max_model_len_that_fits < row["max_model_len"]


@pytest.mark.parametrize("name", ["gemma4-31b-metal-32k", "gemma4-26b-metal-32k"])
def test_grouping_multiplies_the_tokens_of_windowed_models(name: str) -> None:
    row = OBSERVED[name]
    model = config("nvidia--Gemma-4-31B-IT-NVFP4" if "31b" in name else "nvidia--Gemma-4-26B-A4B-NVFP4")
    flags: dict[str, Any] = {"max_model_len": 32768, "available_kv_bytes": 20 * GIB, "advise": False}
    grouped = plan(model, **flags)
    flat = plan(model, disable_hybrid_kv_cache_manager=True, **flags)
    assert flat.kv_cache_tokens < grouped.kv_cache_tokens
    measured = row["kv_tokens"] / row["kv_tokens_ungrouped"]
    assert grouped.kv_cache_tokens / flat.kv_cache_tokens == pytest.approx(measured, rel=0.25)


def test_windowed_and_full_layers_get_blocks_of_equal_bytes() -> None:
    """8 x 256 against 1 x 512 heads: 16 tokens of 8,192 B and 64 tokens of 2,048 B are both 131,072 B."""
    row = OBSERVED["gemma3-4-block-geometry"]
    model = config("google--gemma-4-26B-A4B")
    model["text_config"]["num_global_key_value_heads"] = 1
    found = plan(model, max_model_len=8192)
    cells = {group["kind"]: group["block_size"] for group in row["groups"]}
    assert {group.kind: group.block_size for group in found.groups} == {
        "sliding": cells["sliding_window"], "full": cells["full"],
    }  # fmt: skip
    assert {group.page_bytes for group in found.groups} == {2 * row["block_bytes"]}


def test_only_full_layers_grow_with_the_sequence() -> None:
    """Gemma 4 12B: 8 full layers of one head of 512: 8 x 2 x 512 x 2 B = 16,384."""
    row = OBSERVED["gemma4-12b-per-token"]
    model = config("google--gemma-4-26B-A4B")
    model["text_config"] |= {
        "num_hidden_layers": 48, "num_global_key_value_heads": 1,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    }  # fmt: skip
    assert plan(model, max_model_len=8192).bytes_per_token_per_gpu == row["full_only_bytes_per_token"]


def test_attention_blocks_are_raised_to_the_state() -> None:
    """Nemotron Nano 9B v2: 672 tokens; Qwen3.5 class: 528 with 0.76 % of padding."""
    nano = {
        "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M*M-", "hidden_size": 4480,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 80,
        "ssm_state_size": 128, "conv_kernel": 4, "n_groups": 8, "vocab_size": 131072, "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072, "mamba_ssm_cache_dtype": "bfloat16",
    }  # fmt: skip
    assert (
        plan(nano, max_model_len=8192).block_size
        == OBSERVED["nemotron-nano-9b-v2-page"]["attention_block_size"]
    )
    # 49,152 B of convolution and 2 MiB of fp32 state over 4,096 B a token = 524 -> 528 tokens.
    row = OBSERVED["hybrid-528"]
    found = plan(config("hfdefault--qwen3_5"), max_model_len=8192, mamba_ssm_cache_dtype="float32")
    assert found.block_size == row["attention_block_size"]
    state = next(group for group in found.groups if group.kind == "mamba")
    waste = 100 * (state.page_bytes / state.padded_from_bytes - 1)
    assert round(waste, 2) == row["mamba_page_padding_percent"]


def test_five_windows_to_one_full_layer_on_four_ranks() -> None:
    """Inkling: 7 full layers, 7,168 B a token and rank at TP4: one KV head of 256 each; fp8 is half."""
    row = OBSERVED["inkling-tp4"]
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 7
    model = llama(42, 16, 4, 256, layer_types=kinds, sliding_window=row["sliding_window"])
    flags: dict[str, Any] = {"max_model_len": 8192, "tensor_parallel_size": 4}
    assert plan(model, **flags).bytes_per_token_per_gpu == row["bytes_per_token_per_rank"]
    assert (
        plan(model, kv_cache_dtype="fp8", **flags).bytes_per_token_per_gpu
        == row["bytes_per_token_per_rank_fp8"]
    )


def test_one_prompt_of_a_model_of_large_states_takes_a_third_of_the_pool() -> None:
    row = OBSERVED["glm53-flash-page"]
    found = plan(config("hfdefault--glm5_next"), tensor_parallel_size=2, max_model_len=131072)
    # States and rings are held whatever the prompt; the attention block is a multiple of 128 of that size.
    assert found.block_size % 128 == 0
    assert row["attention_block_size"] % 128 == 0


def test_the_null_block_is_kept_back() -> None:
    """128 blocks of 16: the engine refuses 2,048 tokens and names (128 - 1) x 16 = 2,032."""
    row = OBSERVED["vllm-cpu-null-block"]
    found = plan(
        llama(2, 4, 2, 32), num_gpu_blocks_override=row["num_gpu_blocks"], max_model_len=row["max_model_len"],
        block_size=16, device="cpu", engine_version="0.32.0",
    )  # fmt: skip
    assert found.starts is False
    assert found.max_model_len_that_fits == row["estimated_max_model_len"]
    assert f"maximum model length is {row['estimated_max_model_len']}" in found.log_lines[-1]


def test_every_observed_row_is_named_by_a_test() -> None:
    source = Path(__file__).read_text()
    assert [name for name in OBSERVED if name not in source and not name.startswith("dsv4-gb10")] == []
    assert len(OBSERVED) == 27


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row['model']}-{row['max_model_len']}")
def test_a_layout_of_the_real_engine_is_reproduced_exactly(row: dict[str, Any]) -> None:
    found = plan(
        row["config"], available_kv_bytes=row["kv_memory_bytes"], max_model_len=row["max_model_len"],
        max_num_batched_tokens=row["max_num_batched_tokens"], max_num_seqs=row["max_num_seqs"], device="cpu",
        block_size=row["block_size"], engine_version="0.32.0", enable_prefix_caching=row["prefix_caching"] == "True",
        advise=False,
    )  # fmt: skip
    assert found.num_blocks == row["num_blocks"]
    assert found.kv_cache_tokens == row["reported_tokens"]
    assert found.max_concurrency == row["reported_max_concurrency"]
    assert found.block_bytes == row["bytes_per_block"]
    kinds = {
        "SlidingWindowSpec": "sliding",
        "FullAttentionSpec": "full",
        "MLAAttentionSpec": "mla",
        "MambaSpec": "mamba",
    }
    assert [(g.kind, g.layers, g.block_size, g.page_bytes, g.window_tokens) for g in found.groups] == [
        (kinds[g["kind"]], g["layers"], g["block_size"], g["page_size_bytes_per_layer"],
         int(g["sliding_window"]) if "sliding_window" in g else None)
        for g in row["groups"]
    ]  # fmt: skip
    for mine, theirs in zip(found.groups, row["groups"], strict=True):
        if "blocks_per_request" in theirs:
            assert mine.blocks_per_request == theirs["blocks_per_request"]
        indices = [int(name.split(".")[2]) for name in theirs["layer_names"]]
        assert list(mine.layer_indices) == indices
