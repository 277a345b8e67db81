"""The page of a sweep: every run as a dot, and the runs that no other run beats in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from kvcatch.units import human_count, human_ratio, human_seconds
from kvcatch.views.palette import ROLES

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 360, 70, 46


class Axis(NamedTuple):
    """A column to look at. better: up | down."""

    column: str
    label: str
    better: str


#: without an engine: what does a hit cost; with it: latency against throughput, and against memory
POOL = (Axis("capacity_tokens", "capacity in tokens", "down"), Axis("token_hit_ratio", "hit ratio", "up"))
ENGINE = (
    Axis("output_tokens_per_second", "output tokens a second", "up"),
    Axis("ttft_p99_seconds", "p99 time to first token in seconds", "down"),
)


def frontier(rows: Sequence[Mapping[str, Any]], axes: tuple[Axis, Axis]) -> list[int]:
    """Places of the rows that no other row beats: at least as good in both columns and better in one.

    Rows that lack one of them are left out. In the order of the first axis.
    """

    def cost(row: Mapping[str, Any], axis: Axis) -> float:
        value = float(row[axis.column])
        return value if axis.better == "down" else -value

    known = [n for n, row in enumerate(rows) if all(row.get(axis.column) is not None for axis in axes)]
    known.sort(key=lambda n: (cost(rows[n], axes[0]), cost(rows[n], axes[1])))
    best = float("inf")
    kept: list[int] = []
    for n in known:
        second = cost(rows[n], axes[1])
        if second < best or (kept and _same(rows[n], rows[kept[-1]], axes)):
            kept.append(n)
            best = min(best, second)
    return kept


def _same(one: Mapping[str, Any], other: Mapping[str, Any], axes: tuple[Axis, Axis]) -> bool:
    return all(one[axis.column] == other[axis.column] for axis in axes)


def with_capacity(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with ``capacity_tokens``; None without a limit."""
    return [
        {**row, "capacity_tokens": None if row.get("num_blocks") is None else row["num_blocks"] * row["block_size"]}
        for row in rows
    ]  # fmt: skip


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """One offline HTML page."""
    told = with_capacity(rows)
    engine = any("ttft_p99_seconds" in row for row in told)
    axes = ENGINE if engine else POOL
    kept = frontier(told, axes)
    title = f"{len(told)} runs, {len(kept)} of them beaten by none"
    varied = [name for name in _SETTINGS if len({row.get(name) for row in told}) > 1] or ["num_blocks"]
    shown = [*varied, *(name for name in _RESULTS if any(row.get(name) is not None for row in told))]
    body = "".join(
        f"<tr{' class=best' if n in kept else ''}>" + "".join(f"<td>{_cell(name, row.get(name))}</td>" for name in shown) + "</tr>"
        for n, row in enumerate(told)
    )  # fmt: skip
    head = "".join(f"<th>{escape(name)}</th>" for name in shown)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=Content-Security-Policy "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>kvcatch simulate: {escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>Filled dots: nobody is better in one direction without being worse in the other. "
        f"Across: {escape(axes[0].label)} (good: {axes[0].better}). Up: {escape(axes[1].label)} (good: {axes[1].better}).</p>"
        f"{_picture(told, kept, axes)}<table><tr>{head}</tr>{body}</table></html>\n"
    )


_SETTINGS = (
    "trace", "num_blocks", "block_size", "policy", "scheduling", "max_num_seqs", "max_num_batched_tokens", "watermark",
    "async_scheduling",
)  # fmt: skip
_RESULTS = (
    "token_hit_ratio", "preemptions", "peak_active_ratio", "ttft_mean_seconds", "ttft_p99_seconds", "tpot_mean_seconds",
    "output_tokens_per_second",
)  # fmt: skip
_STYLE = (
    "body{font:14px system-ui;margin:2em;max-width:60em}svg{max-width:100%}table{border-collapse:collapse}"
    "td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #8884}.best{font-weight:600}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}"
)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "unlimited" if name == "num_blocks" else "n/a"
    if name.endswith("_ratio"):
        return human_ratio(value, 2)
    if name.endswith("_seconds"):
        return human_seconds(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escape(str(value))
    return human_count(value) if isinstance(value, int) or value >= 10 else f"{value:g}"


def _picture(rows: Sequence[Mapping[str, Any]], kept: Sequence[int], axes: tuple[Axis, Axis]) -> str:
    known = [n for n, row in enumerate(rows) if all(row.get(axis.column) is not None for axis in axes)]
    if not known:
        return "<p>No run has both numbers.</p>"
    spans = []
    for axis in axes:
        values = [float(rows[n][axis.column]) for n in known]
        low, high = min(values), max(values)
        spans.append((low, (high - low) or abs(high) or 1.0))

    def place(n: int) -> tuple[float, float]:
        x, y = (
            (float(rows[n][axis.column]) - low) / span for axis, (low, span) in zip(axes, spans, strict=True)
        )
        return _LEFT + 10 + x * (_WIDTH - _LEFT - 30), _HEIGHT - _BOTTOM - 10 - y * (_HEIGHT - _BOTTOM - 30)

    color = ROLES["active"][0]
    line = " ".join("{:.1f},{:.1f}".format(*place(n)) for n in kept)
    dots = "".join(_dot(place(n), color, n in kept, _named(rows[n])) for n in known)
    ends = []
    for axis, (low, span), across in zip(axes, spans, (True, False), strict=True):
        for value, at in ((low, 0.0), (low + span, 1.0)):
            x = _LEFT + 10 + at * (_WIDTH - _LEFT - 30) if across else _LEFT - 4
            y = _HEIGHT - _BOTTOM + 18 if across else _HEIGHT - _BOTTOM - 6 - at * (_HEIGHT - _BOTTOM - 30)
            anchor = "middle" if across else "end"
            ends.append(
                f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{_cell(axis.column, value)}</text>'
            )
    label = f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(axes[0].label)}</text>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" font-size="12" fill="currentColor" role="img" '
        f'aria-label="{escape(axes[1].label)} over {escape(axes[0].label)}">'
        f'<path d="M{_LEFT} 10V{_HEIGHT - _BOTTOM}H{_WIDTH - 10}" fill="none" stroke="currentColor" opacity=".5"/>'
        f'<polyline points="{line}" fill="none" stroke="{color}" opacity=".6"/>{dots}{"".join(ends)}{label}</svg>'
    )  # fmt: skip


def _dot(at: tuple[float, float], color: str, filled: bool, title: str) -> str:
    fill = color if filled else "none"
    place = f'cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="5"'
    return f'<circle {place} stroke="{color}" fill="{fill}"><title>{escape(title)}</title></circle>'


def _named(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {row[name]}" for name in _SETTINGS[1:] if row.get(name) is not None)
