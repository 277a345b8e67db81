"""Grafana dashboards from one table of panels. One colour per state everywhere, a description on every panel."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcatch.metrics import THRESHOLDS as T
from kvcatch.views.palette import ROLES

_ME = 'model_name=~"$model_name", target=~"$target", engine=~"$engine"'
_VLLM = 'model_name=~"$model_name"'
_R = "[$__rate_interval]"
_CAPACITY = f"kvcatch_kv_cache_capacity_blocks{{{_ME}}}"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One query of a panel. color: a palette role; right: second axis, in seconds; dashed: a limit."""

    expr: str
    legend: str
    color: str = ""
    right: bool = False
    dashed: bool = False


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One panel. kind: timeseries | stat | heatmap. unit: Grafana's. anchor: section of the runbook."""

    title: str
    description: str
    lines: tuple[Line, ...]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    ratio: bool = False
    anchor: str = ""
    width: int = 12


def _quantiles(metric: str, *shares: float) -> tuple[Line, ...]:
    return tuple(
        Line(
            expr=f"histogram_quantile({share:g}, sum by (le) (rate({metric}_bucket{{{_VLLM}}}{_R})))",
            legend=f"P{share * 100:g}",
        )
        for share in shares
    )


def _heatmap(title: str, metric: str, description: str, unit: str) -> Panel:
    query = f"sum by (le) (increase({metric}_bucket{{{_VLLM}}}{_R}))"
    return Panel(
        title=title, description=description, unit=unit, kind="heatmap",
        lines=(Line(expr=query, legend="{{le}}"),),
    )  # fmt: skip


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Saturation", (
        Panel(
            title="Cache Utilization and Time To First Token", unit="percentunit", ratio=True, width=24,
            anchor="kvc001",
            description="Share of usable KV blocks that running requests hold (left; cached blocks are not counted), "
            "against the p95 time to first token (right). Where the second rises with the first, KV is the limit. "
            "Keep the first below the dashed watermark.",
            lines=(
                Line(expr=f'max(kvcatch_kv_cache_blocks{{state="active", {_ME}}} / ignoring (state) {_CAPACITY})',
                     legend="utilization, fullest engine", color="active"),
                Line(expr=f"min(kvcatch_watermark_ratio{{{_ME}}})", legend="safe watermark", color="watermark",
                     dashed=True),
                Line(expr=f"histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket"
                          f"{{{_VLLM}}}{_R})))", legend="TTFT P95", color="preempted", right=True),
            ),
        ),
        Panel(
            title="KV blocks by state", unit="short", stacked=True, anchor="kvc001",
            description="Active: referenced by requests. Cached: reusable prefixes, given up when needed. Free: empty. "
            "They add up to the pool. A large cached share is good; active near the top is not.",
            lines=tuple(
                Line(expr=f'sum(kvcatch_kv_cache_blocks{{state="{state}", {_ME}}})', legend=state, color=state)
                for state in ("active", "cached", "free")
            ),
        ),
        Panel(
            title="Committed demand", unit="percentunit", anchor="scale-out",
            description="Blocks held plus blocks that waiting prompts need, over usable blocks. Above 100 % not "
            "everything that was asked for fits: the signal to scale out.",
            lines=(
                Line(expr=f"kvcatch_committed_ratio{{{_ME}}}", legend="{{target}} {{engine}}", color=""),
                Line(expr=f"vector({T.committed_target_ratio})", legend="autoscaler target", color="watermark",
                     dashed=True),
            ),
        ),
        Panel(
            title="Headroom", unit="short", anchor="kvc001",
            description="More requests of the recent typical size that fit before one waits. Zero means full.",
            lines=(Line(expr=f"kvcatch_headroom_requests{{{_ME}}}", legend="{{target}} {{engine}}"),),
        ),
        Panel(
            title="What bounds the step", unit="percentunit", stacked=True, anchor="kvc010",
            description="Share of engine steps by the limit that stopped the scheduler: blocks, max_num_seqs, the "
            "token budget, deferred requests, or nothing.",
            lines=(Line(expr=f"sum by (bound) (rate(kvcatch_steps_total{{{_ME}}}{_R})) / ignoring (bound) group_left ()"
                             f" sum(rate(kvcatch_steps_total{{{_ME}}}{_R}))", legend="{{bound}}"),),
        ),
    )),
    ("Prefix cache", (
        Panel(
            title="Prefix hit ratio", unit="percentunit", ratio=True, anchor="kvc203",
            description="Prompt tokens found in the prefix cache over tokens looked up, admitted requests only. Higher "
            "is better; what is possible depends on the prompts.",
            lines=(
                Line(expr=f"sum(rate(kvcatch_prefix_cache_hit_tokens_total{{{_ME}}}{_R})) / "
                          f"sum(rate(kvcatch_prefix_cache_queried_tokens_total{{{_ME}}}{_R}))",
                     legend="admitted requests", color="cached"),
                Line(expr=f"sum(rate(vllm:prefix_cache_hits_total{{{_VLLM}}}{_R})) / "
                          f"sum(rate(vllm:prefix_cache_queries_total{{{_VLLM}}}{_R}))",
                     legend="as the engine counts"),
            ),
        ),
        Panel(
            title="Prompt tokens: looked up and found", unit="short", anchor="kvc203",
            description="Tokens per second looked up in the prefix cache, and found there; of what was not, the part "
            "that had been there before (capacity).",
            lines=(
                Line(expr=f"sum(rate(kvcatch_prefix_cache_queried_tokens_total{{{_ME}}}{_R}))", legend="looked up",
                     color="free"),
                Line(expr=f"sum(rate(kvcatch_prefix_cache_hit_tokens_total{{{_ME}}}{_R}))", legend="found",
                     color="cached"),
                Line(expr="sum(rate(kvcatch_prefix_cache_missed_tokens_total"
                          f"{{{_ME}, cause=\"capacity\"}}{_R}))", legend="missed for lack of room", color="evicted"),
            ),
        ),
    )),
    ("Eviction and residency", (
        Panel(
            title="Evicted blocks", unit="short", anchor="kvc203",
            description="Cached blocks per second whose contents were dropped to make room.",
            lines=(Line(expr=f"sum by (target, engine) (rate(kvcatch_kv_block_evictions_total{{{_ME}}}{_R}))",
                        legend="{{target}} {{engine}}", color="evicted"),),
        ),
        Panel(
            title="Block lifetime and idle time before eviction", unit="s",
            description="Sampled by the engine (--kv-cache-metrics): how long a block lives, and how long it lay idle "
            "before it was evicted. Idle far below the reuse gap means the cache is too small.",
            lines=(
                *(Line(expr=f"histogram_quantile(0.5, sum by (le) (rate(vllm:{name}_bucket{{{_VLLM}}}{_R})))",
                       legend=legend) for name, legend in (
                           ("kv_block_lifetime_seconds", "lifetime, median"),
                           ("kv_block_idle_before_evict_seconds", "idle before eviction, median"),
                           ("kv_block_reuse_gap_seconds", "reuse gap, median"))),
            ),
        ),
        Panel(
            title="Internal fragmentation", unit="percentunit", ratio=True, anchor="kvc301",
            description="Share of token slots in active blocks that hold no token. Lower is better; high values mean "
            "the block size is large for these requests.",
            lines=(Line(expr=f"kvcatch_internal_fragmentation_ratio{{{_ME}}}", legend="{{target}} {{engine}}"),),
        ),
        Panel(
            title="Tokens held", unit="short",
            description="Tokens in active blocks (shared blocks once), against the slots those blocks have.",
            lines=(
                Line(expr=f"sum(kvcatch_kv_cache_tokens{{{_ME}}})", legend="held", color="active"),
                Line(expr=f'sum(kvcatch_kv_cache_blocks{{state="active", {_ME}}} * ignoring (state, tier) '
                          f"kvcatch_kv_cache_block_size_tokens{{{_ME}}})", legend="slots of active blocks",
                     color="free"),
            ),
        ),
        Panel(
            title="KV cache moved between tiers", unit="Bps", anchor="kvc203",
            description="Bytes per second between the device and another tier, as the engine's connectors count them. "
            "Empty without a connector.",
            lines=(Line(expr="sum by (tier, direction) (rate(kvcatch_kv_transfer_bytes_total"
                             f"{{{_ME}}}{_R}))", legend="{{direction}} {{tier}}"),),
        ),
    )),
    ("Preemption", (
        Panel(
            title="Preemptions", unit="short", anchor="kvc002",
            description="Requests per second thrown out of the cache to let others finish. Anything steady is bad.",
            lines=(
                Line(expr=f"sum by (target, engine) (rate(kvcatch_preemptions_total{{{_ME}}}{_R}))",
                     legend="{{target}} {{engine}}", color="preempted"),
                Line(expr=f"sum(rate(vllm:num_preemptions_total{{{_VLLM}}}{_R}))", legend="as the engine counts"),
            ),
        ),
        Panel(
            title="Recomputed tokens", unit="short", anchor="kvc002",
            description="Tokens per second computed again because of preemption, against all prefilled tokens.",
            lines=(
                Line(expr=f"sum(rate(kvcatch_preemption_recomputed_tokens_total{{{_ME}}}{_R}))", legend="recomputed",
                     color="preempted"),
                Line(expr=f'sum(rate(kvcatch_scheduled_tokens_total{{phase="prefill", {_ME}}}{_R}))',
                     legend="all prefill", color="free"),
            ),
        ),
    )),
    ("Requests and tenants", (
        Panel(
            title="Scheduler State", unit="short", anchor="kvc007",
            description="Requests running and waiting, and what they wait for. Waiting for blocks is KV pressure; "
            "other waits are not.",
            lines=(
                Line(expr=f"sum(vllm:num_requests_running{{{_VLLM}}})", legend="running", color="active"),
                Line(expr=f"sum(vllm:num_requests_waiting{{{_VLLM}}})", legend="waiting", color="evicted"),
                Line(expr=f'sum(kvcatch_requests_waiting{{reason="blocks", {_ME}}})', legend="waiting for blocks",
                     color="preempted"),
                Line(expr=f"sum(kvcatch_requests_held{{{_ME}}})", legend="held by kvcatch"),
            ),
        ),
        Panel(
            title="Tenants by blocks", unit="short", stacked=True, anchor="kvc003",
            description="KV blocks held by the tenants with most; everyone else is 'other'.",
            lines=(Line(expr=f"sum by (tenant) (kvcatch_tenant_blocks{{{_ME}}})", legend="{{tenant}}"),),
        ),
        Panel(
            title="Time To First Token Latency", unit="s", anchor="slow-first-token",
            description="From arrival to the first token. Lower is better.",
            lines=_quantiles("vllm:time_to_first_token_seconds", 0.5, 0.9, 0.95, 0.99),
        ),
        Panel(
            title="Time Per Output Token Latency", unit="s",
            description="Between two output tokens. Lower is better.",
            lines=_quantiles("vllm:inter_token_latency_seconds", 0.5, 0.9, 0.95, 0.99),
        ),
        Panel(
            title="E2E Request Latency", unit="s", description="From arrival to the last token.",
            lines=_quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.9, 0.95, 0.99),
        ),
        Panel(
            title="Queue Time", unit="s", description="From arrival to the first time the request runs.",
            lines=_quantiles("vllm:request_queue_time_seconds", 0.5, 0.95),
        ),
        Panel(
            title="Token Throughput", unit="short", description="Prompt and generated tokens per second.",
            lines=(
                Line(expr=f"sum(rate(vllm:prompt_tokens_total{{{_VLLM}}}{_R}))", legend="prompt"),
                Line(expr=f"sum(rate(vllm:generation_tokens_total{{{_VLLM}}}{_R}))", legend="generation"),
            ),
        ),
        _heatmap("Request Prompt Length", "vllm:request_prompt_tokens", "Tokens per prompt.", "short"),
        _heatmap("Request Generation Length", "vllm:request_generation_tokens", "Tokens per answer.", "short"),
        Panel(
            title="Finish Reason", unit="short", description="Requests per second by how they ended.",
            lines=(Line(expr=f"sum by (finished_reason) (rate(vllm:request_success_total{{{_VLLM}}}{_R}))",
                        legend="{{finished_reason}}"),),
        ),
    )),
    ("Ranks", (
        Panel(
            title="Device memory by owner", unit="bytes", stacked=True, anchor="kvc107",
            description="Memory of every rank's card: KV cache, the rest of the engine, other processes, free.",
            lines=(Line(expr=f"sum by (device, tp_rank, pp_rank, dp_rank, owner) (kvcatch_device_memory_bytes{{{_ME}}})",
                        legend="{{device}} tp{{tp_rank}} pp{{pp_rank}} dp{{dp_rank}} {{owner}}"),),
        ),
        Panel(
            title="Step time by rank", unit="s", anchor="kvc304",
            description="Model execution time of each rank. The slowest sets the pace of all.",
            lines=(Line(expr=f"kvcatch_rank_step_seconds{{{_ME}}}",
                        legend="{{device}} tp{{tp_rank}} pp{{pp_rank}} dp{{dp_rank}}"),),
        ),
        Panel(
            title="Scheduler time per step", unit="s",
            description="Time inside the scheduler per step, and of the whole step.",
            lines=(
                Line(expr=f"sum(rate(kvcatch_schedule_seconds_total{{{_ME}}}{_R})) / "
                          f"sum(rate(kvcatch_steps_total{{{_ME}}}{_R}))", legend="schedule"),
                Line(expr=f"sum(rate(kvcatch_step_seconds_total{{{_ME}}}{_R})) / "
                          f"sum(rate(kvcatch_steps_total{{{_ME}}}{_R}))", legend="step"),
            ),
        ),
    )),
    ("Gateway", (
        Panel(
            title="Gateway decisions", unit="short", stacked=True, width=24,
            description="Requests per second by what the gateway decided, and why. Empty without a gateway.",
            lines=(Line(expr=f"sum by (outcome, reason) (rate(kvcatch_gateway_decisions_total{_R}))",
                        legend="{{outcome}} {{reason}}"),),
        ),
    )),
    ("kvcatch itself", (
        Panel(
            title="Targets up", unit="short", anchor="target-down", width=8,
            description="1 for every engine that answers.",
            lines=(Line(expr=f"kvcatch_up{{{_ME}}}", legend="{{target}} {{engine}}"),),
        ),
        Panel(
            title="Findings", unit="short", width=8,
            description="Findings open now; the code is the section of the runbook.",
            lines=(Line(expr=f"sum by (code, severity) (kvcatch_findings{{{_ME}}})", legend="{{code}} {{severity}}"),),
        ),
        Panel(
            title="Lost records and errors", unit="short", anchor="kvc503", width=8,
            description="Records lost by the recorder, errors of its hooks, series refused or unknown.",
            lines=(
                Line(expr=f"sum(rate(kvcatch_capture_dropped_records_total{{{_ME}}}{_R}))", legend="lost/s"),
                Line(expr=f"sum(rate(kvcatch_capture_hook_errors_total{{{_ME}}}{_R}))", legend="hook errors/s"),
                Line(expr=f"max(kvcatch_unknown_series{{{_ME}}})", legend="unknown series"),
            ),
        ),
        Panel(
            title="Read time", unit="s", width=12,
            description="How long one read of a target takes.",
            lines=(Line(expr=f"kvcatch_scrape_duration_seconds{{{_ME}}}", legend="{{target}}"),),
        ),
        Panel(
            title="Age of the data", unit="s", width=12,
            description="Seconds since the newest data of each target.",
            lines=(Line(expr=f"time() - kvcatch_last_sample_timestamp_seconds{{{_ME}}}", legend="{{target}}"),),
        ),
    )),
)  # fmt: skip

FLEET: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Engines side by side", (
        Panel(
            title="Cache Utilization by engine", unit="percentunit", ratio=True, anchor="kvc305",
            description="Share of usable blocks active, per engine. Lines far apart: routing fills engines unevenly.",
            lines=(
                Line(expr=f'kvcatch_kv_cache_blocks{{state="active", {_ME}}} / ignoring (state) {_CAPACITY}',
                     legend="{{target}} {{engine}}"),
                Line(expr=f"min(kvcatch_watermark_ratio{{{_ME}}})", legend="safe watermark", color="watermark",
                     dashed=True),
            ),
        ),
        Panel(
            title="Waiting for blocks by engine", unit="short", anchor="kvc305",
            description="Requests waiting for KV blocks, per engine.",
            lines=(Line(expr=f'kvcatch_requests_waiting{{reason="blocks", {_ME}}}', legend="{{target}} {{engine}}"),),
        ),
        Panel(
            title="Headroom by engine", unit="short",
            description="More requests of the typical size that fit, per engine.",
            lines=(Line(expr=f"kvcatch_headroom_requests{{{_ME}}}", legend="{{target}} {{engine}}"),),
        ),
        Panel(
            title="Preemptions by engine", unit="short", anchor="kvc002",
            description="Preemptions per second, per engine.",
            lines=(Line(expr=f"rate(kvcatch_preemptions_total{{{_ME}}}{_R})", legend="{{target}} {{engine}}"),),
        ),
    )),
)  # fmt: skip


def boards(runbook_url: str) -> dict[str, dict[str, Any]]:
    """File name -> dashboard."""
    return {
        "kvcatch-overview.json": _board("kvcatch-overview", "KV cache", ROWS, runbook_url),
        "kvcatch-fleet.json": _board("kvcatch-fleet", "KV cache, engine by engine", FLEET, runbook_url),
    }


def _board(uid: str, title: str, rows: Any, runbook_url: str) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = number = 0
    for row_title, members in rows:
        number += 1
        panels.append(
            {"id": number, "type": "row", "title": row_title, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        )  # fmt: skip
        top += 1
        left = 0
        for member in members:
            if left + member.width > 24:
                left, top = 0, top + 8
            number += 1
            panels.append(_panel(number, member, left, top, runbook_url))
            left += member.width
        top += 8
    return {
        "uid": uid,
        "title": f"kvcatch / {title}",
        "tags": ["kvcatch", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "utc",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": _variables()},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _variables() -> list[dict[str, Any]]:
    first = {"name": "DS_PROMETHEUS", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    rest = [
        {
            "name": name, "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2, "multi": True,
            "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "label": name,
        }
        for name, query in (
            ("model_name", "label_values(kvcatch_up, model_name)"),
            ("target", 'label_values(kvcatch_up{model_name=~"$model_name"}, target)'),
            ("engine", 'label_values(kvcatch_up{model_name=~"$model_name", target=~"$target"}, engine)'),
        )
    ]  # fmt: skip
    return [first, *rest]


def _panel(number: int, panel: Panel, left: int, top: int, runbook_url: str) -> dict[str, Any]:
    link = f"\n\n[Runbook]({runbook_url}#{panel.anchor})" if panel.anchor else ""
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": {"lineWidth": 2, "fillOpacity": 10}}
    if panel.stacked:
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}}
    if panel.ratio:
        defaults |= {"min": 0, "max": 1}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description + link,
        "datasource": _SOURCE,
        "gridPos": {"x": left, "y": top, "w": panel.width, "h": 8},
        "targets": [
            {"refId": chr(65 + index), "expr": line.expr, "legendFormat": line.legend, "datasource": _SOURCE,
             "format": "heatmap" if panel.kind == "heatmap" else "time_series"}
            for index, line in enumerate(panel.lines)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": [o for line in panel.lines if (o := _override(line))]},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if panel.kind == "timeseries" else {"calculate": False, "yAxis": {"unit": panel.unit}},
    }  # fmt: skip


def _override(line: Line) -> dict[str, Any] | None:
    properties: list[dict[str, Any]] = []
    color = ROLES[line.color][0] if line.color else ""
    if color:
        properties.append({"id": "color", "value": {"mode": "fixed", "fixedColor": color}})
    if line.dashed:
        properties += [
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "text"}},
        ]
    if line.right:
        properties += [
            {"id": "custom.axisPlacement", "value": "right"},
            {"id": "unit", "value": "s"},
            {"id": "min", "value": 0},
            {"id": "max"},
        ]
    if not properties:
        return None
    return {"matcher": {"id": "byName", "options": line.legend}, "properties": properties}
