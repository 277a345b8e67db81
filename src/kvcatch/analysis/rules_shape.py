"""Findings about how blocks are used and spread: KVC301 to KVC305."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcatch.analysis.evidence import Case
from kvcatch.analysis.layout_facts import state_cache
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.rules_hybrid import pressed
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Finding
from kvcatch.units import human_bytes, human_count, human_ratio


def internal_fragmentation(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC301: time-weighted empty share of held blocks while the pool is half full or more."""
    size = case.block_size
    series = case.series
    if series is not None and series.steps:
        filled, usage = series.get("filled"), series.get("usage")
        if filled is None or usage is None:
            return
        rows = ~np.isnan(filled) & (usage >= limits.fragmentation_usage)
        seconds = float(series.seconds[rows].sum())
        if not rows.any() or not seconds or series.share(rows) < limits.pressure_time_ratio:
            return
        empty = 1.0 - float((filled[rows] * series.seconds[rows]).sum()) / seconds
        blocked = series.get("blocked")
        waits = blocked is not None and series.share(rows & (blocked > 0)) > limits.pressure_time_ratio
        peak = float(usage[rows].max())
    else:
        ratio = case.moment.efficiency.internal_fragmentation_ratio
        used = case.moment.pool.utilization_ratio
        if used is None and case.moment.pool.num_blocks and case.moment.pool.active_blocks is not None:
            used = case.moment.pool.active_blocks / case.moment.pool.num_blocks
        if ratio is None or used is None or used < limits.fragmentation_usage:
            return
        empty, waits, peak = ratio, bool(case.moment.queues.waiting_for_blocks), used
    if empty < limits.fragmentation_ratio:
        return
    evidence = [
        fact(f"{human_ratio(empty)} of the token slots in held blocks are empty", empty, "ratio"),
        fact(f"{human_ratio(peak)} of the blocks are active, {human_ratio(peak * (1 - empty))} of the token slots", peak, "ratio"),
        fact("block size", size, "tokens"),
    ]  # fmt: skip
    remedy = ""
    if size and size > 16:
        smaller = max(16, size // 4)
        remedy = f"--block-size {smaller}: the last block of each request then wastes at most {smaller - 1} tokens."
    yield found(
        "KVC301", "warning" if waits else "info", f"{human_ratio(empty, 0)} of held KV memory is empty", *evidence, remedy=remedy
    )  # fmt: skip


def state_pinned(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC302: state groups pin at least one block per running request."""
    groups = sum(group.kind == "mamba" for group in case.info.groups)
    if not case.info.groups and state_cache(case) is not None:
        groups = 1  # pages and logs do not tell how many
    if not groups or not case.usable:
        return
    series = case.series
    running = series.get("running") if series is not None else None
    most = float(np.nanmax(running)) if running is not None else float(case.moment.queues.running or 0)
    pinned = most * groups
    if pinned / case.usable < limits.state_share:
        return
    yield found(
        "KVC302", "warning" if pressed(case, limits) else "info",
        f"{human_count(most)} running requests pin {pinned / case.usable:.0%} of the pool with state blocks",
        fact(f"{'' if case.info.groups else 'at least '}{groups} state group(s), at least one block each per request", pinned, "blocks"),
        fact("usable blocks", case.usable, "blocks"),
        remedy="Lower --max-num-seqs, or give the cache more memory (--gpu-memory-utilization): a request holds the state "
        "it runs on however short it is.",
    )  # fmt: skip


def padding_layers(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC303: the log says how many layers were added."""
    if case.log is None or case.log.padding is None:
        return
    layers, share = case.log.padding
    yield found(
        "KVC303", "warning" if share >= 0.2 else "info", f"{layers} padding layers may waste {share:.1%} of the KV memory",
        fact("padding layers", layers, "layers"), fact("of the KV memory", share, "ratio"),
    )  # fmt: skip


def rank_imbalance(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC304: ranks with clearly different room for the cache."""
    sizes: list[int] = []
    if case.log is not None and case.engine in ("0", "000"):
        sizes = list(case.log.available_kv.values())
    elif len(case.ranks) > 1:
        known = [
            rank
            for rank in case.ranks
            if rank.device != "cpu" and rank.memory_total_bytes and rank.memory_used_bytes
        ]
        # What a rank uses beside its equal share of the cache is what makes the others' room useless.
        sizes = [(rank.memory_total_bytes or 0) - (rank.memory_used_bytes or 0) for rank in known]
    if len(sizes) < 2 or max(sizes) <= 0:
        return
    low, high = min(sizes), max(sizes)
    if (high - low) / high < limits.rank_ratio:
        return
    yield found(
        "KVC304", "warning", f"one rank has {human_bytes(low)} for the cache, another {human_bytes(high)}",
        fact(f"rank {sizes.index(low)} decides: every rank gets {human_bytes(low)}", low, "bytes"),
        fact(f"{human_bytes(sum(size - low for size in sizes))} on the other ranks stay unused",
             sum(size - low for size in sizes), "bytes"),
    )  # fmt: skip


def engines_uneven(cases: Sequence[Case], limits: Limits) -> Iterator[Finding]:
    """KVC305: engines of one service, one with a queue and much fuller or busier than another."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.info.model or "", []).append(case)
    for members in groups.values():
        rows = [(case, *_load(case)) for case in members]
        known = [
            (case, usage, running, waiting) for case, usage, running, waiting in rows if running is not None
        ]
        if len(known) < 2:
            continue
        by_running = sorted(known, key=lambda row: row[2] or 0.0)
        low, high = by_running[0], by_running[-1]
        by_usage = sorted((row for row in known if row[1] is not None), key=lambda row: row[1] or 0.0)
        uneven = bool(by_usage) and (by_usage[-1][1] or 0) - (by_usage[0][1] or 0) > limits.uneven_usage
        busier = (high[2] or 0) >= limits.uneven_running * max(low[2] or 0.0, 1.0) and (high[2] or 0) - (
            low[2] or 0
        ) >= 8
        # Five against nothing is one burst; an engine without work beside full ones is not.
        queue = sum(row[3] or 0.0 for row in known)
        idle_engines = (low[2] or 0) == 0 and (high[2] or 0) >= 16
        if not (uneven or busier) or (queue < limits.waiting and not idle_engines):
            continue
        evidence = [
            fact(f"engine {case.engine}: {human_count(running)} running, {human_count(waiting)} waiting, "
                 f"{human_ratio(usage)} of the pool", usage, "ratio", case.target)
            for case, usage, running, waiting in known[:16]
        ]  # fmt: skip
        yield found(
            "KVC305", "warning", f"engines are unevenly filled: {human_count(high[2])} requests on one, {human_count(low[2])} on another",
            *evidence,
        )  # fmt: skip


def _load(case: Case) -> tuple[float | None, float | None, float | None]:
    """Mean usage, running and waiting over the busy rows of the last ten minutes, or of the moment."""
    series = case.series
    if series is None:
        queues = case.moment.queues
        usage = case.moment.pool.utilization_ratio
        return usage, _float(queues.running), _float(queues.waiting)
    recent = series.unix >= series.unix[-1] - 600.0
    means = []
    for name in ("usage", "running", "waiting"):
        values = series.get(name)
        means.append(None if values is None else float(np.nanmean(values[recent])))
    return means[0], means[1], means[2]


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
