"""Bad configurations and flags: one line that names the field and the value, exit status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_data import latent, llama

from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.planner import plan
from kvcatch.planner.configfile import MAX_CONFIG_BYTES


def without(model: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key not in names}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no heads", without(llama(), "num_attention_heads"), "num_attention_heads is missing"),
    ("no layers", without(llama(), "num_hidden_layers"), "num_hidden_layers is missing"),
    ("no hidden size", without(llama(), "hidden_size"), "hidden_size is missing"),
    ("no type", without(llama(), "model_type"), "model_type"),
    ("odd head_dim", llama() | {"head_dim": 100}, "head_dim is 100"),
    ("head_dim of a family without", {**llama(), "model_type": "gpt_neox", "head_dim": 96}, "head_dim is 96"),
    ("absurd head_dim", llama() | {"head_dim": 65536}, "head_dim is 65536"),
    ("heads that do not divide", without(llama() | {"num_attention_heads": 30, "num_key_value_heads": 30}, "head_dim"), "hidden_size 4096"),
    ("negative layers", llama() | {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ("negative hidden size", llama() | {"hidden_size": -4096}, "hidden_size is -4096"),
    ("zero heads", llama() | {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("words for numbers", llama() | {"num_hidden_layers": "thirty-two"}, "num_hidden_layers is 'thirty-two'"),
    ("half a layer", llama() | {"num_hidden_layers": 32.5}, "num_hidden_layers is 32.5"),
    ("truth for numbers", llama() | {"num_key_value_heads": True}, "num_key_value_heads is True"),
    ("a million layers", llama() | {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    ("more KV heads than heads", llama() | {"num_key_value_heads": 64}, "num_key_value_heads is 64"),
    ("KV heads that do not divide", llama() | {"num_key_value_heads": 5}, "num_key_value_heads is 5"),
    ("unknown attention type", llama() | {"layer_types": ["full_attention"] * 31 + ["telepathy"]}, r"layer_types\[31\] is 'telepathy'"),
    ("too few types", llama() | {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
    ("types of no list", llama() | {"layer_types": "full"}, "layer_types is 'full'"),
    ("negative window", llama() | {"model_type": "mistral", "sliding_window": -5}, "sliding_window is -5"),
    ("negative rank", latent(4, -512, 64), "kv_lora_rank is -512"),
    ("contradictory rope part", latent(4, 512, 64) | {"qk_head_dim": 999}, "qk_head_dim is 999"),
    ("nested nothing", {"model_type": "gemma3", "text_config": 7}, "text_config"),
    ("hybrid without pattern", {**llama(), "model_type": "nemotron_h"}, "hybrid_override_pattern"),
    ("hybrid with a letter too many", {**llama(2), "model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_field_is_named(model: dict[str, Any], text: str) -> None:
    with pytest.raises(KVCatchError, match=text):
        plan(model, max_model_len=2048)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"model_type": "llama", "num_hidden_layers": NaN}', "num_hidden_layers is not a number"),
        ('{"text_config": {"head_dim": -Infinity}}', "text_config.head_dim is not a number"),
        ("[1, 2]", "a JSON list"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\x00\x01", "not JSON"),
    ],
)
def test_a_bad_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, text: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["plan", str(path)]) == 2
    assert text in capsys.readouterr().err


def test_ten_megabytes_are_not_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama() | {"padding": "x" * 10_000_000}))
    assert path.stat().st_size > MAX_CONFIG_BYTES
    assert main(["plan", str(path)]) == 2
    assert "bytes of JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_parallel_size": 0}, "tensor-parallel-size is 0"),
        ({"max_model_len": 0}, "max-model-len is 0"),
        ({"max_model_len": -7}, "max-model-len is -7"),
        ({"gpu_memory_utilization": 1.5}, "gpu-memory-utilization is 1.5"),
        ({"block_size": -16}, "block-size is -16"),
        ({"kv_cache_dtype": "fp3"}, "fp3"),
        ({"dtype": "int8"}, "int8"),
        ({"engine_version": "soon"}, "soon"),
        ({"pipeline_parallel_size": 40}, "pipeline-parallel-size 40"),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": (30, 3)}, "30,3"),
        ({"decode_context_parallel_size": 3, "tensor_parallel_size": 8}, "decode-context-parallel-size 3"),
        ({"concurrency": 0}, "0 requests"),
        ({"context": 9000, "max_model_len": 8192}, "9,000"),
        ({"gpu": "Abacus 9000"}, "Abacus 9000"),
        ({"tensor_paralel_size": 2}, "tensor_paralel_size"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "latent"),
    ],
)
def test_a_bad_flag_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(KVCatchError, match=text):
        plan(llama(), **({"max_model_len": 8192} | options))


def test_a_config_without_a_length_needs_the_flag() -> None:
    model = without(llama(), "max_position_embeddings") | {"model_type": "my_llama"}
    with pytest.raises(KVCatchError, match="--max-model-len"):
        plan(model)
    assert plan(model, max_model_len=4096).max_model_len == 4096


def test_an_unknown_name_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no-such/model-anywhere"]) == 2
    assert "no such model" in capsys.readouterr().err


def test_a_name_that_is_nearly_known_is_answered_with_the_near_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "Qwen3-8C"]) == 2
    assert "Qwen3-8B" in capsys.readouterr().err


def test_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
