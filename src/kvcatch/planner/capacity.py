"""From bytes to blocks, tokens and requests, and back: what fits, what is refused, what the log says.

Formulas: ``max_memory_usage_bytes`` of each spec in ``v1/kv_cache_interface.py``, ``get_kv_cache_configs``,
``get_kv_cache_capacity`` and ``_report_kv_cache_config`` in ``v1/core/kv_cache_utils.py`` (0.12 to 0.33).
"""

from __future__ import annotations

import math

import msgspec

from kvcatch.planner.engine import Era, Limits
from kvcatch.planner.layout import Group, block_bytes
from kvcatch.planner.pages import LayerSpec
from kvcatch.planner.specs import CHUNKED, CROSS, FULL, MAMBA, MLA, RING, SLIDING, EngineFlags
from kvcatch.units import GIB


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool of one engine: its groups, what one block id costs on each stage, the limits."""

    groups: tuple[Group, ...]
    stages: tuple[tuple[Group, ...], ...]
    stage_block_bytes: tuple[int, ...]
    era: Era
    limits: Limits
    dcp: int = 1
    aligned_states: bool = False
    draft_tokens: int = 0
    retained: int = 0
    encoder_tokens: int = 0


def pool_of(
    groups: list[Group],
    stages: list[list[Group]],
    era: Era,
    limits: Limits,
    flags: EngineFlags,
    packed: bool,
    encoder: int,
) -> Pool:
    """A pool from its groups and their share on each pipeline stage."""
    return Pool(
        groups=tuple(groups),
        stages=tuple(tuple(stage) for stage in stages),
        stage_block_bytes=tuple(block_bytes(stage, packed) for stage in stages),
        era=era,
        limits=limits,
        dcp=flags.decode_context_parallel_size,
        aligned_states=limits.enable_prefix_caching and (flags.mamba_cache_mode or "align") != "none",
        draft_tokens=flags.num_speculative_tokens,
        retained=0,
        encoder_tokens=encoder,
    )


def layer_blocks(pool: Pool, spec: LayerSpec, length: int) -> int:
    """Blocks one request of ``length`` tokens holds in a layer like ``spec``."""
    flight = pool.limits.in_flight_tokens
    if spec.kind in (FULL, MLA):
        own = math.ceil(length / pool.dcp) if pool.dcp > 1 else length
        return math.ceil(own / spec.block_size)
    if spec.kind == SLIDING:
        held = min((spec.window or 0) - 1 + pool.retained + flight, length)
        return math.ceil(held / spec.block_size) + 1
    if spec.kind == CHUNKED:
        return math.ceil(min((spec.window or 0) + flight, length) / spec.block_size)
    if spec.kind == MAMBA:
        return (2 + spec.checkpoint_blocks if pool.aligned_states else 1) + pool.draft_tokens
    if spec.kind == RING:
        return 1
    if spec.kind == CROSS:
        # The encoder's length until 0.12, a whole step of encoder input since (``max_num_encoder_input_tokens``).
        held = pool.limits.max_num_batched_tokens if pool.era.encoder_by_step else pool.encoder_tokens
        return math.ceil(held / spec.block_size)
    return 0


def group_blocks(pool: Pool, group: Group, length: int) -> int:
    """Blocks one request holds in a group."""
    return max((layer_blocks(pool, spec, length) for spec in group.specs), default=0)


def request_blocks(pool: Pool, length: int) -> int:
    """Block ids one request of ``length`` tokens holds in all groups together."""
    return sum(group_blocks(pool, group, length) for group in pool.groups)


def num_blocks(pool: Pool, available: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
    """(blocks of the pool, blocks each stage could hold, binding stage). ``available``: bytes per stage."""
    each = tuple(
        max(0, have) // size if size else 0
        for have, size in zip(available, pool.stage_block_bytes, strict=True)
    )
    usable = [(blocks, stage) for stage, blocks in enumerate(each) if pool.stage_block_bytes[stage]]
    if not usable:
        return (1 if pool.era.hybrid_groups else 0), each, 0
    blocks, stage = min(usable)
    return blocks, each, stage


def max_concurrency(pool: Pool, blocks: int, length: int) -> float | None:
    """Requests of ``length`` tokens that the printed capacity holds, None without cache."""
    need = request_blocks(pool, length)
    if not need:
        return None
    if not pool.era.hybrid_groups:
        return blocks * pool.groups[0].first.block_size * pool.dcp / length
    return blocks / need


def kv_tokens(pool: Pool, blocks: int, length: int) -> int:
    """The token figure of the start-up log. On hybrids of newer versions it is derived, not a byte rate (F4)."""
    if not pool.groups:
        return 0
    if pool.era.token_line == "derived":
        return int((max_concurrency(pool, blocks, length) or 0) * length)
    smallest = min(group.first.block_size for group in pool.groups)
    return blocks // len(pool.groups) * smallest * pool.dcp


def check_need(pool: Pool, length: int) -> int:
    """Bytes that the engine's start-up check wants for one request of ``length`` tokens on the first stage."""
    if not pool.groups:
        return 0
    if pool.era.check_sums_layers:
        # These versions check before pages are made equal, so each layer counts in blocks of its own size.
        own = [_own(spec) for group in pool.groups for spec in group.specs]
        return sum(layer_blocks(pool, spec, length) * spec.page_bytes for spec in own)
    return request_blocks(pool, length) * max(pool.stage_block_bytes)


def _own(spec: LayerSpec) -> LayerSpec:
    if spec.split == 1:
        return spec
    return msgspec.structs.replace(
        spec, block_size=spec.block_size // spec.split, page_bytes=spec.page_bytes // spec.split
    )


def longest(pool: Pool, available: tuple[int, ...], ceiling: int) -> int:
    """The largest length that the engine of this version accepts, up to ``ceiling``; 0 when none.

    Counts the blocks of the binding stage. Versions before 0.31 do not keep the null block back, so that a request
    of that very length starts the engine but never runs to its end (B32).
    """
    blocks, _, _ = num_blocks(pool, available)
    return longest_in_blocks(pool, accepted_blocks(pool, blocks), ceiling)


def accepted_blocks(pool: Pool, blocks: int) -> int:
    """Blocks the start-up check of this version counts on."""
    return blocks - 1 if pool.era.reserves_null_block else blocks


def longest_in_blocks(pool: Pool, usable: int, ceiling: int, requests: int = 1) -> int:
    """The largest length that ``requests`` requests can all reach within ``usable`` blocks."""
    return _largest(ceiling, lambda length: requests * request_blocks(pool, length) <= usable)


def engine_estimate(pool: Pool, available: int, ceiling: int) -> int:
    """The "estimated maximum model length" the engine of that version prints, its mistakes included (F6)."""
    room = available - (pool.stage_block_bytes[0] if pool.era.reserves_null_block else 0)
    return _largest(ceiling, lambda length: check_need(pool, length) <= room)


def _largest(ceiling: int, fits: object) -> int:
    """The largest number from 1 to ``ceiling`` that fits, by bisection; 0 when 1 does not."""
    assert callable(fits)
    if ceiling < 1 or not fits(1):
        return 0
    low, high = 1, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def concurrency_that_fits(pool: Pool, usable: int, length: int) -> int:
    """Whole requests of ``length`` tokens that fit into ``usable`` blocks."""
    need = request_blocks(pool, length)
    return usable // need if need else 0


def minimum_reusable_prefix(pool: Pool) -> int | None:
    """Tokens of the shortest prefix the prefix cache can reuse, None without prefix caching.

    One group: a whole block. Several: the least common multiple of their blocks (B3, B8); recurrent states are
    reusable at block ends only.
    """
    if not pool.limits.enable_prefix_caching or not pool.groups:
        return None
    if any(group.first.kind == CROSS for group in pool.groups):
        return None
    cached = [group for group in pool.groups if group.first.kind != RING]
    return math.lcm(*(group.first.block_size * pool.dcp for group in cached))


def log_lines(
    pool: Pool, blocks: int, available: tuple[int, ...], device: str, swap_blocks: int | None
) -> list[str]:
    """The engine's own start-up sentences, in the wording of its version."""
    era, limits = pool.era, pool.limits
    if not pool.groups:
        return []
    name = "CPU" if device == "cpu" else "GPU"
    length = limits.max_model_len
    concurrency = max_concurrency(pool, blocks, length) or 0.0
    if era.token_line == "blocks":
        label = "GPU" if era.version < (0, 7) else "cuda"
        lines = [f"# {label} blocks: {blocks}, # CPU blocks: {swap_blocks if swap_blocks is not None else 0}"]
        if era.version >= (0, 6):
            lines.append(f"Maximum concurrency for {length} tokens per request: {concurrency:.2f}x")
        return lines
    lines = []
    if device != "cpu":
        lines.append(f"Available KV cache memory: {_gib(era, available[0])} GiB")
    need, room = check_need(pool, length), available[0]
    if era.reserves_null_block:
        room -= pool.stage_block_bytes[0]
    if need > room:
        return [*lines, refusal(pool, need, room)]
    tokens = kv_tokens(pool, blocks, length)
    if era.joined_line:
        lines.append(
            f"{name} KV cache size: {tokens:,} tokens, Maximum concurrency for {length:,} tokens per request: "
            f"{concurrency:.2f}x"
        )
    else:
        lines.append(f"GPU KV cache size: {tokens:,} tokens")
        lines.append(f"Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x")
    return lines


def refusal(pool: Pool, need: int, room: int) -> str:
    """The sentence with which the engine refuses to start."""
    if room <= 0:
        return "No available memory for the cache blocks."
    length = pool.limits.max_model_len
    estimate = engine_estimate(
        pool, room + (pool.stage_block_bytes[0] if pool.era.reserves_null_block else 0), length
    )
    model = "model's" if pool.era.rounded_gib else "models's"
    text = (
        f"To serve at least one request with the {model} max seq len ({length}), ({_gib(pool.era, need)} GiB KV cache "
        f"is needed, which is larger than the available KV cache memory ({_gib(pool.era, room)} GiB)."
    )
    if estimate > 0:
        text += f" Based on the available memory, the estimated maximum model length is {estimate}."
    return text


def _gib(era: Era, size: int) -> str:
    """GiB as the release prints them: 24.0 (rounded) since 0.14, 24.00 before."""
    return str(round(size / GIB, 2)) if era.rounded_gib else f"{size / GIB:.2f}"
