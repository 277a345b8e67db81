"""Findings about the card's memory, from logs with tracebacks and from worker ranks: KVC101 to KVC111.

An out-of-memory text is explained in a fixed order: was the KV cache at its peak, was its memory in pieces,
what else was there. The KV cache itself never grows after start, so the answer is mostly in the third part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcatch.analysis.evidence import Case
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Evidence, Finding
from kvcatch.sources.failures import Failures, OutOfMemory
from kvcatch.units import GIB, MIB, human_bytes, human_count, human_ratio

#: functions of a traceback that say what was being done, in the order of trust
_SAMPLER = ("_dummy_sampler_run", "_dummy_pooler_run")
_LOGPROBS = (
    "_get_prompt_logprobs_dict", "_get_prompt_logprobs", "compute_logprobs", "gather_logprobs", "get_logprobs",
    "_get_logprobs", "prompt_logprobs", "compute_prompt_logprobs",
)  # fmt: skip
_GRAPHS = ("capture_model", "_capture_cudagraphs", "capture_graph", "graph_capture", "capture")
_PROFILE = ("profile_run", "determine_available_memory", "determine_num_available_blocks")
_VISION = ("get_multimodal_embeddings", "embed_multimodal", "_process_image_input", "visual", "get_image_features",
           "_process_video_input", "execute_mm_encoder", "_execute_mm_encoder", "get_input_embeddings")  # fmt: skip
#: the allocator hands out large memory in pieces of this size
_PIECE = 2 * MIB


def out_of_memory(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC101 to KVC109: one finding per out-of-memory text."""
    if case.log is None:
        return
    for oom in case.log.oom[:5]:
        yield _explain(case, case.log, oom, limits)


def _explain(case: Case, log: Failures, oom: OutOfMemory, limits: Limits) -> Finding:
    steps = (*_kv_peak(case, oom), *_pieces(oom), *_rest(log, oom))
    asked = human_bytes(oom.requested)
    for decide in (_impossible, _sampler, _logprobs, _graphs, _multimodal, _other_process, _allocator):
        answer = decide(log, oom, limits)
        if answer is not None:
            code, title, remedy, more = answer
            return found(
                code, "critical", f"out of memory: {asked} {title}", *steps, *more, remedy=remedy,
                unix_seconds=oom.unix_seconds,
            )  # fmt: skip
    code, title, remedy = _budget(log, oom, limits)
    return found(
        code,
        "critical",
        f"out of memory: {asked} {title}",
        *steps,
        remedy=remedy,
        unix_seconds=oom.unix_seconds,
    )


def _kv_peak(case: Case, oom: OutOfMemory) -> Iterator[Evidence]:
    """First question: was the KV cache at its peak?"""
    usage = case.series.get("usage") if case.series is not None else None
    if usage is None or case.series is None:
        yield fact("1. KV cache: no usage line in the log; it is reserved at start and cannot grow")
        return
    before = usage
    if oom.unix_seconds is not None and case.series.unix[0] > 1e8:
        known = case.series.unix <= oom.unix_seconds
        before = usage[known] if known.any() else usage[:1]
    peak, last = float(np.nanmax(before)), float(before[-1])
    yield fact(
        f"1. KV cache: {human_ratio(last)} used in the last line before, peak {human_ratio(peak)}; it is reserved "
        "at start and cannot grow", last, "ratio",
    )  # fmt: skip


def _pieces(oom: OutOfMemory) -> Iterator[Evidence]:
    """Second question: is memory there, in pieces?"""
    if oom.unallocated is None:
        yield fact("2. fragmentation: the text does not say what PyTorch reserved")
        return
    verdict = "more than" if oom.unallocated >= oom.requested else "less than"
    yield fact(
        f"2. fragmentation: {human_bytes(oom.unallocated)} reserved but unallocated, {verdict} the "
        f"{human_bytes(oom.requested)} asked for", oom.unallocated, "bytes",
    )  # fmt: skip


def _rest(log: Failures, oom: OutOfMemory) -> Iterator[Evidence]:
    """Third question: what else is in memory? The arithmetic in full."""
    if oom.total is not None and oom.in_use is not None:
        free = oom.free or 0
        others = max(0, oom.total - oom.in_use - free)
        yield fact(
            f"3. card: {human_bytes(oom.total)} total - {human_bytes(oom.in_use)} this process - {human_bytes(free)} free "
            f"= {human_bytes(others)} other processes", others, "bytes",
        )  # fmt: skip
    if oom.in_use is not None and oom.allocated is not None:
        reserved = oom.unallocated or 0
        outside = max(0, oom.in_use - oom.allocated - reserved)
        yield fact(
            f"   this process: {human_bytes(oom.in_use)} - {human_bytes(oom.allocated)} PyTorch - "
            f"{human_bytes(reserved)} reserved = {human_bytes(outside)} outside PyTorch", outside, "bytes",
        )  # fmt: skip
    if oom.total is not None and log.utilization is not None and oom.in_use is not None:
        budget = int(log.utilization * oom.total)
        over = oom.in_use - budget
        sign = "over" if over > 0 else "below"
        yield fact(
            f"   budget: {log.utilization:g} x {human_bytes(oom.total)} = {human_bytes(budget)}, this process is "
            f"{human_bytes(abs(over))} {sign} it", over, "bytes",
        )  # fmt: skip
    if oom.private:
        yield fact(
            f"   of it {human_bytes(oom.private)} in private pools (CUDA graphs)", oom.private, "bytes"
        )


_Answer = tuple[str, str, str, list[Evidence]] | None


def _impossible(log: Failures, oom: OutOfMemory, limits: Limits) -> _Answer:
    if oom.total is None or oom.requested <= oom.total:
        return None
    more = [
        fact(
            f"{human_bytes(oom.requested)} asked for, the card has {human_bytes(oom.total)}",
            oom.requested,
            "bytes",
        )
    ]
    return "KVC108", "in one piece is more than the whole card", "", more


def _among(oom: OutOfMemory, names: tuple[str, ...]) -> bool:
    return any(frame in names for frame in oom.frames)


def _sampler(log: Failures, oom: OutOfMemory, limits: Limits) -> _Answer:
    if oom.dummy_requests is None and not _among(oom, _SAMPLER):
        return None
    more, remedy = [], ""
    seqs = oom.dummy_requests or _setting(log, "max_num_seqs")
    if seqs:
        vocabulary = oom.requested / (4 * seqs)
        more.append(
            fact(f"{human_count(seqs)} dummy requests x 4 bytes x a vocabulary of about {human_count(vocabulary)} = "
                 f"{human_bytes(oom.requested)}", oom.requested, "bytes")
        )  # fmt: skip
        if oom.free is not None:
            fit = int(seqs * oom.free / oom.requested)
            lower = 1 << max(0, fit.bit_length() - 1)
            remedy = f"--max-num-seqs {lower} ({human_count(fit)} would just fit)"
            lowered = _lower(log, oom)
            remedy += f", or {lowered}." if lowered else "."
    return "KVC102", "for the sampler's warm-up", remedy, more


def _logprobs(log: Failures, oom: OutOfMemory, limits: Limits) -> _Answer:
    if not _among(oom, _LOGPROBS):
        return None
    more = []
    tokens = _setting(log, "max_num_batched_tokens")
    if tokens:
        more.append(
            fact(f"{human_count(tokens)} tokens x vocabulary x 6 bytes (logits in 16 bit, log softmax in 32 bit): "
                 f"a vocabulary of 150,000 needs {human_bytes(tokens * 150_000 * 6)}", tokens * 150_000 * 6, "bytes")
        )  # fmt: skip
    return "KVC103", "for log probabilities of prompt tokens", "", more


def _graphs(log: Failures, oom: OutOfMemory, limits: Limits) -> _Answer:
    if not _among(oom, _GRAPHS):
        return None
    more = [fact(f"{human_bytes(oom.private)} in graphs so far", oom.private, "bytes")] if oom.private else []
    lowered = _lower(log, oom, oom.private or 0)
    remedy = f"{lowered}, or capture fewer sizes, or --enforce-eager." if lowered else ""
    return "KVC104", "while CUDA graphs were captured", remedy, more


def _multimodal(log: Failures, oom: OutOfMemory, limits: Limits) -> _Answer:
    profiling = _among(oom, _PROFILE)
    if not profiling or not (_among(oom, _VISION) or log.multimodal):
        return None
    more = []
    if log.multimodal:
        more.append(
            fact(
                f"the profile uses {human_count(log.multimodal)} tokens of images and video",
                log.multimodal,
                "tokens",
            )
        )
    return "KVC109", "in the profile run with the largest image", "", more


def _other_process(log: Failures, oom: OutOfMemory, limits: Limits) -> _Answer:
    others = sum(size for _, size in oom.others)
    if oom.total is not None and oom.in_use is not None and not others:
        others = oom.total - oom.in_use - (oom.free or 0)
    # Drivers and contexts of a few hundred MiB are not another engine.
    if oom.total is None or others < max(limits.others_ratio * oom.total, limits.oom_slack_bytes):
        return None
    if others < oom.requested - (oom.free or 0):
        return None
    more = [fact(f"{human_bytes(others)} belong to other processes", others, "bytes")]
    for pid, size in oom.others[:3]:
        more.append(fact(f"process {pid}: {human_bytes(size)}", size, "bytes"))
    remedy = f"Move it away, or start with --gpu-memory-utilization {max(0.05, (oom.total - others) / oom.total - 0.02):.2f}."
    return "KVC107", f"while other processes hold {human_bytes(others)}", remedy, more


def _allocator(log: Failures, oom: OutOfMemory, limits: Limits) -> _Answer:
    if oom.unallocated is None or oom.unallocated < oom.requested:
        return None
    times = oom.unallocated / oom.requested
    more = [fact(f"reserved but unallocated is {times:.1f} times the request", times)]
    return "KVC105", "although PyTorch holds more than that unused", "", more


def _budget(log: Failures, oom: OutOfMemory, limits: Limits) -> tuple[str, str, str]:
    """What is left: memory outside the budget, or peaks on top of each other while serving."""
    lowered = _lower(log, oom)
    remedy = f"{lowered}." if lowered else ""
    outside = 0
    if oom.in_use is not None and oom.allocated is not None:
        outside = oom.in_use - oom.allocated - (oom.unallocated or 0)
    serving = not _among(oom, _PROFILE) and _among(
        oom, ("execute_model", "step", "_model_forward", "sample_tokens")
    )
    if serving and outside < GIB:
        if remedy:
            remedy = f"{remedy[:-1]}, or a smaller --max-num-batched-tokens."
        return "KVC106", "while serving: peaks met on a full budget", remedy
    return "KVC101", "outside what the KV cache was budgeted for", remedy


def _setting(log: Failures, name: str) -> int | None:
    value = log.args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _lower(log: Failures, oom: OutOfMemory, further: int = 0) -> str:
    """``--gpu-memory-utilization`` that leaves room for the request and 1 GiB more."""
    if log.utilization is None or oom.total is None:
        return ""
    missing = oom.requested - (oom.free or 0) + further + GIB
    step = -(-missing * 100 // oom.total) / 100
    value = log.utilization - step
    return f"--gpu-memory-utilization {value:.2f} (now {log.utilization:g})" if value > 0.05 else ""


def start_refused(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC110: the engine says that its longest request does not fit."""
    log = case.log
    if log is None:
        return
    if log.refused is not None:
        length, needed, there, fits = log.refused
        evidence = [fact(f"max_model_len {human_count(length)}", length, "tokens")]
        if needed is not None and there is not None:
            evidence.append(
                fact(
                    f"needs {needed:g} GiB of KV cache, {there:g} GiB are there",
                    (needed - there) * GIB,
                    "bytes",
                )
            )
            if needed and there and not fits:
                fits = int(length * there / needed)
                evidence.append(fact(f"in proportion {human_count(fits)} tokens fit", fits, "tokens"))
            elif fits and needed and abs(fits / length - there / needed) > 0.1 * (there / needed):
                evidence.append(
                    fact(f"in proportion {human_count(length * there / needed)} tokens would fit: the engine's own "
                         "figure rounds per KV group, or counts all pipeline stages", length * there / needed, "tokens")
                )  # fmt: skip
        remedy = f"Start with --max-model-len {fits}" if fits else ""
        if remedy:
            evidence.append(fact(f"the largest that fits: {human_count(fits)} tokens", fits, "tokens"))
            remedy += (
                ", or give the cache more memory: --gpu-memory-utilization, --kv-cache-dtype fp8, more cards."
            )
        yield found(
            "KVC110", "critical", f"start refused: {human_count(length)} tokens do not fit"
            + (f", {human_count(fits)} do" if fits else ""), *evidence, remedy=remedy,
        )  # fmt: skip
    elif log.no_memory and not log.oom:
        evidence = [fact("no memory is left for the KV cache", 0, "bytes")]
        if log.weights:
            evidence.append(fact(f"the weights take {human_bytes(log.weights)}", log.weights, "bytes"))
        yield found(
            "KVC110", "critical", "start refused: no memory left for the KV cache", *evidence,
            remedy="Raise --gpu-memory-utilization, use more cards (--tensor-parallel-size) or smaller weights; "
            "kvcatch plan says which of them is enough.",
        )  # fmt: skip


def profile_disturbed(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC111: free memory changed during the profile run."""
    log = case.log
    if log is None or log.profile is None:
        return
    before, after = log.profile
    change = after - before
    evidence = [fact(f"free memory {before:g} GiB before, {after:g} GiB after", change * GIB, "bytes")]
    title = (
        f"{abs(change):.2f} GiB were {'freed' if change > 0 else 'taken'} by others while vLLM measured memory"
        if abs(change) >= 0.01
        else "memory did not change at all while vLLM measured it: another process freed what the model took"
    )
    yield found("KVC111", "critical", title, *evidence)


def no_room_at_start(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC107 at start: the card is not as free as the budget asks."""
    log = case.log
    if log is None or log.start_memory is None:
        return
    free, total, utilization, wanted = log.start_memory
    fits = int(100 * free / total) / 100
    yield found(
        "KVC107", "critical", f"{total - free:.2f} GiB of the card are taken before the engine starts",
        fact(f"{free:g} of {total:g} GiB are free", free * GIB, "bytes"),
        fact(f"{utilization:g} x {total:g} GiB = {wanted:g} GiB are wanted", wanted * GIB, "bytes"),
        fact(f"missing: {wanted - free:.2f} GiB", (wanted - free) * GIB, "bytes"),
        remedy=f"Find the process with nvidia-smi and move it, or start with --gpu-memory-utilization {fits:.2f}.",
    )  # fmt: skip


def others_on_card(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC107 on a running engine: other processes hold what the engine may still need.

    A host's memory is never the engine's alone, so ranks on the CPU are left out. Without shortage it is a note.
    """
    for rank in case.ranks:
        others, total = rank.other_processes_bytes, rank.memory_total_bytes
        if rank.device == "cpu" or not others or not total or others / total < limits.others_ratio:
            continue
        used = rank.memory_used_bytes or 0
        left = total - used - others
        severity = "warning" if left < limits.oom_slack_bytes else "info"
        yield found(
            "KVC107", severity, f"other processes hold {others / total:.0%} of {rank.device or 'the card'}, rank {rank.tp_rank}",
            fact(f"{human_bytes(others)} held by other processes", others, "bytes"),
            fact(f"{human_bytes(max(0, left))} free", max(0, left), "bytes"),
            remedy="Find them with nvidia-smi and move them away before the next peak.",
        )  # fmt: skip
