"""Pages of the documentation that are made from the code's own tables."""

from __future__ import annotations

from kvcatch.engine_series import ENGINE_SERIES
from kvcatch.metrics import CATALOGUE, THRESHOLDS, Metric
from kvcatch.views.mixin_rules import ALERTS, RECORDING
from kvcatch.views.mixin_runbook import runbook

_HEAD = """# Metrics

`kvcatch serve` exports what the engine lacks, with the engine's own words: base units, ratios from 0 to 1,
counters that end in `_total`. Every per-engine series carries `target` (what `kvcatch serve` was pointed at),
`model_name` and `engine` (the data parallel rank), as vLLM's do. Unknown is an absent series, never 0. A
target that stops answering keeps its counters and loses its gauges; `kvcatch_up` says 0.

*scraped*: filled for an engine that is only scraped. The rest needs a recorder (`kvcatch run`).
"""
_ENGINE_HEAD = """
## Names that engines use

What a scrape reads, newest name first. Both spellings (`vllm:x_total` and OpenMetrics' `vllm_x_total`), the
`ray_` prefix and old names are accepted; two names at once count once. Where a series is missing, the quantity
is unknown.

| quantity | kind | names |
| --- | --- | --- |
"""
_UNITS = """
Units that changed: prefix counters of vLLM 0.8 are in blocks, later in tokens (the help text tells; without it the
numbers do). `kv_cache_usage_perc` is a fraction of 1, over the pool without the null block; early V1 releases count
that block as used. `reason="capacity"` of `num_requests_waiting_by_reason` is read as waiting for blocks.
"""


def metrics_page() -> str:
    """``docs/metrics.md``."""
    lines = [_HEAD, "| metric | labels | unit | scraped | meaning |", "| --- | --- | --- | --- | --- |"]
    lines += [_row(metric) for metric in CATALOGUE]
    lines += [_ENGINE_HEAD.rstrip("\n")]
    lines += [
        f"| {row.quantity} | {row.kind} | {', '.join(f'`{_exposed(name, row.kind)}`' for name in row.names)} |"
        for row in ENGINE_SERIES
    ]
    lines += [_UNITS, "## Recording rules", "", "| rule | expression |", "| --- | --- |"]
    lines += [f"| `{name}` | `{_cell(expr)}` |" for name, expr in RECORDING.items()]
    lines += [
        "",
        "## Alerts",
        "",
        "| alert | severity | after | runbook | expression |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.name} | {row.severity} | {row.wait} | [{row.anchor}](runbook.md#{row.anchor}) | `{_cell(row.expr)}` |"
        for row in ALERTS
    ]
    lines += ["", "## Thresholds", "", "| name | value |", "| --- | --- |"]
    lines += [f"| {name} | {getattr(THRESHOLDS, name):g} |" for name in THRESHOLDS.__struct_fields__]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    scraped = "yes" if metric.scraped else "gateway" if metric.exporter == "gateway" else ""
    return f"| `{metric.name}` | {labels} | {metric.unit or '–'} | {scraped} | {metric.help} |"


def _exposed(name: str, kind: str) -> str:
    engine, _, rest = name.partition("_")
    return f"{engine}:{rest}{'_total' if kind == 'counter' else ''}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


#: path below docs/ -> the function that makes it
GENERATED = {"metrics.md": metrics_page, "runbook.md": runbook}
