"""The token mixers of a layer as weight matrices: attention, latent attention, recurrent states.

Column-parallel matrices lose rows, row-parallel ones lose columns, KV projections keep at least one head,
low-rank MLA inputs are whole on every rank (``vllm/model_executor/layers/linear.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

from kvcatch.planner.specs import CHUNKED, FULL, MAMBA, MLA, SLIDING, LayerShape, ModelShape

_BIASED_QKV = frozenset(
    (
        *("qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "chatglm"),
        *("gpt2", "gpt_bigcode", "gpt_neox", "phi", "phi-msft"),
    )
)


class Matrix(NamedTuple):
    """``copies`` matrices of ``rows`` × ``cols`` (out × in) on one rank. ``name`` = the module's own name."""

    name: str
    rows: int
    cols: int
    copies: int = 1
    quantisable: bool = True
    bias: bool = False


class Ranks(NamedTuple):
    """How many ways matrices are cut: ``tp`` dense ones, ``expert_tp`` experts, ``ep`` the set of experts."""

    tp: int = 1
    expert_tp: int = 1
    ep: int = 1


def mixer_matrices(shape: ModelShape, layer: LayerShape, tp: int) -> Iterator[Matrix]:
    """One token mixer on one of ``tp`` ranks."""
    if layer.role == "window":
        yield from _compressed(shape, layer, tp)
    elif layer.kind == MLA:
        yield from _mla(shape, layer, tp)
    elif layer.kind == MAMBA:
        yield from _state_mixer(shape, tp)
    elif layer.kind in (FULL, SLIDING, CHUNKED):
        yield from _attention(shape, layer, tp)


def local_heads(heads: int, tp: int) -> int:
    """KV heads one rank holds: split while there are enough, one copy each after that."""
    return max(1, heads // tp)


def _attention(shape: ModelShape, layer: LayerShape, tp: int) -> Iterator[Matrix]:
    hidden, dim = shape.hidden_size or 0, layer.head_dim
    dim_v = layer.head_dim_v or dim
    heads = (
        positive(shape.text, "swa_num_attention_heads") if layer.kind == SLIDING else None
    ) or shape.num_heads
    local = ceil(heads / tp)
    kv = local_heads(layer.num_kv_heads or 1, tp)
    bias = bool(shape.text.get("attention_bias")) or shape.model_type in _BIASED_QKV
    gate = (
        2
        if shape.text.get("attn_output_gate") or shape.model_type.startswith(("qwen3_next", "qwen3_5"))
        else 1
    )
    same_kv = layer.kind == FULL and bool(shape.text.get("attention_k_eq_v"))
    own = 0 if layer.shares_kv else kv * dim + (0 if same_kv else kv * dim_v)
    yield Matrix("self_attn", local * dim * gate + own, hidden, bias=bias)
    yield Matrix("self_attn", hidden, local * dim_v)


def _mla(shape: ModelShape, layer: LayerShape, tp: int) -> Iterator[Matrix]:
    hidden, heads = shape.hidden_size or 0, ceil(shape.num_heads / tp)
    nope, rope = shape.qk_nope_head_dim or 128, shape.qk_rope_head_dim or 0
    value, latent = shape.v_head_dim or nope, shape.kv_lora_rank or layer.latent_dim - rope
    query = hidden
    if shape.q_lora_rank:
        yield Matrix("self_attn", shape.q_lora_rank, hidden)
        query = shape.q_lora_rank
    yield Matrix("self_attn", heads * (nope + rope), query)
    yield Matrix("self_attn", latent + rope, hidden)
    yield Matrix("self_attn", heads * (nope + value), latent)
    yield Matrix("self_attn", hidden, heads * value)
    # The decode path keeps its own 16-bit copies of the up-projections (W_UK_T and W_UV of MLAAttention).
    yield Matrix("absorbed", heads * (nope + value), latent, quantisable=False)
    if index_heads := positive(shape.text, "index_n_heads"):
        dim = positive(shape.text, "index_head_dim") or 128
        yield Matrix("indexer", index_heads * dim, query)
        yield Matrix("indexer", dim + index_heads, hidden, quantisable=False)


def _compressed(shape: ModelShape, layer: LayerShape, tp: int) -> Iterator[Matrix]:
    """DeepSeek V4: low-rank queries, one shared KV head, grouped low-rank output, an indexer on some layers."""
    hidden, dim, rank = shape.hidden_size or 0, layer.latent_dim or shape.head_dim, shape.q_lora_rank or 1024
    groups, out = positive(shape.text, "o_groups") or 8, positive(shape.text, "o_lora_rank") or 1024
    heads = ceil(shape.num_heads / tp)
    yield Matrix("self_attn", rank + dim, hidden)
    yield Matrix("self_attn", heads * dim, rank)
    yield Matrix("self_attn", ceil(groups * out / tp), ceil(shape.num_heads * dim / groups))
    yield Matrix("self_attn", hidden, ceil(groups * out / tp))
    if index_heads := positive(shape.text, "index_n_heads"):
        width = index_heads * (positive(shape.text, "index_head_dim") or 128)
        yield Matrix("indexer", ceil(width / tp), rank)


def _state_mixer(shape: ModelShape, tp: int) -> Iterator[Matrix]:
    """Gated delta net, Mamba 2, Kimi's delta attention, or Mamba 1."""
    text, hidden = shape.text, shape.hidden_size or 0
    if value_heads := positive(text, "linear_num_value_heads"):
        key_heads = positive(text, "linear_num_key_heads") or value_heads
        key = key_heads * (positive(text, "linear_key_head_dim") or 128)
        value = value_heads * (positive(text, "linear_value_head_dim") or 128)
        kernel = positive(text, "linear_conv_kernel_dim") or 4
        yield Matrix("linear_attn", ceil((2 * key + 2 * value + 2 * value_heads) / tp), hidden)
        yield Matrix("linear_attn", hidden, ceil(value / tp))
        yield Matrix("conv", ceil((2 * key + value) / tp), kernel, quantisable=False)
        return
    second = shape.model_type == "mamba2"
    if heads := positive(
        text, "mamba_num_heads", "mamba_n_heads", *(("num_heads", "n_mamba_heads") if second else ())
    ):
        size = positive(text, "mamba_head_dim", "mamba_d_head", *(("head_dim",) if second else ()))
        inner = positive(text, "mamba_d_ssm") or heads * (size or 64)
        groups = positive(text, "n_groups", "mamba_n_groups") or 1
        state = positive(text, "ssm_state_size", "mamba_d_state", "state_size") or 128
        yield Matrix("mixer", ceil((2 * inner + 2 * groups * state + heads) / tp), hidden)
        yield Matrix("mixer", hidden, ceil(inner / tp))
        return
    if shape.model_type == "kimi_linear" or positive(text, "linear_num_heads"):
        nested = text.get("linear_attn_config")
        linear = nested if isinstance(nested, dict) else {}
        width = positive(text, "linear_head_dim") or positive(linear, "head_dim") or 128
        inner = (
            positive(text, "linear_num_heads") or positive(linear, "num_heads") or shape.num_heads
        ) * width
        yield Matrix("linear_attn", ceil(3 * inner / tp), hidden)
        yield Matrix("linear_attn", hidden, ceil(inner / tp))
        # Forget and output gates are low-rank: hidden -> head size -> inner.
        yield Matrix("linear_attn", 2 * width, hidden)
        yield Matrix("linear_attn", ceil(2 * inner / tp), width)
        return
    inner = positive(
        text, "mamba_d_inner", "intermediate_size" if shape.model_type.endswith("mamba") else ""
    ) or (hidden * (positive(text, "mamba_expand", "expand", "expand_factor") or 2))
    rank = positive(text, "time_step_rank", "mamba_dt_rank") or ceil(hidden / 16)
    state = positive(text, "state_size", "mamba_d_state") or 16
    yield Matrix("mixer", ceil(2 * inner / tp), hidden)
    yield Matrix("mixer", hidden, ceil(inner / tp))
    yield Matrix("mixer", rank + 2 * state, ceil(inner / tp))
    yield Matrix("mixer", ceil(inner / tp), rank + state, quantisable=False)


def positive(text: dict[str, Any], *keys: str) -> int | None:
    """The first of ``keys`` that holds a positive integer."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
