"""From the series of one page to quantities with one meaning, whatever engine and version wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec

from kvcatch.engine_series import ENGINE_SERIES, EngineSeries
from kvcatch.sources.openmetrics import Page, Sample

#: labels that repeat one figure on several ranks; the largest counts, never the sum
_COPIES = ("tp_rank", "pp_rank", "moe_ep_rank", "pid")
_INFLATED = (
    "prompt tokens: failed admissions are counted again (vLLM up to 0.24), the hit ratio is not to be trusted"
)
_STRUCTURED = {"histogram", "summary", "info", "stateset", "gaugehistogram"}


class Histogram(NamedTuple):
    """A cumulative histogram: ``heights[i]`` observations up to ``bounds[i]``; the last bound is +Inf."""

    observations: float
    total: float
    bounds: tuple[float, ...]
    heights: tuple[float, ...]


class EngineKey(NamedTuple):
    """What tells the engines of one page apart."""

    instance: str
    model: str
    engine: str


class Reading(msgspec.Struct, kw_only=True):
    """One engine at one scrape. None is unknown. Tokens and blocks are totals, never per second.

    usable_blocks excludes vLLM's null block. queries and hits are in tokens; ``query_blocks`` and
    ``hit_blocks`` keep block counts whose block size is unknown.
    """

    key: EngineKey
    kind: str = "vllm"
    unix_seconds: float | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_for_blocks: int | None = None
    waiting_other: int | None = None
    usage_ratio: float | None = None
    usable_blocks: int | None = None
    active_blocks: int | None = None
    block_size: int | None = None
    active_tokens: int | None = None
    queries: int | None = None
    hits: int | None = None
    hit_ratio: float | None = None
    preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    evicted_tokens: int | None = None
    generation_rate: float | None = None
    prompt_rate: float | None = None
    max_running: int | None = None
    load_bytes: int | None = None
    load_seconds: float | None = None
    store_bytes: int | None = None
    store_seconds: float | None = None
    remote_bytes: Histogram | None = None
    remote_seconds: Histogram | None = None
    ttft: Histogram | None = None
    tpot: Histogram | None = None
    queue: Histogram | None = None
    e2e: Histogram | None = None
    request_prompt_tokens: Histogram | None = None
    request_generation_tokens: Histogram | None = None
    drafts: int | None = None
    block_lifetime: Histogram | None = None
    config: dict[str, str] = {}
    unknown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read(page: Page) -> dict[EngineKey, Reading]:
    """Every engine of a page. Refusals are added to ``page.rejected``."""
    groups = _groups(page)
    return {key: _reading(key, series, page) for key, series in groups.items()}


_Series = dict[str, list[Sample]]


def _groups(page: Page) -> dict[EngineKey, _Series]:
    """Series by engine. Series without an ``engine`` or ``model_name`` label belong to every engine."""
    groups: dict[EngineKey, _Series] = {}
    shared: list[tuple[str, Sample, str, str | None]] = []
    for name, samples in page.samples.items():
        for sample in samples:
            labels = sample.labels
            instance = labels.get("instance") or labels.get("pod") or ""
            model = labels.get("model_name") or labels.get("name") or labels.get("model")
            engine = labels.get("engine") or labels.get("dp_rank")
            if model is None or name.endswith("_config_info"):
                shared.append((name, sample, instance, engine))
                continue
            group = groups.setdefault(EngineKey(instance, model, engine or "0"), {})
            group.setdefault(name, []).append(sample)
    if not groups:
        for _, _, instance, engine in shared:
            groups.setdefault(EngineKey(instance, "", engine or "0"), {})
    for name, sample, instance, engine in shared:
        for key, group in groups.items():
            if key.instance == instance and engine in (None, key.engine):
                group.setdefault(name, []).append(sample)
    return groups


def _reading(key: EngineKey, series: _Series, page: Page) -> Reading:
    reading = Reading(key=key, unix_seconds=page.unix_seconds)
    reading.kind = next((kind for kind in ("vllm", "sglang", "trtllm") if _speaks(series, kind)), "vllm")
    values: dict[str, float] = {}
    used: dict[str, str] = {}
    for row in ENGINE_SERIES:
        for name in row.names:
            if row.kind == "histogram":
                histogram = _histogram(name, series, page)
                if histogram is not None:
                    setattr(reading, row.quantity, histogram)
                    break
            elif row.quantity not in ("config", "waiting_by_reason"):
                value = _value(name, row, series, page)
                if value is not None:
                    values[row.quantity], used[row.quantity] = value, name
                    break
    reading.config = _config(series)
    _queues(reading, values, series, page)
    _pool(reading, values, series)
    _prefix(reading, values, used, page)
    for name in (
        "preemptions", "prompt_tokens", "generation_tokens", "evicted_tokens", "max_running", "load_bytes", "store_bytes",
        "drafts",
    ):  # fmt: skip
        if name in values:
            setattr(reading, name, int(values[name]))
    reading.load_seconds, reading.store_seconds = values.get("load_seconds"), values.get("store_seconds")
    reading.generation_rate = values.get("generation_rate")
    reading.prompt_rate = values.get("prompt_rate")
    reading.unknown = tuple(_unknown(reading))
    return reading


def _speaks(series: _Series, kind: str) -> bool:
    return any(name.startswith(kind + "_") for name in series)


def _value(name: str, row: EngineSeries, series: _Series, page: Page) -> float | None:
    """The one value of a gauge or counter for this engine, or None with a reason on the page."""
    samples = series.get(name)
    if not samples:
        return None
    declared = page.types.get(name)
    if declared in _STRUCTURED or (declared in ("gauge", "counter") and declared != row.kind):
        page.reject(name, f"declared a {declared}, should be a {row.kind}")
        return None
    value = _merged(samples, name.startswith("vllm_"))
    if value is None:
        page.reject(name, "several series for one engine")
        return None
    if value < 0:
        # vLLM's old hit-rate gauge says -1 for "not measured"; nothing else may be negative at all.
        page.reject(name, f"negative: {value:g}")
        return None
    if row.check == "ratio" and value > 1:
        page.reject(name, f"{value:g} is not a ratio from 0 to 1")
        return None
    if row.check == "count" and value != int(value):
        page.reject(name, f"{value:g} is not a whole number")
        return None
    return value


def _merged(samples: list[Sample], strict: bool) -> float | None:
    """One figure from several label sets: copies on ranks count once, parts (by source) add up."""
    if len(samples) == 1:
        return samples[0].value
    if strict:
        return None
    parts: dict[tuple[tuple[str, str], ...], float] = {}
    totals: list[float] = []
    for sample in samples:
        part = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in _COPIES))
        parts[part] = max(parts.get(part, sample.value), sample.value)
        if sample.labels.get("priority") == "":
            totals.append(sample.value)
    return max(totals) if totals else sum(parts.values())


def _histogram(name: str, series: _Series, page: Page) -> Histogram | None:
    """A histogram whose parts agree, or None with a reason on the page."""
    counts, sums, buckets = (series.get(name + end) for end in ("_count", "_sum", "_bucket"))
    if not counts and not sums and not buckets:
        return None
    if not counts or not sums or not buckets:
        page.reject(name, "histogram with parts missing")
        return None
    if page.types.get(name, "histogram") != "histogram":
        page.reject(name, f"declared a {page.types[name]}, should be a histogram")
        return None
    best = max(counts, key=lambda sample: sample.value)
    total = next((sample.value for sample in sums if sample.labels == best.labels), None)
    rows: list[tuple[float, float]] = []
    for sample in buckets:
        bound = _bound(sample.labels.get("le"))
        if bound is None:
            page.reject(name, "bucket without a readable bound")
            return None
        if {k: v for k, v in sample.labels.items() if k != "le"} == best.labels:
            rows.append((bound, sample.value))
    rows.sort()
    problem = _histogram_problem(best.value, total, rows)
    if total is None or problem:
        page.reject(name, problem or "histogram with parts missing")
        return None
    return Histogram(best.value, total, tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def _bound(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _histogram_problem(count: float, total: float | None, rows: list[tuple[float, float]]) -> str:
    if total is None or total < 0 or count < 0:
        return "histogram with a negative or missing sum"
    if not rows or rows[-1][0] != float("inf"):
        return "histogram without its +Inf bucket: the page was cut"
    heights = [row[1] for row in rows]
    if any(low > high for low, high in pairwise(heights)) or heights[0] < 0:
        return "histogram buckets are not cumulative"
    if heights[-1] != count:
        return f"histogram count {count:g} differs from its +Inf bucket {heights[-1]:g}"
    return ""


def _config(series: _Series) -> dict[str, str]:
    rows = [*series.get("vllm_cache_config_info", ()), *series.get("sglang_cache_config_info", ())]
    # Two API server processes may both publish it, one of them before the pool was sized.
    rows.sort(key=lambda row: _whole(row.labels.get("num_gpu_blocks")) is None)
    return rows[0].labels if rows else {}


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


def _queues(reading: Reading, values: Mapping[str, float], series: _Series, page: Page) -> None:
    if "running" in values:
        reading.running = int(values["running"])
    if "waiting" in values:
        reading.waiting = int(values["waiting"])
    reasons: dict[str, int] = {}
    for sample in series.get("vllm_num_requests_waiting_by_reason", ()):
        if sample.value < 0 or sample.value != int(sample.value):
            page.reject("vllm_num_requests_waiting_by_reason", f"{sample.value:g} is not a count")
            return
        reasons[sample.labels.get("reason", "")] = int(sample.value)
    if "capacity" in reasons and "deferred" in reasons:
        reading.waiting_for_blocks = reasons["capacity"]
        reading.waiting_other = reasons["deferred"]
        if reading.waiting is None:
            reading.waiting = sum(reasons.values())
    elif reading.waiting == 0:
        reading.waiting_for_blocks = reading.waiting_other = 0
    if values.get("swapped"):
        # The V0 engine swapped requests out for want of blocks: they wait for blocks.
        reading.waiting_for_blocks = (reading.waiting_for_blocks or 0) + int(values["swapped"])
        reading.waiting = (reading.waiting or 0) + int(values["swapped"])


def _is_v0(values: Mapping[str, float], series: _Series) -> bool:
    """True for vLLM's first engine: swap metrics, and no prefix counters."""
    return ("swapped" in values or "cpu_usage" in values) and "queries" not in values


def _pool(reading: Reading, values: Mapping[str, float], series: _Series) -> None:
    config = reading.config
    usage = values.get("usage")
    reading.usage_ratio = usage
    total = _whole(config.get("num_gpu_blocks"))
    reading.block_size = _whole(config.get("block_size")) or _whole(config.get("page_size"))
    if reading.kind == "sglang":
        _sglang_pool(reading, values)
        return
    if total is None:
        return
    if _is_v0(values, series):
        reading.usable_blocks = total
        reading.active_blocks = None if usage is None else round(usage * total)
        return
    reading.usable_blocks = total - 1
    if usage is not None:
        reading.active_blocks = _active(usage, total)


def _active(usage: float, total: int) -> int | None:
    """Blocks in use from the usage gauge, exactly.

    Newer vLLM divides by ``total - 1`` (BlockPool.get_usage subtracts the null block), older V1 by ``total``
    with the null block counted as used. The gauge is k / divisor, so the right divisor gives a whole k.
    """
    inner = usage * (total - 1)
    if abs(inner - round(inner)) < 1e-6:
        return round(inner)
    outer = usage * total
    if abs(outer - round(outer)) < 1e-6:
        return max(0, round(outer) - 1)
    return round(inner)


def _sglang_pool(reading: Reading, values: Mapping[str, float]) -> None:
    used, capacity = values.get("used_tokens"), values.get("capacity_tokens")
    reading.active_tokens = None if used is None else int(used)
    size = reading.block_size
    pages = _whole(reading.config.get("num_pages"))
    if size is None:
        return
    if pages is None and capacity is not None:
        pages = int(capacity) // size
    reading.usable_blocks = pages
    if used is not None:
        reading.active_blocks = -(-int(used) // size)


def _prefix(reading: Reading, values: Mapping[str, float], used: Mapping[str, str], page: Page) -> None:
    reading.hit_ratio = values.get("hit_rate")
    queries, hits = values.get("queries"), values.get("hits")
    if reading.kind == "sglang":
        # SGLang counts cached tokens of all prompts; every prompt token is looked up.
        queries = values.get("prompt_tokens") if hits is not None else None
    if queries is None or hits is None:
        return
    if hits > queries:
        page.reject(used.get("hits", "hits"), f"more hits ({hits:g}) than lookups ({queries:g})")
        reading.hit_ratio = None
        return
    reading.hit_ratio = hits / queries if queries else None
    scale = _tokens_per_unit(reading, queries, values.get("prompt_tokens"), used, page)
    if scale is None:
        reading.warnings += ("prefix counters: neither blocks nor tokens for sure; only their ratio is used",)
        return
    reading.queries, reading.hits = int(queries * scale), int(hits * scale)
    prompts = values.get("prompt_tokens")
    if prompts and reading.queries > 1.05 * prompts and reading.kind == "vllm":
        reading.warnings += (f"{reading.queries:,} prefix tokens looked up for {prompts:,.0f} {_INFLATED}",)
    if queries == 0 and prompts and reading.config.get("enable_prefix_caching") == "True":
        reading.warnings += ("prefix counters stand at zero although prompts were processed",)


def _tokens_per_unit(
    reading: Reading, queries: float, prompts: float | None, used: Mapping[str, str], page: Page
) -> int | None:
    """1 when the counters are in tokens, the block size when they are in blocks (vLLM until mid-2025)."""
    name = used.get("queries", "")
    if name != "vllm_gpu_prefix_cache_queries" or queries == 0:
        return 1
    words = page.helps.get(name, "")
    if re.search(r"blocks\b", words):
        return reading.block_size
    if "tokens" in words:
        return 1
    # No help text: the lookups of all prompts are about as many tokens as the prompts have.
    if prompts and queries > 0.7 * prompts:
        return 1
    if prompts and reading.block_size and queries * reading.block_size < 1.2 * prompts:
        return reading.block_size
    return None


def _unknown(reading: Reading) -> Iterable[str]:
    for name in (
        "running", "waiting", "waiting_for_blocks", "usage_ratio", "usable_blocks", "block_size",
        "queries", "hits", "preemptions", "prompt_tokens", "generation_tokens", "ttft", "tpot",
    ):  # fmt: skip
        if getattr(reading, name) is None:
            yield name
