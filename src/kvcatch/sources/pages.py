"""Getting ``/metrics`` pages: from an engine's address, or from files."""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kvcatch.errors import KVCatchError
from kvcatch.sources import fetch, openmetrics


def metrics_url(url: str) -> str:
    """``http://host:port`` means its ``/metrics``."""
    parts = urlsplit(url)
    return url.rstrip("/") + "/metrics" if parts.path in ("", "/") and not parts.query else url


def scrape_once(url: str, timeout_seconds: float = 5.0) -> list[openmetrics.Page]:
    """One GET of a metrics page, stamped with the time it was asked for. Raises KVCatchError."""
    now = time.time()
    with fetch.get(url, timeout_seconds, accept="text/plain;version=0.0.4") as response:
        pages = openmetrics.parse(response.chunks(), url)
    # What stands behind an end mark is not part of the answer.
    pages[0].unix_seconds = now
    return pages[:1]


def beside(url: str) -> dict[str, Any]:
    """What the engine's other routes say: version and longest request. Silent when they do not answer."""
    base = metrics_url(url).rsplit("/metrics", 1)[0]
    found: dict[str, Any] = {}
    version = _json(f"{base}/version")
    if isinstance(version.get("version"), str):
        found["engine_version"] = version["version"]
    rows = _json(f"{base}/v1/models").get("data")
    if isinstance(rows, list) and rows and isinstance(rows[0], dict):
        longest = rows[0].get("max_model_len")
        found["max_model_len"] = longest if isinstance(longest, int) else None
        found["model"] = rows[0].get("id")
    return found


def _json(url: str) -> dict[str, Any]:
    try:
        with fetch.get(url, 2.0, accept="application/json") as response:
            answer = json.loads(response.body(1 << 20))
    except (KVCatchError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def saved(targets: Sequence[str]) -> list[openmetrics.Page]:
    """Pages of files, in the order of their stamps, or as given when one has none."""
    paths: list[str] = []
    for target in targets:
        if os.path.isdir(target):
            paths += sorted(glob.glob(os.path.join(glob.escape(target), "*.prom")))
        else:
            paths += [target] if os.path.exists(target) else sorted(glob.glob(target))
    if not paths:
        raise KVCatchError(
            f"{' '.join(targets)}: no such file.", "Give a saved /metrics page or a folder of them."
        )
    pages: list[openmetrics.Page] = []
    for path in paths:
        pages += _read_file(path)
    if all(page.unix_seconds is not None for page in pages):
        pages.sort(key=lambda page: page.unix_seconds or 0.0)
    return pages


def _read_file(path: str) -> list[openmetrics.Page]:
    try:
        with open(path, "rb") as file:
            return openmetrics.parse(iter(lambda: file.read(1 << 18), b""), path)
    except OSError as error:
        raise KVCatchError(f"{path}: {error.strerror}.") from None
