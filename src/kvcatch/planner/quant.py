"""How many bytes a weight matrix takes on the card, by quantisation method.

Layouts are vLLM's own as of 0.19 (``vllm/model_executor/layers/quantization``): the packed weight plus the
scales that stay beside it. Embeddings, norms, routers and the output head stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1}

#: Quantisation names that vLLM applies while it loads a 16-bit checkpoint.
_ONLINE = {
    "fp8": "fp8_channel",
    "fp8_per_tensor": "fp8_channel",
    "fp8_per_block": "fp8_block",
    "int8": "int8",
}


class Scheme(msgspec.Struct, frozen=True):
    """One way to store a matrix.

    ``kind`` = none | fp8_channel | fp8_block | int8 | int4 | nvfp4 | mxfp4 | nf4.
    ``only_experts`` = attention and dense layers stay unquantised (gpt-oss); ``skipped`` holds the name parts
    that the checkpoint leaves unquantised, None when the file does not say which; ``dynamic_input`` =
    activations are quantised at run time to one byte each. ``experts`` = another kind for routed experts.
    """

    kind: str = "none"
    group_size: int = 128
    zero_points: bool = False
    only_experts: bool = False
    skipped: tuple[str, ...] | None = ()
    dynamic_input: bool = False
    experts: str = ""

    def matrix_bytes(self, rows: int, cols: int, dtype_bytes: int) -> int:
        """Bytes of a ``rows`` × ``cols`` (out × in) matrix with its scales."""
        count = rows * cols
        match self.kind:
            case "fp8_channel" | "int8":
                return count + 4 * rows
            case "fp8_block":
                return count + 4 * ceil(rows / 128) * ceil(cols / 128)
            case "int4":
                groups = ceil(cols / self.group_size) if self.group_size > 0 else 1
                zeros = rows * groups // 2 if self.zero_points else 0
                return count // 2 + 2 * rows * groups + zeros
            case "nvfp4":
                return count // 2 + rows * ceil(cols / 16) + 8
            case "mxfp4":
                return count // 2 + rows * ceil(cols / 32)
            case "nf4":
                return count // 2 + 4 * ceil(count / 64)
        return count * dtype_bytes

    def skips(self, *names: str) -> bool:
        """Whether any of a matrix's names is on the checkpoint's unquantised list."""
        return any(name in entry for entry in self.skipped or () for name in names)


def scheme_of(config: Mapping[str, Any] | None, requested: str | None, experts: str = "") -> Scheme:
    """The scheme of a checkpoint's ``quantization_config``, or of ``--quantization`` on a plain one.

    ``experts`` = kind of the routed experts where the model's own code stores them in another one.
    """
    if not config:
        kind = _ONLINE.get(requested or "", "nf4" if requested == "bitsandbytes" else "none")
        return Scheme(kind, dynamic_input=kind in ("fp8_channel", "fp8_block", "int8"))
    method = str(config.get("quant_method") or requested or "").lower().replace("_", "-")
    skipped = _skipped(config)
    if method in ("awq", "gptq", "awq-marlin", "gptq-marlin", "auto-round"):
        bits, group = _int(config.get("bits") or config.get("w_bit"), 4), _int(config.get("group_size"), 128)
        zeros = method.startswith("awq") and config.get("zero_point", True) is not False
        kind = "int8" if bits == 8 else "int4"
        return Scheme(kind, group, zeros, skipped=skipped or ())
    if method in ("fp8", "fbgemm-fp8"):
        block = config.get("weight_block_size")
        kind = "fp8_block" if block else "fp8_channel"
        return Scheme(kind, skipped=skipped or (), dynamic_input=True, experts=experts)
    if method == "mxfp4":
        return Scheme("mxfp4", only_experts=True, skipped=skipped)
    if method == "compressed-tensors":
        return _compressed_tensors(config, skipped)
    if method in ("modelopt", "modelopt-fp4"):
        algorithm = str(config.get("quant_algo") or "").upper()
        kind = "fp8_channel" if algorithm == "FP8" else "nvfp4"
        return Scheme(kind, skipped=skipped, dynamic_input=kind == "fp8_channel")
    if method == "bitsandbytes":
        return Scheme("int8" if config.get("load_in_8bit") else "nf4", skipped=skipped or ())
    return Scheme()


def _compressed_tensors(config: Mapping[str, Any], skipped: tuple[str, ...] | None) -> Scheme:
    groups = config.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    weights = weights if isinstance(weights, Mapping) else {}
    bits, size = _int(weights.get("num_bits"), 8), _int(weights.get("group_size"), 0)
    if bits == 8:
        kind = "int8" if weights.get("type") == "int" else "fp8_channel"
        if weights.get("strategy") == "block":
            kind = "fp8_block"
        return Scheme(kind, skipped=skipped, dynamic_input=True)
    if weights.get("type") == "float":
        return Scheme("mxfp4" if size == 32 else "nvfp4", skipped=skipped)
    return Scheme("int4", size or -1, zero_points=weights.get("symmetric") is False, skipped=skipped)


def _skipped(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        value = config.get(key)
        if isinstance(value, list):
            return tuple(str(item) for item in value)
    return None


def _int(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
