"""Count the parameters that transformers builds from its configuration classes' defaults, for the weight tests.

    .venv-engine/bin/python tools/hf_parameters.py

Writes ``tests/data/plan_boot/hf_parameters.json.gz``: per model type the configuration (defaults spelled out) and
the number of parameters, built on the meta device. Takes some minutes; needs transformers and torch.
"""

from __future__ import annotations

import gzip
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from kvcatch.planner.catalogue import models

TARGET = Path(__file__).resolve().parents[1] / "tests/data/plan_boot/hf_parameters.json.gz"
#: Fields that say nothing about the weights and are long.
NOISE = ("id2label", "label2id", "transformers_version", "task_specific_params", "generation_config")
#: The class builds only a part of the model (text tower, decoder), its defaults contradict each other (glm4_moe:
#: 4096 hidden, 96 heads), or vLLM does not run the family.
LEFT_OUT = (
    *("bart", "whisper", "mistral3", "gemma4", "qwen3_5", "qwen3_5_moe", "longcat_flash", "glm4_moe"),
    *("rwkv", "xlstm", "mllama", "recurrent_gemma", "jetmoe"),
)


def counted(model_type: str) -> tuple[dict[str, Any], int] | None:
    """(configuration, parameters), None where transformers cannot build the defaults."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    try:
        config = AutoConfig.for_model(model_type)
        with torch.device("meta"):
            for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM):
                if type(config) in auto._model_mapping:
                    model = auto.from_config(config)
                    break
            else:
                return None
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        print(f"{model_type}: {error}", file=sys.stderr)
        return None
    plain = json.loads(config.to_json_string(use_diff=False))
    return _trimmed(plain), sum(parameter.numel() for parameter in model.parameters())


def _trimmed(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _trimmed(value) for key, value in config.items() if key not in NOISE and value is not None}


def main() -> int:
    warnings.simplefilter("ignore")
    found = {}
    for entry in models():
        model_type = entry.name.removeprefix("hfdefault--")
        if entry.kind != "transformers-class-default" or model_type in LEFT_OUT:
            continue
        if (row := counted(model_type)) is not None:
            found[model_type] = {"config": row[0], "parameters": row[1]}
    packed = gzip.compress(json.dumps(found, separators=(",", ":"), sort_keys=True).encode(), 9, mtime=0)
    TARGET.write_bytes(packed)
    print(f"Wrote {TARGET} ({len(found)} models, {len(packed):,} bytes)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
