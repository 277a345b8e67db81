"""Metrics pages of any vLLM release, built from the metric names that release defines."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data" / "metrics"
BLOCKS, BLOCK_SIZE = 101, 16

#: what the engine of every generated page is doing
STATE = {
    "num_requests_running": 5,
    "num_requests_waiting": 7,
    "prompt_tokens": 4000,
    "generation_tokens": 900,
    "num_preemptions": 3,
}
TOKENS = {"queries": 4000, "hits": 1600}


@cache
def releases() -> dict[str, list[dict[str, str]]]:
    """Release -> rows of name, kind, help, engine (v0 or v1)."""
    versions: dict[str, list[dict[str, str]]] = json.loads((DATA / "vllm_metric_names.json").read_text())[
        "versions"
    ]
    return versions


def build(release: str, engine: str = "v1", *, openmetrics: bool = False, help_lines: bool = True) -> str:
    """The page of one release with the same work done on each."""
    labels = (
        '{engine="0",model_name="m"}' if engine == "v1" and release != "0.8.5.post2" else '{model_name="m"}'
    )
    lines: list[str] = []
    done: set[str] = set()
    for row in releases()[release]:
        if row["engine"] != engine or row["name"] in done or not row["name"].startswith("vllm:"):
            continue
        done.add(row["name"])
        lines += _family(row, labels, openmetrics, help_lines)
    size = f'block_size="{BLOCK_SIZE}",num_gpu_blocks="{BLOCKS}",enable_prefix_caching="True"'
    info = "vllm_cache_config_info" if openmetrics else "vllm:cache_config_info"
    lines += [f"# TYPE {info} gauge", f"{info}{{{size}}} 1.0"]
    return "\n".join([*lines, "# EOF" if openmetrics else "", ""])


def _family(row: dict[str, str], labels: str, openmetrics: bool, help_lines: bool) -> list[str]:
    base = row["name"].removesuffix("_total") if row["kind"] == "counter" else row["name"]
    name = base.replace(":", "_") if openmetrics else base
    exposed = f"{name}_total" if row["kind"] == "counter" else name
    head = [f"# HELP {name if openmetrics else exposed} {row['help']}"] if help_lines else []
    head.append(f"# TYPE {name if openmetrics else exposed} {row['kind']}")
    if row["kind"] == "histogram":
        inner = labels[1:-1]
        rows = [f'{name}_bucket{{{inner},le="{bound}"}} {height}' for bound, height in
                (("0.1", 1.0), ("1.0", 3.0), ("+Inf", 4.0))]  # fmt: skip
        return [*head, *rows, f"{name}_count{labels} 4.0", f"{name}_sum{labels} 6.0"]
    if base.endswith("waiting_by_reason"):
        return [*head, *(f'{name}{{{labels[1:-1]},reason="{reason}"}} {count}' for reason, count in
                         (("capacity", 4.0), ("deferred", 3.0)))]  # fmt: skip
    return [*head, f"{exposed}{labels} {_value(base, row)}"]


def _value(base: str, row: dict[str, str]) -> Any:
    short = base.removeprefix("vllm:")
    if short in STATE:
        return float(STATE[short])
    if short.endswith("cache_usage_perc"):
        # 40 blocks in use, by the divisor each engine generation uses.
        return 0.0 if short.startswith("cpu") else 40 / BLOCKS if row["engine"] == "v0" else 40 / (BLOCKS - 1)
    if short in (
        "prefix_cache_queries",
        "gpu_prefix_cache_queries",
        "prefix_cache_hits",
        "gpu_prefix_cache_hits",
    ):
        tokens = TOKENS["queries" if short.endswith("queries") else "hits"]
        return float(tokens // BLOCK_SIZE if "queried blocks" in _queries_help(row) else tokens)
    return 0.0


def _queries_help(row: dict[str, str]) -> str:
    """vLLM 0.8.5 counts blocks; only its help texts say so."""
    for rows in releases().values():
        if row in rows:
            return next((r["help"] for r in rows if r["name"].endswith("gpu_prefix_cache_queries")), "")
    return ""
