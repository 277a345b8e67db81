"""What an image tower adds: its weights, and the memory one profiled batch of images keeps.

Towers are counted from ``vision_config``. A config without one (a trimmed file) gets the class defaults of
its model type in transformers 5.24.0, and the caller widens the band.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvcatch.planner.specs import ModelShape

_SIGLIP_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
_QWEN_VL = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "patch_size": 16,
    "spatial_merge_size": 2,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "spatial_merge_size": 2,
}

#: Class defaults by model type, for configs that lost their ``vision_config``.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {**_SIGLIP_SO400M, "image_size": 896},
    "gemma4": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "patch_size": 16},
    "mistral3": _PIXTRAL,
    "ministral3": _PIXTRAL,
    "llama4": {
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
    "kimi_vl": {**_SIGLIP_SO400M, "merge_kernel_size": [2, 2]},
    "kimi_k25": {**_SIGLIP_SO400M, "merge_kernel_size": [2, 2]},
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "qwen3_5": _QWEN_VL,
    "qwen3_5_moe": _QWEN_VL,
    "qwen2_vl": {"embed_dim": 1280, "mlp_ratio": 4, "depth": 32, "patch_size": 14, "spatial_merge_size": 2},
    "qwen2_5_vl": {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "depth": 32,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
    "llava": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14},
    "llava_next": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14},
}
_GATED_TOWERS = ("pixtral", "qwen2_5_vl")


class Tower(msgspec.Struct, frozen=True):
    """An image tower: parameters that tensor parallelism splits, parameters it does not, pixels per token."""

    split_parameters: int
    whole_parameters: int
    pixels_per_token: int
    assumed: bool


def tower_of(shape: ModelShape) -> Tower | None:
    """The image tower of a multimodal model, None for text models and unknown towers."""
    if not shape.multimodal or not shape.hidden_size:
        return None
    given = shape.config.get("vision_config")
    config: Mapping[str, Any] = given if isinstance(given, Mapping) and given else {}
    default = _CLASS_DEFAULTS.get(shape.model_type) or _CLASS_DEFAULTS.get(_outer_type(shape), {})
    assumed = not config
    if assumed:
        config = default

    def number(*keys: str, default: int = 0) -> int:
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        return default

    hidden = number("embed_dim", "hidden_size", "width")
    layers = number("num_hidden_layers", "depth", "vt_num_hidden_layers")
    if not hidden or not layers:
        return None
    inter = number("intermediate_size", default=hidden * number("mlp_ratio", default=4))
    patch = number("patch_size", "spatial_patch_size", default=14)
    gated = (
        3 if any(kind in str(config.get("model_type", _outer_type(shape))) for kind in _GATED_TOWERS) else 2
    )
    merge = _merge(shape, config)
    split = layers * (4 * hidden * hidden + gated * hidden * inter + 4 * hidden + inter)
    rotary = str(config.get("model_type", "")) == "pixtral"
    positions = 0 if rotary else (number("image_size", default=64 * patch) // patch) ** 2
    whole = 3 * patch * patch * hidden + positions * hidden + _projector(shape, hidden, merge, rotary)
    return Tower(split, whole, _pixels_per_token(shape, config, patch, merge), assumed)


def _projector(shape: ModelShape, hidden: int, merge: int, pixtral: bool) -> int:
    """Parameters between tower and text model: one matrix (Gemma 3), merger and two (Pixtral), or two."""
    text = shape.hidden_size or 0
    merged = hidden * merge * merge
    if _outer_type(shape) == "gemma3":
        return merged * text
    if pixtral:
        return merged * hidden + hidden * text + text * text
    if merge > 1:
        return merged * merged + merged * text
    features = shape.config.get("vision_feature_layer")
    return merged * text * (len(features) if isinstance(features, list) else 1) + text * text


def _outer_type(shape: ModelShape) -> str:
    return str(shape.config.get("model_type", ""))


def _merge(shape: ModelShape, config: Mapping[str, Any]) -> int:
    value = config.get("spatial_merge_size") or shape.config.get("spatial_merge_size")
    if value is None and isinstance(config.get("merge_kernel_size"), list):
        value = config["merge_kernel_size"][0]
    return value if isinstance(value, int) and 0 < value <= 8 else 1


def _pixels_per_token(shape: ModelShape, config: Mapping[str, Any], patch: int, merge: int) -> int:
    tokens, side = shape.config.get("mm_tokens_per_image"), config.get("image_size")
    if _outer_type(shape) == "gemma3" and tokens is None:
        tokens = 256
    if isinstance(tokens, int) and isinstance(side, int) and tokens > 0:
        return side * side // tokens
    return (patch * merge) ** 2
