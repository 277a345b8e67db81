"""KV dtype support: answers a reader of vLLM's source would give, with the line to check them at."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvcatch.cli.main import main
from kvcatch.planner.catalogue import find_model
from kvcatch.planner.dtypes import _table, kv_dtype_support
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import EngineFlags


def ask(model: str, gpu: str | None, dtype: str, version: str, **flags: Any) -> dict[str, Any] | None:
    config = find_model(model)
    assert config is not None
    return kv_dtype_support(
        model_shape(model, config),
        EngineFlags(gpu=gpu, kv_cache_dtype=dtype, engine_version=version, **flags),
    )


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "version", "backend"),
    [
        ("Qwen3-8B", "H100", "fp8", "0.24.0", "FLASH_ATTN"),  # FlashAttention 3 reads fp8 on Hopper
        ("Qwen3-8B", "A100", "fp8", "0.24.0", "FLASHINFER"),  # no FlashAttention 3 there
        ("Qwen3-8B", "L4", "fp8", "0.32.0", "FLASHINFER"),
        ("Qwen3-8B", "H100", "fp8_e5m2", "0.24.0", "FLASHINFER"),  # FlashAttention lists e4m3 only
        ("Qwen3-8B", "B200", "nvfp4", "0.31.0", "FLASHINFER"),
        ("Qwen3-8B", "A100", "nvfp4", "0.33.0", "FLASHINFER"),  # on FA2 kernels since 0.32
        ("Qwen3-8B", "H100", "int8_per_token_head", "0.24.0", "TRITON_ATTN"),
        ("Qwen3-8B", "H100", "turboquant_k8v4", "0.24.0", "TURBOQUANT"),
        ("deepseek-v3", "H100", "fp8", "0.24.0", "FLASHMLA"),
        ("deepseek-v3", "B200", "fp8", "0.33.0", "FLASHINFER_MLA"),
        ("DeepSeek-V3.2", "H100", "fp8", "0.33.0", "FLASHMLA_SPARSE"),
        ("Qwen3-8B", "MI300X", "fp8", "0.33.0", "ROCM_ATTN"),
        # A boot log of Qwen3.8-27B-FP8 on RTX 3090 ran with fp8_e4m3 (case A45).
        ("Qwen3.5-27B", "RTX 3090", "fp8_e4m3", "0.27.0", "FLASHINFER"),
    ],
)
def test_supported(model: str, gpu: str, dtype: str, version: str, backend: str) -> None:
    answer = ask(model, gpu, dtype, version)
    assert answer is not None
    assert (answer["supported"], answer["backend"]) == (True, backend)
    assert re.fullmatch(r"vllm/.+\.py:\d+", answer["source"])
    assert answer["nearest"] is None


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "version", "nearest", "reason"),
    [
        # Turing: FlashInfer starts at 8.0 since 0.24, Triton's fp8 at 8.9.
        (
            "Qwen3-8B",
            "T4",
            "fp8",
            "0.24.0",
            "int8_per_token_head",
            "Triton's fp8 needs compute capability 8.9",
        ),
        # Head size 80 has no FlashInfer kernel.
        ("phi-2", "A100", "fp8", "0.24.0", "int8_per_token_head", "needs"),
        ("deepseek-v3", "A100", "fp8", "0.12.0", "auto", "TRITON_MLA does not take fp8"),
        ("Qwen3-8B", "A100", "nvfp4", "0.31.0", "int4_per_token_head", "nvfp4 needs the TRT-LLM kernels"),
        ("Qwen3-8B", "H100", "int4_per_token_head", "0.24.0", "turboquant_4bit_nc", "0.24 has no KV dtype"),
        ("gpt-oss-20b", "A100", "nvfp4", "0.33.0", "int4_per_token_head", "no attention sinks"),
    ],
)
def test_unsupported_names_the_nearest(
    model: str, gpu: str, dtype: str, version: str, nearest: str, reason: str
) -> None:
    answer = ask(model, gpu, dtype, version)
    assert answer is not None
    assert (answer["supported"], answer["backend"], answer["nearest"]) == (False, None, nearest)
    reasons = [answer["reason"], *(refusal["reason"] for refusal in answer["refusals"])]
    assert any(reason in text for text in reasons), reasons
    again = ask(model, gpu, nearest, version)
    assert again is not None
    assert again["supported"]


def test_what_fp8_switches_off_on_ampere() -> None:
    answer = ask("Qwen3-8B", "A100", "fp8", "0.12.0")
    assert answer is not None
    lost = [item["what"] for item in answer["switches_off"]]
    assert any("FLASH_ATTN" in text for text in lost)
    assert any("cascade" in text for text in lost)
    newer = ask(
        "Qwen3-8B", "A100", "fp8", "0.24.0"
    )  # disable_cascade_attn is the default there: nothing to lose
    assert newer is not None
    assert [i["what"] for i in newer["switches_off"]] == ["the FLASH_ATTN backend"]


def test_cpu_and_a_backend_by_name() -> None:
    assert ask("Qwen3-8B", None, "fp8", "0.32.0", device="cpu")["backend"] == "CPU_ATTN"  # type: ignore[index]
    old = ask("Qwen3-8B", None, "fp8", "0.12.0", device="cpu")
    assert old is not None
    assert (old["supported"], old["nearest"]) == (False, "auto")
    forced = ask("Qwen3-8B", "H100", "fp8", "0.24.0", attention_backend="flashinfer_vllm_v1")
    assert forced is not None
    assert forced["backend"] == "FLASHINFER"
    wrong = ask("Qwen3-8B", "H100", "fp8", "0.24.0", attention_backend="NO_SUCH")
    assert wrong is not None
    assert "not a backend" in wrong["reason"]


def test_unknown_is_not_an_answer() -> None:
    assert ask("Qwen3-8B", None, "fp8", "0.24.0") is None
    assert ask("DeepSeek-V4-Flash", "B200", "fp8", "0.33.0") is None  # serves itself, not in the table


def test_version_between_two_read_ones_is_said() -> None:
    answer = ask("Qwen3-8B", "H100", "fp8", "0.19.0")
    assert answer is not None
    assert (answer["table_version"], answer["exact_version"]) == ("0.24", False)


def test_table_covers_the_releases_and_cites_every_fact() -> None:
    assert list(_table()) == ["0.12", "0.24", "0.31", "0.32", "0.33"]
    for release in _table().values():
        for row in release["backends"].values():
            assert set(row["dtypes"]) <= {*release["cache_dtypes"], "auto"}
            assert re.fullmatch(r"vllm/.+\.py:\d+", row["source"])
        for condition in release["conditions"]:
            assert condition["backend"] in release["backends"]
        order = [name for key, names in release["priorities"].items() if key != "source" for name in names]
        assert set(order) <= set(release["backends"])


def test_the_note_of_what_a_dtype_switches_off_is_a_sentence(capsys) -> None:
    main(
        [
            "plan",
            "Qwen3-8B",
            "--gpu",
            "A100",
            "--kv-cache-dtype",
            "nvfp4",
            "--max-num-seqs",
            "4",
            "--context",
            "8192",
        ]
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "--kv-cache-dtype nvfp4 switches off the FLASH_ATTN backend (vllm/platforms/cuda.py:83)" in said
    assert "{" not in said
