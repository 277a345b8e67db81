"""Build the packaged catalogue of model configurations, ``src/kvcatch/planner/data/models.json.gz``.

    python tools/model_catalogue.py CONFIGS [--check]

CONFIGS is a folder of trimmed ``config.json`` files with an ``index.json`` (name, kind, checkpoint,
source, licence). Dimensions of checkpoints that a boot log proves come from
``tests/data/plan_boot/models.json``, a few more from the list below.
Output is deterministic, so ``--check`` can compare.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "src/kvcatch/planner/data/models.json.gz"
BOOTS = ROOT / "tests/data/plan_boot/models.json"


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def dense(kind: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    """A llama-shaped configuration; sizes = hidden, intermediate, layers, heads, KV heads, vocabulary."""
    hidden, inter, layers, heads, kv, vocab = sizes
    architecture = ARCHITECTURES[kind]
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


#: Layers, heads and head sizes as LitGPT 0.5.13 (Apache-2.0) states them; widths from the checkpoints' cards.
MORE = {
    "meta-llama/Llama-3.3-70B-Instruct": dense(
        "llama", (8192, 28672, 80, 64, 8, 128256), head_dim=128, max_position_embeddings=131072
    ),
    "Qwen/Qwen3-4B": dense(
        "qwen3",
        (2560, 9728, 36, 32, 8, 151936),
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-14B": dense(
        "qwen3", (5120, 17408, 40, 40, 8, 151936), head_dim=128, max_position_embeddings=40960
    ),
    "Qwen/Qwen2.5-14B-Instruct": dense(
        "qwen2", (5120, 13824, 48, 40, 8, 152064), max_position_embeddings=32768
    ),
    "Qwen/Qwen2.5-32B-Instruct": dense(
        "qwen2", (5120, 27648, 64, 40, 8, 152064), max_position_embeddings=32768
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": dense(
        "qwen2", (896, 4864, 24, 14, 2, 151936), max_position_embeddings=32768, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": dense(
        "qwen2", (1536, 8960, 28, 12, 2, 151936), max_position_embeddings=32768, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-3B-Instruct": dense(
        "qwen2", (2048, 11008, 36, 16, 2, 151936), max_position_embeddings=32768, tie_word_embeddings=True
    ),
    "mistralai/Mistral-Large-Instruct-2411": dense(
        "mistral", (12288, 28672, 88, 96, 8, 32768), head_dim=128, max_position_embeddings=131072
    ),
    "microsoft/Phi-4-mini-instruct": dense(
        "phi3", (3072, 8192, 32, 24, 8, 200064), max_position_embeddings=131072, tie_word_embeddings=True
    ),
    "microsoft/Phi-3.5-mini-instruct": dense(
        "phi3", (3072, 8192, 32, 32, 32, 32064), max_position_embeddings=131072
    ),
}
#: Checkpoints with the shape of another one (LitGPT 0.5.13 lists them alike), and what differs.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Meta-Llama-3-8B": ("meta-llama/Meta-Llama-3.1-8B", {"max_position_embeddings": 8192}),
    "meta-llama/Meta-Llama-3-70B": ("meta-llama/Meta-Llama-3.1-70B", {"max_position_embeddings": 8192}),
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": ("meta-llama/Meta-Llama-3.1-70B", {}),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("meta-llama/Meta-Llama-3.1-8B", {}),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": ("meta-llama/Meta-Llama-3.1-70B", {}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        "Qwen/Qwen2.5-7B-Instruct",
        {"max_position_embeddings": 131072},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": (
        "Qwen/Qwen2.5-14B-Instruct",
        {"max_position_embeddings": 131072},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": (
        "Qwen/Qwen2.5-32B-Instruct",
        {"max_position_embeddings": 131072},
    ),
    "Qwen/QwQ-32B": ("Qwen/Qwen2.5-32B-Instruct", {"max_position_embeddings": 40960}),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ("Qwen/Qwen2.5-7B-Instruct", {}),
    "Qwen/Qwen2.5-Coder-14B-Instruct": ("Qwen/Qwen2.5-14B-Instruct", {}),
    "Qwen/Qwen2.5-Coder-32B-Instruct": ("Qwen/Qwen2.5-32B-Instruct", {}),
    "Qwen/Qwen3-4B-Instruct-2507": ("Qwen/Qwen3-4B", {"max_position_embeddings": 262144}),
    "microsoft/Phi-4-reasoning": ("microsoft/phi-4", {"max_position_embeddings": 32768}),
}


#: Fields that the trimmed files lost, with what proves them: the published number of parameters.
CORRECTIONS: dict[str, dict[str, Any]] = {
    # 400 billion parameters: every second layer is dense, and twice as wide.
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": {
        "text_config": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 16384}
    },
    # 120 and 550 billion parameters: experts work in a latent space.
    "nvidia/NVIDIA-Nemotron-3-Super-120B": {"moe_latent_size": 1024},
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B": {"moe_latent_size": 2048},
    "sgl-project/DeepSeek-V4-": {"expert_dtype": "fp8"},
}


def corrected(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with its lost fields; NVIDIA keeps some quantisation in a second file, told by the name."""
    config = dict(config)
    for prefix, fields in CORRECTIONS.items():
        if name.startswith(prefix):
            for key, value in fields.items():
                config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    algorithm = next((end for end in ("NVFP4", "FP8") if name.endswith(f"-{end}")), None)
    if name.startswith("nvidia/") and algorithm and "quantization_config" not in config:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algorithm}
    return config


def build(folder: Path) -> bytes:
    """The catalogue as compressed JSON lines: one header, then one entry a line."""
    entries: list[dict[str, Any]] = []
    for row in json.loads((folder / "index.json").read_text()):
        config = json.loads((folder / f"{row['name']}.json").read_text())
        source = (
            f"{row['source']} {row['commit'][:8]} ({row['licence']})" if row.get("commit") else row["source"]
        )
        default = row["kind"] == "transformers-class-default"
        # Class defaults are not the checkpoint that the class documentation names.
        name = row["name"] if default or not row["checkpoint"] else row["checkpoint"]
        entries.append(
            {"name": name, "kind": row["kind"], "source": source, "config": corrected(name, config)}
        )
    for name, config in json.loads(BOOTS.read_text()).items():
        entries.append({"name": name, "kind": "boot-log", "source": "tests/data/plan_boot", "config": config})
    for name, config in MORE.items():
        entries.append(
            {"name": name, "kind": "dimensions", "source": "LitGPT 0.5.13 (Apache-2.0)", "config": config}
        )
    known = {entry["name"]: entry["config"] for entry in entries}
    for name, (twin, fields) in TWINS.items():
        source = f"shape of {twin}, as LitGPT 0.5.13 (Apache-2.0) lists it"
        entries.append({"name": name, "kind": "dimensions", "source": source, "config": known[twin] | fields})
    entries.sort(key=lambda entry: (entry["name"], entry["kind"]))
    text = "".join(json.dumps(entry, separators=(",", ":"), sort_keys=True) + "\n" for entry in entries)
    return gzip.compress(text.encode(), 9, mtime=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the packaged file, write nothing")
    args = parser.parse_args()
    packed = build(args.configs)
    if args.check:
        same = gzip.decompress(packed) == gzip.decompress(TARGET.read_bytes())
        print(
            "up to date" if same else "models.json.gz differs: run tools/model_catalogue.py", file=sys.stderr
        )
        return 0 if same else 1
    TARGET.write_bytes(packed)
    print(f"Wrote {TARGET} ({len(packed):,} bytes)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
