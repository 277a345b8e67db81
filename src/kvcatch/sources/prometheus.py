"""A past hour from Prometheus itself: ``prometheus:URL[?selector]`` as a capture of scraped pages.

The engine's series are asked for through ``/api/v1/query_range`` and turned into one page per step, which
then means exactly what a page scraped at that moment would have meant. Where kvcatch's own exporter is scraped by the
same Prometheus, its series tell which tenants held the blocks.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

from kvcatch.engine_series import ENGINE_SERIES
from kvcatch.errors import KVCatchError
from kvcatch.sources import exported, fetch
from kvcatch.sources.openmetrics import FAMILIES, Page, Series, canonical
from kvcatch.sources.scrape import ScrapeCapture

PREFIX = "prometheus:"
DEFAULT_SPAN_SECONDS = 3600.0
#: points per series that one query may return (Prometheus refuses more than 11,000)
MAX_POINTS = 1500
_TIMEOUT_SECONDS = 30.0


def open_prometheus(
    target: str, start: float | None = None, stop: float | None = None, step_seconds: float | None = None
) -> ScrapeCapture:
    """A capture from ``prometheus:http://host:9090?namespace="prod"``; by default the last hour.

    Args:
        target: ``prometheus:`` and the server's address; after ``?`` label matchers as in PromQL.
        start, stop: unix seconds.
        step_seconds: distance of the points; by default 15 s, less for spans under half an hour (down to 1 s), or what keeps a
            series under 1,500 points.

    Raises KVCatchError when the server does not answer, or has no engine series there.
    """
    base, matchers = _split(target)
    stop = time.time() if stop is None else stop
    start = stop - DEFAULT_SPAN_SECONDS if start is None else start
    if start >= stop:
        raise KVCatchError("the span is empty: it ends before it starts.")
    # Of a short span every scrape counts: at 15 s a burst of some seconds would fall between two points.
    span = stop - start
    step = step_seconds or max(1.0, min(15.0, span / 120), span / MAX_POINTS)
    query = f'{{__name__=~"{_names()}"{"," + matchers if matchers else ""}}}'
    rows = _query_range(base, query, start, stop, step)
    if not rows:
        raise KVCatchError(
            f"{target}: no series of vLLM or SGLang in that span.",
            "Check the matchers and the time; kvcatch asks for vllm:* and sglang:*.",
        )
    capture = ScrapeCapture(target, pages=pages_of(rows, _metadata(base)), keep=MAX_POINTS * 2)
    own = exported.matchers_for(matchers)
    names = f'{{__name__=~"{"|".join(exported.NAMES)}"{"," + own if own else ""}}}'
    with suppress(KVCatchError):  # only what more there is to know; the engine's series stand without it
        capture.held_by(exported.holdings(_query_range(base, names, start, stop, step)))
    return capture


def _split(target: str) -> tuple[str, str]:
    text = target.removeprefix(PREFIX)
    base, _, matchers = text.partition("?")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise KVCatchError(
            f"{target}: not a Prometheus address.", 'Write prometheus:http://host:9090?namespace="prod"'
        )
    return base.rstrip("/"), matchers.strip().strip("{}")


def _names() -> str:
    """A regular expression of every exposed name of every quantity we know."""
    names = []
    for row in ENGINE_SERIES:
        ends = {"counter": "_total", "histogram": "_(bucket|sum|count)"}.get(row.kind, "")
        for name in row.names:
            engine, _, rest = name.partition("_")
            names.append(f"(ray_)?{engine}[:_]{rest}{ends}")
    return "|".join(names)


def _answer(url: str) -> Any:
    with fetch.get(url, _TIMEOUT_SECONDS, accept="application/json") as response:
        body = response.body()
    try:
        answer = json.loads(body)
    except ValueError:
        raise KVCatchError(
            f"{url.partition('?')[0]}: the answer is not JSON.", "Is it a Prometheus server?"
        ) from None
    if not isinstance(answer, dict) or answer.get("status") != "success":
        raise KVCatchError(f"{url.partition('?')[0]}: {str(answer)[:200]}")
    return answer.get("data")


def _query_range(base: str, query: str, start: float, stop: float, step: float) -> list[dict[str, Any]]:
    url = (
        f"{base}/api/v1/query_range?query={quote(query, safe='')}"
        f"&start={start:.3f}&end={stop:.3f}&step={step:.3f}"
    )
    data = _answer(url)
    rows = data.get("result") if isinstance(data, dict) else None
    if not isinstance(rows, list) or (rows and data.get("resultType") != "matrix"):
        raise KVCatchError(f"{base}: the answer is not a matrix of series.")
    return [row for row in rows if isinstance(row, dict)]


def _metadata(base: str) -> dict[str, dict[str, str]]:
    """Canonical name -> type and help; empty when the server has none (long-term stores often do not)."""
    try:
        data = _answer(f"{base}/api/v1/metadata")
    except KVCatchError:
        return {}
    found: dict[str, dict[str, str]] = {}
    for name, entries in data.items() if isinstance(data, dict) else ():
        known = canonical(name) in FAMILIES
        if known and isinstance(entries, list) and entries and isinstance(entries[0], dict):
            found[canonical(name)] = {key: str(entries[0].get(key, "")) for key in ("type", "help")}
    return found


def pages_of(rows: list[dict[str, Any]], metadata: dict[str, dict[str, str]] | None = None) -> list[Page]:
    """One page per point in time, oldest first, from the result of a range query."""
    pages: dict[float, Page] = {}
    for row in rows:
        labels = row.get("metric")
        points = row.get("values")
        if not isinstance(labels, dict) or not isinstance(points, list):
            continue
        name = canonical(str(labels.get("__name__", "")))
        own = {key: str(value) for key, value in labels.items() if key != "__name__"}
        series = Series(str(labels.get("__name__", "")), name, own, (name, tuple(sorted(own.items()))))
        for point in points:
            try:
                stamp, value = float(point[0]), float(point[1])
            except (TypeError, ValueError, IndexError, KeyError):
                continue
            page = pages.get(stamp)
            if page is None:
                page = pages[stamp] = Page()
                page.unix_seconds = stamp
                _declare(page, metadata or {})
            if not math.isfinite(value):
                page.reject(name, f"value is {point[1]}")
            else:
                page.add(series, value)
    return [pages[stamp] for stamp in sorted(pages)]


def _declare(page: Page, metadata: dict[str, dict[str, str]]) -> None:
    for name, row in metadata.items():
        if row["type"] not in ("", "unknown"):
            page.types[name] = row["type"]
        page.helps[name] = row["help"]
