"""The page of a quality answer: verdict first, then numbers, tasks, layers and eviction; from its JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kvcatch.units import human_bytes, human_ratio
from kvcatch.views.palette import ROLES

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_SEVERITY = {"pass": "fine", "fail": "critical", "inconclusive": "warning"}
_WIDTH, _HEIGHT = 640, 260
#: colour-blind safe, one per policy, always with a mark of its own
_MARKS = {"streaming": ("#3b8fd6", "circle"), "h2o": ("#1fa88c", "square"), "snapkv": ("#e69f00", "up"),
          "tova": ("#e0552b", "down"), "knorm": ("#9467bd", "diamond"), "random": ("#8a8f98", "cross")}  # fmt: skip


def render(document: dict[str, Any]) -> str:
    """The whole HTML document; nothing in it is loaded from anywhere."""
    style = files("kvcatch.views.html").joinpath("report.css").read_text(encoding="utf-8")
    colors = "".join(f"--{role}:{hue};" for role, (hue, _, _) in ROLES.items() if hue)
    quality = document.get("quality")
    parts = []
    if quality:
        parts.append(_regression(document, quality))
    if document.get("location"):
        parts.append(_location(document["location"]))
    if document.get("eviction"):
        parts.append(_eviction(document["eviction"]))
    if document.get("need"):
        need = document["need"]
        parts.append(
            f"<section><h2>Would a smaller cache help?</h2><p>{escape(str(need['helps']))}: {escape(need['reason'])}</p></section>"
        )
    eviction = document.get("eviction")
    verdict, reason = "answer", ""
    if quality:
        verdict, reason = quality["verdict"], "; ".join(quality["reasons"])
    elif eviction:
        held = [one for one in eviction["advice"] if one["policy"]]
        verdict = (
            "; ".join(f"{one['workload']}: {one['policy']} at {one['budget']:.0%}" for one in held)
            or "keep everything"
        )
        reason = f"the smallest budget that holds, on {eviction['model']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>kvcatch quality</title><style>:root{{{colors}}}{style}</style></head>\n"
        f'<body><header><p class="what">kvcatch quality</p><h1 class="{_SEVERITY.get(verdict, "fine")}">'
        f"{escape(verdict)}</h1><p>{escape(reason)}</p>{_numbers(document, quality)}</header>"
        f"<main>{''.join(parts)}</main></body></html>\n"
    )


def _numbers(document: dict[str, Any], quality: dict[str, Any] | None) -> str:
    if not quality:
        return ""
    checks = {one["name"]: one for one in quality["checks"]}
    saved = document["savings"]["saved_ratio"]
    rows = (
        (
            "mean KL",
            _number(checks["kl_mean"]["value"]),
            f"nats, at least; k = {quality['logprobs_k']}",
        ),
        ("top tokens changed", human_ratio(checks["top1_flips"]["value"]), f"of {quality['positions']:,}"),
        ("KV bytes saved", human_ratio(saved), "per token and GPU"),
    )
    return (
        '<div class="numbers">'
        + "".join(
            f'<div class="number"><span>{escape(a)}</span><strong>{escape(b)}</strong><small>{escape(c)}</small></div>'
            for a, b, c in rows
        )
        + "</div>"
    )


def _regression(document: dict[str, Any], quality: dict[str, Any]) -> str:
    checks = _table(
        ("number", "value", "95 % interval", "limit", "verdict", ""),
        (
            (
                one["name"], _number(one["value"]), _interval(one["low"], one["high"]), _number(one["limit"]),
                one["verdict"], one["note"],
            )
            for one in quality["checks"]
        ),
    )  # fmt: skip
    task_rows = _table(
        ("task", "questions", "baseline", "candidate", "lost", "won", "p", "verdict"),
        (
            [
                str(one[name])
                for name in ("kind", "questions", "baseline_right", "candidate_right", "lost", "won")
            ]
            + [f"{one['p_value']:.2g}", one["verdict"]]
            for one in quality["tasks"]
        ),
    )
    position = _bars(
        [(f"{low}–{high}", mean) for low, high, mean in quality["kl_by_position"]], "KL by position (nats)"
    )
    gap = _bars(
        [
            (f"{at + 1}", max(0.0, sum(row[2] for row in chunk) / len(chunk)))
            for at in range(0, len(quality["decode_gap"]), 8)
            if (chunk := quality["decode_gap"][at : at + 8])
        ],
        "Decoding against prefill of the same tokens, by generated token (nats)",
    )
    patterns = "".join(
        f'<details class="finding warning" open><summary><b>{escape(one["name"])}</b> {escape(one["evidence"])}</summary>'
        f"<p><b>Cause</b> {escape(one['cause'])}</p><p><b>Do</b> {escape(one['remedy'])}</p></details>"
        for one in quality["patterns"]
    )
    facts = _table(
        ("", ""),
        (
            ("baseline", document["baseline"]), ("candidate", document["candidate"]), ("model", document["model"]),
            ("engine", str(document["engine_version"])), ("corpus", document["corpus"]), ("seed", str(document["seed"])),
            ("reference against itself", f"KL {quality['floor_kl']:.3g}"), ("limits", quality["limits"]["source"]),
        ),
    )  # fmt: skip
    return (
        f"<section><h2>What was measured</h2>{checks}</section><section><h2>Tasks</h2>{task_rows}</section>"
        f'<section class="charts"><h2>Where it shows</h2>{position}{gap}</section>'
        f"<section><h2>Recognised</h2>{patterns or '<p class=fine>Nothing known.</p>'}</section>"
        f"<section><h2>Provenance</h2>{facts}</section>"
    )


def _location(found: dict[str, Any]) -> str:
    if not found["accepted"]:
        body = f"<p>Not accepted: {escape(found['note'])}</p>"
        table = _table(
            ("fault", "explains"), ((one["where"], f"{one['similarity']:.3f}") for one in found["suspects"])
        )
    else:
        layers = sorted(found["layers"], key=lambda one: int(one["layer"]))
        body = _bars([(str(one["layer"]), one["kl"]) for one in layers], "KL of each layer alone (nats)")
        table = _table(
            ("format", "KL", "95 % interval", "flips", "bytes per value"),
            (
                (one["form"], _number(one["kl"]), _interval(one["low"], one["high"]), human_ratio(one["flips"]), f"{one['bytes_per_value']:.4g}")
                for one in found["formats"]
            ),
        )  # fmt: skip
    return f'<section class="charts"><h2>Which layers lose it</h2>{body}</section><section>{table}</section>'


def _eviction(found: dict[str, Any]) -> str:
    advice = _table(
        ("workload", "policy", "budget", "why"),
        (
            (one["workload"], one["policy"] or "none", human_ratio(one["budget"], 0), one["reason"])
            for one in found["advice"]
        ),
    )
    low, high = found["prompt_tokens"]
    return (
        f'<section class="charts"><h2>Token eviction</h2>{_scatter(found["trials"])}</section><section>{advice}'
        f"<p>Measured on prompts of {low:,} to {high:,} tokens; nothing is said about longer ones.</p></section>"
    )


def _scatter(trials: Sequence[dict[str, Any]]) -> str:
    """Bytes kept against divergence, log scale; open marks: whole blocks."""
    import math

    shown = [one for one in trials if one["kl"] > 0]
    if not shown:
        return ""
    top = max(one["kv_bytes"] for one in trials)
    lows = [math.log10(max(one["kl"], 1e-6)) for one in shown]
    floor, ceiling = math.floor(min(lows)), math.ceil(max(lows))
    span = max(1, ceiling - floor)
    marks = []
    for one in shown:
        x = 50 + (_WIDTH - 70) * one["kv_bytes"] / top
        y = 10 + (_HEIGHT - 40) * (ceiling - math.log10(max(one["kl"], 1e-6))) / span
        color, shape = _MARKS.get(one["policy"], ("#8a8f98", "circle"))
        title = f"{one['policy']} {one['budget']:.0%} {one['grain']}: KL {one['kl']:.3g}, {human_bytes(one['kv_bytes'])}"
        fill = color if one["grain"] == "token" else "none"
        marks.append(
            f'<g fill="{fill}" stroke="{color}"><title>{escape(title)}</title>{_mark(shape, x, y)}</g>'
        )
    grid = "".join(
        f'<line x1="50" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".15"/>'
        f'<text x="46" y="{y + 4:.1f}" text-anchor="end" font-size="11" fill="currentColor">1e{power}</text>'
        for power in range(floor, ceiling + 1)
        for y in [10 + (_HEIGHT - 40) * (ceiling - power) / span]
    )
    legend = " ".join(f'<span style="color:{color}">■ {name}</span>' for name, (color, _) in _MARKS.items())
    return (
        "<figure class=wide><h3>Bytes kept against what they cost</h3>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Pareto picture">{grid}{"".join(marks)}'
        f'<text x="{_WIDTH - 20}" y="{_HEIGHT - 6}" text-anchor="end" font-size="11" fill="currentColor">KV bytes, 0 to {human_bytes(top)}</text></svg>'
        f"<p class=legend>{legend} (filled: single tokens; open: whole blocks)</p>"
        "<figcaption>KL of the thinned cache from the full one on the text that follows, in nats; lower left is better.</figcaption></figure>"
    )


def _mark(shape: str, x: float, y: float) -> str:
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    points = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)), "up": ((0, -6), (5, 4), (-5, 4)),
        "down": ((0, 6), (5, -4), (-5, -4)), "diamond": ((0, -6), (5, 0), (0, 6), (-5, 0)),
        "cross": ((-5, -1), (-1, -1), (-1, -5), (1, -5), (1, -1), (5, -1), (5, 1), (1, 1), (1, 5), (-1, 5), (-1, 1), (-5, 1)),
    }[shape]  # fmt: skip
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in points)}"/>'


def _bars(rows: Sequence[tuple[str, float]], title: str) -> str:
    """Horizontal bars with their numbers."""
    if not rows:
        return ""
    most = max(value for _, value in rows) or 1.0
    body = "".join(
        f'<text x="70" y="{14 + 18 * at}" text-anchor="end" font-size="11" fill="currentColor">{escape(name)}</text>'
        f'<rect x="76" y="{4 + 18 * at}" width="{440 * value / most:.1f}" height="12" fill="var(--active)"/>'
        f'<text x="{82 + 440 * value / most:.1f}" y="{14 + 18 * at}" font-size="11" fill="currentColor">{value:.3g}</text>'
        for at, (name, value) in enumerate(rows)
    )
    return (
        f"<figure class=wide><h3>{escape(title)}</h3>"
        f'<svg viewBox="0 0 {_WIDTH} {18 * len(rows) + 8}" role="img" aria-label="{escape(title)}">{body}</svg></figure>'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.4g} .. {high:.4g}"
