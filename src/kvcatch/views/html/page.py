"""The page around a report: static HTML that reads without its script, data and script inline, nothing loaded."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files

from kvcatch import __version__
from kvcatch.views.html.content import Report
from kvcatch.views.palette import ROLES

#: nothing may be loaded from anywhere; what is inline is ours
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_DRAWN = (
    ("use", "time", ("Blocks by state at the fullest moment of each slice (left), longest wait for a first token (right). "
     "Active: held by requests; cached: free but still reusable. Dashed: safe watermark, 85 % until one is measured. PromQL: "
     "vllm:kv_cache_usage_perc, kvcatch_kv_cache_blocks{state}; vllm:time_to_first_token_seconds")),
    ("queues", "time", "Most requests in each slice. PromQL: vllm:num_requests_running, vllm:num_requests_waiting"),
    ("preempt", "time", ("Preempted requests lose their blocks and are computed again. PromQL: "
     "rate(vllm:num_preemptions_total[1m]), kvcatch_preemption_recomputed_tokens_total")),
    ("hits", "time", ("Prompt tokens found in the cache, of those looked up in each slice. PromQL: "
     "rate(vllm:prefix_cache_hits_total[1m]) / rate(vllm:prefix_cache_queries_total[1m])")),
    ("empty", "time", ("Token slots of held blocks that hold nothing, most in each slice; shared blocks count once. PromQL: "
     "kvcatch_internal_fragmentation_ratio")),
    ("rate", "time", "Generated tokens per second of engine time. PromQL: rate(vllm:generation_tokens_total[1m])"),
    ("holders", "time", ("Blocks held, by tenant; choose a tenant to see its largest requests. A block that several requests "
     "share counts for each. PromQL: kvcatch_tenant_blocks")),
    ("icicle", "wide", "Who held what at the moment chosen above: the pool, its tenants, their largest requests."),
    ("lives", "wide", ("Arrival to finish: waiting, prefill, generation, preempted (waiting again), recompute (length from the "
     "measured prefill speed). Sort and filter above.")),
    ("residency", "half", "Evicted blocks by the time since a request last took them, and since the last one let go of them."),
    ("distance", "half", "Reused blocks by the room that was needed to keep them (reuse distance); dashed: today's size."),
    ("curve", "wide", ("Share of prompt tokens that caches of other sizes would hit, requests one after the other; dashed: "
     "today's size. kvcatch simulate --curve")),
)  # fmt: skip


def render(report: Report) -> str:
    """The whole HTML document."""
    folder = files("kvcatch.views.html")
    style = folder.joinpath("report.css").read_text(encoding="utf-8")
    script = folder.joinpath("report.js").read_text(encoding="utf-8")
    colors = "".join(f"--{role}:{hue};" for role, (hue, _, _) in ROLES.items() if hue)
    # Names come from clients: no tag may end the data early.
    data = json.dumps(report.charts, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(report.title)} · kvcatch report</title><style>:root{{{colors}}}{style}</style></head>\n"
        f"<body>{_head(report)}<main>{_findings(report)}{_charts(report)}{_tables(report)}</main>"
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>\n'
    )


def _head(report: Report) -> str:
    numbers = "".join(
        f'<div class="number"><span>{escape(name)}</span><strong>{escape(value)}</strong><small>{escape(detail)}</small></div>'
        for name, value, detail in report.numbers
    )
    return (
        f'<header><p class="what">{escape(report.title)}</p>'
        f'<h1 class="{report.severity}">{escape(report.verdict)}</h1><div class="numbers">{numbers}</div></header>'
        '<nav id="axis" aria-label="Time shown by all charts"><div id="minimap"></div>'
        '<div class="tools"><output id="window"></output><button id="reset">Whole run</button>'
        '<label>Filter <input id="filter" type="search" placeholder="tenant or request"></label>'
        '<button id="theme" aria-label="Light or dark">Theme</button></div></nav>'
    )


def _findings(report: Report) -> str:
    if not report.findings:
        return '<section><h2>Findings</h2><p class="fine">Nothing found.</p></section>'
    rows = []
    for number, one in enumerate(report.findings):
        evidence = "".join(f"<li>{escape(text)}</li>" for text in one["evidence"])
        when = ""
        if one["when"]:
            when = f'<button class="when" data-ms="{one["unix_ms"]}">{escape(one["when"])}</button>'
        rows.append(
            f'<details class="finding {one["severity"]}"{" open" if number < 2 else ""}>'
            f"<summary><b>{escape(one['severity'])}</b> <code>{one['code']} {escape(one['name'])}</code> {escape(one['title'])}"
            f"</summary><ul>{evidence}</ul><p><b>Cause</b> {escape(one['cause'])}</p>"
            f"<p><b>Do</b> {escape(one['remedy'])}</p>{when}</details>"
        )
    return f"<section><h2>Findings</h2>{''.join(rows)}</section>"


def _charts(report: Report) -> str:
    titles, charts = report.charts["titles"], report.charts
    missing = {
        "holders": charts["holders"] is None, "icicle": charts["holders"] is None, "residency": charts["residency"] is None,
        "distance": charts["reuse"] is None, "curve": charts["reuse"] is None, "lives": not charts["lives"]["rows"],
    }  # fmt: skip
    instead = {
        "residency": "No block was evicted.", "curve": "No prefix was shared: no size of cache would hit.",
        "distance": "No block was used again.",
    }  # fmt: skip
    names = {
        "icicle": "Who holds the cache at one moment", "distance": "How far apart blocks are used again",
        "curve": titles.get("reuse", "What more room would win"), "residency": titles.get("residency", "How long blocks stay"),
        "holders": titles.get("holders", "Who holds the cache"),
    }  # fmt: skip
    parts = []
    for key, kind, caption in _DRAWN:
        if missing.get(key):
            body = f'<p class="fine">{escape(instead.get(key, "Not in this recording."))}</p>'
        else:
            tools = ""
            if key == "lives":
                tools = (
                    '<p class="tools"><label>Sort <select id="sort"><option value="trouble">trouble first</option>'
                    '<option value="arrival">arrival</option><option value="blocks">blocks</option><option value="ttft">TTFT</option>'
                    '</select></label> <button id="fewer">◀</button> <output id="page"></output> <button id="more">▶</button></p>'
                )
            body = f'{tools}<div class="plot" id="{key}"></div><p class="legend" id="{key}-legend"></p>'
        parts.append(
            f'<figure class="{kind}"><h3>{escape(names.get(key, titles.get(key, "")))}</h3>{body}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    return f'<section class="charts"><h2>Over time</h2>{"".join(parts)}</section><div id="tip" role="status"></div>'


def _tables(report: Report) -> str:
    causes = "".join(
        f"<tr><td>{escape(a)}</td><td class=n>{escape(b)}</td><td>{escape(c)}</td></tr>"
        for a, b, c in report.causes
    )
    ranks = ""
    if report.ranks:
        head = "".join(f"<th>{escape(name)}</th>" for name in report.ranks[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>"
            for row in report.ranks
        )
        ranks = f"<section><h2>Ranks</h2><table><tr>{head}</tr>{body}</table></section>"
    facts = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in report.provenance)
    settings = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in report.settings)
    losses = "".join(f"<li>{escape(text)}</li>" for text in report.losses)
    missed = (
        f"<p>Where the other prompt tokens went:</p><table><tr><th>cause</th><th>tokens</th><th>meaning</th></tr>{causes}</table>"
        if causes
        else ""
    )
    return (
        f"<section><h2>What caching saved</h2><p>{escape(report.saved)}</p>{missed}</section>{ranks}"
        f"<section><h2>Where this comes from</h2><table>{facts}</table><h3>What is missing</h3><ul>{losses}</ul>"
        f"<details><summary>Resolved settings</summary><table>{settings}</table></details>"
        f"<p class=fine>Written by kvcatch {__version__}. No prompt text is recorded.</p></section>"
    )
