"""Tiny random models for tests: a few megabytes, loaded by the real engine in seconds, speaking nonsense.

    .venv-engine/bin/python tools/tiny_models.py      # write all kinds into the cache

One token is one printable ASCII character, so a prompt of n characters is n tokens and every answer decodes.
"""

from __future__ import annotations

import json
import os
import string
import sys
from pathlib import Path

CACHE = Path(os.environ.get("KVCATCH_DEV_CACHE", Path.home() / ".cache" / "kvcatch-dev"))
#: raise when the written files change
REVISION = 1
LAYERS, HIDDEN, HEADS, KV_HEADS, MLP, VOCAB = 4, 128, 4, 2, 256, 128
WINDOW = 128
SPECIAL = ["<s>", "</s>", "<unk>"]
#: kind -> what differs in config.json
KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": WINDOW},
    "alternating": {
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "sliding_window": WINDOW,
    },
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def tiny_model(kind: str = "full") -> Path:
    """The folder of one tiny model, written if absent. Needs torch, safetensors and tokenizers."""
    folder = CACHE / "models" / f"tiny-{kind}-r{REVISION}"
    if (folder / ".complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": VOCAB,
        "torch_dtype": "bfloat16",
        **KINDS[kind],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(folder)
    _write_tokenizer(folder)
    (folder / ".complete").touch()
    return folder


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(20)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(torch.bfloat16)

    kv = HIDDEN // HEADS * KV_HEADS
    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = random(rows, HIDDEN)
        for name, rows, columns in (("gate", MLP, HIDDEN), ("up", MLP, HIDDEN), ("down", HIDDEN, MLP)):
            weights[f"{prefix}.mlp.{name}_proj.weight"] = random(rows, columns)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    letters = [c for c in string.printable if c.isprintable()] + ["\n"]
    filler = [chr(0x100 + i) for i in range(VOCAB - len(SPECIAL) - len(letters))]
    vocabulary = {word: index for index, word in enumerate(SPECIAL + letters + filler)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or KINDS:
        print(tiny_model(wanted))
