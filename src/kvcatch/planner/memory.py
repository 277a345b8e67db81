"""Where the memory of a card goes: weights, activation peak, CUDA graphs, the rest, and what is left for KV.

The identity is vLLM's (``Worker.determine_available_memory``): available KV = utilisation × total - weights -
activation peak - non-torch, and from 0.21 minus the CUDA graph estimate. Every part says whether it was given,
is exact, derived or estimated, and how far off it may be.
"""

from __future__ import annotations

import msgspec

from kvcatch.planner.activations import FITTED, Activations, Constants, activation_peak
from kvcatch.planner.catalogue import GPU
from kvcatch.planner.engine import Limits, parse_version, resolve_limits
from kvcatch.planner.layout import pipeline_split
from kvcatch.planner.specs import EngineFlags, MemoryPart, MemoryPlan, ModelShape
from kvcatch.planner.tensors import own_layers
from kvcatch.planner.weights import StageWeights, stage_weights
from kvcatch.units import GIB, human_bytes

#: Multiprocessors assumed for an unknown card.
_SMS = 108
#: The CUDA context of one process: gone before anything is measured, outside the budget (cases A77-A129).
_CONTEXT = int(0.5 * GIB)
#: Room the sampler's warm-up needs, in fp32 logits. At 0.95 of an H100, 1.00 GiB of them started beside 1.14 GiB of
#: graphs (case A86), 0.77 beside 1.84 did not (B54): the truth lies between 2.1 and 2.3.
_WARMUP_COPIES = 2.1
#: Experts capture a quarter more than the engine estimates (cases A78, A111, A115, A125: 13 to 34 %).
_EXPERT_GRAPHS = 1.25
#: Largest batch captured by default, tokens; gpt-oss asks for 1024 (GptOssForCausalLMConfig).
_CAPTURED = 512


class Stage(msgspec.Struct, frozen=True):
    """Memory of one rank of one pipeline stage, bytes. ``kv_layers`` = layers that hold KV there."""

    weights: StageWeights
    activations: Activations
    graphs: int
    non_torch: int
    kv_layers: int


def memory_plan(
    shape: ModelShape, flags: EngineFlags, gpu: GPU | None, constants: Constants = FITTED
) -> MemoryPlan:
    """The memory of the binding card. Raises KVCatchError when the parts cannot be split over the stages."""
    total = _total(flags, gpu)
    limits = resolve_limits(shape, flags, total.bytes)
    stages = _stages(shape, flags, limits, gpu, constants)
    budget = _budget(flags, total)
    counted = parse_version(flags.engine_version) >= (0, 21)
    parts = [_parts(flags, stage, counted=counted) for stage in stages]
    available = [_available(flags, budget, part, counted=counted) for part in parts]
    binding = min(
        range(len(stages)),
        key=lambda i: (available[i].bytes or 0) / max(1, stages[i].kv_layers),
    )
    weights, activation, graphs, non_torch = parts[binding]
    return MemoryPlan(
        total=total,
        budget=budget,
        weights=weights,
        activation_peak=activation,
        cuda_graphs=graphs,
        non_torch=non_torch,
        available_kv=available[binding],
        binding_rank=f"pipeline stage {binding} of {len(stages)}" if len(stages) > 1 else "",
        available_kv_per_stage=tuple(part.bytes for part in available if part.bytes is not None),
        warnings=tuple(_warnings(shape, flags, limits, total, budget, graphs)),
    )


def sampler_warmup_bytes(shape: ModelShape, limits: Limits) -> int:
    """The largest single tensor of the sampler warm-up right after KV allocation: fp32 logits.

    1,024 requests of gpt-oss-20b want 785.5 MiB (llm-d-planner pull request 205).
    """
    return limits.max_num_seqs * (shape.vocab_size or 0) * 4


def prompt_logprobs_bytes(shape: ModelShape, tokens: int) -> int:
    """Logits of ``tokens`` prompt tokens in 16 bits and fp32, which no profile covers (vLLM issue 5907)."""
    return tokens * (shape.vocab_size or 0) * 6


def default_utilization(version: str) -> float:
    """``gpu_memory_utilization`` when it is not given: 0.92 in 0.24 and later, 0.9 in 0.12 and before."""
    return 0.92 if parse_version(version) >= (0, 20) else 0.9


def _stages(
    shape: ModelShape, flags: EngineFlags, limits: Limits, gpu: GPU | None, constants: Constants
) -> list[Stage]:
    bounds = pipeline_split(shape.num_layers, flags.pipeline_parallel_size, flags.pp_layer_partition)
    counts = [end - start for start, end in bounds]
    weights = stage_weights(shape, flags, counts, gpu.capability if gpu else None)
    mixers, stages = own_layers(shape), []
    for number, (start, end) in enumerate(bounds):
        indices = range(start, end)
        activations = activation_peak(
            shape,
            flags,
            limits,
            indices=indices,
            first=number == 0,
            last=number == len(counts) - 1,
            sms=(gpu.sms if gpu else None) or _SMS,
            constants=constants,
        )
        holders = [layer for i in indices for layer in mixers.get(i, [])]
        stages.append(
            Stage(
                weights[number],
                activations,
                _graphs(shape, flags, limits, end - start, constants),
                _non_torch(flags, constants),
                sum(1 for layer in holders if layer.kind != "none" and not layer.shares_kv),
            )
        )
    return stages


def _non_torch(flags: EngineFlags, constants: Constants) -> int:
    """CUDA modules and NCCL. Pipeline stages send nothing in the profile run, so only tensor groups count."""
    size = constants.non_torch_single
    if flags.tensor_parallel_size > 1:
        size += constants.non_torch_group + constants.non_torch_rank * flags.tensor_parallel_size
    return int(size)


def _graphs(shape: ModelShape, flags: EngineFlags, limits: Limits, layers: int, constants: Constants) -> int:
    """The engine's estimate of its graph pool, in proportion to the largest batch captured."""
    if flags.enforce_eager or flags.device == "cpu":
        return 0
    size = constants.graph_base + constants.graph_layer * layers
    size += constants.graph_experts if shape.num_experts else 0
    size += constants.graph_latent if shape.kv_lora_rank else 0
    widest = 2 * _CAPTURED if shape.model_type.startswith("gpt_oss") else _CAPTURED
    widest = max(flags.cudagraph_capture_sizes or (min(widest, 2 * limits.max_num_seqs),))
    return int(size * max(0.25, widest / _CAPTURED))


def _total(flags: EngineFlags, gpu: GPU | None) -> MemoryPart:
    if flags.gpu_memory_bytes is not None and (gpu is None or flags.gpu_memory_bytes != gpu.memory_bytes):
        return MemoryPart(bytes=flags.gpu_memory_bytes, evidence="given", band=0)
    if gpu is None:
        return MemoryPart(note="name the card with --gpu or its memory with --gpu-memory")
    evidence = "exact" if gpu.exact else "estimated"
    return MemoryPart(
        bytes=gpu.memory_bytes, evidence=evidence, band=gpu.band_bytes, note=f"{gpu.name}: {gpu.source}"
    )


def _budget(flags: EngineFlags, total: MemoryPart) -> MemoryPart:
    share = flags.gpu_memory_utilization
    note = "" if share is not None else "default utilization of this version"
    share = default_utilization(flags.engine_version) if share is None else share
    if total.bytes is None:
        return MemoryPart(note=total.note)
    return MemoryPart(
        bytes=int(total.bytes * share), evidence="derived", band=int((total.band or 0) * share), note=note
    )


def _parts(
    flags: EngineFlags, stage: Stage, *, counted: bool
) -> tuple[MemoryPart, MemoryPart, MemoryPart, MemoryPart]:
    """weights, activation peak, CUDA graphs, non-torch; what the user gave wins."""
    off = _activation_band(flags)
    activation = stage.activations.bytes
    graphs_note = "" if counted else "captured after the pool is allocated, outside the budget before 0.21"
    return (
        _given(flags.weights_bytes)
        or MemoryPart(
            bytes=max(0, stage.weights.total - int(flags.cpu_offload_gb * GIB)),
            evidence="derived",
            band=stage.weights.band,
            note="; ".join(stage.weights.notes),
        ),
        _given(flags.activation_bytes)
        or MemoryPart(
            bytes=activation,
            band=int(activation * off + 0.03 * GIB),
            note=f"set by the {stage.activations.limit}",
        ),
        _given(flags.cuda_graphs_bytes)
        or MemoryPart(
            bytes=stage.graphs,
            evidence="estimated" if stage.graphs else "exact",
            band=int(0.35 * stage.graphs + 0.25 * GIB) if stage.graphs else 0,
            note=graphs_note if stage.graphs else "none captured",
        ),
        _given(flags.non_torch_bytes) or MemoryPart(bytes=stage.non_torch, band=_non_torch_band(flags)),
    )


def _activation_band(flags: EngineFlags) -> float:
    """Fraction of the activation peak: small where logs prove the model (0.19), wider away from it."""
    version = parse_version(flags.engine_version)
    if (0, 17) <= version < (0, 25):
        return 0.05
    return 0.3 if version < (0, 10) or version >= (0, 31) else 0.15


def _non_torch_band(flags: EngineFlags) -> int:
    """±0.15 GiB on one card, ±0.3 in a tensor group; a pipeline's or replica's own share is not in any log."""
    if flags.tensor_parallel_size > 1:
        return int(0.3 * GIB)
    return int((0.5 if flags.pipeline_parallel_size * flags.data_parallel_size > 1 else 0.15) * GIB)


def _given(value: int | None) -> MemoryPart | None:
    return MemoryPart(bytes=value, evidence="given", band=0) if value is not None else None


def _available(
    flags: EngineFlags, budget: MemoryPart, parts: tuple[MemoryPart, ...], *, counted: bool
) -> MemoryPart:
    fixed = flags.available_kv_bytes if flags.available_kv_bytes is not None else flags.kv_cache_memory_bytes
    if fixed is not None:
        return MemoryPart(bytes=fixed, evidence="given", band=0)
    if flags.device == "cpu":
        return MemoryPart(note="on CPU the pool is what VLLM_CPU_KVCACHE_SPACE says: give --available-kv")
    if budget.bytes is None:
        return MemoryPart(note=budget.note)
    weights, activation, graphs, non_torch = parts
    taken = [weights, activation, non_torch, *([graphs] if counted else [])]
    left = budget.bytes - sum(part.bytes or 0 for part in taken)
    return MemoryPart(
        bytes=left,
        evidence="given" if all(part.evidence == "given" for part in taken) else "estimated",
        band=(budget.band or 0) + sum(part.band or 0 for part in taken),
        note="" if left > 0 else "nothing is left for the KV cache",
    )


def _warnings(
    shape: ModelShape,
    flags: EngineFlags,
    limits: Limits,
    total: MemoryPart,
    budget: MemoryPart,
    graphs: MemoryPart,
) -> list[str]:
    """What may still run out of memory after the KV cache has been sized."""
    found: list[str] = []
    if total.bytes is None or budget.bytes is None or flags.device == "cpu":
        return found
    warmup = sampler_warmup_bytes(shape, limits)
    counted = parse_version(flags.engine_version) >= (0, 21)
    outside = 0 if counted else (graphs.bytes or 0) * (_EXPERT_GRAPHS if shape.num_experts else 1)
    if total.bytes - budget.bytes - _CONTEXT < outside + _WARMUP_COPIES * warmup:
        found.append(
            f"the sampler warm-up asks for {human_bytes(warmup)} in one piece ({limits.max_num_seqs} requests x "
            f"{shape.vocab_size} tokens) and little is left outside the budget: lower max_num_seqs or "
            "gpu_memory_utilization if start-up runs out of memory"
        )
    if flags.max_logprobs:
        tokens = limits.max_num_batched_tokens
        found.append(
            f"prompt_logprobs of {tokens} tokens needs {human_bytes(prompt_logprobs_bytes(shape, tokens))} "
            "that no profile covers: leave that much room"
        )
    return found
