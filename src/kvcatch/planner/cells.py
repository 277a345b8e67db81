"""Bytes of one token of one KV head, for every KV cache dtype of vLLM.

Source, vLLM 0.32: ``customize_spec`` of the attention backends, ``utils/torch_utils.py``,
``model_executor/layers/quantization/turboquant/config.py``.
"""

from __future__ import annotations

import math

from kvcatch.errors import KVCatchError
from kvcatch.planner.specs import EngineFlags, ModelShape

MODEL_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Bytes per element of the dtypes that change nothing else.
_PLAIN = {
    "float16": 2, "bfloat16": 2, "float32": 4, "half": 2, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "int8": 1,
}  # fmt: skip
#: Bits of one packed element with a float32 scale per token and head.
_PER_HEAD_BITS = {"int8_per_token_head": 8, "fp8_per_token_head": 8, "int4_per_token_head": 4}
#: Key bits (8 = fp8) and value bits of the TurboQuant presets, and whether norms are corrected.
_TURBO = {
    "turboquant_k8v4": (8, 4), "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4), "turboquant_3bit_nc": (3, 3),
}  # fmt: skip
#: Opaque cells of sparse MLA, bytes per token.
DS_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
KV_DTYPES = ("auto", *_PLAIN, *_PER_HEAD_BITS, "nvfp4", "nvfp4_4over6", *_TURBO, *DS_MLA)


def effective_kv_dtype(shape: ModelShape, flags: EngineFlags) -> str:
    """``--kv-cache-dtype`` with ``auto`` resolved from the checkpoint's quantisation config.

    Source: ``utils/torch_utils.py::resolve_kv_cache_dtype_string`` of vLLM 0.32. Raises KVCatchError for an
    unknown name.
    """
    asked = flags.kv_cache_dtype
    if asked not in KV_DTYPES:
        raise KVCatchError(f"unknown KV cache dtype {asked!r}.", "Known: " + ", ".join(KV_DTYPES) + ".")
    if asked != "auto":
        return asked
    if any(layer.role == "latent" for layer in shape.layers):
        return "fp8_ds_mla"
    quantization = shape.quantization or {}
    scheme = quantization.get("kv_cache_quant_algo")
    inner = quantization.get("quantization")
    if scheme is None and isinstance(inner, dict):
        scheme = inner.get("kv_cache_quant_algo")
    if isinstance(scheme, str) and quantization.get("quant_method", "modelopt").startswith("modelopt"):
        return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(scheme.lower(), "auto")
    stated = quantization.get("kv_cache_scheme")
    if isinstance(stated, dict) and stated.get("type") == "float":
        return {8: "fp8_e4m3", 4: "nvfp4"}.get(stated.get("num_bits", 0), "auto")
    return "auto"


def model_dtype(shape: ModelShape, flags: EngineFlags) -> str:
    """The dtype the engine computes in: ``--dtype``, with float32 checkpoints served in 16 bits."""
    asked = {"half": "float16", "float": "float32"}.get(flags.dtype, flags.dtype)
    if asked != "auto":
        if asked not in MODEL_BYTES:
            raise KVCatchError(f"unknown dtype {flags.dtype!r}.", "Known: auto, float16, bfloat16, float32.")
        return asked
    return "bfloat16" if shape.dtype == "float32" else shape.dtype


def cell_bytes(key_dim: int, value_dim: int, dtype: str, model: str, latent: bool = False) -> int:
    """Bytes of one token of one KV head (keys and values; ``latent``: one shared vector)."""
    if dtype in DS_MLA and latent:
        return DS_MLA[dtype]
    if dtype in _PER_HEAD_BITS:
        bits = _PER_HEAD_BITS[dtype]
        return key_dim * bits // 8 + value_dim * bits // 8 + 8
    if dtype.startswith("nvfp4"):
        return sum(dim // 2 + dim // 16 for dim in (key_dim, value_dim))
    if dtype in _TURBO:
        key_bits, value_bits = _TURBO[dtype]
        # 3- and 4-bit keys carry two half norms, values a scale and a zero point; slots are even.
        keys = key_dim if key_bits == 8 else math.ceil(key_dim * key_bits / 8) + 2
        values = math.ceil(value_dim * value_bits / 8) + 4
        return keys + values + (keys + values) % 2
    if dtype.startswith("fp8_ds") or dtype.startswith("nvfp4_ds"):
        raise KVCatchError(f"KV cache dtype {dtype} needs a model with latent attention.", "Use fp8.")
    width = MODEL_BYTES[model] if dtype == "auto" else _PLAIN[dtype]
    return (key_dim + value_dim) * width
