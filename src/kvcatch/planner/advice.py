"""What to change when the peak does not fit, each with the numbers it would give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner.specs import Advice, EngineFlags, ModelShape, Plan

#: How far another model's size may be from the asked one to be "of the same class".
_SAME_CLASS = (0.6, 1.5)


def advice(shape: ModelShape, flags: EngineFlags, question: Any, result: Plan) -> tuple[Advice, ...]:
    """Changes that make the peak fit or bring it closer: first what fits, gentlest first, then what only helps."""
    found: list[Advice] = []
    for change, flag, new_flags, new_question, note in _changes(shape, flags, question, result):
        trial = _tried(shape, new_flags, new_question)
        if trial is None or not _better(trial, result):
            continue
        found.append(_advice(change, flag, trial, note))
    found = _one_card(found)
    found += _models(shape, flags, question, result)
    return tuple(sorted(found, key=lambda entry: not (entry.peak_fits and entry.starts)))


def _one_card(found: list[Advice]) -> list[Advice]:
    """Of several cards only the smallest that is enough, or the largest when none is."""
    cards = [entry for entry in found if entry.flag.startswith("--gpu ")]
    enough = [entry for entry in cards if entry.peak_fits and entry.starts]
    keep = enough[:1] or cards[-1:]
    return [entry for entry in found if entry not in cards or entry in keep]


def _advice(change: str, flag: str, trial: Plan, note: str) -> Advice:
    return Advice(
        change=change,
        flag=flag,
        starts=trial.starts,
        peak_fits=trial.peak_fits,
        kv_cache_tokens=trial.kv_cache_tokens,
        max_concurrency=trial.max_concurrency,
        peak_kv_bytes=trial.peak_kv_bytes,
        shortfall_bytes=trial.shortfall_bytes,
        note=note,
    )


def _tried(shape: ModelShape, flags: EngineFlags, question: Any) -> Plan | None:
    """The plan after a change, None when the engine would refuse the flags."""
    from kvcatch.planner.planning import plan_shape

    try:
        trial = plan_shape(shape, flags, question, advise=False)
    except KVCatchError:
        return None
    support = trial.kv_dtype_support
    return None if support is not None and support.get("supported") is False else trial


def _better(trial: Plan, before: Plan) -> bool:
    """Whether a change leads to a start, makes the peak fit, or at least shrinks the gap."""
    if (trial.starts and before.starts is False) or (trial.peak_fits and before.peak_fits is False):
        return True
    if trial.starts is False and before.starts:
        return False
    short, was = trial.shortfall_bytes, before.shortfall_bytes
    return short is not None and was is not None and short < was


Change = tuple[str, str, EngineFlags, Any, str]


def _changes(shape: ModelShape, flags: EngineFlags, question: Any, result: Plan) -> Iterator[Change]:
    """Candidates from the gentlest to the dearest."""
    replace = msgspec.structs.replace
    support = result.kv_dtype_support or {}
    if support.get("supported") is False and support.get("nearest"):
        yield (
            f"the nearest KV cache dtype with a kernel here: {support['nearest']}",
            f"--kv-cache-dtype {support['nearest']}",
            replace(flags, kv_cache_dtype=support["nearest"]),
            question,
            str(support.get("reason") or ""),
        )
    fewer = result.max_concurrency_that_fits
    if fewer and result.peak_concurrency and fewer < result.peak_concurrency:
        yield (
            f"at most {fewer:,} requests at once",
            f"--max-num-seqs {fewer}",
            replace(flags, max_num_seqs=fewer),
            replace(question, concurrency=fewer),
            "the others wait in the queue instead of preempting",
        )
    shorter = result.max_context_that_fits
    if shorter and result.peak_context and shorter < result.peak_context:
        yield (
            f"at most {shorter:,} tokens a request",
            f"--max-model-len {shorter}",
            replace(flags, max_model_len=shorter),
            replace(question, context=None, output=0, concurrency=result.peak_concurrency),
            "longer requests are refused",
        )
    elif result.starts is False and result.max_model_len_that_fits:
        longest = result.max_model_len_that_fits
        yield (
            f"a maximum length of {longest:,} tokens, the longest of which one request fits",
            f"--max-model-len {longest}",
            replace(flags, max_model_len=longest),
            question,
            "longer requests are refused",
        )
    # Memory the engine leaves unused by default.
    if flags.gpu_memory_bytes is not None and (flags.gpu_memory_utilization or 0.9) < 0.95:
        yield (
            "let the engine use 95% of the card",
            "--gpu-memory-utilization 0.95",
            replace(flags, gpu_memory_utilization=0.95),
            question,
            "leaves less for CUDA contexts and other processes",
        )
    if result.kv_cache_dtype in ("auto", "float16", "bfloat16"):
        yield (
            "fp8 KV cache: half the bytes",
            "--kv-cache-dtype fp8",
            replace(flags, kv_cache_dtype="fp8"),
            question,
            "check answers first: kvcatch quality",
        )
    batched = result.max_num_batched_tokens or 0
    if batched > 2048:
        yield (
            "smaller steps: less activation memory and shorter windows in flight",
            "--max-num-batched-tokens 2048",
            replace(flags, max_num_batched_tokens=2048),
            question,
            "long prompts take more steps",
        )
    given = flags.gpu_memory_bytes is None
    kept = "keeps the given KV memory per card" if given else "weights and KV heads are split"
    for tp in (2 * flags.tensor_parallel_size, 4 * flags.tensor_parallel_size):
        yield (
            f"tensor parallelism over {tp} cards",
            f"--tensor-parallel-size {tp}",
            replace(flags, tensor_parallel_size=tp),
            question,
            kept,
        )
    pp = 2 * flags.pipeline_parallel_size
    yield (
        f"{pp} pipeline stages",
        f"--pipeline-parallel-size {pp}",
        replace(flags, pipeline_parallel_size=pp),
        question,
        "each stage holds its layers only",
    )
    yield from _cards(flags, question)


def _cards(flags: EngineFlags, question: Any) -> Iterator[Change]:
    """All larger cards of the catalogue, smallest first."""
    if flags.gpu_memory_bytes is None or flags.device == "cpu":
        return
    from kvcatch.planner.catalogue import gpus

    seen: set[int] = set()
    for card in sorted(gpus(), key=lambda card: card.memory_bytes):
        size = round(card.gib)
        if card.memory_bytes <= 1.1 * flags.gpu_memory_bytes or size in seen or card.vendor != "nvidia":
            continue
        seen.add(size)
        yield (
            f"another card: {card.name}",
            f'--gpu "{card.name}"',
            msgspec.structs.replace(flags, gpu=card.name, gpu_memory_bytes=None),
            question,
            f"{card.gib:.0f} GiB",
        )


def _models(shape: ModelShape, flags: EngineFlags, question: Any, result: Plan) -> list[Advice]:
    """One model of the same class whose cache is smaller per token: fewer KV heads, or latent attention."""
    from kvcatch.planner.catalogue import models
    from kvcatch.planner.shape import model_shape

    mine, rate = _work(shape), result.bytes_per_token_per_gpu or 0
    best: tuple[int, ModelShape] | None = None
    for entry in models():
        if entry.kind != "checkpoint":
            continue
        config = entry.parsed()
        try:
            other = model_shape(entry.name, config)
        except KVCatchError:
            continue
        if not _SAME_CLASS[0] <= _work(other) / max(mine, 1) <= _SAME_CLASS[1]:
            continue
        trial = _tried(other, msgspec.structs.replace(flags, weights_bytes=None), question)
        cost = (trial.bytes_per_token_per_gpu or 0) if trial else 0
        if trial is None or not (trial.peak_fits and trial.starts) or not 0 < cost < rate:
            continue
        if best is None or cost < best[0]:
            best = (cost, other)
    if best is None:
        return []
    final = _tried(best[1], msgspec.structs.replace(flags, weights_bytes=None), question)
    if final is None:
        return []
    kind = "latent attention" if best[1].kv_lora_rank else f"{best[1].num_kv_heads} KV heads"
    note = f"{kind}, {best[0]:,} instead of {rate:,} bytes a token"
    return [_advice(f"a model of this size with a smaller cache: {best[1].name}", "", final, note)]


def _work(shape: ModelShape) -> float:
    """A size measure that needs no weights: layers x hidden², experts counted by their own width."""
    hidden = shape.hidden_size or 0
    inner = shape.intermediate_size or 4 * hidden
    if shape.num_experts and shape.moe_intermediate_size:
        inner = shape.num_experts * shape.moe_intermediate_size
    return shape.num_layers * hidden * (4 * hidden + 3 * inner)
