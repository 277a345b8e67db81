"""Layers that keep a recurrent state instead of keys and values: which they are, and the state's shape.

Shapes and types follow ``MambaStateShapeCalculator`` and ``MambaStateDtypeCalculator`` of vLLM 0.32
(``model_executor/layers/mamba/mamba_utils.py``).
"""

from __future__ import annotations

import math
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.planner.configfile import Fields
from kvcatch.planner.specs import FULL, MAMBA, MLA, NONE, EngineFlags, LayerShape, ModelShape

State = tuple[str, dict[str, int]]
_PATTERN = {"M": MAMBA, "*": FULL, "-": NONE, "E": NONE, "|": NONE}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


def layer_kinds(fields: Fields, family: str, count: int) -> list[str] | None:
    """The kind of each layer of a hybrid family, None when the family is not hybrid."""
    full = MLA if fields.get("kv_lora_rank") is not None else FULL
    if family == "nemotron_h":
        return _nemotron(fields, count)
    if family == "jamba":
        period, offset = fields.need("attn_layer_period"), fields.number("attn_layer_offset", least=0) or 0
        return [FULL if index % period == offset else MAMBA for index in range(count)]
    if family in ("bamba", "granitemoehybrid"):
        return _typed(fields, count, "layer_types", "layers_block_type") or _indices(
            fields, count, fields.numbers("attn_layer_indices") or []
        )
    if family in ("zamba", "zamba2"):
        return _zamba(fields, count)
    if family == "recurrent_gemma":
        cycle = fields.items("block_types") or ["recurrent", "recurrent", "attention"]
        return ["sliding" if cycle[index % len(cycle)] == "attention" else MAMBA for index in range(count)]
    if family in ("lfm2", "lfm2_moe"):
        stated = _typed(fields, count, "layer_types")
        return stated or _indices(fields, count, fields.numbers("full_attn_idxs") or list(range(count)))
    if family in ("minimax", "minimax_text_01"):
        listed = fields.numbers("attn_type_list", count)
        if listed is not None:
            return [FULL if value else MAMBA for value in listed[:count]]
        return _typed(fields, count, "layer_types") or [MAMBA if i % 2 else FULL for i in range(count)]
    linear = fields.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi-Linear and K3: layer numbers start at one
        where = Fields(linear, f"{fields.where}: linear_attn_config")
        states = where.numbers("kda_layers") or []
        return [MAMBA if index + 1 in states else full for index in range(count)]
    if family in (
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "olmo_hybrid",
        "kimi_linear",
        "glm5_next",
        "bailing_hybrid",
    ):
        stated = _typed(fields, count, "layer_types")
        if stated is not None:
            return [full if kind == FULL else kind for kind in stated]
        every = fields.number("full_attention_interval", "layer_group_size") or 4
        fields.assumed.append(f"every {every}. layer has attention (default of the {family} family)")
        return [full if (index + 1) % every == 0 else MAMBA for index in range(count)]
    return None


def _typed(fields: Fields, count: int, *names: str) -> list[str] | None:
    from kvcatch.planner.kinds import TYPE_KINDS

    for name in names:
        if fields.raw.get(name) is None:
            continue
        stated = fields.items(name, count) or []
        kinds = []
        for index, entry in enumerate(stated[:count]):
            kind = TYPE_KINDS.get(entry) if isinstance(entry, str) else None
            if kind is None:
                raise fields.error(f"{name}[{index}]", entry, "an unknown layer type")
            kinds.append(kind)
        return kinds
    return None


def _indices(fields: Fields, count: int, attention: list[int]) -> list[str]:
    return [FULL if index in attention else MAMBA for index in range(count)]


def _nemotron(fields: Fields, count: int) -> list[str]:
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        stated = _typed(fields, count, "layers_block_type", "layer_types")
        if stated is None:
            raise KVCatchError(
                f"{fields.where}: field hybrid_override_pattern is missing.",
                "It says which layer is of which kind.",
            )
        return stated
    if not isinstance(pattern, str) or any(letter not in _PATTERN for letter in pattern):
        raise fields.error("hybrid_override_pattern", pattern, "letters M, *, - and E are expected")
    if len(pattern) < count:
        raise fields.error(
            "hybrid_override_pattern", pattern, f"one letter for each of {count} layers is needed"
        )
    return [_PATTERN[letter] for letter in pattern[:count]]


def _zamba(fields: Fields, count: int) -> list[str]:
    """Attention comes on top of the state in hybrid layers."""
    stated = _typed(fields, count, "layers_block_type")
    if stated is not None:
        return stated
    ids = fields.numbers("hybrid_layer_ids")
    if ids is not None:
        return ["hybrid" if index in ids else MAMBA for index in range(count)]
    period, offset = fields.number("attn_layer_period") or 6, fields.number("attn_layer_offset", least=0) or 4
    return ["hybrid" if index % period == offset else MAMBA for index in range(count)]


def state_of(fields: Fields, family: str, numbers: dict[str, int]) -> State:
    """The recurrent state of one layer: its type and the numbers its tensors are made of."""
    hidden = numbers["hidden"]
    if family in ("mamba", "falcon_mamba"):
        inner = fields.number("intermediate_size") if "intermediate_size" in fields.raw else None
        inner = inner or (fields.number("expand") or 2) * hidden
        return "mamba1", _mamba1(inner, fields.need("state_size"), fields.need("conv_kernel"))
    if family in ("jamba", "zamba"):
        inner = (fields.number("mamba_expand") or 2) * hidden
        heads = fields.number("n_mamba_heads") or 1
        return "mamba1", _mamba1(
            inner * heads // heads, fields.need("mamba_d_state"), fields.need("mamba_d_conv")
        )
    if family == "recurrent_gemma":
        width = fields.number("lru_width") or hidden
        return "rglru", {"inner": width, "conv": fields.number("conv1d_width") or 4}
    if family in ("lfm2", "lfm2_moe"):
        return "short_conv", {
            "inner": fields.number("conv_dim") or hidden,
            "conv": fields.need("conv_L_cache"),
        }
    if family in ("minimax", "minimax_text_01"):
        return "linear", {"heads": numbers["heads"], "head_dim": numbers["head_dim"]}
    linear = fields.get("linear_attn_config")
    if isinstance(linear, dict):
        where = Fields(linear, f"{fields.where}: linear_attn_config")
        return "kda", {
            "heads": where.need("num_heads"),
            "head_dim": where.need("head_dim"),
            "conv": where.number("short_conv_kernel_size") or 4,
        }
    if family in ("kimi_linear", "glm5_next", "bailing_hybrid"):
        return "kda", {
            "heads": fields.need("linear_num_heads", "num_attention_heads"),
            "head_dim": fields.need("linear_head_dim", "head_dim"),
            "conv": fields.number("linear_conv_kernel_dim") or 4,
        }
    if fields.get("linear_num_value_heads") is not None:
        return "gdn", {
            "heads_k": fields.need("linear_num_key_heads"),
            "heads_v": fields.need("linear_num_value_heads"),
            "dim_k": fields.need("linear_key_head_dim"),
            "dim_v": fields.need("linear_value_head_dim"),
            "conv": fields.need("linear_conv_kernel_dim"),
        }
    return "mamba2", _mamba2(fields, family, hidden)


def _mamba1(inner: int, state: int, conv: int) -> dict[str, int]:
    return {"inner": inner, "state": state, "conv": conv}


def _mamba2(fields: Fields, family: str, hidden: int) -> dict[str, int]:
    heads = fields.need("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    head_dim = fields.number("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    expand = fields.number("mamba_expand", "expand") or 2
    inner = expand * hidden
    if family == "falcon_h1":
        inner = fields.number("mamba_d_ssm") or inner
    if family == "nemotron_h":
        inner = heads * fields.need("mamba_head_dim")
    return {
        "inner": inner,
        "groups": fields.number("mamba_n_groups", "mamba_ngroups", "n_groups") or 1,
        "heads": heads,
        "head_dim": head_dim or inner // heads,
        "state": fields.need("mamba_d_state", "ssm_state_size", "state_size"),
        "conv": fields.need("mamba_d_conv", "conv_kernel"),
    }


def state_bytes(layer: LayerShape, shape: ModelShape, flags: EngineFlags, dtype: str) -> int:
    """Bytes of one recurrent state on one rank. Raises KVCatchError when TP does not divide it."""
    p, tp, draft = layer.params, flags.tensor_parallel_size, flags.num_speculative_tokens
    conv_bytes = _DTYPE_BYTES[flags.mamba_cache_dtype if flags.mamba_cache_dtype != "auto" else dtype]
    state_size = _state_dtype_bytes(layer, shape, flags, conv_bytes)
    kind = layer.mamba_type
    if kind == "mamba1":
        return (
            _part(p["inner"], tp) * (p["conv"] - 1) * conv_bytes
            + _part(p["inner"], tp) * p["state"] * state_size
        )
    if kind == "rglru":
        return p["inner"] // tp * ((p["conv"] - 1) * conv_bytes + 4)
    if kind == "short_conv":
        return _part(p["inner"], tp) * (p["conv"] - 1 + draft) * conv_bytes
    if kind == "linear":
        return _part(p["heads"], tp) * p["head_dim"] ** 2 * conv_bytes
    if kind == "kda":
        conv = 3 * p["heads"] * p["head_dim"]
        return (
            _part(conv, tp) * (p["conv"] - 1 + draft) * conv_bytes
            + _part(p["heads"], tp) * p["head_dim"] ** 2 * state_size
        )
    if kind == "gdn":
        conv = 2 * p["heads_k"] * p["dim_k"] + p["heads_v"] * p["dim_v"]
        return (
            _part(conv, tp) * (p["conv"] - 1 + draft) * conv_bytes
            + _part(p["heads_v"], tp) * p["dim_v"] * p["dim_k"] * state_size
        )
    # Groups are replicated so that every rank has those of its heads.
    groups = p["groups"] if p["groups"] % tp == 0 else tp
    conv = p["inner"] + 2 * groups * p["state"]
    return (
        _part(conv, tp) * (p["conv"] - 1 + draft) * conv_bytes
        + _part(p["heads"], tp) * p["head_dim"] * p["state"] * state_size
    )


def _part(count: int, tp: int) -> int:
    if count % tp:
        raise KVCatchError(
            f"--tensor-parallel-size {tp} does not divide the recurrent state of this model ({count}).",
            f"Use a divisor of {math.gcd(count, 1 << 20)}.",
        )
    return count // tp


def _state_dtype_bytes(layer: LayerShape, shape: ModelShape, flags: EngineFlags, conv_bytes: int) -> int:
    asked: Any = flags.mamba_ssm_cache_dtype
    if asked == "auto":
        asked = shape.text.get("mamba_ssm_dtype") or shape.text.get("mamba_ssm_cache_dtype")
    if asked is None and (layer.mamba_type in ("kda",) or "nemotron" in shape.model_type.lower()):
        asked = "float32"
    return _DTYPE_BYTES.get(str(asked), conv_bytes)
