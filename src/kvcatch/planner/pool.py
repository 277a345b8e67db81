"""A model and flags become a block pool."""

from __future__ import annotations

import msgspec

from kvcatch.planner.capacity import Pool, pool_of
from kvcatch.planner.engine import era_of, resolve_limits
from kvcatch.planner.layout import Group, form_groups, on_stage, pipeline_split
from kvcatch.planner.pages import compressed_model, layer_specs
from kvcatch.planner.specs import CHUNKED, CROSS, FULL, MAMBA, MLA, RING, SLIDING, EngineFlags, ModelShape


def build_pool(shape: ModelShape, flags: EngineFlags, gpu_memory: int | None = None) -> Pool:
    """The pool of one engine replica. Raises KVCatchError for flags that do not fit the model."""
    era = era_of(flags.engine_version)
    limits = resolve_limits(shape, flags, gpu_memory)
    specs, _ = layer_specs(shape, flags, limits)
    packed = era.hybrid_groups and (compressed_model(shape) or shape.model_type.startswith("glm5_next"))
    groups = form_groups(specs, era, packed)
    bounds = pipeline_split(shape.num_layers, flags.pipeline_parallel_size, flags.pp_layer_partition)
    stages = [
        on_stage(groups, _scaled(edge, shape), number == len(bounds) - 1)
        for number, edge in enumerate(bounds)
    ]
    encoder = shape.max_source_positions or (limits.max_model_len if shape.encoder_layers else 0)
    encoder = encoder or limits.max_num_batched_tokens
    pool = pool_of(groups, stages, era, limits, flags, packed, encoder)
    if flags.speculative_method and "mtp" in flags.speculative_method and shape.num_draft_layers > 1:
        pool = msgspec.structs.replace(pool, retained=max(0, flags.num_speculative_tokens - 1))
    return pool


def _scaled(edge: tuple[int, int], shape: ModelShape) -> tuple[int, int]:
    """Layer indices of a stage; models with two attentions a layer count both."""
    per_layer = 2 if shape.model_type == "longcat_flash" else 1
    return edge[0] * per_layer, edge[1] * per_layer


def bytes_per_token(pool: Pool) -> int:
    """Bytes one more token costs on the widest stage, once windows and states are full.

    Full and latent layers count, and windows that max_model_len never leaves. A model of windows only (Mistral 7B
    v0.1) is given by what a token costs inside the window.
    """
    return max((_per_token(pool, stage) for stage in pool.stages), default=0) or bytes_per_token_in_window(
        pool
    )


def bytes_per_token_in_window(pool: Pool) -> int:
    """Bytes one more token costs on the widest stage while every window still covers the whole sequence."""
    return max((_per_token(pool, stage, windows=True) for stage in pool.stages), default=0)


def fixed_bytes_per_request(pool: Pool, length: int) -> int:
    """Bytes a request of ``length`` tokens holds whatever its length: full windows, states, encoder output.

    The logical size without in-flight tokens and block rounding, on the widest stage.
    """
    return max((_fixed(pool, stage, length) for stage in pool.stages), default=0)


def _per_token(pool: Pool, groups: tuple[Group, ...], windows: bool = False) -> int:
    total = 0.0
    for group in groups:
        for spec in group.specs:
            if spec.kind in (FULL, MLA) or (
                spec.kind in (SLIDING, CHUNKED)
                and (windows or (spec.window or 0) >= pool.limits.max_model_len)
            ):
                total += (spec.padded_from or spec.page_bytes) / spec.block_size
    return round(total)


def _fixed(pool: Pool, groups: tuple[Group, ...], length: int) -> int:
    total = 0.0
    for group in groups:
        for spec in group.specs:
            page = spec.padded_from or spec.page_bytes
            if spec.kind in (SLIDING, CHUNKED) and (spec.window or 0) < pool.limits.max_model_len:
                total += min(spec.window or 0, length) * page / spec.block_size
            elif spec.kind in (MAMBA, RING):
                total += page
            elif spec.kind == CROSS:
                total += pool.encoder_tokens * page / spec.block_size
    return round(total)
