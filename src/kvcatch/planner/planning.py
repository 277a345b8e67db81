"""``plan``: does it fit, how much of it, and what would make it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvcatch import __version__
from kvcatch.errors import KVCatchError
from kvcatch.planner import capacity
from kvcatch.planner.capacity import Pool
from kvcatch.planner.cells import effective_kv_dtype
from kvcatch.planner.configfile import load_config
from kvcatch.planner.drafts import draft_shape
from kvcatch.planner.engine import era_of, lengths_of, parse_version
from kvcatch.planner.layout import Group
from kvcatch.planner.pool import (
    build_pool,
    bytes_per_token,
    bytes_per_token_in_window,
    fixed_bytes_per_request,
)
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import RING, EngineFlags, KVGroupLayout, MemoryPart, MemoryPlan, ModelShape, Plan

if TYPE_CHECKING:
    from kvcatch.planner.catalogue import GPU


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What has to fit: ``concurrency`` requests of ``context`` tokens, plus ``output`` tokens each when given.

    None = the engine's own limits: max_num_seqs requests of max_model_len tokens. ``lengths`` are the total lengths
    of expected requests, in tokens.
    """

    concurrency: int | None = None
    context: int | None = None
    output: int = 0
    lengths: tuple[int, ...] = ()


def plan(model: str | dict[str, Any], *, advise: bool = True, **options: Any) -> Plan:
    """KV capacity of a model: a config.json, a folder, a known name or a configuration object.

    ``options`` are the fields of ``EngineFlags`` (vLLM's own names) and of ``Question``. Raises KVCatchError for
    an unknown model, a bad config, or flags that do not fit.
    """
    name, config = ("model", model) if isinstance(model, dict) else load_config(model)
    known = {field.name for field in msgspec.structs.fields(EngineFlags)}
    asked = {field.name for field in msgspec.structs.fields(Question)}
    unknown = sorted(set(options) - known - asked)
    if unknown:
        raise KVCatchError(f"plan() has no option {unknown[0]}.", "The options are vLLM's own flags.")
    flags = EngineFlags(**{key: value for key, value in options.items() if key in known})
    question = Question(**{key: value for key, value in options.items() if key in asked})
    return plan_shape(model_shape(name, config), flags, question, advise=advise)


def plan_shape(
    shape: ModelShape, flags: EngineFlags, question: Question | None = None, advise: bool = True
) -> Plan:
    """The plan of a model already read."""
    question = question or Question()
    check_flags(flags)
    flags, shape = _asked_length(shape, flags, question)
    flags, gpu = with_card(flags)
    memory = _memory(shape, flags, gpu)
    pool = build_pool(shape, flags, flags.gpu_memory_bytes)
    available = available_per_stage(pool, flags, memory)
    if flags.max_model_len == -1 and available is not None:
        # --max-model-len -1: the engine takes the longest that fits.
        fitted = capacity.longest(pool, available, pool.limits.max_model_len)
        if fitted:
            flags = msgspec.structs.replace(flags, max_model_len=fitted)
            pool = build_pool(shape, flags, flags.gpu_memory_bytes)
    result = _answer(shape, flags, question, pool, memory, available)
    if advise and available is not None and (result.peak_fits is False or result.starts is False):
        from kvcatch.planner.advice import advice

        result = msgspec.structs.replace(result, advice=advice(shape, flags, question, result))
    return result


def _asked_length(
    shape: ModelShape, flags: EngineFlags, question: Question
) -> tuple[EngineFlags, ModelShape]:
    """Who asks for a context and names no --max-model-len plans an engine of that length, and is told so."""
    asked = (question.context or 0) + question.output
    promised = lengths_of(shape, flags).longest
    if flags.max_model_len is not None or question.context is None or asked < 1:
        return flags, shape
    if promised is not None and asked >= promised:
        return flags, shape
    stated = "nothing" if promised is None else f"{promised:,}"
    note = f"max_model_len = {asked:,}, from --context (the config promises {stated}): give the engine --max-model-len"
    return (
        msgspec.structs.replace(flags, max_model_len=asked),
        msgspec.structs.replace(shape, assumed=(*shape.assumed, note)),
    )


def check_flags(flags: EngineFlags) -> None:
    """Raises KVCatchError for values no engine takes."""
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_gpu_blocks_override",
    ):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise KVCatchError(f"--{name.replace('_', '-')} is {value}.", "It has to be at least 1.")
    length = flags.max_model_len
    if length is not None and length < 1 and length != -1:
        raise KVCatchError(
            f"--max-model-len is {length}.", "Give a length in tokens, or -1 for the longest that fits."
        )
    share = flags.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise KVCatchError(f"--gpu-memory-utilization is {share}.", "It is a fraction above 0 and up to 1.")
    if flags.tensor_parallel_size % flags.decode_context_parallel_size:
        raise KVCatchError(
            f"--decode-context-parallel-size {flags.decode_context_parallel_size} does not divide "
            f"--tensor-parallel-size {flags.tensor_parallel_size}.",
            "DCP reuses the tensor-parallel ranks.",
        )
    parse_version(flags.engine_version)


def with_card(flags: EngineFlags) -> tuple[EngineFlags, GPU | None]:
    """The flags with the memory of the named card filled in. Raises KVCatchError for an unknown card."""
    if flags.gpu is None:
        return flags, None
    from kvcatch.planner.catalogue import find_gpu

    card = find_gpu(flags.gpu)
    if card is None:
        raise KVCatchError(
            f"unknown GPU {flags.gpu!r}.", "Give its memory instead, for example --gpu-memory 80GiB."
        )
    if flags.gpu_memory_bytes is None:
        flags = msgspec.structs.replace(flags, gpu_memory_bytes=card.memory_bytes)
    return flags, card


def _memory(shape: ModelShape, flags: EngineFlags, gpu: GPU | None) -> MemoryPlan:
    """The memory split: given as a whole, or from the memory model."""
    given = (
        flags.kv_cache_memory_bytes if flags.kv_cache_memory_bytes is not None else flags.available_kv_bytes
    )
    if given is not None and flags.gpu_memory_bytes is None:
        return MemoryPlan(available_kv=MemoryPart(bytes=given, evidence="given"))
    if flags.gpu_memory_bytes is None:
        return MemoryPlan()
    from kvcatch.planner.memory import memory_plan

    return memory_plan(shape, flags, gpu)


def available_per_stage(pool: Pool, flags: EngineFlags, memory: MemoryPlan) -> tuple[int, ...] | None:
    """Bytes for the KV cache on each pipeline stage, None when nothing is known about memory."""
    stages = len(pool.stages)
    override = flags.num_gpu_blocks_override
    if override is not None and (pool.era.version >= (0, 20) or memory.available_kv.bytes is None):
        return tuple(override * size for size in pool.stage_block_bytes)
    if flags.available_kv_stages:
        if len(flags.available_kv_stages) != stages:
            raise KVCatchError(
                f"--available-kv names {len(flags.available_kv_stages)} stages of {stages}.",
                "Give one size a stage.",
            )
        return flags.available_kv_stages
    if memory.available_kv_per_stage and len(memory.available_kv_per_stage) == stages:
        return memory.available_kv_per_stage
    have = memory.available_kv.bytes
    return None if have is None else (have,) * stages


def _answer(
    shape: ModelShape,
    flags: EngineFlags,
    question: Question,
    pool: Pool,
    memory: MemoryPlan,
    available: tuple[int, ...] | None,
) -> Plan:
    limits = pool.limits
    length = limits.max_model_len
    ceiling = max(length, lengths_of(shape, flags).longest or 0)
    need = capacity.request_blocks(pool, length)
    widest = max(pool.stage_block_bytes, default=0)
    blocks = tokens = usable = stage = longest = None
    concurrency = starts = None
    lines: list[str] = []
    each: tuple[int, ...] = ()
    if available is not None:
        blocks, each, stage = capacity.num_blocks(pool, available)
        if flags.num_gpu_blocks_override is not None and pool.groups:
            blocks = flags.num_gpu_blocks_override
        usable = max(0, blocks - 1) if era_of(flags.engine_version).hybrid_groups else blocks
        tokens = capacity.kv_tokens(pool, blocks, length)
        concurrency = capacity.max_concurrency(pool, blocks, length)
        accepted = capacity.accepted_blocks(pool, blocks)
        longest = capacity.longest_in_blocks(pool, accepted, ceiling) if pool.groups else ceiling
        starts = (need <= accepted) if pool.groups else True
        swap = None
        if flags.swap_space_bytes is not None and widest:
            swap = flags.swap_space_bytes // widest
        lines = capacity.log_lines(pool, blocks, available, flags.device, swap)
    result = Plan(
        kvcatch_version=__version__,
        model=shape.name,
        architecture=shape.architecture,
        engine_version=flags.engine_version,
        kv_cache_dtype=effective_kv_dtype(shape, flags),
        max_model_len=length,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        bytes_per_token_per_gpu=bytes_per_token(pool),
        bytes_per_token_in_window=bytes_per_token_in_window(pool),
        fixed_bytes_per_request=fixed_bytes_per_request(pool, length),
        block_size=min(
            (group.first.block_size for group in pool.groups if group.first.kind != RING), default=None
        ),
        block_bytes=widest,
        num_blocks=blocks,
        usable_blocks=usable,
        kv_cache_tokens=tokens,
        max_concurrency=concurrency,
        blocks_per_max_len_request=need,
        bytes_per_max_len_request=need * widest,
        min_reusable_prefix_tokens=capacity.minimum_reusable_prefix(pool),
        groups=tuple(_group(pool, group, length) for group in pool.groups),
        stage_blocks=each if len(each) > 1 else (),
        stage_layers=tuple(sum(len(group.specs) for group in groups) for groups in pool.stages)
        if len(pool.stages) > 1
        else (),
        binding_stage=stage if len(each) > 1 else None,
        memory=memory,
        max_model_len_that_fits=longest,
        starts=starts,
        log_lines=tuple(lines),
        kv_dtype_support=_dtype_support(shape, flags),
        assumed=shape.assumed,
        warnings=(*shape.warnings, *memory.warnings, *_warnings(shape, flags, pool, available)),
    )
    if starts and usable is not None and need > usable:
        text = (
            "a request of max_model_len needs the null block too: this version starts, but it never finishes"
        )
        result = msgspec.structs.replace(result, warnings=(*result.warnings, text))
    support = result.kv_dtype_support or {}
    if support.get("supported") is False:
        result = msgspec.structs.replace(result, starts=False)
    for lost in support.get("switches_off") or ():
        text = f"--kv-cache-dtype {flags.kv_cache_dtype} switches off {lost['what']} ({lost['source']})"
        result = msgspec.structs.replace(result, warnings=(*result.warnings, text))
    from kvcatch.planner.peak import with_peak

    return with_peak(result, question, pool, flags)


def _group(pool: Pool, group: Group, length: int) -> KVGroupLayout:
    widest = max(len(other.specs) for other in pool.groups)
    pages = {spec.page_bytes for spec in group.specs}
    return KVGroupLayout(
        kind=group.first.kind,
        layers=len(group.specs),
        block_size=group.first.block_size,
        page_bytes=group.first.page_bytes
        if len(pages) == 1
        else sum(spec.page_bytes for spec in group.specs),
        padding_layers=0 if group.uniform else widest - len(group.specs),
        blocks_per_request=capacity.group_blocks(pool, group, length),
        window_tokens=group.first.window,
        padded_from_bytes=group.first.padded_from,
        layer_indices=tuple(spec.index for spec in group.specs),
    )


def _dtype_support(shape: ModelShape, flags: EngineFlags) -> dict[str, Any] | None:
    """Whether the KV dtype has a kernel on the card, None when no card is named."""
    if flags.gpu is None or flags.device == "cpu":
        return None
    from kvcatch.planner.catalogue import find_gpu
    from kvcatch.planner.dtypes import kv_dtype_support

    return kv_dtype_support(shape, flags, find_gpu(flags.gpu))


def _warnings(
    shape: ModelShape, flags: EngineFlags, pool: Pool, available: tuple[int, ...] | None
) -> list[str]:
    """What the engine gets wrong or the user should know."""
    found = []
    length = pool.limits.max_model_len
    promised = lengths_of(shape, flags)
    if promised.longest and length > promised.longest:
        found.append(
            f"max_model_len {length:,} is above the {promised.longest:,} the config promises; "
            "the engine refuses it without VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        )
    elif flags.max_model_len is None and promised.longest != promised.start:
        found.append(
            f"with LongRoPE the engine starts with {length:,}, the length before scaling: for more, up to "
            f"{promised.longest:,}, give --max-model-len"
        )
    if len(pool.groups) > 1 and pool.era.token_line == "derived":
        found.append(
            "the engine's token figure is derived (concurrency x max_model_len) because layers hold different "
            "numbers of tokens: do not divide memory by it"
        )
    if available is not None and len(pool.stages) > 1 and pool.era.check_sums_layers and pool.groups:
        printed = capacity.engine_estimate(pool, available[0], length)
        true = capacity.longest(pool, available, length)
        if printed < true:
            found.append(
                f"this engine version compares the whole model's need with one stage's memory: it prints an estimated "
                f"maximum of {printed:,} tokens where {true:,} fit, and refuses more (fixed in 0.17)"
            )
    if flags.speculative_model is not None and draft_shape(flags.speculative_model) is None:
        found.append(f"the draft model {flags.speculative_model} is not at hand: its layers are not counted")
    dcp = flags.decode_context_parallel_size
    if dcp > 1 and any(spec.window for group in pool.groups for spec in group.specs):
        found.append("decode context parallelism does not support sliding windows")
    if available is not None and flags.data_parallel_size > 1:
        found.append(f"{flags.data_parallel_size} independent pools: capacity is per replica")
    return found
