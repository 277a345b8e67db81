"""The tables of the plan page are recomputed."""

from __future__ import annotations

from typing import Any

from plan_data import DATA, config, llama
from test_plan_configs import gemma3

from kvcatch.planner import plan

MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": llama(32, 32, 8, 128),
    "Llama-2-7B": config("mlc--llama2_7b"),
    "Qwen2.5-7B": llama(28, 28, 4, 128),
    "Qwen3-30B-A3B": config("Qwen--Qwen3-30B-A3B"),
    "Gemma-3-12B": gemma3(48, 3840, num_attention_heads=16, num_key_value_heads=8),
    "DeepSeek-V3": config("deepseek-ai--DeepSeek-V3"),
    "gpt-oss-20b": config("openai--gpt-oss-20b"),
    "Qwen3-Next-80B": config("hfdefault--qwen3_next"),
}
#: Bytes one sequence of 8,192 tokens holds, by hand: 2 x layers x KV heads x head size x 2 B per token, windows
#: capped, latent (512 + 64) x 2 B, 36 states of 49,152 + 1,048,576 B.
TRUTH = {
    "Llama-3-8B": 1_073_741_824, "Llama-2-7B": 4_294_967_296, "Qwen2.5-7B": 469_762_048,
    "Qwen3-30B-A3B": 805_306_368, "Gemma-3-12B": 872_415_232, "DeepSeek-V3": 575_668_224,
    "gpt-oss-20b": 204_472_320, "Qwen3-Next-80B": 240_844_800,
}  # fmt: skip


def test_the_table_of_eight_models() -> None:
    page = (DATA.parents[1] / "docs" / "verbs" / "plan.md").read_text()
    for name, model in MODELS.items():
        cells = [name]
        for batched in (2048, 8192):
            found = plan(
                {**model, "quantization_config": None}, max_model_len=8192, max_num_batched_tokens=batched,
                async_scheduling=False, engine_version="0.32.0", mamba_ssm_cache_dtype="bfloat16",
                enable_prefix_caching="Next" not in name,
            )  # fmt: skip
            logical = found.bytes_per_token_per_gpu * 8192 + found.fixed_bytes_per_request
            assert logical == TRUTH[name]
            if batched == 2048:
                cells += [
                    f"{n:,}" for n in (found.bytes_per_token_per_gpu, found.fixed_bytes_per_request, logical)
                ]
            cells.append(f"{found.bytes_per_max_len_request:,}")
        assert f"| {' | '.join(cells)} |" in page
