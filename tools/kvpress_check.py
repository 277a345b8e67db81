"""Compare our eviction scores with kvpress's own, in an environment of its own (kvpress wants an older transformers).

    python tools/kvpress_check.py        # exit 1 when a policy differs by more than 1e-5

The environment sees the engine's torch through a .pth file and gets kvpress without its dependencies.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ["kvpress==0.5.5", "transformers==5.2.0", "huggingface_hub<2", "tokenizers==0.22.2", "accelerate", "peft", "cachetools",
        "fire", "termcolor", "pandas"]  # fmt: skip

COMPARE = """
import math, sys, types
import torch
import kvpress
from kvcatch.quality import policies

worst = {}
for seed in range(8):
    torch.manual_seed(seed)
    heads, kv, size, tokens = 9, 3, 64, 200 + 37 * seed
    keys, values = torch.randn(1, kv, tokens, size), torch.randn(1, kv, tokens, size)
    logits = torch.randn(1, heads, tokens, tokens) * 2
    causal = torch.triu(torch.full((tokens, tokens), float("-inf")), 1)
    attention = torch.softmax(logits + causal, dim=-1)
    hidden = torch.zeros(1, tokens, 576)
    config = types.SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv)
    module = types.SimpleNamespace(config=config, head_dim=size)
    theirs = {
        "h2o": kvpress.ObservedAttentionPress(),
        "snapkv": kvpress.SnapKVPress(),
        "tova": kvpress.TOVAPress(),
        "knorm": kvpress.KnormPress(),
        "random": kvpress.RandomPress(seed=seed),
    }
    for name, press in theirs.items():
        a = policies.POLICIES[name](keys, attention, seed)
        b = press.score(module, hidden, keys, values, attention, {})
        worst[name] = max(worst.get(name, 0.0), float((a - b).abs().max()))
    for ratio in (0.25, 0.5, 0.75, 0.88):
        press = kvpress.StreamingLLMPress(compression_ratio=ratio)
        scores = press.score(module, hidden, keys, values, attention, {})
        kept = scores[0, 0].nonzero().flatten()
        ours = policies.choose(policies.streaming(keys, attention, 0), 1 - ratio)[0, 0]
        same = kept.tolist() == ours.tolist()
        worst["streaming"] = max(worst.get("streaming", 0.0), 0.0 if same else 1.0)
for name, difference in sorted(worst.items()):
    print(f"{name:<10} largest difference {difference:.2g}")
sys.exit(any(difference > 1e-5 for difference in worst.values()))
"""


def environment() -> Path:
    """The environment's interpreter, made if absent."""
    sys.path.insert(0, str(ROOT / "tools"))
    from engine_env import install_engine, own_environment, site_packages

    python = own_environment("kvpress-0.5.5", ["--no-deps", *PINS])
    packages = site_packages(python.parents[1])
    (packages / "zz_engine.pth").write_text(f"{site_packages(install_engine())}\n")
    # Imported at top level for a data set that is never loaded here.
    (packages / "datasets.py").write_text(
        "def load_dataset(*args, **kwargs):\n    raise RuntimeError('no data sets')\n"
    )
    return python


if __name__ == "__main__":
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{COMPARE}"
    # The package's own __init__ needs nothing; only quality.policies and its lazy torch are used.
    sys.exit(subprocess.run([environment(), "-c", code], check=False).returncode)
