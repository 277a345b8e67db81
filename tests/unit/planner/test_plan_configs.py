"""All shipped configurations get an answer; a second opinion agrees; sparse files use their class defaults."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from plan_data import PLAN, config, configs, refused

from kvcatch.errors import KVCatchError
from kvcatch.planner import plan
from kvcatch.planner.specs import Plan

#: Models that keep nothing per token.
NO_KV = {
    "hfdefault--mamba", "hfdefault--mamba2", "hfdefault--falcon_mamba", "hfdefault--rwkv", "hfdefault--xlstm",
    "hfdefault--granitemoehybrid", "hfdefault--bamba",
}  # fmt: skip
#: Pairs whose names differ, and the one where LitGPT names another checkpoint.
SAME = {
    "mlc--codellama_34b": "codellama/CodeLlama-34b-hf", "mlc--codellama_7b": "codellama/CodeLlama-7b-hf",
    "mlc--llama2_7b": "meta-llama/Llama-2-7b-hf", "mlc--llama2_13b": "meta-llama/Llama-2-13b-hf",
    "mlc--llama2_70b": "meta-llama/Llama-2-70b-hf", "mlc--llama3_1_8b": "meta-llama/Meta-Llama-3.1-8B",
    "mlc--llama3_1_70b": "meta-llama/Meta-Llama-3.1-70B", "mlc--mistral_7b": "mistralai/Mistral-7B-v0.1",
    "mlc--olmo2_7b": "allenai/OLMo-2-1124-7B", "mlc--phi-3_5": "microsoft/Phi-3.5-mini-instruct",
    "mlc--phi-4": "microsoft/Phi-4-mini-instruct", "mlc--tinyllama_1b_chat_v1.0": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "nvidia--Llama-3.1-70B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-70B-Instruct",
    "hfdefault--falcon": "tiiuae/falcon-7b",
}  # fmt: skip


def answer(model: dict[str, Any], **more: Any) -> Plan:
    return plan(model, advise=False, **({"max_model_len": 2048} | more))


@pytest.mark.parametrize("name", sorted(configs()))
def test_a_configuration_is_answered_or_refused_by_name(name: str) -> None:
    if name in refused():
        with pytest.raises(KVCatchError, match=refused()[name]):
            answer(config(name))
        return
    found = answer(config(name), available_kv_bytes=1 << 34)
    assert found.starts is not None
    assert found.bytes_per_token_per_gpu >= 0
    assert (found.bytes_per_token_per_gpu == 0) == (name in NO_KV)
    assert json.loads(json.dumps(found.to_dict()))["groups"] is not None


def test_there_are_249_and_few_refusals() -> None:
    assert len(configs()) == 249
    assert len(refused()) <= 15
    assert set(refused()) <= set(configs())


ANSWERS = [json.loads(line) for line in (PLAN / "engine_answers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row["name"])
def test_the_recorded_answer_of_the_engine(row: dict[str, Any]) -> None:
    """Blocks, tokens, concurrency, the reserve of one request and every group, as vLLM 0.32 itself computes them."""
    found = answer(
        {**config(row["config"]), "quantization_config": None}, device="cpu", engine_version="0.32.0",
        available_kv_bytes=1 << 33, **row["flags"],
    )  # fmt: skip
    assert found.num_blocks == row["num_blocks"]
    assert found.kv_cache_tokens == row["tokens"]
    assert (found.max_concurrency or 0.0) == row["concurrency"]
    assert found.bytes_per_max_len_request == row["need"]
    assert [(group.layers, group.block_size) for group in found.groups] == [
        (layers, block) for _, layers, block, _ in row["groups"]
    ]


def test_the_recorded_answers_cover_the_architectures() -> None:
    assert len(ANSWERS) >= 200
    assert len({config(row["config"])["model_type"] for row in ANSWERS}) >= 70


def _pairs() -> list[tuple[str, dict[str, Any]]]:
    rows = json.loads((PLAN / "litgpt_second_opinion.json").read_text())["rows"]
    plain = {re.sub(r"[^a-z0-9]", "", row["hf"].split("/")[-1].lower()): row for row in rows}
    by_name = {row["hf"]: row for row in rows}
    pairs = []
    for name, row in configs().items():
        key = re.sub(r"[^a-z0-9]", "", name.split("--", 1)[1].lower())
        if name in SAME:
            pairs.append((name, by_name[SAME[name]]))
        elif key in plain and row["kind"] != "transformers-class-default":
            pairs.append((name, plain[key]))
    return pairs


def test_the_second_opinion_agrees_on_every_pair() -> None:
    pairs = _pairs()
    assert len(pairs) >= 34
    found = {
        name: answer(config(name), kv_cache_dtype="bfloat16").bytes_per_token_in_window for name, _ in pairs
    }
    assert found == {name: row["kv_bytes_per_token_16bit"] for name, row in pairs}


def gemma3(layers: int, hidden: int, **more: Any) -> dict[str, Any]:
    """Gemma 3 as its repositories ship it: most of the text config is left to the class."""
    text = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "model_type": "gemma3_text",
        "num_hidden_layers": layers,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {**text, "sliding_window": 1024, **more}, "vision_config": {"model_type": "siglip_vision_model"},
    }  # fmt: skip


def test_gemma_3_as_shipped_takes_heads_and_pattern_from_its_class() -> None:
    """4B: heads, KV heads, head size, pattern and length are absent; the log of the real engine has 34 layers of
    4 x 256, 5 of them full (case A87): 5 x 4 x 256 x 2 x 2 B = 20,480 a token."""
    found = answer(gemma3(34, 2560), engine_version="0.19.0", max_num_batched_tokens=8192, max_model_len=8192)
    assert (found.block_bytes, found.blocks_per_max_len_request, len(found.groups)) == (327_680, 3590, 7)
    assert found.bytes_per_token_per_gpu == 20_480
    assert found.bytes_per_token_in_window == 34 * 4096
    for field in (
        "head_dim = 256",
        "num_attention_heads = 8",
        "num_key_value_heads = 4",
        "every 6. layer is global",
    ):
        assert any(field in note for note in found.assumed), field


def test_gemma_3_12b_as_shipped_is_not_a_pure_window() -> None:
    """Truth of the comparison table: 65,536 B a token and 335,544,320 B fixed."""
    found = answer(gemma3(48, 3840, num_attention_heads=16, num_key_value_heads=8), max_model_len=8192)
    assert found.bytes_per_token_per_gpu == 65_536
    assert found.fixed_bytes_per_request == 335_544_320
    layers = {group.kind: 0 for group in found.groups}
    for group in found.groups:
        layers[group.kind] += group.layers
    assert layers == {"sliding": 40, "full": 8}


def test_a_missing_window_is_the_class_default_and_a_null_one_is_off() -> None:
    """Mistral 7B v0.1 names its window, v0.2 says null; a file without the field gets the class's 4,096."""
    model = config("meta-llama--Meta-Llama-3.1-8B") | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    }
    model.pop("sliding_window", None)
    assert {group.kind for group in answer(model).groups} == {"sliding"}
    assert {group.kind for group in answer(model | {"sliding_window": None}).groups} == {"full"}


def test_traps_of_the_readme() -> None:
    """Each has its own field that the naive reading gets wrong."""
    kinds = lambda name, **more: {group.kind for group in answer(config(name), **more).groups}  # noqa: E731
    assert answer(config("hfdefault--falcon")).bytes_per_token_per_gpu == 32 * 64 * 2 * 2
    assert answer(config("deepseek-ai--DeepSeek-V3")).bytes_per_token_per_gpu == 61 * 576 * 2
    assert answer(config("moonshotai--Kimi-K2.5")).bytes_per_token_per_gpu == 61 * 576 * 2
    assert kinds("meta-llama--Llama-4-Scout-17B-16E-Instruct") == {"chunked", "full"}
    assert kinds("hfdefault--qwen2") == {"full"}
    assert kinds("hfdefault--whisper") == {"full", "cross"}
    # 40 of 80 blocks... the no-op ones keep nothing: 49 with attention of 8 KV heads.
    blocks = config("nvidia--Llama-3_3-Nemotron-Super-49B-v1")["block_configs"]
    own = sum(1 for block in blocks if not block["attention"]["no_op"])
    found = answer(config("nvidia--Llama-3_3-Nemotron-Super-49B-v1"))
    assert sum(group.layers for group in found.groups) == own
    # 35 layers, the last 15 read the cache of others.
    assert sum(group.layers for group in answer(config("hfdefault--gemma3n")).groups) == 20
    # Index keys: 128 fp8 + 4 B of scale on each of 61 layers beside 576 x 2 B.
    assert answer(
        config("deepseek-ai--DeepSeek-V3.2"), kv_cache_dtype="bfloat16"
    ).bytes_per_token_per_gpu == 61 * (1152 + 132)
    # 192-wide keys, 128-wide values: 9 full layers of 4 heads.
    mimo = config("XiaomiMiMo--MiMo-V2-Flash")
    full = mimo["hybrid_layer_pattern"].count(0)
    assert answer(mimo, kv_cache_dtype="bfloat16").bytes_per_token_per_gpu == full * 4 * (192 + 128) * 2


def test_models_without_cache_answer_zero_bytes() -> None:
    for name in ("hfdefault--rwkv", "hfdefault--xlstm"):
        found = answer(config(name), available_kv_bytes=1 << 30)
        assert (found.bytes_per_token_per_gpu, found.peak_kv_bytes, found.peak_fits) == (0, 0, True)
    encoder = {"model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    found = answer(encoder | {"max_position_embeddings": 512}, max_model_len=512, available_kv_bytes=1 << 30)
    assert (found.bytes_per_token_per_gpu, found.groups, found.starts) == (0, (), True)
