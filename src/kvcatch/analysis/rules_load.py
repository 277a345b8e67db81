"""Findings about load on the pool and its limits: KVC001, KVC004, KVC007, KVC010."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcatch.analysis.evidence import Case, Series
from kvcatch.analysis.layout_facts import state_cache
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Evidence, Finding
from kvcatch.store.base import BOUNDS
from kvcatch.units import human_count, human_ratio, human_seconds


def safe_line(case: Case, limits: Limits) -> float:
    """The used fraction above which the pool counts as pressed: measured for this configuration, else assumed."""
    pool = case.moment.pool
    measured = pool.watermark_utilization_ratio if pool.watermark_source == "measured" else None
    return limits.watermark_ratio if measured is None else measured


def kv_pressure(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC001: active blocks above the watermark while requests wait for blocks."""
    if case.series is None:
        yield from _pressure_now(case, limits)
        return
    series = case.series
    usage, blocked = series.get("usage"), series.get("blocked")
    if usage is None or blocked is None:
        return
    mark = safe_line(case, limits)
    mask = (usage > mark) & (blocked > 0)
    share = series.share(mask)
    enough = int(mask.sum()) >= (limits.pressure_steps if series.steps else 1)
    if share < limits.pressure_time_ratio or not enough:
        return
    waits = _wait_share(case)
    severity = "warning"
    if (waits or 0.0) >= limits.critical_wait_ratio or (waits is None and series.share(usage >= 0.995) > 0.9):
        severity = "critical"
    worst = int(np.argmax(np.where(mask, blocked, -1)))
    evidence = [
        fact(f"{human_ratio(share, 0)} of the busy time above the {mark:.0%} watermark with requests waiting for blocks",
             share, "ratio"),
        fact(f"peak {human_ratio(float(np.nanmax(usage)))} of the usable blocks active", float(np.nanmax(usage)), "ratio"),
        fact(f"at most {human_count(float(blocked[worst]))} waited for blocks", float(blocked[worst]), "requests"),
    ]  # fmt: skip
    if waits is not None:
        evidence.append(
            fact(f"requests spent {human_ratio(waits, 0)} of their time in the queue", waits, "ratio")
        )
    more, remedy = _what_fits(case)
    evidence += more
    if case.kind == "metrics":
        who = "which request holds" if case.tenants else "which request or tenant holds"
        evidence.append(fact(f"{who} them no metric tells: a recorder does (kvcatch run -- vllm ...)"))
    yield found(
        "KVC001", severity, f"KV pressure: {human_count(float(blocked[worst]))} requests waited for blocks, "
        f"{human_ratio(float(np.nanmax(usage)), 0)} of the pool active", *evidence, remedy=remedy,
        unix_seconds=float(series.unix[worst]),
    )  # fmt: skip


def _pressure_now(case: Case, limits: Limits) -> Iterator[Finding]:
    pool, queues = case.moment.pool, case.moment.queues
    used, waiting = pool.utilization_ratio, queues.waiting_for_blocks
    if used is None and pool.num_blocks and pool.active_blocks is not None:
        used = pool.active_blocks / pool.num_blocks
    if waiting is None and used is not None and used >= 0.9:
        waiting = queues.waiting
    mark = safe_line(case, limits)
    if used is None or not waiting or used < mark or queues.running == 0:
        return
    more, remedy = _what_fits(case)
    yield found(
        "KVC001", "warning", f"KV pressure: {used:.0%} of blocks active, {waiting:,} wait for blocks",
        fact("active share of the usable blocks", used, "ratio"),
        fact("safe watermark", mark, "ratio", pool.watermark_source),
        fact("requests waiting for blocks", waiting, "requests"), *more, remedy=remedy,
    )  # fmt: skip


def _what_fits(case: Case) -> tuple[list[Evidence], str]:
    """How many requests of the usual size fit, as evidence and as remedy; nothing where sizes are unknown."""
    cap = _cap(case)
    if cap is None:
        return [], ""
    remedy = (
        f"About {human_count(cap)} requests of this size fit at once: --max-num-seqs {cap} (or that limit at the "
        f"gateway), or --watermark 0.05 so that admitted requests can grow; more KV memory raises it."
    )
    return [fact(f"{human_count(cap)} requests of the mean size fit in the pool", cap, "requests")], remedy


def _wait_share(case: Case) -> float | None:
    """Share of all requests' time between arrival and end that passed before they were first scheduled."""
    if case.requests is None or case.rows is None or not len(case.rows):
        return None
    table = case.requests
    rows = case.rows[table.finish[case.rows] > 0]
    if not len(rows):
        return None
    whole = (table.finish[rows] - table.arrival[rows]).sum()
    queued = (
        np.where(table.scheduled[rows] > 0, table.scheduled[rows], table.finish[rows]) - table.arrival[rows]
    ).sum()
    return float(queued / whole) if whole > 0 else None


def _cap(case: Case) -> int | None:
    """Requests of the mean size that fit into the pool below a 5 % reserve."""
    if case.requests is not None and case.rows is not None:
        rows = case.rows[case.requests.finish[case.rows] > 0]
        if not len(rows):
            return None
        mean = (case.requests.prompt_tokens[rows] + case.requests.output_tokens[rows]).mean()
        blocks = case.blocks_of(round(float(mean)))
    elif case.pages is not None and (case.info.groups or state_cache(case) is None):
        last = case.pages[1]
        sizes = [last.request_prompt_tokens, last.request_generation_tokens]
        means = [size.total / size.observations for size in sizes if size is not None and size.observations]
        blocks = case.blocks_of(round(sum(means))) if len(means) == 2 else None
    else:
        return None
    return max(1, int(0.95 * case.usable // blocks)) if blocks and case.usable else None


def exhaustion_ahead(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC004: a steady rise of a living engine that reaches the pool within minutes."""
    series = case.series
    if series is None or case.moment.state in ("ended", "disconnected"):
        return
    usage = series.get("usage")
    if usage is None or series.span_seconds < limits.trend_seconds:
        return
    recent = series.unix >= series.unix[-1] - limits.exhaustion_seconds
    times, values = series.unix[recent] - series.unix[-1], usage[recent]
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    if len(values) < 4 or times[0] > -limits.trend_seconds:
        return
    slope, level = np.polyfit(times, values, 1)
    spread = float(np.var(values))
    fit = 1 - float(np.var(values - (slope * times + level))) / spread if spread else 0.0
    if slope <= 0 or fit < 0.8 or not 0.5 <= level < limits.full_ratio:
        return
    left = (1.0 - float(level)) / float(slope)
    if left > limits.exhaustion_seconds:
        return
    yield found(
        "KVC004", "warning", f"the pool is full in {human_seconds(left)} at this growth",
        fact(f"{human_ratio(float(level))} of the usable blocks active", float(level), "ratio"),
        fact(f"growing by {human_ratio(60 * float(slope))} of the pool a minute", 60 * float(slope), "ratio per minute"),
        fact(f"straight line through {human_seconds(-float(times[0]))}, fit {fit:.2f}", fit),
        unix_seconds=float(series.unix[-1]),
    )  # fmt: skip


def not_kv_bound(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC007: a queue with free blocks, no preemption, and the token budget as the limit."""
    series = case.series
    if series is None:
        return
    usage, waiting, preempted = series.get("usage"), series.get("waiting"), series.total("preemptions")
    if usage is None or waiting is None or preempted:
        return
    bound = series.get("bound")
    queue = (waiting >= limits.waiting) & (usage < limits.low_usage_ratio)
    if bound is not None:
        queue &= bound == BOUNDS.index("token_budget")
    elif _at_seq_limit(case, series) is not None:
        return
    share = series.share(queue)
    if share < limits.limit_time_ratio or not queue.any():
        return
    most = float(waiting[queue].max())
    third = max(1, len(waiting) // 3)
    growing = float(np.nanmean(waiting[-third:])) > 1.5 * float(np.nanmean(waiting[:third]))
    yield found(
        "KVC007", "warning" if growing and most >= limits.long_queue else "info", f"up to {human_count(most)} requests queue with {1 - float(usage[queue].max()):.0%} of the blocks not in use",
        fact(f"{human_ratio(share, 0)} of the busy time with a queue of {limits.waiting} or more", share, "ratio"),
        fact(f"peak usage in that time {human_ratio(float(usage[queue].max()))}", float(usage[queue].max()), "ratio"),
        fact("preemptions", 0.0 if preempted is not None else None, "preemptions"),
        unix_seconds=float(series.unix[int(np.argmax(np.where(queue, waiting, -1)))]),
    )  # fmt: skip


def limit_not_kv(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC010: running at max_num_seqs with blocks free."""
    series = case.series
    if series is None:
        pool, other = case.moment.pool, case.moment.queues.waiting_other
        if (
            case.moment.bound_by != "max_num_seqs"
            or not other
            or not pool.num_blocks
            or pool.active_blocks is None
        ):
            return
        used = pool.active_blocks / pool.num_blocks
        if used < safe_line(case, limits):
            yield found(
                "KVC010", "info", f"max_num_seqs binds: {other:,} wait with {1 - used:.0%} of blocks not in use",
                fact("running requests", case.moment.queues.running, "requests"),
            )  # fmt: skip
        return
    usage, waiting = series.get("usage"), series.get("waiting")
    at_limit = _at_seq_limit(case, series)
    if usage is None or waiting is None or at_limit is None:
        return
    mask = at_limit & (waiting > 0) & (usage < limits.low_usage_ratio)
    share = series.share(mask)
    if share < limits.limit_time_ratio:
        return
    most = float(waiting[mask].max())
    yield found(
        "KVC010", "info", f"max_num_seqs binds: up to {human_count(most)} wait with "
        f"{1 - float(usage[mask].max()):.0%} of the blocks never in use",
        fact(f"{human_ratio(share, 0)} of the busy time at the limit", share, "ratio"),
        fact("max_num_seqs", case.info.max_num_seqs, "requests"),
        fact("peak usage in that time", float(usage[mask].max()), "ratio"),
    )  # fmt: skip


def _at_seq_limit(case: Case, series: Series) -> np.ndarray | None:
    bound = series.get("bound")
    if bound is not None:
        mask: np.ndarray = bound == BOUNDS.index("max_num_seqs")
        return mask
    running = series.get("running")
    if running is None or not case.info.max_num_seqs:
        return None
    full: np.ndarray = running >= case.info.max_num_seqs
    return full if full.any() else None
