"""Bytes of one block of one layer on one rank: the engine's KV cache spec of a layer.

Sources, vLLM 0.32: ``v1/kv_cache_interface.py`` (page sizes), the backends' ``customize_spec`` (quantised cells),
``platforms/interface.py::_align_hybrid_block_size`` (attention blocks raised to the size of a recurrent state).
"""

from __future__ import annotations

import math

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner import compressed, recurrent
from kvcatch.planner.cells import DS_MLA, MODEL_BYTES, cell_bytes, effective_kv_dtype, model_dtype
from kvcatch.planner.drafts import with_drafts
from kvcatch.planner.engine import Limits, era_of
from kvcatch.planner.specs import (
    CHUNKED,
    ENCODER,
    FULL,
    MAMBA,
    MLA,
    NONE,
    RING,
    SLIDING,
    EngineFlags,
    LayerShape,
    ModelShape,
)


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer as the KV cache manager sees it. Equal ``identity`` means one group may hold both."""

    kind: str
    index: int
    block_size: int
    page_bytes: int
    identity: tuple[object, ...]
    window: int | None = None
    padded_from: int | None = None  # page bytes before padding
    alignment: int = 1
    split: int = 1  # blocks of the layer's own size that one block of the group holds
    checkpoint_blocks: int = 0  # states exported in the middle of a prefill
    draft: bool = False
    role: str = "attention"


def compressed_model(shape: ModelShape) -> bool:
    """Whether the layers are those of ``compressed.py``."""
    return any(layer.role in ("latent", "compressor") for layer in shape.layers)


def heads_per_rank(heads: int, tp: int) -> int:
    """KV heads on one rank: replicated when there are more ranks than heads.

    Raises KVCatchError when the heads do not spread evenly (vLLM asserts the same).
    """
    if (heads >= tp and heads % tp) or (heads < tp and tp % heads):
        raise KVCatchError(
            f"--tensor-parallel-size {tp} does not fit {heads} KV heads.",
            "Use a divisor or a multiple of the number of KV heads.",
        )
    return max(1, heads // tp)


def _token_bytes(layer: LayerShape, dtype: str, model: str, tp: int, sparse: bool) -> int:
    """Bytes one token takes in one attention layer on one rank."""
    if layer.role == "indexer":
        return layer.head_dim  # fp8 keys and their scales, whatever the main cache uses
    if layer.role == "indexer-plain":
        return layer.head_dim * (1 if dtype.startswith("fp8") else MODEL_BYTES[model])
    if layer.kind == MLA:
        if sparse and dtype.startswith("fp8"):
            return DS_MLA["fp8_ds_mla"]
        return cell_bytes(layer.latent_dim, 0, dtype, model, latent=True)
    cell = cell_bytes(layer.head_dim, layer.head_dim_v or layer.head_dim, dtype, model)
    return heads_per_rank(layer.num_kv_heads, tp) * cell


def default_block_size(shape: ModelShape, flags: EngineFlags) -> int:
    """Tokens per block before any alignment, as the platform and the attention backend choose it."""
    mla = any(layer.kind == MLA for layer in shape.layers)
    if compressed_model(shape):
        return compressed.BLOCK_TOKENS
    if flags.block_size is not None:
        return flags.block_size
    if flags.device == "cpu":
        # The reference CPU kernel for latent attention knows 16 only; with AMX the default is 128.
        return 16 if mla else 128
    backend = (flags.attention_backend or "").upper()
    if "FLASHMLA" in backend or any(layer.role == "indexer" for layer in shape.layers):
        return 64
    if "CUTLASS_MLA" in backend or any(layer.role == "indexer-plain" for layer in shape.layers):
        return 128
    return 16


def layer_specs(shape: ModelShape, flags: EngineFlags, limits: Limits) -> tuple[list[LayerSpec], int]:
    """The specs of all layers that own cache, and the attention block size. Raises KVCatchError."""
    era, tp = era_of(flags.engine_version), flags.tensor_parallel_size
    if shape.num_heads and shape.num_heads % tp:
        raise KVCatchError(
            f"--tensor-parallel-size {tp} does not divide the {shape.num_heads} attention heads.",
            "Use a divisor.",
        )
    layers = with_drafts(shape, flags)
    if compressed_model(shape):
        return [_compressed_spec(layer) for layer in layers], compressed.BLOCK_TOKENS
    dtype, model = effective_kv_dtype(shape, flags), model_dtype(shape, flags)
    sparse = any(layer.role == "indexer" for layer in layers)
    if era.version < (0, 7):
        layers = [_expanded_mla(layer, shape) for layer in layers]
    block = default_block_size(shape, flags)
    kernel = 32 if flags.device == "cpu" else 16
    attention = [
        layer for layer in layers if layer.kind not in (MAMBA, NONE, ENCODER) and not layer.shares_kv
    ]
    states = [layer for layer in layers if layer.kind == MAMBA]
    state = max((recurrent.state_bytes(layer, shape, flags, model) for layer in states), default=0)
    padded = None
    if states and attention:
        base = [layer for layer in attention if layer.role == "attention" and not layer.draft] or attention
        token = _token_bytes(base[0], dtype, model, tp, sparse)
        step = max(kernel, block)
        if any(layer.kind == MLA for layer in attention) and era.version >= (0, 31):
            step = max(step, 128)
        needed = step * math.ceil(state / (step * token))
        # Pooled index keys are read in pages of 32 states, each of several tokens.
        unit = max(
            (32 * layer.tokens_per_state for layer in attention if layer.tokens_per_state > 1), default=1
        )
        needed = unit * math.ceil(needed / unit)
        block = max(block, needed)
        padded = block * token
    specs: list[LayerSpec] = []
    for layer in layers:
        if layer.shares_kv or layer.kind in (NONE, ENCODER):
            continue
        if layer.kind == MAMBA:
            specs.append(_state_spec(layer, shape, flags, limits, model, block, padded))
            continue
        if layer.kind == RING:
            specs.append(_ring_spec(layer, flags))
            continue
        token = _token_bytes(layer, dtype, model, tp, sparse)
        kind, window = layer.kind, layer.window
        if kind in (SLIDING, CHUNKED) and (not era.hybrid_groups or flags.disable_hybrid_kv_cache_manager):
            # Without the hybrid manager such layers hold every token when full layers are present.
            kind = (
                FULL
                if any(other.kind in (FULL, MLA) for other in attention) or not era.hybrid_groups
                else kind
            )
            window = None if kind == FULL else window
        stored = layer.tokens_per_state
        own = block
        if kind == SLIDING and era.version >= (0, 31):
            # Window layers take the largest block of their kernel within the common one, at least one kernel block.
            own = max(kernel, block // kernel * kernel)
        specs.append(
            LayerSpec(
                kind=kind,
                index=layer.index,
                block_size=own,
                page_bytes=own // stored * token,
                identity=(
                    kind,
                    token,
                    window if kind != FULL else None,
                    stored,
                    layer.role,
                    layer.num_kv_heads,
                ),
                window=window,
                # Sparse kernels index whole token rows across the pages of a packed block.
                alignment=token if sparse and kind == MLA else 1,
                draft=layer.draft,
                role=layer.role,
            )
        )
    return specs, block


def _state_spec(
    layer: LayerShape,
    shape: ModelShape,
    flags: EngineFlags,
    limits: Limits,
    model: str,
    block: int,
    padded: int | None,
) -> LayerSpec:
    size = recurrent.state_bytes(layer, shape, flags, model)
    page = max(size, padded or 0)
    aligned = limits.enable_prefix_caching
    return LayerSpec(
        kind=MAMBA,
        index=layer.index,
        block_size=block if aligned else limits.max_model_len,
        page_bytes=page,
        identity=(MAMBA, page, layer.mamba_type, size),
        padded_from=size if page != size else None,
        checkpoint_blocks=_checkpoints(layer, shape, flags),
        draft=layer.draft,
    )


def _ring_spec(layer: LayerShape, flags: EngineFlags) -> LayerSpec:
    """One block a request holding the pool that is not full yet, bf16, drafts included."""
    pool = layer.params["pool"]
    spans = math.ceil((pool + flags.num_speculative_tokens) / pool)
    tokens = pool * (1 << (spans - 1).bit_length())
    page = layer.num_kv_heads * tokens * layer.head_dim * 2
    return LayerSpec(
        kind=RING,
        index=layer.index,
        block_size=tokens,
        page_bytes=page,
        identity=(RING, page),
        role=layer.role,
    )


def _checkpoints(layer: LayerShape, shape: ModelShape, flags: EngineFlags) -> int:
    """Blocks for a state exported inside a prefill: Mamba-2 since 0.32 (``MambaMixer2.get_kv_cache_spec``)."""
    if era_of(flags.engine_version).version < (0, 32):
        return 0
    flash_kda = layer.mamba_type == "kda" and flags.device != "cpu" and shape.model_type != "kimi_linear"
    return int(layer.mamba_type == "mamba2" or flash_kda)


def _compressed_spec(layer: LayerShape) -> LayerSpec:
    block, cell = layer.params["block"], layer.params["cell"]
    page = block // layer.tokens_per_state * cell
    unit = compressed.PAGE_ALIGNMENT
    return LayerSpec(
        kind=layer.kind,
        index=layer.index,
        block_size=block,
        page_bytes=-(-page // unit) * unit,
        identity=(layer.kind, block, cell, layer.window, layer.tokens_per_state, layer.role),
        window=layer.window,
        padded_from=page if page % unit else None,
        role=layer.role,
    )


def _expanded_mla(layer: LayerShape, shape: ModelShape) -> LayerShape:
    """Before 0.7 latent attention was stored as full keys and values, padded to the next kernel width (A30)."""
    if layer.kind != MLA or layer.role != "attention":
        return layer
    width = (shape.qk_nope_head_dim or 0) + (shape.qk_rope_head_dim or 0)
    width = next((size for size in (64, 80, 96, 112, 128, 256) if size >= width), width)
    return msgspec.structs.replace(
        layer, kind=FULL, num_kv_heads=shape.num_heads, head_dim=width, head_dim_v=width, latent_dim=0
    )
