"""Shared readers of tests/data/plan."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data"
PLAN = DATA / "plan"


@functools.cache
def configs() -> dict[str, dict[str, Any]]:
    """Every configuration by name, as {kind, checkpoint, config}."""
    lines = (PLAN / "model_configs.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


def config(name: str) -> dict[str, Any]:
    """One configuration."""
    return json.loads(json.dumps(configs()[name]["config"]))


def refused() -> dict[str, str]:
    """Configurations that plan refuses, and the field it names."""
    rows = [line.split("\t") for line in (DATA / "plan_refused.tsv").read_text().splitlines()[1:]]
    return {row[0]: row[1] for row in rows}


def llama(
    layers: int = 32, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, **more: Any
) -> dict[str, Any]:
    """A plain decoder of that shape."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": heads * head_dim,
        "intermediate_size": 4 * heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 21,
        "torch_dtype": "bfloat16",
        **more,
    }


def latent(layers: int, rank: int, rope: int, heads: int = 64, **more: Any) -> dict[str, Any]:
    """A decoder with multi-head latent attention."""
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 21,
        "torch_dtype": "bfloat16",
        **more,
    }
