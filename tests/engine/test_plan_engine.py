"""``plan`` beside vLLM 0.32: blocks, tokens, concurrency and the log line, architecture by architecture.

Two oracles. ``plan_oracle`` builds the engine's real model classes, KV cache specs and KV cache configs in one process
without weights (what is real is listed there); three architectures are started whole, and the line the engine then
logs is compared word by word. ``make test`` runs twelve architectures and the starts, ``make soak`` every shipped
configuration that this engine can build.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.support import env
from kvcatch.planner import plan

CONFIGS = env.ROOT / "tests" / "data" / "plan" / "model_configs.jsonl"
BUDGET = 1 << 33
#: Architecture by trait; sizes are those of the real checkpoints, no weights are needed.
TWELVE = {
    "grouped-query": "Qwen--Qwen3-8B",
    "multi-head": "mlc--llama2_7b",
    "multi-query": "mlc--gemma_2b",
    "sliding": "mlc--mistral_7b",
    "alternating": "mlc--gemma2_2b",
    "five-to-one": "mlc--gemma3_1b_it",
    "latent": "deepseek-ai--DeepSeek-V3",
    "linear-hybrid": "Qwen--Qwen3.5-27B",
    "state-space-hybrid": "hfdefault--jamba",
    "experts": "openai--gpt-oss-20b",
    "multimodal": "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "two page sizes": "google--gemma-4-26B-A4B",
}
#: As its repository ships it: what is absent comes from the class.
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
    },
}  # fmt: skip
#: What the trimmed file of DeepSeek V4 lacks and its classes cannot do without.
ROPE = {
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
}  # fmt: skip
KINDS = {
    "FullAttentionSpec": "full", "SlidingWindowSpec": "sliding", "MLAAttentionSpec": "mla", "MambaSpec": "mamba",
    "ChunkedLocalAttentionSpec": "chunked", "CrossAttentionSpec": "cross",
}  # fmt: skip

Case = dict[str, Any]


def _configs() -> dict[str, dict[str, Any]]:
    rows = map(json.loads, CONFIGS.read_text().splitlines())
    return {row["name"]: row["config"] for row in rows}


def _case(config: dict[str, Any], **flags: Any) -> Case:
    text = config.get("text_config") or config
    limits = [text.get(name) for name in ("max_position_embeddings", "n_positions", "max_target_positions")]
    length = min([2048, *[limit for limit in limits if isinstance(limit, int) and limit > 0]])
    # The CPU kernel of latent attention knows blocks of 16 only, the others multiples of 32.
    block = 16 if "kv_lora_rank" in text else 32
    base = {"max_model_len": length, "block_size": block, "mamba_ssm_cache_dtype": "float32"}
    return {"config": config, "flags": base | flags, "budget": BUDGET}


def ask_engine(cases: dict[str, Case], folder: Path) -> dict[str, dict[str, Any]]:
    """The engine's own answers, from a child process."""
    asked, answered = folder / "cases.json", folder / "answers.jsonl"
    asked.write_text(json.dumps(cases))
    done = subprocess.run(
        [env.PYTHON, "-m", "engine.support.plan_oracle", str(asked), str(answered)],
        env=env.environment(VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS=""), cwd=env.ROOT / "tests", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = map(json.loads, answered.read_text().splitlines())
    return {row["name"]: row["answer"] for row in rows}


def ask_plan(case: Case, engine: dict[str, Any]) -> dict[str, Any]:
    """The same facts from ``plan``."""
    flags = dict(case["flags"])
    # The flags of the API server differ from those of the class LLM in their defaults: take the engine's.
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        flags.setdefault(name, engine.get(name))
    found = plan(
        {**case["config"], "quantization_config": None}, device="cpu", engine_version="0.32.0",
        available_kv_bytes=case["budget"], advise=False, **flags,
    )  # fmt: skip
    return {
        "num_blocks": found.num_blocks,
        "tokens": found.kv_cache_tokens,
        "concurrency": found.max_concurrency or 0.0,
        "need": found.bytes_per_max_len_request,
        "line": found.log_lines[-1] if found.log_lines else "",
        "groups": [[group.kind, group.layers, group.block_size] for group in found.groups],
    }


def as_plan(answer: dict[str, Any]) -> dict[str, Any]:
    """The engine's answer in the words of ``plan``. A group of unlike layers has no kind of its own."""
    groups = [[KINDS.get(kind, ""), layers, block] for kind, layers, block, _ in answer["groups"]]
    return {
        **{name: answer[name] for name in ("num_blocks", "tokens", "concurrency", "need", "line")},
        "groups": groups,
    }


def compare(cases: dict[str, Case], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Where the two differ; empty is good."""
    wrong: dict[str, Any] = {}
    for name, answer in answers.items():
        if "error" in answer or "refused" in answer:
            continue
        mine, theirs = ask_plan(cases[name], answer), as_plan(answer)
        for own, other in zip(mine["groups"], theirs["groups"], strict=False):
            own[0] = own[0] if other[0] else ""
        if mine != theirs:
            wrong[name] = {"plan": mine, "engine": theirs}
    return wrong


def latent_block() -> int:
    """The block size of latent attention: AMX kernels take 64, the reference kernel of the CPU only 16."""
    import torch

    return 64 if torch.cpu._is_amx_tile_supported() else 16


def _twelve() -> dict[str, Case]:
    configs = _configs()
    cases = {trait: _case(configs[name]) for trait, name in TWELVE.items()}
    for trait in ("grouped-query", "alternating", "experts"):
        cases[f"{trait}, fp8"] = _case(configs[TWELVE[trait]], kv_cache_dtype="fp8_e4m3")
    for trait in ("grouped-query", "multi-query", "latent", "linear-hybrid"):
        cases[f"{trait}, two ranks"] = _case(configs[TWELVE[trait]], tensor_parallel_size=2)
    cases["alternating, no hybrid manager"] = _case(
        configs[TWELVE["alternating"]], disable_hybrid_kv_cache_manager=True
    )
    cases["five-to-one, small steps"] = _case(configs[TWELVE["five-to-one"]], max_num_batched_tokens=512)
    compressed = configs["deepseek-ai--DeepSeek-V4-Flash"]
    ratios = compressed["compress_ratios"][: compressed["num_hidden_layers"]]
    cases["compressed"] = _case(compressed | ROPE | {"compress_ratios": ratios}, block_size=256)
    cases["indexed"] = _case(configs["deepseek-ai--DeepSeek-V3.2"], block_size=latent_block())
    if latent_block() == 64:  # without AMX the engine refuses this mixture on the CPU
        cases["states, pooled index keys and rings"] = _case(configs["hfdefault--glm5_next"], block_size=64)
    # The two models whose reserve depends on the batch, as the page of the verb has them.
    for batched in (2048, 8192):
        flags = {"max_model_len": 8192, "block_size": 16, "max_num_batched_tokens": batched}
        cases[f"Gemma 3 as shipped, {batched}"] = _case(GEMMA_3_12B, **flags)
        cases[f"gpt-oss, {batched}"] = _case(configs["openai--gpt-oss-20b"], **flags)
    return cases


TOO_LITTLE = 60 << 20
REFUSED = ("Qwen--Qwen3-8B", "mlc--gemma2_2b", "deepseek-ai--DeepSeek-V3")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Case], dict[str, dict[str, Any]]]:
    """The cases of this module and the engine's answers, from one child process."""
    configs = _configs()
    cases = _twelve() | {
        f"refused: {name}": _case(configs[name]) | {"budget": TOO_LITTLE} for name in REFUSED
    }
    return cases, ask_engine(cases, tmp_path_factory.mktemp("plan"))


def test_twelve_architectures_agree_with_the_engine(asked: tuple[dict[str, Case], dict[str, Any]]) -> None:
    cases, answers = asked
    ours = {name: answer for name, answer in answers.items() if not name.startswith("refused: ")}
    assert {name: answer for name, answer in ours.items() if "num_blocks" not in answer} == {}
    assert compare(cases, ours) == {}


def test_the_refusal_is_the_engines(asked: tuple[dict[str, Case], dict[str, Any]]) -> None:
    """A budget below one request: the same need, the same room, the same estimated maximum."""
    cases, answers = asked
    for name in REFUSED:
        case, answer = cases[f"refused: {name}"], answers[f"refused: {name}"]
        found = plan(
            {**case["config"], "quantization_config": None}, device="cpu", engine_version="0.32.0", advise=False,
            available_kv_bytes=TOO_LITTLE, max_num_batched_tokens=2048, **case["flags"],
        )  # fmt: skip
        assert found.starts is False
        assert found.log_lines[-1].split("Based on")[0].strip() in answer["refused"]
        assert f"maximum model length is {found.max_model_len_that_fits}" in answer["refused"]


@pytest.mark.soak
def test_every_configuration_agrees_with_the_engine(tmp_path: Path) -> None:
    """All that this engine can build on CPU; the others say why they cannot."""
    refused = (CONFIGS.parents[1] / "plan_refused.tsv").read_text()
    # Its rotary tables take minutes to build; a checkpoint of the family is among the others.
    skipped = {"hfdefault--phimoe"} | {line.split("\t")[0] for line in refused.splitlines()}
    cases = {name: _case(config) for name, config in _configs().items() if name not in skipped}
    for name in list(cases):
        if cases[name]["config"].get("model_type") in ("qwen3", "llama", "gemma2", "gpt_oss", "qwen3_moe"):
            cases[f"{name} fp8"] = _case(cases[name]["config"], kv_cache_dtype="fp8_e4m3")
            cases[f"{name} two ranks"] = _case(cases[name]["config"], tensor_parallel_size=2)
    answers = ask_engine(cases, tmp_path)
    built = [name for name, answer in answers.items() if "num_blocks" in answer]
    kinds = {cases[name]["config"]["model_type"] for name in built}
    assert compare(cases, answers) == {}
    assert len(kinds) >= 40
    assert len(built) >= 150


START = """
import json, sys
from vllm import LLM
flags = json.loads(sys.argv[1])
llm = LLM(load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True, **flags)
cache = llm.llm_engine.vllm_config.cache_config
print("BLOCKS", cache.num_gpu_blocks)
"""
#: Shrunk models started whole: alternating windows, latent attention, gated delta net.
STARTED = ("gemma3", "deepseek_mla", "qwen3_next")


@pytest.mark.parametrize("model", STARTED)
def test_a_whole_engine_logs_the_line_that_plan_prints(model: str, tmp_path: Path) -> None:
    layouts = json.loads((CONFIGS.parent / "vllm_cpu_kv_layouts.json").read_text())["rows"]
    config = next(row["config"] for row in layouts if row["model"] == model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags: dict[str, Any] = {
        "max_model_len": 4096, "max_num_batched_tokens": 1024, "max_num_seqs": 8,
        "block_size": latent_block() if model == "deepseek_mla" else 64, "enable_prefix_caching": True,
        "mamba_ssm_cache_dtype": "float32",
    }  # fmt: skip
    with env.LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [env.PYTHON, "-c", START, json.dumps({"model": str(tmp_path), **flags})],
            env=env.environment(VLLM_PLUGINS=""), capture_output=True, text=True, check=False,
        )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    found = plan(
        str(tmp_path),
        device="cpu",
        engine_version="0.32.0",
        available_kv_bytes=1 << 30,
        advise=False,
        **flags,
    )
    assert f"BLOCKS {found.num_blocks}" in said
    assert found.log_lines[-1] in said
