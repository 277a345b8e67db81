"""Weights against published parameter counts and the bytes real start-ups printed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.planner.catalogue import find_model
from kvcatch.planner.quant import Scheme, scheme_of
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import EngineFlags, ModelShape
from kvcatch.planner.weights import allocated, stage_weights, tied
from kvcatch.units import GIB, MIB


def shape(name: str) -> ModelShape:
    config = find_model(name)
    assert config is not None
    return model_shape(name, config)


def total(name: str, **flags: int) -> int:
    model = shape(name)
    return stage_weights(model, EngineFlags(**flags), [model.num_layers])[0].total


@pytest.mark.parametrize(
    ("name", "billions", "bytes_each"),
    [
        # Parameter counts as the model cards state them.
        ("meta-llama/Meta-Llama-3.1-8B", 8.03, 2),
        ("meta-llama/Meta-Llama-3.1-405B", 405.9, 2),
        ("Qwen/Qwen3-8B", 8.19, 2),
        ("Qwen/Qwen3-235B-A22B", 235.1, 2),
        ("mistralai/Mixtral-8x22B-v0.1", 140.6, 2),
        ("llama2_70b", 68.98, 2),
        ("gemma2_9b", 9.24, 2),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494, 2),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.544, 2),
        ("Qwen/Qwen2.5-3B-Instruct", 3.086, 2),
        ("Qwen/Qwen2.5-14B-Instruct", 14.77, 2),
        ("Qwen/Qwen2.5-32B-Instruct", 32.76, 2),
        ("Qwen/Qwen3-4B", 4.02, 2),
        ("Qwen/Qwen3-14B", 14.77, 2),
        ("mistralai/Mistral-Large-Instruct-2411", 122.6, 2),
        ("microsoft/Phi-4-mini-instruct", 3.84, 2),
        ("microsoft/Phi-3.5-mini-instruct", 3.82, 2),
        ("phi-2", 2.78, 2),
        ("qwen2moe", 14.3, 2),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 2),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 400.7, 2),
        ("nvidia/Nemotron-H-56B-Base-8K", 56.3, 2),
        ("moonshotai/Kimi-K2-Instruct", 1026.0, 1),
        ("deepseek-ai/DeepSeek-V3", 671.0, 1),
    ],
)
def test_parameter_counts_of_model_cards(name: str, billions: float, bytes_each: int) -> None:
    assert total(name) == pytest.approx(billions * 1e9 * bytes_each, rel=0.01)


def test_llama_2_7b_by_hand() -> None:
    # 32 x (4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096) + 2 x 32000 x 4096, and one rotary table.
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096
    parts = stage_weights(shape("llama2_7b"), EngineFlags(), [32])[0].parts
    assert sum(size for part, size in parts.items() if part != "rotary") == 2 * parameters


def test_gpt_oss_loads_what_the_log_says_on_hopper() -> None:
    # vllm issue 33155 (0.14.1, H100, Triton MXFP4): "Model loading took 64.38 GiB".
    model = shape("openai/gpt-oss-120b")
    loaded = stage_weights(model, EngineFlags(), [36], (9, 0))[0]
    assert loaded.total / GIB == pytest.approx(64.38, rel=0.002)
    assert stage_weights(model, EngineFlags(), [36], (10, 0))[0].total < loaded.total


def test_tensor_parallel_ranks_keep_whole_what_cannot_be_split() -> None:
    one, eight = total("Qwen/Qwen3-8B"), total("Qwen/Qwen3-8B", tensor_parallel_size=8)
    assert one / 8 < eight < one / 8 + 0.05 * GIB
    # Four KV heads over eight ranks: each rank holds one, so more than an eighth.
    model = shape("Qwen/Qwen3-30B-A3B")
    whole = stage_weights(model, EngineFlags(), [48])[0].parts["attention"]
    part = stage_weights(model, EngineFlags(tensor_parallel_size=8), [48])[0].parts["attention"]
    assert part == whole / 8 + 48 * 2 * 128 * 2048 * 2 * (1 - 4 / 8)


def test_experts_spread_over_data_parallel_ranks() -> None:
    # FusedMoEParallelConfig.make flattens tensor and data parallel ranks, with and without expert parallelism.
    model = shape("Qwen/Qwen3-30B-A3B")

    def experts(**flags: int | bool) -> int:
        return stage_weights(model, EngineFlags(**flags), [48])[0].parts["experts"]  # type: ignore[arg-type]

    assert experts(data_parallel_size=4) == experts() // 4
    assert experts(data_parallel_size=4, enable_expert_parallel=True) == experts() // 4


def test_pipeline_stages_add_up_and_hold_their_ends() -> None:
    model = shape("meta-llama/Meta-Llama-3.1-70B")
    first, middle, last = stage_weights(model, EngineFlags(pipeline_parallel_size=3), [26, 28, 26])
    whole = stage_weights(model, EngineFlags(), [80])[0]
    assert "embedding" in first.parts
    assert "lm_head" in last.parts
    assert not {"embedding", "lm_head"} & set(middle.parts)
    for part in ("attention", "mlp", "norm"):
        assert first.parts[part] + middle.parts[part] + last.parts[part] == whole.parts[part]


def test_tied_embedding_is_held_twice_by_a_pipeline() -> None:
    model = shape("Qwen/Qwen3-4B")
    assert tied(model)
    first, last = stage_weights(model, EngineFlags(pipeline_parallel_size=2), [18, 18])
    assert first.parts["embedding"] == last.parts["embedding"] == 151936 * 2560 * 2


def test_a_draft_model_is_loaded_on_the_last_stage() -> None:
    model = shape("Qwen/Qwen3-32B")
    draft = EngineFlags(
        speculative_method="draft_model", speculative_model="Qwen/Qwen3-0.6B", pipeline_parallel_size=2
    )
    first, last = stage_weights(model, draft, [32, 32])
    assert "draft" not in first.parts
    assert last.parts["draft"] == total("Qwen/Qwen3-0.6B")
    unknown = EngineFlags(speculative_method="eagle3", speculative_model="someone/eagle")
    assert "not counted" in " ".join(stage_weights(model, unknown, [64])[0].notes)


@pytest.mark.parametrize(
    ("config", "rows", "cols", "expected"),
    [
        # AWQ: 4 bits, a 16-bit scale and a 4-bit zero point for 128 inputs.
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4096, 4096, 8388608 + 262144 + 65536),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4096, 4096, 8388608 + 262144),
        # DeepSeek: one fp32 scale for each 128 x 128 tile.
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 256, 384, 256 * 384 + 4 * 2 * 3),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 64, 160, 64 * 160 // 2 + 64 * 10 + 8),
        ({"quant_method": "mxfp4"}, 64, 160, 64 * 160 // 2 + 64 * 5),
        (None, 64, 160, 64 * 160 * 2),
    ],
)
def test_bytes_of_a_quantised_matrix(
    config: dict[str, object] | None, rows: int, cols: int, expected: int
) -> None:
    assert scheme_of(config, None).matrix_bytes(rows, cols, 2) == expected


def test_online_quantisation_and_skipped_modules() -> None:
    assert scheme_of(None, "fp8").kind == "fp8_channel"
    listed = scheme_of(
        {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*self_attn.*"]}, None
    )
    assert listed.skips("self_attn")
    assert not listed.skips("mlp")
    half = total("meta-llama/Meta-Llama-3.1-8B") - total("meta-llama/Meta-Llama-3.1-8B", quantization="fp8")  # type: ignore[arg-type]
    assert half == pytest.approx(6.98e9, rel=0.01)  # 6.98 billion of 8.03 are in linear layers


@given(st.integers(1, 10 * GIB))
def test_allocator_never_gives_less_and_wastes_at_most_a_mebibyte(size: int) -> None:
    assert 0 <= allocated(size) - size <= MIB + 511


@given(
    st.integers(1, 4096), st.integers(1, 4096), st.sampled_from(["fp8_channel", "fp8_block", "int4", "nvfp4"])
)
def test_quantised_is_smaller_for_real_sizes(rows: int, cols: int, kind: str) -> None:
    rows, cols = rows * 64, cols * 64
    assert Scheme(kind).matrix_bytes(rows, cols, 2) < Scheme().matrix_bytes(rows, cols, 2)


DEFAULTS = Path(__file__).resolve().parents[2] / "data/plan_boot/hf_parameters.json.gz"
COUNTED: dict[str, dict[str, Any]] = json.loads(gzip.decompress(DEFAULTS.read_bytes()))


@pytest.mark.parametrize("model_type", sorted(COUNTED))
def test_parameters_that_transformers_builds_from_the_same_defaults(model_type: str) -> None:
    model = model_shape(model_type, COUNTED[model_type]["config"])
    loaded = stage_weights(model, EngineFlags(dtype="bfloat16"), [model.num_layers])[0]
    # Image towers are counted too; rotary tables and the kernels' own copies are no parameters.
    ours = sum(size for part, size in loaded.parts.items() if part not in ("rotary", "absorbed")) / 2
    # Zamba's shared blocks take twice the hidden size in; the rest agrees to a percent.
    rel = 0.035 if model_type == "zamba" else 0.0115
    assert ours == pytest.approx(COUNTED[model_type]["parameters"], rel=rel)
