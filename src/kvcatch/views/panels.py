"""The fixed part of ``top``: header, pool bar, the numbers of each view, curves. Lines of (text, role)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvcatch.results import Finding, Headroom, Queues, Snapshot
from kvcatch.units import human_bytes, human_count, human_ratio, human_seconds
from kvcatch.views.palette import STATE_ROLE, Line, Look, clip

SEVERITIES = ("critical", "warning", "info")
BOUND_TEXT = {
    "none": "nothing",
    "blocks": "KV blocks",
    "max_num_seqs": "max_num_seqs",
    "token_budget": "token budget",
    "deferred": "deferred requests",
}


#: columns of " max 999.9 ms in 300 s"
_CURVE_LABEL = 22


@dataclass(frozen=True)
class Curves:
    """Utilisation and TTFT over one span, newest last; None where nothing was seen."""

    seconds: float = 0.0
    utilization: list[float | None] = field(default_factory=list)
    ttft_seconds: list[float | None] = field(default_factory=list)


def worst(findings: tuple[Finding, ...]) -> Finding | None:
    """The most severe finding, the first of its kind."""
    ranked = [finding for finding in findings if finding.severity in SEVERITIES]
    return min(ranked, key=lambda finding: SEVERITIES.index(finding.severity), default=None)


def header(snapshot: Snapshot, look: Look, *, note: str = "") -> list[Line]:
    """Two lines: what is watched and how fresh it is, then the worst finding and what was lost."""
    glyph = look.glyphs
    age = snapshot.data_age_seconds
    engine = " ".join(word for word in (snapshot.engine, snapshot.engine_version) if word) or "engine n/a"
    if snapshot.state in {"ended", "past"} and snapshot.unix_seconds is not None:
        fresh = f" at {clock(snapshot.unix_seconds)}"
    else:
        fresh = f" {_age(age)} old" if age is not None else " age n/a"
    first: Line = [
        (f"{glyph.state.get(snapshot.state, '?')} {snapshot.state}", STATE_ROLE.get(snapshot.state, "dim")),
        (fresh, "dim"),
    ]
    model = snapshot.model.rpartition("/")[2] if snapshot.model else "model n/a"
    rest: Line = [
        (f"  {model}  {engine}", ""),
        (f"  step {human_count(snapshot.step)}", "dim"),
        (f"  {note}" if note else "", "info"),
    ]
    # The target is the longest and the least needed: it takes what is left.
    left = look.width - 2 - sum(len(text) for text, _ in (*first, *rest))
    target = clip([(short_target(snapshot.target), "title")], max(12, left), glyph.cut)
    first += [("  ", ""), *target, *rest]
    finding = worst(snapshot.findings)
    lost = loss_text(snapshot)
    if finding is None:
        second: Line = [("no finding", "dim"), (f"  {lost}", "dim" if lost == "lost 0" else "warning")]
    else:
        more = len(snapshot.findings) - 1
        text = f"{glyph.severity[finding.severity]} {finding.code} {finding.title}"
        tail = f"  (+{more})  {lost}" if more else f"  {lost}"
        second = [
            *clip([(text, finding.severity)], max(10, look.width - len(tail)), glyph.cut),
            (tail, "dim"),
        ]
    return [clip(first, look.width, glyph.cut), clip(second, look.width, glyph.cut)]


def short_target(target: str) -> str:
    """A path by its file name, the rest as it is; the header has no room for folders."""
    if "://" in target or not target:
        return target or "no target"
    return target.rstrip("/").rpartition("/")[2].removesuffix(".kvring")


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.1f} s" if seconds < 100 else human_seconds(seconds)


def loss_text(snapshot: Snapshot) -> str:
    """What is missing from the record, in a few words."""
    loss = snapshot.loss
    parts = [f"lost {loss.dropped_records:,}"]
    if loss.hook_errors:
        parts.append(f"hook errors {loss.hook_errors:,}")
    if loss.sampled_steps > 1:
        parts.append(f"1 of {loss.sampled_steps} steps sampled")
    if loss.warnings:
        parts.append(f"warnings {len(loss.warnings)}")
    return ", ".join(parts)


def pool_bar(snapshot: Snapshot, look: Look) -> list[Line]:
    """The pool as a bar of active, cached and free blocks with the watermark, and its legend below."""
    pool, glyph = snapshot.pool, look.glyphs
    mark, source = watermark(snapshot)
    total = pool.num_blocks
    width = max(20, look.width - 6)
    used = utilization(snapshot)
    if used is None:
        bar: Line = [("pool  ", "title"), ("n/a".ljust(width), "dim")]
    else:
        # Where only the fraction is known, the bar stands for the pool.
        cells = _cells(round(used * width), 0, width, width)
        if total and pool.active_blocks is not None:
            cells = _cells(pool.active_blocks, pool.cached_blocks or 0, total, width)
        at = min(width - 1, int(mark * width))
        bar = [("pool  ", "title"), *_with_mark(cells, at, look)]
    most = _part(pool.active_blocks_max, total)
    split = [
        (f"  {glyph.cached} cached {_part(pool.cached_blocks, total)}", "cached"),
        (f"  {glyph.free} free {_part(pool.free_blocks, total)}", "free"),
    ]
    if used is not None and pool.cached_blocks is None and pool.free_blocks is None:
        split = [(f"  {glyph.free} cached or free {human_ratio(1 - used)}", "free")]
    more = f" +{_part(pool.step_blocks, total)} in this step" if pool.step_blocks and total else ""
    legend: Line = [
        (f"{glyph.active} active {human_ratio(used)}{more}", "active"),
        (f" max {most}" if most != "n/a" else "", "active"),
        *split,
        (f"  {glyph.watermark} watermark {human_ratio(mark, 0)} {source}", "watermark"),
    ]
    return [bar, clip(legend, look.width, glyph.cut)]


def utilization(snapshot: Snapshot) -> float | None:
    """The active fraction of the pool, 0–1, also where only the fraction is known."""
    pool = snapshot.pool
    if pool.num_blocks and pool.active_blocks is not None:
        return pool.active_blocks / pool.num_blocks
    return pool.utilization_ratio


def watermark(snapshot: Snapshot) -> tuple[float, str]:
    """The used fraction to draw and where it comes from; 0.85 *assumed* until one was measured."""
    value = snapshot.pool.watermark_utilization_ratio
    return (0.85, "assumed") if value is None else (value, snapshot.pool.watermark_source)


def _part(blocks: int | None, total: int | None) -> str:
    return "n/a" if blocks is None or not total else human_ratio(blocks / total)


def _cells(active: int, cached: int, total: int, width: int) -> list[str]:
    """One role per column, to scale; a state that holds any block gets at least one column."""
    blocks = {"active": active, "cached": cached, "free": max(0, total - active - cached)}
    columns = {role: max(1, round(count / total * width)) if count else 0 for role, count in blocks.items()}
    # What rounding left over or took too much goes to the state with the most room.
    widest = max(columns, key=lambda role: columns[role])
    columns[widest] += width - sum(columns.values())
    return [role for role, count in columns.items() for _ in range(count)]


def _with_mark(cells: list[str], at: int, look: Look) -> Line:
    draw = {"active": look.glyphs.active, "cached": look.glyphs.cached, "free": look.glyphs.free}
    line: Line = []
    for index, role in enumerate(cells):
        text, kind = (look.glyphs.watermark, "watermark") if index == at else (draw[role], role)
        if line and line[-1][1] == kind:
            line[-1] = (line[-1][0] + text, kind)
        else:
            line.append((text, kind))
    return line


def headroom_text(room: Headroom, look: Look) -> str:
    """How many more requests fit, of which size, and what binds."""
    if room.prompt_tokens is None:
        return "headroom n/a"
    size = f"({room.prompt_tokens:,}+{human_count(room.output_tokens)} tokens)"
    limit = f", limit {room.limit}" if room.limit else ""
    return f"headroom {human_count(room.requests)} {look.glyphs.times} {size}{limit}"


def numbers(snapshot: Snapshot, view: str, look: Look) -> list[Line]:
    """Three lines where the width allows: queues, latency, and what the view is about."""
    queues, latency, pool = snapshot.queues, snapshot.latency, snapshot.pool
    size = f"{human_count(pool.num_blocks)} blocks of {human_count(pool.block_size)} tokens"
    if pool.num_blocks and pool.block_bytes:
        size += f" = {human_bytes(pool.num_blocks * pool.block_bytes)}"
    rows = [
        [
            f"running {_with_max(queues.running, queues.running_max)}",
            _waiting(queues),
            f"preempted {human_count(snapshot.preemption.preemptions)}",
        ],
        [
            f"TTFT {human_seconds(latency.ttft_seconds)} p95 {human_seconds(latency.ttft_p95_seconds)}",
            f"TPOT {human_seconds(latency.tpot_seconds)}",
            f"out {human_count(latency.output_tokens_per_second)} tok/s",
            f"hit {human_ratio(snapshot.prefix.hit_ratio)}",
        ],
        [*_VIEW_NUMBERS[view](snapshot, look), size],
    ]
    return [line for row in rows for line in _flow(row, look.width)]


def _waiting(queues: Queues) -> str:
    """Who waits and for what; only the sum where the source does not know the reasons."""
    if queues.waiting_for_blocks is None and queues.waiting is not None:
        return f"waiting {human_count(queues.waiting)} (for blocks: n/a){_max(queues.waiting_max)}"
    held = f", {human_count(queues.held)} held" if queues.held else ""
    other = f"{human_count(queues.waiting_other)} other{held}{_max(queues.waiting_max)}"
    return f"waiting {human_count(queues.waiting_for_blocks)} for blocks, {other}"


def _flow(words: list[str], width: int) -> list[Line]:
    """Words two spaces apart, broken into lines where the width ends."""
    out: list[str] = []
    for word in words:
        if out and len(out[-1]) + 2 + len(word) <= width:
            out[-1] += f"  {word}"
        else:
            out.append(word[:width])
    return [[(line, "")] for line in out]


def _with_max(value: int | None, top: int | None) -> str:
    return human_count(value) + _max(top)


def _max(top: int | None) -> str:
    return "" if top is None else f" (max {human_count(top)})"


def _capacity(snapshot: Snapshot, look: Look) -> list[str]:
    return [
        headroom_text(snapshot.headroom, look),
        f"fill {human_ratio(snapshot.efficiency.block_utilization_ratio)}",
    ]


def _requests(snapshot: Snapshot, look: Look) -> list[str]:
    return [
        f"queue time {human_seconds(snapshot.latency.queue_seconds)}",
        f"in {human_count(snapshot.latency.prompt_tokens_per_second)} tok/s",
        headroom_text(snapshot.headroom, look),
    ]


def _reuse(snapshot: Snapshot, look: Look) -> list[str]:
    del look
    prefix = snapshot.prefix
    return [
        f"prefix hit {human_ratio(prefix.hit_ratio)}",
        f"= {human_count(prefix.hit_tokens)} of {human_count(prefix.queried_tokens)} tokens",
        f"cached {human_count(snapshot.pool.cached_blocks)} blocks",
    ]


def _scheduling(snapshot: Snapshot, look: Look) -> list[str]:
    del look
    lost, latency = snapshot.preemption, snapshot.latency
    bound = snapshot.bound_by
    return [
        f"bound by {BOUND_TEXT.get(bound, bound) if bound else 'n/a'}",
        f"recomputed {human_count(lost.recomputed_tokens)} tok",
        f"step {human_seconds(latency.step_seconds)} (max {human_seconds(latency.step_seconds_max)})",
        f"schedule {human_seconds(latency.schedule_seconds)}",
    ]


def _fragmentation(snapshot: Snapshot, look: Look) -> list[str]:
    del look
    efficiency, pool = snapshot.efficiency, snapshot.pool
    slots = None
    if pool.active_blocks is not None and pool.block_size:
        slots = pool.active_blocks * pool.block_size
    return [
        f"internal fragmentation {human_ratio(efficiency.internal_fragmentation_ratio)}",
        f"max {human_ratio(efficiency.internal_fragmentation_ratio_max)}",
        f"{human_count(pool.active_tokens)} tokens in {human_count(slots)} slots",
    ]


_VIEW_NUMBERS = {
    "capacity": _capacity,
    "requests": _requests,
    "reuse": _reuse,
    "scheduling": _scheduling,
    "fragmentation": _fragmentation,
}


def curves(data: Curves, look: Look) -> list[Line]:
    """Two sparklines on one time axis, utilisation over TTFT, each with its maximum."""
    rows = (
        ("used", data.utilization, 1.0, human_ratio, "active"),
        ("TTFT", data.ttft_seconds, None, human_seconds, "evicted"),
    )
    out: list[Line] = []
    for name, values, top, show, role in rows:
        most = max((value for value in values if value is not None), default=None)
        text = spark(values, curve_width(look), top or most, look)
        label = f" max {show(most)} in {data.seconds:.0f} s"
        out.append([(f"{name:<6}", "title"), (text, role), (label[:_CURVE_LABEL].ljust(_CURVE_LABEL), "dim")])
    return out


def curve_width(look: Look) -> int:
    """Columns a curve has on this screen: the bins to ask for."""
    return max(1, look.width - 6 - _CURVE_LABEL)


def spark(values: list[float | None], width: int, top: float | None, look: Look) -> str:
    """One character per value, the newest at the right edge; a blank where nothing was seen."""
    levels = look.glyphs.spark
    tail = values[-width:]
    marks = []
    for value in tail:
        if value is None or not top:
            marks.append(" " if value is None else levels[0])
        else:
            marks.append(levels[min(len(levels) - 1, max(0, int(value / top * len(levels))))])
    return "".join(marks).rjust(width)


def clock(unix_seconds: float | None) -> str:
    """Local wall-clock time with its zone, with the date when that is not today; ``n/a`` when unknown."""
    if unix_seconds is None:
        return "n/a"
    when = time.localtime(unix_seconds)
    today = time.strftime("%Y-%m-%d", when) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M:%S %Z" if today else "%Y-%m-%d %H:%M:%S %Z", when)
