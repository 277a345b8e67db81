"""vLLM's own KV layout of a config.json, in one process and without weights.

    python -m engine.support.plan_oracle CASES.json ANSWERS.jsonl

What is real: the engine's config resolution, its model classes (built on the meta device), the KV cache spec of
every layer, ``resolve_kv_cache_layout``, ``get_kv_cache_configs`` and the start-up log line. What is not: no weights,
no profiling (the byte budget is given), and with tensor parallelism the process is rank 0 of a group whose other
ranks exist on paper only.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

#: Not needed for shapes, and absent from (or broken in) a CPU installation.
ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional",
          "torchvision.transforms.functional", "torchvision.io", "torchvision.ops")  # fmt: skip
#: Language models inside multimodal architectures that do not build without their tower's files.
INNER = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM", "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM", "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM", "LlavaForConditionalGeneration": "LlamaForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM", "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}  # fmt: skip
RENAMED = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
#: Architectures whose name does not follow from the model type.
NAMED = {"whisper": "WhisperForConditionalGeneration"}


def main(argv: list[str]) -> int:
    """Answer every case; a case the engine refuses is answered with the error."""
    _stand_ins()
    signal.signal(signal.SIGALRM, _too_long)
    cases = json.loads(Path(argv[0]).read_text())
    _start_group()
    with Path(argv[1]).open("w") as file:
        for name, case in cases.items():
            print(json.dumps({"name": name, "answer": _answer(case)}), file=file, flush=True)
    return 0


def _stand_ins() -> None:
    for name in ABSENT:
        module = MagicMock(name=name)
        module.__spec__, module.__path__, module.__version__ = (
            importlib.machinery.ModuleSpec(name, None),
            [],
            "0.0",
        )
        sys.modules[name] = module
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.get_attn_backend_cls.__func__

    def backend(cls: Any, selected: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        # No CPU kernel exists for sparse attention: take the specs of the CUDA one.
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        chosen: str = choose(cls, selected, attn_selector_config, *args, **kwargs)
        return chosen

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    # What the layers of sparse and compressed models ask of a card while they are built; none of it is used here.
    torch.cuda.Event = torch.cuda.Stream = MagicMock
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda *_: MagicMock(multi_processor_count=132)
    torch.accelerator.empty_cache = lambda: None
    from vllm.model_executor.models import registry

    def inspect(lazy: Any) -> Any:
        # The engine asks a subprocess per class; here one process serves all.
        return registry._ModelInfo.from_model_cls(lazy.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def _start_group() -> None:
    """The distributed state that model code asks for: this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device("meta"))


def _answer(case: dict[str, Any]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for config in _variants(case["config"]):
        try:
            # Some classes compute for ever on numbers that make no sense.
            signal.alarm(90)
            return _filled(config, case)
        except Exception as error:  # noqa: BLE001 - any refusal of the engine is an answer
            last = last or {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        finally:
            signal.alarm(0)
    return last


def _too_long(*_: object) -> None:
    raise TimeoutError("the model class took more than 90 s to build")


def _filled(config: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Build the model; fields that the trimmed file lacks and that say nothing about the cache get any value."""
    for _ in range(12):
        try:
            return _build(config, case)
        except AttributeError as error:
            missing = re.search(r"'\w*Config' object has no attribute '(\w+)'", str(error))
            holder = config.get("text_config", config)
            if missing is None or missing.group(1) in holder:
                raise
            holder[missing.group(1)] = _any_value(missing.group(1))
    raise AttributeError("too many fields are missing")


def _any_value(name: str) -> Any:
    if name.endswith(("eps", "epsilon")):
        return 1e-5
    if name.endswith(("func", "function")):
        return "sigmoid"
    if name.endswith("act"):
        return "silu"
    if name.startswith(("use_", "enable_", "norm_", "add_", "mla_scale")) or name.endswith(("bias", "norm")):
        return False
    return 1.0 if name.endswith(("scale", "scaling", "factor", "multiplier")) else 1


def _variants(config: dict[str, Any]) -> Any:
    """The config as it is, then its language model alone."""
    from transformers.models.auto import modeling_auto as auto

    config = json.loads(json.dumps(config))
    inner = config.get("text_config")
    for part in (config, inner or {}):
        part.pop("quantization_config", None)
    text = inner if inner is not None else config
    if text.get("rope_theta") is None:
        text["rope_theta"] = 10000.0
    if not config.get("architectures"):
        tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                  auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)  # fmt: skip
        order = tables if inner is None else tables[::-1]
        found = next((table[config["model_type"]] for table in order if config["model_type"] in table), None)
        config["architectures"] = [NAMED.get(config["model_type"], found or "Unknown")]
    name = config["architectures"][0]
    yield config
    if inner is not None:
        for inside in (INNER.get(name), name.replace("ForConditionalGeneration", "ForCausalLM")):
            if inside:
                kind = inner.get("model_type", "")
                yield {**inner, "architectures": [inside], "model_type": RENAMED.get(kind, kind)}
    if name.endswith("Model"):
        yield {**config, "architectures": [name.removesuffix("Model") + "ForCausalLM"]}


def _build(config: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.gpu_model_runner import customize_attention_spec

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        parallel_state.get_tp_group().world_size = case["flags"].get("tensor_parallel_size", 1)
        flags = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True} | case["flags"]
        engine = EngineArgs(model=folder, **flags).create_engine_config()
        with set_current_vllm_config(engine), torch.device("meta"):
            torch.set_default_dtype(engine.model_config.dtype)
            try:
                initialize_model(engine)
            finally:
                torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(engine):
        current_platform.update_block_size_for_backend(engine)
        specs, backends = {}, []
        for name, layer in get_layers_from_vllm_config(engine, AttentionLayerBase).items():
            if isinstance(layer, Attention) and layer.kv_sharing_target_layer_name:
                continue
            spec = layer.get_kv_cache_spec(engine)
            if spec is None:
                continue
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(layer.get_attn_backend(), spec)
            specs[name] = spec
            backends.append(layer.get_attn_backend())
        names = [layout.name for layout in get_supported_kv_cache_layouts(list(dict.fromkeys(backends)))]
        resolve_kv_cache_layout(engine, [names], list(specs.values()))
        try:
            (answer,) = kv_cache_utils.get_kv_cache_configs(engine, [specs], [case["budget"]])
        except ValueError as error:
            return {"refused": str(error)}
        line, tokens, concurrency = "", 0, 0.0
        if answer.kv_cache_groups:
            tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(engine, answer)
            line = _logged(kv_cache_utils, engine, answer)
        groups = [
            [type(group.kv_cache_spec).__name__, len(group.layer_names), group.kv_cache_spec.block_size,
             group.kv_cache_spec.page_size_bytes]
            for group in answer.kv_cache_groups
        ]  # fmt: skip
    return {
        "num_blocks": answer.num_blocks, "tokens": tokens, "concurrency": concurrency, "line": line, "groups": groups,
        "need": kv_cache_utils._max_memory_usage_bytes_from_groups(engine, answer.kv_cache_groups),
        "layers": len(specs), "block_size": engine.cache_config.block_size,
        "prefix_caching": engine.cache_config.enable_prefix_caching, "max_num_seqs": engine.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": engine.scheduler_config.max_num_batched_tokens,
    }  # fmt: skip


def _logged(module: Any, engine: Any, answer: Any) -> str:
    """The sentence the engine logs about its capacity."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener()
    logger = logging.getLogger(module.__name__)
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    # ``info_once`` remembers; every case here is a start of its own.
    for name in ("_print_info_once", "print_info_once"):
        cached = getattr(sys.modules.get("vllm.logger"), name, None)
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    try:
        module.update_kv_cache_capacity(engine, answer)
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    return said[-1] if said else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
