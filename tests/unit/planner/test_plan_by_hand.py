"""Arithmetic a person can redo: the worked example, dtypes, parallelism, eras, the peak question."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_data import config, latent, llama

from kvcatch.errors import KVCatchError
from kvcatch.planner import plan
from kvcatch.planner.cells import cell_bytes
from kvcatch.planner.engine import era_of, parse_version
from kvcatch.planner.layout import pipeline_split
from kvcatch.planner.pool import build_pool
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import EngineFlags
from kvcatch.units import GIB, KIB, MIB

#: 32 layers, 8 KV heads of 128, fp16.
EXAMPLE = llama(32, 32, 8, 128, torch_dtype="float16")
#: 24 GB card, 14 GB of weights, nothing else: 10 GB for the cache at full utilisation.
CARD: dict[str, Any] = {
    "gpu_memory_bytes": 24 * GIB, "weights_bytes": 14 * GIB, "activation_bytes": 0, "cuda_graphs_bytes": 0,
    "non_torch_bytes": 0, "gpu_memory_utilization": 1.0,
}  # fmt: skip


def test_the_worked_example() -> None:
    """2 x 8 x 128 x 2 B = 4 KiB per layer; x 32 = 128 KiB; x 8,192 = 1 GiB; x 16 = 16 GiB."""
    found = plan(EXAMPLE, max_model_len=8192, concurrency=16)
    assert found.bytes_per_token_per_gpu == 128 * KIB
    assert found.bytes_per_token_per_gpu // 32 == 4 * KIB
    assert found.bytes_per_max_len_request == 1 * GIB
    assert found.peak_kv_bytes == 16 * GIB
    half = plan(EXAMPLE, max_model_len=8192, concurrency=16, kv_cache_dtype="fp8")
    assert half.peak_kv_bytes * 2 == found.peak_kv_bytes
    assert half.bytes_per_token_per_gpu * 2 == found.bytes_per_token_per_gpu


def test_24_gb_with_14_gb_of_weights_does_not_hold_16_requests() -> None:
    """10 GiB hold 5,120 blocks of 2 MiB, 5,119 without the null block: 9 requests of 512 blocks, 16 of 319."""
    found = plan(EXAMPLE, max_model_len=8192, concurrency=16, context=8192, **CARD)
    assert found.memory.available_kv.bytes == 10 * GIB
    assert (found.num_blocks, found.usable_blocks) == (5120, 5119)
    assert found.starts is True
    assert found.peak_fits is False
    assert found.max_concurrency_that_fits == 9
    assert found.max_context_that_fits == 319 * 16
    assert found.shortfall_bytes == (16 * 512 - 5119) * 2 * MIB
    changes = {entry.flag: entry for entry in found.advice}
    assert changes["--max-num-seqs 9"].peak_fits
    assert changes[f"--max-model-len {319 * 16}"].peak_fits
    # Half of 16 GiB is 8 GiB: fp8 makes it fit.
    assert changes["--kv-cache-dtype fp8"].peak_fits
    assert changes["--kv-cache-dtype fp8"].peak_kv_bytes == 8 * GIB
    fitting = [entry.peak_fits and entry.starts for entry in found.advice]
    assert fitting == sorted(fitting, reverse=True)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("auto", 2 * 128 * 2),
        ("bfloat16", 2 * 128 * 2),
        ("fp8", 2 * 128),
        ("fp8_e5m2", 2 * 128),
        # One fp32 scale per token and head for keys and values each.
        ("int8_per_token_head", 2 * (128 + 4)),
        ("fp8_per_token_head", 2 * (128 + 4)),
        ("int4_per_token_head", 2 * (64 + 4)),
        # fp4 data and one fp8 scale per 16 values.
        ("nvfp4", 2 * (64 + 8)),
        # fp8 keys, 4-bit values with scale and zero point.
        ("turboquant_k8v4", 128 + 64 + 4),
        ("turboquant_3bit_nc", (48 + 2) + (48 + 4)),
    ],
)
def test_bytes_of_one_head_by_dtype(dtype: str, size: int) -> None:
    assert cell_bytes(128, 128, dtype, "bfloat16") == size
    found = plan(llama(), kv_cache_dtype=dtype, max_model_len=8192)
    assert found.bytes_per_token_per_gpu == 32 * 8 * size


@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1 / 2),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1 / 2),
        ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, 72 / 256),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 1),
    ],
)
def test_auto_follows_the_checkpoint(quantization: dict[str, Any], share: float) -> None:
    found = plan(llama(quantization_config=quantization), max_model_len=8192)
    assert found.bytes_per_token_per_gpu == 128 * KIB * share
    asked = plan(llama(quantization_config=quantization), kv_cache_dtype="bfloat16", max_model_len=8192)
    assert asked.bytes_per_token_per_gpu == 128 * KIB


def test_latent_attention_stores_one_vector_and_ignores_tensor_parallelism() -> None:
    """(512 + 64) x 2 B x 27 layers = 31,104 with one rank and with two (F2)."""
    model = latent(27, 512, 64)
    assert [
        plan(model, tensor_parallel_size=tp, max_model_len=8192).bytes_per_token_per_gpu for tp in (1, 2, 4)
    ] == [31_104] * 3
    # The packed sparse format has 656 bytes a token.
    sparse = config("deepseek-ai--DeepSeek-V3.2")
    assert plan(sparse, kv_cache_dtype="fp8", max_model_len=8192).bytes_per_token_per_gpu == 61 * (656 + 132)


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_replicated_beyond_their_number(tp: int, heads: int) -> None:
    found = plan(llama(), tensor_parallel_size=tp, max_model_len=8192)
    assert found.bytes_per_token_per_gpu == 32 * heads * 2 * 128 * 2


@pytest.mark.parametrize("tp", [3, 5, 12])
def test_ranks_that_do_not_fit_the_heads_are_refused(tp: int) -> None:
    with pytest.raises(KVCatchError, match="tensor-parallel-size"):
        plan(llama(), tensor_parallel_size=tp, max_model_len=8192)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (32, 4, [8, 8, 8, 8]),
        (61, 2, [31, 30]),
        (62, 4, [15, 16, 16, 15]),
        (92, 8, [11, 11, 11, 12, 12, 12, 12, 11]),
    ],
)
def test_layers_left_over_go_to_the_middle(layers: int, stages: int, sizes: list[int]) -> None:
    """As ``get_pp_indices``: the last stage holds the logits, so it gets none of the rest."""
    assert [end - start for start, end in pipeline_split(layers, stages, None)] == sizes


def test_pipeline_stages_share_one_number_of_blocks() -> None:
    found = plan(
        llama(61, 32, 8, 128), pipeline_parallel_size=2, available_kv_bytes=10 * GIB, max_model_len=8192
    )
    assert found.stage_layers == (31, 30)
    assert found.num_blocks == min(found.stage_blocks) == 10 * GIB // (31 * 4 * KIB * 16)
    assert found.binding_stage == 0


def test_decode_context_parallelism_multiplies_tokens() -> None:
    one = plan(latent(61, 512, 64), tensor_parallel_size=8, available_kv_bytes=8 * GIB, max_model_len=131072)
    four = plan(
        latent(61, 512, 64), tensor_parallel_size=8, decode_context_parallel_size=4, available_kv_bytes=8 * GIB,
        max_model_len=131072,
    )  # fmt: skip
    assert four.max_concurrency == pytest.approx(4 * one.max_concurrency)
    old = plan(
        latent(61, 512, 64), tensor_parallel_size=8, decode_context_parallel_size=4, num_gpu_blocks_override=1000,
        max_model_len=8192, engine_version="0.12.0",
    )  # fmt: skip
    assert old.kv_cache_tokens == 1000 * 16 * 4


def test_a_draft_model_is_one_more_layer_on_the_last_stage(tmp_path: Path) -> None:
    """An Eagle head of one layer beside 32: 33 x 4 KiB a token; with two stages 16 and 17."""
    (tmp_path / "config.json").write_text(json.dumps(llama(1, 32, 8, 128)))
    draft: dict[str, Any] = {
        "speculative_method": "eagle", "speculative_model": str(tmp_path), "num_speculative_tokens": 3, "max_model_len": 8192,
    }  # fmt: skip
    assert plan(llama(), **draft).bytes_per_token_per_gpu == 33 * 4 * KIB
    assert plan(llama(), pipeline_parallel_size=2, **draft).stage_layers == (16, 17)
    absent = plan(llama(), **(draft | {"speculative_model": "no/such-head"}))
    assert absent.bytes_per_token_per_gpu == 32 * 4 * KIB
    assert any("not at hand" in warning for warning in absent.warnings)


def test_replicas_are_independent_pools() -> None:
    found = plan(llama(), data_parallel_size=4, available_kv_bytes=8 * GIB, max_model_len=8192, advise=False)
    assert (
        found.kv_cache_tokens
        == plan(llama(), available_kv_bytes=8 * GIB, max_model_len=8192, advise=False).kv_cache_tokens
    )
    assert any("4 independent pools" in warning for warning in found.warnings)


def test_padding_layers_cost_memory() -> None:
    """5 full and 29 sliding layers (Gemma 3 4B): groups of 5, six of them sliding, one slot empty."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4
    found = plan(llama(34, 8, 4, 256, layer_types=kinds, sliding_window=1024), max_model_len=8192)
    assert sorted((group.kind, group.layers, group.padding_layers) for group in found.groups) == [
        ("full", 5, 0), *[("sliding", 4, 1)], *[("sliding", 5, 0)] * 5,
    ]  # fmt: skip


def test_windows_hold_the_tokens_in_flight() -> None:
    """ceil(min(window - 1 + in flight, length) / block) + 1, in flight twice the batch with async scheduling (F4)."""
    kinds = ["sliding_attention", "full_attention"] * 4
    model = llama(8, 8, 2, 64, layer_types=kinds, sliding_window=512)
    held = {}
    for version in ("0.19.0", "0.32.0"):
        found = plan(model, engine_version=version, max_num_batched_tokens=2048, max_model_len=8192)
        held[version] = next(group.blocks_per_request for group in found.groups if group.kind == "sliding")
    assert held == {"0.19.0": math.ceil(2559 / 16) + 1, "0.32.0": math.ceil(4607 / 16) + 1}
    cpu = plan(model, device="cpu", max_num_batched_tokens=2048, max_model_len=8192, block_size=16)
    # The CPU kernel takes blocks of 32, and one page size for both kinds raises the full layers too.
    assert {(g.kind, g.block_size) for g in cpu.groups} == {("sliding", 32), ("full", 32)}
    assert next(g.blocks_per_request for g in cpu.groups if g.kind == "sliding") == math.ceil(2559 / 32) + 1


def test_chunks_hold_one_chunk_and_the_tokens_in_flight() -> None:
    """Llama 4 Scout: 36 layers attend to chunks of 8,192, 12 to everything; 131,072 tokens in steps of 2,048."""
    scout = config("meta-llama--Llama-4-Scout-17B-16E-Instruct")
    found = plan(scout, max_model_len=131_072, max_num_batched_tokens=2048, engine_version="0.19.0")
    assert [(group.kind, group.layers, group.blocks_per_request) for group in found.groups] == [
        *[("chunked", 12, (8192 + 2048) // 16)] * 3, ("full", 12, 131_072 // 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("full", "sliding", "version", "groups"),
    [
        # 13 is less than 1.25 x 12: pad to 13 (gpt-oss-20b with an Eagle head), not 12 + 24.
        (13, 12, "0.12.0", [13, 12]),
        # 14 is less than 1.5 x 10 but not than 1.25 x 10.
        (14, 10, "0.24.0", [14, 10]),
        (14, 10, "0.12.0", [7, 7, 10]),
    ],
)
def test_almost_equal_classes_are_padded_to_the_larger(
    full: int, sliding: int, version: str, groups: list[int]
) -> None:
    kinds = ["full_attention"] * full + ["sliding_attention"] * sliding
    found = plan(
        llama(full + sliding, 8, 2, 64, layer_types=kinds, sliding_window=512),
        engine_version=version,
        max_model_len=8192,
    )
    assert [group.layers for group in found.groups] == groups


def test_recurrent_groups_are_replicated_so_that_each_rank_has_its_own() -> None:
    """Mamba-2, 128 heads of 64, state 256, one group, TP2: the convolution holds (8192 + 2 x 2 x 256) / 2 columns."""
    found = plan(config("hfdefault--granitemoehybrid"), tensor_parallel_size=2, max_model_len=2048)
    (state,) = found.groups
    assert state.page_bytes == (8192 + 2 * 2 * 256) // 2 * 3 * 2 + 128 // 2 * 64 * 256 * 2


def test_latent_attention_beside_states_has_blocks_of_128() -> None:
    """Kimi Linear: 32 heads of 128 x 128 fp32 and 3 x 3 x 4096 bf16 over 576 x 2 B: 1,885 tokens -> 15 x 128."""
    found = plan(config("hfdefault--kimi_linear"), max_model_len=2048)
    state = 32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2
    assert found.block_size == math.ceil(state / 1152 / 128) * 128 == 1920


def test_multi_query_by_a_flag() -> None:
    assert (
        plan(config("hfdefault--gpt_bigcode"), max_model_len=1024).bytes_per_token_per_gpu
        == 12 * 1 * 64 * 2 * 2
    )
    many = config("hfdefault--gpt_bigcode") | {"multi_query": False, "num_key_value_heads": None}
    assert plan(many, max_model_len=1024).bytes_per_token_per_gpu == 12 * 12 * 64 * 2 * 2


def test_compressed_attention_is_packed_as_the_engine_packs_it() -> None:
    """DeepSeek V4 Flash with 8 GiB and 2,048 tokens: the numbers of vLLM 0.32's own ``get_kv_cache_configs``."""
    found = plan(
        config("deepseek-ai--DeepSeek-V4-Flash"), device="cpu", available_kv_bytes=8 * GIB, max_model_len=2048,
        max_num_batched_tokens=2048, engine_version="0.32.0", advise=False,
    )  # fmt: skip
    assert [(group.layers, group.block_size) for group in found.groups] == [
        (22, 64), (21, 64), (62, 256), (42, 4), (20, 8),
    ]  # fmt: skip
    # One page where all layers have the same, else the sum: 21 x (37,440 + 8,640) + 20 x 1,728 = 1,002,240.
    assert [group.page_bytes for group in found.groups] == [37_440, 37_440, 1_002_240, 870_912, 32_832]
    assert (found.num_blocks, found.kv_cache_tokens, found.block_bytes) == (8570, 20_795, 1_002_240)
    assert found.max_concurrency == 10.154028436018958
    assert found.bytes_per_max_len_request == 845_890_560


def test_without_the_hybrid_manager_windows_hold_every_token() -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    model = llama(8, 8, 2, 64, layer_types=kinds, sliding_window=512)
    off = plan(model, disable_hybrid_kv_cache_manager=True, max_model_len=8192)
    old = plan(model, engine_version="0.9.2", max_model_len=8192)
    assert [group.kind for group in off.groups] == [group.kind for group in old.groups] == ["full"]
    assert off.bytes_per_token_per_gpu == 8 * 2 * 2 * 64 * 2


def test_the_log_line_of_each_era() -> None:
    lines = {
        version: plan(
            llama(), num_gpu_blocks_override=5120, max_model_len=8192, engine_version=version, advise=False
        ).log_lines
        for version in ("0.4.0", "0.6.4", "0.7.2", "0.12.0", "0.24.0", "0.32.0")
    }
    assert lines["0.4.0"] == ("# GPU blocks: 5120, # CPU blocks: 0",)
    assert lines["0.6.4"][1] == "Maximum concurrency for 8192 tokens per request: 10.00x"
    assert lines["0.7.2"][0].startswith("# cuda blocks: 5120")
    assert lines["0.12.0"][1:] == (
        "GPU KV cache size: 81,920 tokens",
        "Maximum concurrency for 8,192 tokens per request: 10.00x",
    )
    assert lines["0.24.0"][1:] == lines["0.12.0"][1:]
    assert lines["0.32.0"][1:] == (
        "GPU KV cache size: 81,920 tokens, Maximum concurrency for 8,192 tokens per request: 10.00x",
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.19.0", (0, 19)), ("v0.7.2", (0, 7)), ("0.6.4.x (V0)", (0, 6)), ("nightly Jan 2026", (0, 14)), ("2026", (0, 31)),
     ("V1 dev Feb 2025", (0, 7)), ("0.1.dev20073", (0, 33)), (None, (0, 33)), ("0.20.0 -> 0.21.0", (0, 20))],
)  # fmt: skip
def test_versions_as_people_write_them(text: str | None, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_a_word_is_not_a_version() -> None:
    with pytest.raises(KVCatchError, match="not a vLLM version"):
        era_of("newest please")


def test_expected_lengths_show_why_the_mean_lies() -> None:
    """99 requests of 1,000 tokens and one of 8,000: the mean is 1,070, the peak 8,192."""
    found = plan(
        EXAMPLE,
        max_model_len=8192,
        concurrency=40,
        available_kv_bytes=10 * GIB,
        lengths=(1000,) * 99 + (8000,),
        advise=False,
    )
    rows = {row["name"]: row for row in (found.expected_lengths or {})["rows"]}
    assert {name: row["tokens"] for name, row in rows.items()} == {
        "mean": 1070, "p50": 1000, "p99": 1000, "max": 8000, "peak": 8192,
    }  # fmt: skip
    steps = plan(EXAMPLE, max_model_len=8192, concurrency=4, lengths=tuple(range(10, 2010, 10)), advise=False)
    points = {row["name"]: row["tokens"] for row in (steps.expected_lengths or {})["rows"]}
    assert (points["p50"], points["p99"], points["max"]) == (1000, 1980, 2000)
    assert rows["mean"]["fits"] is True
    assert rows["peak"]["fits"] is False
    assert rows["mean"]["kv_bytes"] == 40 * math.ceil(1070 / 16) * 2 * MIB


def test_a_context_without_a_maximum_length_plans_that_length() -> None:
    """10 GiB do not hold one request of 131,072 tokens (16 GiB), but 4 of 8,192 + 512 are 4 x 544 blocks of 2 MiB."""
    model = EXAMPLE | {"max_position_embeddings": 131072}
    found = plan(model, available_kv_bytes=10 * GIB, concurrency=4, context=8192, output=512)
    assert (found.max_model_len, found.starts, found.peak_fits) == (8704, True, True)
    assert found.peak_kv_bytes == 4 * 544 * 2 * MIB
    assert any("from --context" in note for note in found.assumed)
    whole = plan(
        model, available_kv_bytes=10 * GIB, concurrency=4, context=8192, max_model_len=131072, advise=False
    )
    assert (whole.starts, whole.peak_fits) == (False, True)


def test_minus_one_takes_the_longest_that_fits() -> None:
    found = plan(
        EXAMPLE | {"max_position_embeddings": 131072},
        max_model_len=-1,
        available_kv_bytes=2 * GIB,
        advise=False,
    )
    assert found.max_model_len == (1024 - 1) * 16
    assert found.starts


def test_the_shortest_reusable_prefix() -> None:
    assert plan(llama(), max_model_len=8192).min_reusable_prefix_tokens == 16
    assert plan(llama(), max_model_len=8192, enable_prefix_caching=False).min_reusable_prefix_tokens is None
    # A recurrent state is reusable at block ends only.
    found = plan(
        config("Qwen--Qwen3.5-27B"), max_model_len=8192, tensor_parallel_size=2, kv_cache_dtype="fp8"
    )
    assert found.min_reusable_prefix_tokens == found.block_size == 1568


SHAPES = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 96),
        "kv_heads": st.sampled_from([1, 2, 4, 8, 16]),
        "head_dim": st.sampled_from([64, 80, 96, 128, 256]),
        "windowed": st.integers(0, 6),
    }
)


def _model(shape: dict[str, Any]) -> dict[str, Any]:
    kinds = [
        "sliding_attention" if shape["windowed"] and index % (shape["windowed"] + 1) else "full_attention"
        for index in range(shape["layers"])
    ]
    return llama(
        shape["layers"], 32, shape["kv_heads"], shape["head_dim"], layer_types=kinds, sliding_window=1024
    )


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, gib=st.integers(1, 80), length=st.integers(16, 65536))
def test_properties_of_every_pool(shape: dict[str, Any], gib: int, length: int) -> None:
    model = _model(shape)
    found = plan(model, available_kv_bytes=gib * GIB, max_model_len=length, advise=False)
    assert found.num_blocks * found.block_bytes <= gib * GIB < (found.num_blocks + 1) * found.block_bytes
    # No layer is lost, and padding fills every group to the same width.
    assert sum(group.layers for group in found.groups) == shape["layers"]
    assert len({group.layers + group.padding_layers for group in found.groups}) == 1
    assert found.starts is (found.blocks_per_max_len_request <= found.num_blocks - 1)
    longest = found.max_model_len_that_fits
    if found.starts:
        assert longest >= length
    else:
        assert longest < length
    assert found.max_concurrency_that_fits == found.usable_blocks // found.blocks_per_max_len_request
    # More memory never holds less; half-size cells never hold fewer tokens.
    more = plan(model, available_kv_bytes=(gib + 1) * GIB, max_model_len=length, advise=False)
    assert more.num_blocks >= found.num_blocks
    half = plan(model, available_kv_bytes=gib * GIB, max_model_len=length, kv_cache_dtype="fp8", advise=False)
    assert half.bytes_per_token_per_gpu * 2 == found.bytes_per_token_per_gpu


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, stages=st.integers(1, 8))
def test_stages_partition_the_layers(shape: dict[str, Any], stages: int) -> None:
    if stages > shape["layers"]:
        return
    read = model_shape("model", _model(shape))
    pool = build_pool(read, EngineFlags(pipeline_parallel_size=stages, max_model_len=4096))
    indices = sorted(spec.index for stage in pool.stages for group in stage for spec in group.specs)
    assert indices == list(range(shape["layers"]))
