"""KV cache configs of one vLLM release for given layers, without a model or an engine.

    PYTHONPATH=<unpacked release>:tests python -m engine.support.plan_eras CASES.json ANSWERS.json

Real: the release's spec classes, ``get_kv_cache_configs`` and its log lines. The layers and the settings come from the
caller; the engine's configuration is a plain namespace with what that code reads.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def main(argv: list[str]) -> int:
    """Answer every case."""
    from vllm.v1 import kv_cache_interface as specs
    from vllm.v1.core import kv_cache_utils as utils

    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        planning = utils
    _register(specs)
    answers = {}
    for name, case in json.loads(Path(argv[0]).read_text()).items():
        answers[name] = _answer(case, specs, planning, utils)
    Path(argv[1]).write_text(json.dumps(answers))
    return 0


def _register(specs: Any) -> None:
    """Newer releases ask for every spec class to be registered."""
    try:
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    except ImportError:
        return
    register_all_kvcache_specs(SimpleNamespace())


def _made(cls: Any, **values: Any) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in values.items() if key in known})


def _spec(layer: dict[str, Any], specs: Any) -> Any:
    kind, block = layer["kind"], layer["block_size"]
    if kind == "mamba":
        shape = ((layer["state_bytes"] // 2,),)
        return _made(
            specs.MambaSpec, block_size=block, shapes=shape, dtypes=(torch.bfloat16,), mamba_cache_mode="none",
            page_size_padded=layer["page_bytes"] if layer["page_bytes"] != layer["state_bytes"] else None,
        )  # fmt: skip
    common = {
        "block_size": block, "num_kv_heads": layer["heads"], "head_size": layer["head_size"],
        "dtype": DTYPES[layer["width"]], "use_mla": kind == "mla",
    }  # fmt: skip
    if kind == "mla":
        return _made(specs.MLAAttentionSpec, **common)
    if kind == "sliding":
        return _made(specs.SlidingWindowSpec, **common, sliding_window=layer["window"])
    if kind == "chunked":
        return _made(specs.ChunkedLocalAttentionSpec, **common, attention_chunk_size=layer["window"])
    return _made(specs.FullAttentionSpec, **common)


def _config(case: dict[str, Any]) -> Any:
    from vllm.config import CacheConfig

    length, batched = case["max_model_len"], case["max_num_batched_tokens"]
    cache = SimpleNamespace(
        num_gpu_blocks_override=None, mamba_cache_mode="none", block_size=16, enable_prefix_caching=False,
        prefix_cache_retention_interval=None, kv_cache_layout="LBNHC", kv_cache_size_tokens=None,
        kv_cache_max_concurrency=None, prefix_match_unit=None,
    )  # fmt: skip
    if hasattr(CacheConfig, "get_resolved_kv_cache_layout"):
        from vllm.v1.kv_cache_layout import KVCacheLayout

        cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout.LBNHC
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length, original_max_model_len=length),
        cache_config=cache,
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=batched, disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=batched
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=None, kv_transfer_config=None, num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=case["in_flight_tokens"],
    )  # fmt: skip


def _answer(case: dict[str, Any], specs: Any, planning: Any, utils: Any) -> dict[str, Any]:
    layers = {f"model.layers.{n}.attn": _spec(layer, specs) for n, layer in enumerate(case["layers"])}
    config = _config(case)
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    _forget_once()
    try:
        arguments = [config, [layers], [case["budget"]]]
        if "global_kv_cache_groups" in inspect.signature(planning.get_kv_cache_configs).parameters:
            # Since 0.33 the caller forms the groups first.
            arguments.append(planning.get_kv_cache_groups(config, dict(layers)))
        (answer,) = planning.get_kv_cache_configs(*arguments)
        if hasattr(utils, "update_kv_cache_capacity"):
            utils.update_kv_cache_capacity(config, answer)
        concurrency = utils.get_max_concurrency_for_kv_cache_config(config, answer)
    except ValueError as error:
        return {"refused": str(error)}
    finally:
        logger.removeHandler(listener)
    return {
        "num_blocks": answer.num_blocks,
        "concurrency": concurrency,
        "lines": [line for line in said if "KV cache size" in line or "Maximum concurrency" in line],
        "groups": [
            [len(group.layer_names), group.kv_cache_spec.block_size] for group in answer.kv_cache_groups
        ],
    }


def _forget_once() -> None:
    """``info_once`` says a thing once per process; each case here is a start of its own."""
    module = sys.modules["vllm.logger"]
    for name in dir(module):
        clear = getattr(getattr(module, name), "cache_clear", None)
        if clear is not None:
            clear()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
