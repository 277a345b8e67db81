"""A plan for people: the answer first, then the numbers, the memory picture, and what to change."""

from __future__ import annotations

import csv
import io
import textwrap

from kvcatch.planner.specs import MemoryPart, Plan
from kvcatch.units import human_bytes, human_count, human_ratio

_PARTS = ("weights", "activation_peak", "cuda_graphs", "non_torch", "available_kv")
_LABELS = {
    "weights": "weights",
    "activation_peak": "activations",
    "cuda_graphs": "CUDA graphs",
    "non_torch": "outside torch",
    "available_kv": "KV cache",
}
_FILL = {
    "weights": "█",
    "activation_peak": "▓",
    "cuda_graphs": "▒",
    "non_torch": "░",
    "available_kv": "●",
    "free": "·",
}
_FILL_ASCII = {
    "weights": "W",
    "activation_peak": "A",
    "cuda_graphs": "G",
    "non_torch": "o",
    "available_kv": "K",
    "free": ".",
}
CSV_COLUMNS = (
    "model", "engine_version", "kv_cache_dtype", "max_model_len", "max_num_seqs", "bytes_per_token_per_gpu",
    "fixed_bytes_per_request", "block_size", "block_bytes", "num_blocks", "kv_cache_tokens", "max_concurrency",
    "blocks_per_max_len_request", "max_model_len_that_fits", "starts", "peak_fits", "peak_kv_bytes",
    "shortfall_bytes", "max_concurrency_that_fits", "max_context_that_fits",
)  # fmt: skip


def plan_lines(plan: Plan, width: int = 100, ascii_only: bool = False) -> list[str]:
    """Everything ``plan`` prints for one model."""
    lines = [*_verdict(plan), "", *_numbers(plan), "", *_groups(plan)]
    lines += _kv_dtype(plan)
    picture = _memory(plan, width, ascii_only)
    if picture:
        lines += ["", *picture]
    if plan.expected_lengths:
        lines += ["", *_expected(plan)]
    if plan.log_lines:
        lines += ["", f"vLLM {plan.engine_version} will print:", *(f"  {line}" for line in plan.log_lines)]
    if plan.advice:
        lines += ["", "What to change (first what makes it fit):", *_advice(plan)]
    for title, notes in (("Assumed", plan.assumed), ("Note", plan.warnings)):
        for note in notes:
            lines += textwrap.wrap(f"{title}: {note}", width, subsequent_indent="  ")
    return lines


def _verdict(plan: Plan) -> list[str]:
    peak = f"{_requests(plan.peak_concurrency)} of {human_count(plan.peak_context)} tokens"
    need = human_bytes(plan.peak_kv_bytes)
    head = f"{plan.model} ({plan.architecture})"
    if plan.num_blocks is None:
        return [
            f"{head}: {peak} need {need} of KV cache per GPU.",
            "Give --gpu or --available-kv to know whether it fits.",
        ]
    if plan.starts is False:
        longest = plan.max_model_len_that_fits
        text = f"NO, it does not start: one request of {human_count(plan.max_model_len)} tokens needs "
        text += f"{human_bytes(plan.bytes_per_max_len_request)}; the longest that fits is {human_count(longest)} tokens."
        support = plan.kv_dtype_support
        if support and support.get("supported") is False:
            text = f"NO, it does not start: {support.get('reason', 'no kernel for this KV cache dtype')}."
        return [head, text]
    if plan.peak_fits:
        return [
            head,
            f"YES: {peak} need {need} of KV cache per GPU; {human_bytes(plan.margin_bytes)} remain.",
        ]
    return [
        head,
        f"NO: {peak} need {need} of KV cache per GPU, {human_bytes(plan.shortfall_bytes)} more than there is.",
        (
            f"It holds {_requests(plan.max_concurrency_that_fits)} of {human_count(plan.peak_context)} tokens, or "
            f"{_requests(plan.peak_concurrency)} of {human_count(plan.max_context_that_fits)} tokens."
        ),
    ]


def _kv_dtype(plan: Plan) -> list[str]:
    """Who serves the KV dtype and what that costs; nothing for the default one that works."""
    support = plan.kv_dtype_support
    if not support or (support["supported"] and plan.kv_cache_dtype == "auto"):
        return []
    release = (
        support["table_version"]
        if support["exact_version"]
        else f"{support['table_version']}, the nearest read"
    )
    if not support["supported"]:
        nearest = support["nearest"] or "none"
        reason = f"  KV dtype {plan.kv_cache_dtype}: {support['reason']} ({support['source']} in {release})"
        return ["", reason, f"  nearest that works here: {nearest}"]
    lines = ["", f"  KV dtype {plan.kv_cache_dtype}: {support['backend']} ({support['source']} in {release})"]
    lost = "; ".join(item["what"] for item in support["switches_off"])
    return [*lines, f"  switched off: {lost}"] if lost else lines


def _requests(count: int | None) -> str:
    return f"{human_count(count)} request{'' if count == 1 else 's'}"


def _numbers(plan: Plan) -> list[str]:
    concurrency = "n/a" if plan.max_concurrency is None else f"{plan.max_concurrency:.2f}x"
    rows = [
        ("KV bytes per token and GPU", human_count(plan.bytes_per_token_per_gpu)),
        ("fixed bytes per request", human_bytes(plan.fixed_bytes_per_request)),
        ("block", f"{human_count(plan.block_size)} tokens, {human_bytes(plan.block_bytes)}"),
        ("blocks (one is the null block)", human_count(plan.num_blocks)),
        ("tokens the engine prints", human_count(plan.kv_cache_tokens)),
        (f"requests of {human_count(plan.max_model_len)} tokens", concurrency),
        ("blocks one such request holds", human_count(plan.blocks_per_max_len_request)),
        ("longest request that fits", human_count(plan.max_model_len_that_fits)),
        ("shortest reusable prefix", human_count(plan.min_reusable_prefix_tokens)),
    ]
    if plan.stage_blocks:
        stages = ", ".join(f"{count:,}" for count in plan.stage_blocks)
        rows.append(("blocks each pipeline stage could hold", f"{stages} (stage {plan.binding_stage} binds)"))
    return [f"  {name:<38} {value:>22}" for name, value in rows]


def _groups(plan: Plan) -> list[str]:
    if not plan.groups:
        return ["  No KV cache: every layer is without attention over the past."]
    lines = [
        f"  {'group':<10}{'layers':>8}{'padding':>9}{'block':>8}{'page':>12}{'window':>9}{'blocks/request':>16}"
    ]
    seen: list[tuple[str, int]] = []
    for group in plan.groups:
        window = "" if group.window_tokens is None else f"{group.window_tokens:,}"
        line = (
            f"  {group.kind:<10}{group.layers:>8}{group.padding_layers or '':>9}{group.block_size:>8,}"
            f"{human_bytes(group.page_bytes):>12}{window:>9}{human_count(group.blocks_per_request):>16}"
        )
        if seen and seen[-1][0] == line:
            seen[-1] = (line, seen[-1][1] + 1)
        else:
            seen.append((line, 1))
    return lines + [line if count == 1 else f"{line}   x {count}" for line, count in seen]


def _memory(plan: Plan, width: int, ascii_only: bool) -> list[str]:
    memory = plan.memory
    total = memory.total.bytes
    if not total:
        return []
    fill = _FILL_ASCII if ascii_only else _FILL
    room = max(20, min(width, 100) - 4)
    parts = [(name, getattr(memory, name)) for name in _PARTS]
    bar = ""
    for name, part in parts:
        bar += fill[name] * round(max(0, part.bytes or 0) / total * room)
    bar = bar[:room].ljust(room, fill["free"])
    lines = [
        f"  One card, {human_bytes(total)} ({human_ratio((memory.budget.bytes or 0) / total, 0)} for vLLM):",
        f"  [{bar}]",
    ]
    for name, part in parts:
        lines.append(f"  {fill[name]} {_LABELS[name]:<14}{human_bytes(part.bytes):>12}  {_evidence(part)}")
    return lines


def _evidence(part: MemoryPart) -> str:
    band = f" ± {human_bytes(part.band)}" if part.band else ""
    note = f" ({part.note})" if part.note else ""
    return f"{part.evidence}{band}{note}"


def _expected(plan: Plan) -> list[str]:
    lengths = plan.expected_lengths or {}
    lines = [
        f"  {lengths['requests']:,} expected requests, {human_count(plan.peak_concurrency)} at once:",
        f"  {'if all were':<12}{'tokens':>10}{'KV cache':>14}{'fits':>7}{'at once':>10}",
    ]
    for row in lengths["rows"]:
        fits = {True: "yes", False: "NO", None: "n/a"}[row["fits"]]
        lines.append(
            f"  {row['name']:<12}{row['tokens']:>10,}{human_bytes(row['kv_bytes']):>14}{fits:>7}"
            f"{human_count(row['max_concurrency']):>10}"
        )
    return lines


def _advice(plan: Plan) -> list[str]:
    lines = []
    for number, entry in enumerate(plan.advice, 1):
        verdict = "fits" if entry.peak_fits else f"still {human_bytes(entry.shortfall_bytes)} short"
        if entry.starts is False:
            verdict = "does not start yet"
        elif plan.starts is False:
            verdict = f"starts, {verdict}"
        concurrency = "" if entry.max_concurrency is None else f", {entry.max_concurrency:.2f}x"
        lines.append(f"  {number}. {entry.change}: {verdict}{concurrency}")
        detail = " — ".join(part for part in (entry.flag, entry.note) if part)
        if detail:
            lines.append(f"     {detail}")
    return lines


def plans_csv(plans: list[Plan]) -> str:
    """One row per model; unknown is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for plan in plans:
        row = [getattr(plan, name) for name in CSV_COLUMNS]
        writer.writerow(["" if value is None else value for value in row])
    return out.getvalue()
