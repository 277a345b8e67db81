"""Names people type find the right model and card; facts are sourced."""

from __future__ import annotations

import pytest

from kvcatch.planner.catalogue import find_gpu, find_model, find_model_entry, gpus, model_names, models
from kvcatch.planner.shape import model_shape


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen--Qwen3-8B", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B"),
        ("gemma-3-12b", "google/gemma-3-12b-it"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B-FP8"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("hfdefault--llama", "hfdefault--llama"),
        ("Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("DeepSeek-R1-Distill-Qwen-14B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
        ("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_model_names(name: str, found: str) -> None:
    entry = find_model_entry(name)
    assert entry is not None
    assert entry.name == found


@pytest.mark.parametrize("name", ["", "llama", "Qwen3-9000B", "Qwen3-8B-FP4-of-someone", "../../etc/passwd"])
def test_unknown_models_are_unknown(name: str) -> None:
    # A quantised twin must not borrow the plain model's weights, nor a family name somebody's class defaults.
    assert find_model(name) is None


def test_every_entry_has_a_source_and_most_have_a_shape() -> None:
    shapes = 0
    for entry in models():
        assert entry.source
        if entry.kind != "transformers-class-default":
            assert model_shape(entry.name, entry.parsed()).num_layers > 0
            shapes += 1
    assert shapes == len([entry for entry in models() if entry.kind != "transformers-class-default"]) > 150
    assert not any(name.startswith("hfdefault") for name in model_names())


def test_find_model_gives_a_copy_of_its_own() -> None:
    first = find_model("Qwen3-8B")
    assert first is not None
    first["hidden_size"] = 0
    again = find_model("Qwen3-8B")
    assert again is not None
    assert again["hidden_size"] == 4096


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100 pcie", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("A100", "A100 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_gpu_names(name: str, found: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.name == found


def test_unknown_gpu() -> None:
    assert find_gpu("H9000") is None
    assert find_gpu("") is None


def test_gpu_totals_are_the_logged_ones_where_a_log_proves_them() -> None:
    # Figures as printed by vLLM: cases A77, A67, A1, A72 and the run of LLMServingSim (25,250,627,584 bytes).
    for name, gib in (("H100", 79.19), ("A100", 79.15), ("RTX 3090", 23.58), ("GB10", 121.63)):
        gpu = find_gpu(name)
        assert gpu is not None
        assert gpu.exact
        assert gpu.gib == gib
    card = find_gpu("RTX 4090")
    assert card is not None
    assert abs(card.memory_bytes - 25_250_627_584) < card.band_bytes
    for gpu in gpus():
        assert gpu.source
        assert gpu.band > 0
        assert gpu.exact or gpu.band >= 0.15
