"""The longest sequence that vLLM itself takes from a config.json, in one process and without a model.

    python -m engine.support.length_oracle CONFIGS.jsonl ANSWERS.jsonl

``CONFIGS`` has objects with ``name`` and ``config``; an answer is what the engine starts with when told nothing, or the
error. Real: the config's class, ``get_hf_text_config`` and ``_get_and_verify_max_len`` of the release on the path.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.support.plan_oracle import _stand_ins


def answer(config: dict[str, Any]) -> int:
    """Tokens. Raises what the engine raises."""
    from vllm.config import model as engine
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        whole = get_config(folder, trust_remote_code=False)
    text = get_hf_text_config(whole)
    values: dict[str, Any] = {
        "hf_config": text, "tokenizer_config": None, "max_model_len": None, "disable_sliding_window": False,
        "sliding_window": None,
    }  # fmt: skip
    if "model_arch_config" in inspect.signature(engine._get_and_verify_max_len).parameters:
        from vllm.transformers_utils import model_arch_config_convertor as convertors

        kind = convertors.MODEL_ARCH_CONFIG_CONVERTORS.get(
            whole.model_type, convertors.ModelArchConfigConvertorBase
        )
        key = kind(whole, text).derive_max_model_len_and_key()
        values["model_arch_config"] = SimpleNamespace(derived_max_model_len_and_key=key)
    return int(engine._get_and_verify_max_len(**values))


def main(argv: list[str]) -> int:
    """Answer every row."""
    _stand_ins()
    with Path(argv[1]).open("w") as file:
        for line in Path(argv[0]).read_text().splitlines():
            row = json.loads(line)
            try:
                said: int | str = answer(row["config"])
            except Exception as error:  # noqa: BLE001 - any refusal of the engine is an answer
                said = f"{type(error).__name__}: {str(error)[:200]}"
            print(json.dumps({"name": row["name"], "answer": said}), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
