"""A picture of a board from real data: the panels of the mixin's dashboards, asked from a Prometheus, as SVG.

    python tools/board_picture.py http://127.0.0.1:9090 START END docs/img/board.svg [ROW ...]

Start and end are unix seconds; TARGET in the environment selects targets as on the board. Without rows, the first four of the overview are drawn.
"""

from __future__ import annotations

import html
import json
import os
import sys
import urllib.parse
import urllib.request
from typing import NamedTuple

from kvcatch.views import mixin_boards
from kvcatch.views.mixin_boards import Line, Panel
from kvcatch.views.palette import ROLES

WIDTH, HEIGHT, GAP, TOP = 560, 210, 16, 30
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 56, 48, 30, 44
COLORS = ("#3b8fd6", "#e69f00", "#1fa88c", "#cc79a7", "#56b4e9", "#e0552b", "#8a8f98")
Points = list[tuple[float, float]]


class Curve(NamedTuple):
    """One drawn series."""

    name: str
    color: str
    points: Points
    line: Line


def ask(server: str, expr: str, start: float, end: float) -> list[tuple[dict[str, str], Points]]:
    """Series of an expression over the span."""
    for name, value in (("model_name", ".*"), ("target", os.environ.get("TARGET", ".*")), ("engine", ".*")):
        expr = expr.replace(f"${name}", value)
    step = max(1.0, (end - start) / 240)
    query = {"query": expr.replace("$__rate_interval", "10s"), "start": start, "end": end, "step": step}
    with urllib.request.urlopen(f"{server}/api/v1/query_range?{urllib.parse.urlencode(query)}") as answer:
        rows = json.loads(answer.read())["data"]["result"]
    return [
        (row["metric"], [(float(at), float(value)) for at, value in row["values"] if value != "NaN"])
        for row in rows
    ]


def legend(line: Line, labels: dict[str, str]) -> str:
    """The legend with its labels filled in."""
    text = line.legend
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def curves(server: str, panel: Panel, start: float, end: float) -> list[Curve]:
    """Everything one panel shows."""
    found: list[Curve] = []
    for line in panel.lines:
        for labels, points in ask(server, line.expr, start, end):
            color = ROLES[line.color][0] if line.color else ""
            color = color or ("#444444" if line.dashed else COLORS[len(found) % len(COLORS)])
            found.append(Curve(legend(line, labels), color, points, line))
    return found


def number(value: float, unit: str) -> str:
    """An axis label."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.2g} s" if value >= 1 else f"{1000 * value:.0f} ms"
    if unit == "bytes":
        return f"{value / 2**30:.1f} GiB"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(panel: Panel, found: list[Curve], start: float, end: float, left: float, top: float) -> list[str]:
    """One panel as SVG."""
    width = WIDTH * 2 + GAP if panel.width > 12 else WIDTH
    out = [f'<g transform="translate({left:.0f},{top:.0f})">',
           f'<rect width="{width}" height="{HEIGHT}" rx="4" fill="#fff" stroke="#ddd"/>',
           f'<text x="12" y="20" class="t">{html.escape(panel.title)}</text>']  # fmt: skip
    x0, x1 = PLOT_LEFT, width - PLOT_RIGHT
    y0, y1 = HEIGHT - PLOT_BOTTOM, PLOT_TOP
    sides = {side: [c for c in found if c.line.right == side] for side in (False, True)}
    for side, members in sides.items():
        if not members:
            continue
        unit = "s" if side else panel.unit
        top_value = _top(panel, members, side)
        for share in (0.0, 0.5, 1.0):
            y = y0 + (y1 - y0) * share
            if not side:
                out.append(f'<line x1="{x0}" x2="{x1}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
            x, anchor = (x1 + 6, "start") if side else (x0 - 6, "end")
            out.append(f'<text x="{x}" y="{y + 4:.1f}" text-anchor="{anchor}" class="a">'
                       f"{number(top_value * share, unit)}</text>")  # fmt: skip
        base: dict[float, float] = {}
        for curve in members:
            out += _curve(panel, curve, base, (start, end, top_value), (x0, x1, y0, y1))
    for index, curve in enumerate(found[:6]):
        x = 12 + index * (width - 24) / max(1, min(6, len(found)))
        out.append(f'<rect x="{x:.0f}" y="{HEIGHT - 20}" width="10" height="10" fill="{curve.color}"/>')
        out.append(
            f'<text x="{x + 14:.0f}" y="{HEIGHT - 11}" class="a">{html.escape(curve.name[:34])}</text>'
        )
    if not found:
        out.append(f'<text x="{width / 2}" y="{HEIGHT / 2}" text-anchor="middle" class="a">no data</text>')
    return [*out, "</g>"]


def _top(panel: Panel, members: list[Curve], right: bool) -> float:
    if panel.ratio and not right:
        return 1.0
    if panel.stacked:
        sums: dict[float, float] = {}
        for curve in members:
            for at, value in curve.points:
                sums[at] = sums.get(at, 0.0) + value
        return max(sums.values(), default=1.0) or 1.0
    return max((value for curve in members for _, value in curve.points), default=1.0) * 1.05 or 1.0


def _curve(
    panel: Panel,
    curve: Curve,
    base: dict[float, float],
    scale: tuple[float, float, float],
    plot: tuple[float, float, float, float],
) -> list[str]:
    start, end, top_value = scale
    x0, x1, y0, y1 = plot

    def place(at: float, value: float) -> str:
        x = x0 + (x1 - x0) * (at - start) / (end - start)
        return f"{x:.1f},{y0 + (y1 - y0) * min(1.0, value / top_value):.1f}"

    if not curve.points:
        return []
    if panel.stacked:
        low = [place(at, base.get(at, 0.0)) for at, _ in curve.points]
        for at, value in curve.points:
            base[at] = base.get(at, 0.0) + value
        high = [place(at, base[at]) for at, _ in curve.points]
        return [
            f'<polygon points="{" ".join([*high, *reversed(low)])}" fill="{curve.color}" opacity="0.75"/>'
        ]
    dash = ' stroke-dasharray="6 5"' if curve.line.dashed else ""
    line = " ".join(place(at, value) for at, value in curve.points)
    return [f'<polyline points="{line}" fill="none" stroke="{curve.color}" stroke-width="1.8"{dash}/>']


def picture(server: str, start: float, end: float, rows: list[str]) -> str:
    """The whole board."""
    out: list[str] = []
    top = 12.0
    wide = WIDTH * 2 + GAP * 3
    for title, members in mixin_boards.ROWS:
        if title not in rows:
            continue
        out.append(f'<text x="{GAP}" y="{top + 18:.0f}" class="r">{html.escape(title)}</text>')
        top += TOP
        left = float(GAP)
        for panel in members:
            full = panel.width > 12
            if left > GAP and full:
                left, top = float(GAP), top + HEIGHT + GAP
            out += draw(panel, curves(server, panel, start, end), start, end, left, top)
            left += WIDTH + GAP
            if full or left > WIDTH * 2:
                left, top = float(GAP), top + HEIGHT + GAP
        if left > GAP:
            top += HEIGHT + GAP
    style = (
        "text{font-family:system-ui,sans-serif;fill:#222}.t{font-size:13px;font-weight:600}"
        ".a{font-size:11px;fill:#555}.r{font-size:15px;font-weight:700}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {top:.0f}" width="{wide}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#f6f6f4"/>{"".join(out)}</svg>\n'
    )


def main() -> None:
    """Draw and write."""
    server, start, end, path, *rows = sys.argv[1:]
    chosen = rows or [title for title, _ in mixin_boards.ROWS[:4]]
    with open(path, "w", encoding="utf-8") as file:
        file.write(picture(server.rstrip("/"), float(start), float(end), chosen))
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
