"""``plan`` beside the KV cache arithmetic of five vLLM releases: groups, blocks, concurrency, refusals, log lines.

The layers are handed over as ``plan`` derives them, so this compares what releases changed: how groups are dealt, what
windows hold in flight, whether the null block is kept back, what is logged.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.support import env
from kvcatch.planner import plan
from kvcatch.planner.engine import resolve_limits
from kvcatch.planner.pages import layer_specs
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import EngineFlags
from old_engines import RELEASES, release

GIB = 1 << 30
CONFIGS = env.ROOT / "tests" / "data" / "plan" / "model_configs.jsonl"
#: One model per layout.
MODELS = {
    "full": "meta-llama--Meta-Llama-3.1-8B",
    "latent": "deepseek-ai--DeepSeek-V3",
    "alternating": "mlc--gemma2_2b",
    "five to one": "mlc--gemma3_1b_it",
    "chunked": "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "two page sizes": "google--gemma-4-26B-A4B",
    "states": "Qwen--Qwen3.5-27B",
}


def _flags(version: str, **more: Any) -> dict[str, Any]:
    # The recurrent models keep one state a request here: what prefix caching adds is tested with the whole engine.
    return {"engine_version": version, "max_model_len": 8192, "max_num_batched_tokens": 2048,
            "enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32", **more}  # fmt: skip


def _case(config: dict[str, Any], flags: dict[str, Any], budget: int) -> dict[str, Any]:
    """The layers of a model in numbers, and the settings the engine's arithmetic reads."""
    shape, settings = model_shape("model", {**config, "quantization_config": None}), EngineFlags(**flags)
    limits = resolve_limits(shape, settings, None)
    layers = {layer.index: layer for layer in shape.layers}
    rows = []
    for spec in layer_specs(shape, settings, limits)[0]:
        layer = layers[spec.index]
        rows.append(
            {
                "kind": spec.kind, "block_size": spec.block_size, "page_bytes": spec.page_bytes, "width": 2,
                "window": spec.window, "heads": layer.num_kv_heads, "head_size": layer.head_dim,
                "state_bytes": spec.padded_from or spec.page_bytes,
            }
        )  # fmt: skip
    return {"layers": rows, "budget": budget, "in_flight_tokens": limits.in_flight_tokens,
            "max_model_len": limits.max_model_len, "max_num_batched_tokens": limits.max_num_batched_tokens}  # fmt: skip


@pytest.mark.parametrize("version", list(RELEASES))
def test_the_arithmetic_of_a_release(version: str, tmp_path: Path) -> None:
    configs = {row["name"]: row["config"] for row in map(json.loads, CONFIGS.read_text().splitlines())}
    flags = _flags(version)
    budgets = {"": 8 * GIB, " refused": 48 << 20}
    asked = {
        trait + suffix: _case(configs[name], flags, budget)
        for trait, name in MODELS.items()
        for suffix, budget in budgets.items()
    }
    cases, answers = tmp_path / "cases.json", tmp_path / "answers.json"
    cases.write_text(json.dumps(asked))
    done = subprocess.run(
        [env.PYTHON, "-m", "engine.support.plan_eras", str(cases), str(answers)],
        env=env.environment(PYTHONPATH=f"{release(version)}:{env.ROOT / 'tests'}", VLLM_PLUGINS=""),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = {}
    for name, answer in json.loads(answers.read_text()).items():
        trait = name.removesuffix(" refused")
        found = plan(
            {**configs[MODELS[trait]], "quantization_config": None}, available_kv_bytes=asked[name]["budget"],
            advise=False, **flags,
        )  # fmt: skip
        if "refused" in answer:
            same = found.starts is False and found.log_lines[-1].rstrip(".") in answer["refused"]
        else:
            groups = [[group.layers, group.block_size] for group in found.groups]
            same = (
                found.num_blocks == answer["num_blocks"]
                and found.max_concurrency == answer["concurrency"]
                and groups == answer["groups"]
                and list(found.log_lines[1:]) == answer["lines"]
            )
        if not same:
            wrong[name] = {
                "plan": [found.num_blocks, found.max_concurrency, found.log_lines],
                "engine": answer,
            }
    assert wrong == {}
