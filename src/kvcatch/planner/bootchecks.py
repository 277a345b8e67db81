"""Rebuilding the memory identity of a start-up log, and the figures of the engine that need correcting."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner.bootlog import ROUNDING, BootLog, Correction, RankMemory
from kvcatch.planner.engine import parse_version
from kvcatch.planner.specs import EngineFlags, ModelShape
from kvcatch.units import GIB, MIB, human_bytes

#: What the hint of vLLM keeps back beyond the parts (``compile_or_warm_up_model``).
_HINT_RESERVE = 150 * MIB


def checked(log: BootLog, shape: ModelShape | None) -> BootLog:
    """The log with its identity rebuilt, the binding rank named and misleading figures corrected."""
    binding = _binding(log)
    parts = _parts(log, binding)
    error = _identity_error(binding, parts, log)
    log = msgspec.structs.replace(
        log,
        binding_rank=binding.rank or None,
        parts_bytes=parts,
        took_most=max(parts, key=lambda name: parts[name]) if parts else None,
        identity_error_bytes=error,
    )
    found: list[Correction] = []
    for check in (_utilization, _global_limit, _free_memory, _pipeline_refusal, _hint, _ranks_differ):
        found += check(log, binding)
    found += _derived_tokens(log)
    found += _other_rank_binds(log, shape)
    found += _sampler(log)
    return msgspec.structs.replace(log, corrections=tuple(found))


def _binding(log: BootLog) -> RankMemory:
    """The rank with the least room: the pool is as large as it can hold."""
    with_room = [
        rank for rank in log.ranks if rank.available_kv_bytes is not None or rank.kv_cache_tokens is not None
    ]
    if not with_room:
        return log.ranks[0] if log.ranks else RankMemory()
    return min(with_room, key=lambda rank: (rank.kv_cache_tokens or 0, rank.available_kv_bytes or 0))


def _parts(log: BootLog, rank: RankMemory) -> dict[str, int]:
    """Every part of the card's memory that the log tells, bytes; the rest of the budget is the KV cache."""
    parts: dict[str, int] = {}
    weights, activation, non_torch = rank.weights_bytes, rank.activation_bytes, rank.non_torch_bytes
    if rank.torch_peak_bytes is not None and weights is not None and activation is None:
        activation = rank.torch_peak_bytes - weights  # 0.6.4 prints the peak with the weights in it
    if rank.consumed_bytes is not None and weights is not None and non_torch is None:
        non_torch = rank.consumed_bytes - weights
    if rank.peak_with_graphs_bytes is not None and activation is None:
        activation = rank.peak_with_graphs_bytes - (rank.graphs_estimate_bytes or 0)
    for name, value in (
        ("weights", weights),
        ("activation_peak", activation),
        ("non_torch", non_torch),
        ("cuda_graphs", rank.graphs_bytes if rank.graphs_bytes is not None else rank.graphs_estimate_bytes),
        (
            "other_processes",
            rank.already_used_bytes if log.version and parse_version(log.version) == (0, 6) else None,
        ),
        ("kv_cache", rank.available_kv_bytes),
    ):
        if value is not None and value > 0:
            parts[name] = value
    return parts


def _budget(rank: RankMemory) -> int | None:
    if rank.requested_bytes is not None:
        return rank.requested_bytes
    if rank.total_bytes is not None and rank.utilization is not None:
        return int(rank.total_bytes * rank.utilization)
    return None


def _identity_error(rank: RankMemory, parts: dict[str, int], log: BootLog) -> int | None:
    """budget - parts - available KV; near zero when the printed figures fit together."""
    budget = _budget(rank)
    if budget is None or rank.available_kv_bytes is None or "activation_peak" not in parts:
        return None
    taken = parts.get("weights", 0) + parts["activation_peak"] + parts.get("non_torch", 0)
    counted = log.version is not None and parse_version(log.version) >= (0, 21)
    return budget - taken - (rank.graphs_estimate_bytes or 0 if counted else 0) - rank.available_kv_bytes


def _utilization(log: BootLog, rank: RankMemory) -> Iterator[Correction]:
    """Parts that do not add up at the printed utilization but do at another one."""
    error, total = log.identity_error_bytes, rank.total_bytes
    if error is None or total is None or rank.utilization is None or abs(error) <= 6 * ROUNDING:
        return
    fitting = rank.utilization - error / total
    if 0 < fitting <= 1:
        yield Correction(
            code="utilization-mismatch",
            printed=f"gpu_memory_utilization {rank.utilization:g}",
            corrected=f"gpu_memory_utilization {fitting:.3f}",
            why=f"the printed parts add up only there: {human_bytes(error)} are missing at {rank.utilization:g}",
        )


def _global_limit(log: BootLog, rank: RankMemory) -> Iterator[Correction]:
    """Until 0.6.4 the utilization limited the whole card, other processes included."""
    used, budget = rank.already_used_bytes, _budget(rank)
    if used is None or budget is None or used <= budget:
        return
    yield Correction(
        code="other-processes-counted",
        printed="No available memory for the cache blocks",
        corrected=f"{human_bytes(used)} were in use before this engine, its whole budget is {human_bytes(budget)}",
        why="in 0.6.4 gpu_memory_utilization limits all processes on the card together; per engine again from 0.6.5",
    )


def _free_memory(log: BootLog, rank: RankMemory) -> Iterator[Correction]:
    if log.settings.get("refused_utilization") is None or not rank.free_bytes or not rank.total_bytes:
        return
    largest = floor(1000 * rank.free_bytes / rank.total_bytes) / 1000
    yield Correction(
        code="card-in-use",
        printed=f"utilization {log.settings['refused_utilization']:g} refused",
        corrected=f"at most {largest:.3f} fits beside what is already on the card",
        why=f"{human_bytes(rank.total_bytes - rank.free_bytes)} of {human_bytes(rank.total_bytes)} are in use by others",
    )


def _pipeline_refusal(log: BootLog, rank: RankMemory) -> Iterator[Correction]:
    """0.12 to 0.16 compare the whole model's need with the room of one pipeline stage."""
    refusal, stages = log.refusal or {}, log.settings.get("pipeline_parallel_size") or 1
    needed, room, length = (
        refusal.get("needed_bytes"),
        refusal.get("available_kv_bytes"),
        refusal.get("refused_len"),
    )
    if stages < 2 or not needed or not room or not length:
        return
    if log.version is not None and parse_version(log.version) >= (0, 17):
        return
    layers = [int(part) for part in str(log.settings.get("layers_per_stage") or "").split(",") if part]
    # The printed room is the first stage's own; without the layers an even split is assumed.
    share = layers[0] / sum(layers) if len(layers) == stages else 1 / stages
    tokens = int(room / (needed * share / length))
    fits = "fits" if needed * share <= room else "does not fit"
    yield Correction(
        code="pipeline-estimate",
        printed=f"estimated maximum model length {refusal.get('estimated_len')}",
        corrected=f"about {tokens // 16 * 16:,} tokens on the first stage, where {length:,} {fits}",
        why=f"the engine compares the need of all layers ({human_bytes(needed)}) with the room of one of {stages} "
        "stages; fixed in 0.17",
    )


def _hint(log: BootLog, rank: RankMemory) -> Iterator[Correction]:
    """The --kv-cache-memory suggestion; since 0.29 it counts the graphs twice."""
    hint, budget = rank.hint_requested_bytes, _budget(rank)
    if hint is None or budget is None or rank.peak_with_graphs_bytes is None or rank.consumed_bytes is None:
        return
    estimate, actual = rank.graphs_estimate_bytes or 0, rank.graphs_bytes or 0
    taken = rank.consumed_bytes + rank.peak_with_graphs_bytes - estimate + actual + _HINT_RESERVE
    right = budget - taken
    if abs(right - hint) <= 6 * ROUNDING:
        return
    full = (
        f" (or {human_bytes(rank.free_bytes - taken)} to fill the card)"
        if rank.free_bytes is not None
        else ""
    )
    yield Correction(
        code="negative-hint" if hint < 0 else "graphs-counted-twice",
        printed=f"--kv-cache-memory={hint} ({human_bytes(hint)})",
        corrected=f"--kv-cache-memory={right} ({human_bytes(right)}){full}",
        why=f"the suggestion subtracts the CUDA graph estimate ({human_bytes(estimate)}) beside the graphs it captured",
    )


def _derived_tokens(log: BootLog) -> Iterator[Correction]:
    """From 0.21 the token line is concurrency x length: a made-up figure where layers hold different token counts."""
    tokens, concurrency, length = log.kv_cache_tokens, log.max_concurrency, log.max_model_len
    if tokens is None or not concurrency or not length or log.engine != "vllm":
        return
    if log.version is not None and parse_version(log.version) < (0, 21):
        return
    derived = abs(tokens / length - concurrency) <= 0.0051
    block = log.block_size or 16
    mixed = bool(log.padding) or "attention_block_size" in log.settings or tokens % block != 0
    if derived and mixed:
        yield Correction(
            code="derived-token-figure",
            printed=f"{tokens:,} tokens",
            corrected=f"{concurrency:g} requests of {length:,} tokens; another length gives another figure",
            why="layers of this model hold different numbers of tokens, so the engine prints concurrency x "
            "max_model_len: memory divided by it is not bytes per token",
        )


def _ranks_differ(log: BootLog, rank: RankMemory) -> Iterator[Correction]:
    """The first rank's figure is what people read; the smallest counts."""
    first = log.ranks[0] if log.ranks else rank
    if len(log.ranks) < 2 or first.rank == rank.rank:
        return
    # A token line of the engine core stands for all ranks; only lines of their own differ.
    what = "kv_cache_tokens" if first.kv_cache_tokens != rank.kv_cache_tokens else "available_kv_bytes"
    most, least = getattr(first, what), getattr(rank, what)
    if most is None or least is None or most <= least:
        return
    shown = (lambda value: f"{value:,} tokens") if what == "kv_cache_tokens" else human_bytes
    yield Correction(
        code="another-rank-binds",
        printed=f"{shown(most)} on {first.rank}",
        corrected=f"{shown(least)} on {rank.rank}",
        why="every rank gets as many blocks as the fullest one can hold",
    )


def _other_rank_binds(log: BootLog, shape: ModelShape | None) -> Iterator[Correction]:
    """Printed memory that would hold more tokens than the engine gives: a rank that printed nothing binds."""
    tokens = log.kv_cache_tokens or (log.refusal or {}).get("refused_tokens")
    room = next((rank.available_kv_bytes for rank in log.ranks if rank.available_kv_bytes is not None), None)
    if tokens is None and log.num_gpu_blocks is not None:
        tokens = log.num_gpu_blocks * (log.block_size or 16)
    if (
        shape is None
        or tokens is None
        or room is None
        or len([r for r in log.ranks if r.available_kv_bytes]) > 1
    ):
        return
    per_token = _bytes_per_token(log, shape)
    if (
        per_token is None
        or tokens * per_token >= room - ROUNDING - 64 * per_token
        or tokens * per_token < 0.5 * room
    ):
        return
    yield Correction(
        code="another-rank-binds",
        printed=f"{human_bytes(room)} for the KV cache",
        corrected=f"{human_bytes(tokens * per_token)} are used ({tokens:,} tokens x {per_token:,} bytes)",
        why="a rank that did not print its memory has less room (the driver process, or the last pipeline stage "
        "with its logits), and all ranks get the same number of blocks",
    )


def _bytes_per_token(log: BootLog, shape: ModelShape) -> int | None:
    """Bytes of KV cache one token takes on one rank, None where layers differ."""
    from kvcatch.planner.pool import build_pool, bytes_per_token

    flags = EngineFlags(
        engine_version=log.version or "0.19.0",
        tensor_parallel_size=log.settings.get("tensor_parallel_size") or 1,
        pipeline_parallel_size=log.settings.get("pipeline_parallel_size") or 1,
        kv_cache_dtype=log.settings.get("kv_cache_dtype") or "auto",
        max_model_len=log.max_model_len,
        block_size=log.block_size,
    )
    try:
        pool = build_pool(shape, flags)
    except KVCatchError:
        return None
    return bytes_per_token(pool) if len(pool.groups) == 1 and len(pool.stages) == 1 else None


def _sampler(log: BootLog) -> Iterator[Correction]:
    """Out of memory in the sampler's warm-up: say what it wanted and what to lower."""
    oom = log.out_of_memory or {}
    requests, asked = oom.get("sampler_requests"), oom.get("asked_bytes")
    if not requests or not asked:
        return
    graphs = log.ranks[0].graphs_bytes if log.ranks else None
    beside = f"; CUDA graphs took {human_bytes(graphs)} outside the budget" if graphs else ""
    yield Correction(
        code="sampler-warm-up",
        printed=f"tried to allocate {human_bytes(asked)} of {human_bytes(oom.get('total'))}",
        corrected=f"max_num_seqs {requests // 2} halves it; 3 % less gpu_memory_utilization makes the same room",
        why=f"the sampler is warmed up with {requests} requests x the vocabulary in fp32 ({asked / GIB:.2f} GiB in one "
        f"piece) right after the KV cache is allocated{beside}",
    )
