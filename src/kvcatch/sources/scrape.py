"""``/metrics`` pages, live or saved, as a ``Capture``: pool and queues over time, nothing per request.

One page may hold several engines (``engine`` labels under data parallelism): the capture is their sum, and
``engines()`` gives each on its own. Saved pages are ordered by their ``# scrape_unix_ms`` comment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from kvcatch import __version__
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.results import (
    Efficiency,
    Latency,
    LossView,
    Pool,
    Preemption,
    Prefix,
    Queues,
    RequestView,
    Snapshot,
)
from kvcatch.sources import frames, openmetrics, readings
from kvcatch.sources.exported import Holdings, assign
from kvcatch.sources.frames import Frame
from kvcatch.sources.pages import beside, metrics_url, saved, scrape_once
from kvcatch.sources.readings import EngineKey, Reading
from kvcatch.store.base import SAMPLE_COLUMNS, Capture, Columns
from kvcatch.store.watermark import watermark_for

#: what no metrics page can tell
NEVER_KNOWN = ("requests", "tenants", "cached_blocks", "free_blocks", "recomputed_tokens", "bound_by")
#: pages kept of a live engine; at one a second this is an hour
KEEP_PAGES = 3600
STALE_SECONDS = 15.0
#: pages over which a gauge may be called stuck
_STUCK_SECONDS = 600.0


class ScrapeCapture(Capture):
    """One scraped target.

    Args:
        target: what the user typed.
        load: returns the newest pages; None for saved pages.
        pages: pages already read, oldest first.
        keep: how many readings to hold.
    """

    def __init__(
        self,
        target: str,
        pages: Sequence[openmetrics.Page] = (),
        load: Callable[[], list[openmetrics.Page]] | None = None,
        keep: int = KEEP_PAGES,
    ) -> None:
        self.target = target
        self.info = EngineInfo(adapter="scrape", num_blocks=0, block_size=0)
        self.fetch_seconds: float | None = None
        self.error: str | None = None
        self.process_start: float | None = None
        self._load = load
        self._frames: deque[Frame] = deque(maxlen=keep)
        self._rejected: tuple[openmetrics.Rejected, ...] = ()
        self._num_rejected = 0
        self._details: dict[str, Any] = {}
        self._windows: dict[float, list[Reading]] = {}
        self.holdings: Holdings | None = None
        self._held: dict[EngineKey, Holdings] = {}
        self.take(pages)

    # -- reading ---------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Scrape once. A failure is kept in ``error`` and shown as state, never raised."""
        if self._load is None:
            return
        start = time.monotonic()
        try:
            self.take(self._load())
            self.error = None
        except KVCatchError as error:
            self.error = error.message
        self.fetch_seconds = time.monotonic() - start

    def take(self, pages: Sequence[openmetrics.Page]) -> None:
        """Add pages, oldest first."""
        for page in pages:
            frame = readings.read(page)
            if frame:
                self._frames.append(frame)
                self.process_start = page.process_start
                self._rejected = tuple(page.rejected)
                self._num_rejected = page.num_rejected
        self._windows.clear()
        if self._frames:
            self._describe(self._newest())

    def held_by(self, found: Sequence[Holdings]) -> None:
        """Take in who held the blocks of these engines, from another source over the same time."""
        keys = sorted({key for frame in self._frames for key in frame})
        self._held = assign(found, keys)
        self.holdings = self._held.get(keys[0]) if len(keys) == 1 else None

    def describe(self, **details: Any) -> None:
        """Facts from beside the page: ``engine_version``, ``max_model_len``, ``pid``."""
        self._details.update(details)
        if self._frames:
            self._describe(self._newest())

    def _describe(self, reading: Reading) -> None:
        self.info = msgspec.structs.replace(
            info_of(reading),
            model=reading.key.model or self._details.get("model"),
            dp_size=len(self._frames[-1]),
            engine_version=self._details.get("engine_version") or "unknown",
            max_model_len=self._details.get("max_model_len"),
            pid=self._details.get("pid") or 0,
        )

    def _newest(self) -> Reading:
        return frames.merged(list(self._frames[-1].values()))

    def _merged(self) -> list[Reading]:
        """Every frame as one engine."""
        return [frames.merged(list(frame.values())) for frame in self._frames]

    def engines(self) -> list[ScrapeCapture]:
        """One capture per engine of the page, in label order. They do not scrape by themselves."""
        if not self._frames or len(self._frames[-1]) == 1:
            return [self]
        keys = sorted({key for frame in self._frames for key in frame})
        return [self._only(key) for key in keys]

    def _only(self, key: EngineKey) -> ScrapeCapture:
        name = f"{self.target}#engine={key.engine}" if len(self._frames[-1]) > 1 else self.target
        one = ScrapeCapture(name, keep=self._frames.maxlen or KEEP_PAGES)
        one._frames.extend({key: frame[key]} for frame in self._frames if key in frame)
        one._rejected, one._num_rejected, one.error = self._rejected, self._num_rejected, self.error
        one._details, one.fetch_seconds = dict(self._details), self.fetch_seconds
        one._load = self._load and (lambda: [])
        one.holdings = self._held.get(key)
        one._describe(one._newest())
        return one

    @property
    def engine_label(self) -> str:
        """The ``engine`` label of the page, ``all`` for the sum of several."""
        return self._newest().key.engine if self._frames else "0"

    def typical_size(self) -> tuple[int, int] | None:
        """Mean prompt and output tokens of finished requests, of the window when any finished in it."""
        if not self._frames:
            return None
        window = self._window(600.0)
        first, now = window[0], window[-1]
        sizes = []
        for name in ("request_prompt_tokens", "request_generation_tokens"):
            whole = getattr(now, name)
            recent = frames.grown(getattr(first, name), whole)
            average = frames.mean(recent) or frames.mean(whole)
            if average is None:
                return None
            sizes.append(max(1, round(average)))
        return sizes[0], sizes[1]

    # -- answers ---------------------------------------------------------------------------------------
    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        """The newest page. Rates and latencies cover the window; with one page, the engine's whole life."""
        state, age = self._state()
        if not self._frames:
            return Snapshot(
                kvcatch_version=__version__, target=self.target, state=state, source="scrape", loss=self.loss
            )
        window = self._window(window_seconds)
        now = window[-1]
        first = window[0] if len(window) > 1 else None
        if frames.stuck_gauges(self._window(_STUCK_SECONDS)):
            # Zero while work runs is no measurement; what reads it must not take the engine for idle.
            now = msgspec.structs.replace(now, running=None, usage_ratio=None, active_blocks=None)
        return Snapshot(
            kvcatch_version=__version__,
            target=self.target,
            state=state,
            source="scrape",
            engine=self.info.engine,
            engine_version=None if self.info.engine_version == "unknown" else self.info.engine_version,
            model=self.info.model or None,
            pid=self.info.pid or None,
            unix_seconds=now.unix_seconds,
            data_age_seconds=age,
            pool=_pool(now, window),
            queues=_queues(now, window),
            prefix=Prefix(queried_tokens=now.queries, hit_tokens=now.hits, hit_ratio=now.hit_ratio),
            preemption=Preemption(preemptions=now.preemptions),
            efficiency=_efficiency(now),
            latency=_latency(first, now),
            loss=self.loss,
        )

    def _window(self, seconds: float) -> list[Reading]:
        """Readings of the last ``seconds`` since the last restart, oldest first."""
        if seconds not in self._windows:
            self._windows[seconds] = self._find_window(seconds)
        return self._windows[seconds]

    def _find_window(self, seconds: float) -> list[Reading]:
        window: list[Reading] = []
        for frame in reversed(self._frames):
            reading = frames.merged(list(frame.values()))
            if window:
                newest, later = window[0], window[-1]
                if reading.unix_seconds is None or newest.unix_seconds is None:
                    break
                if newest.unix_seconds - reading.unix_seconds > seconds:
                    break
                if reading.key != later.key or frames.restarted(reading, later):
                    break
            window.append(reading)
        return window[::-1]

    def _state(self) -> tuple[str, float | None]:
        stamp = next(iter(self._frames[-1].values())).unix_seconds if self._frames else None
        if self._load is None:
            return "ended", None
        age = None if stamp is None else max(0.0, time.time() - stamp)
        if self.error is not None:
            return "disconnected", age
        if age is None:
            return "connecting", None
        return ("stale" if age > STALE_SECONDS else "live"), age

    def samples(self, start: int | None = None, stop: int | None = None) -> Columns:
        """One row per page. Counts are increases since the page before; unknown is NaN, so all are floats."""
        history: list[Frame] = [{}]
        for frame in self._frames:
            unix_ns = _unix_ns(frame)
            if stop is not None and unix_ns >= stop:
                continue
            if start is not None and unix_ns < start:
                history[0] = frame  # only to tell the increases of the first row
            else:
                history.append(frame)
        first, rows = len(self._frames) - len(history) + 1, history[1:]
        columns: Columns = {name: np.full(len(rows), np.nan) for name in SAMPLE_COLUMNS}
        columns["unix_ns"] = np.array([_unix_ns(frame) for frame in rows], dtype=np.int64)
        columns["step"] = np.arange(first, first + len(rows), dtype=np.int64)
        for index, frame in enumerate(rows):
            for column, value in _row(history[index], frame).items():
                if value is not None:
                    columns[column][index] = value
        return columns

    def readings(self, start: int | None = None, stop: int | None = None) -> list[Reading]:
        """Every page read, its engines summed, oldest first, of wall-clock nanoseconds in [start, stop)."""
        kept = []
        for row in self._merged():
            unix_ns = round((row.unix_seconds or 0.0) * 1e9)
            if (start is None or unix_ns >= start) and (stop is None or unix_ns < stop):
                kept.append(row)
        return kept

    def requests(self) -> list[RequestView]:
        """Empty: a metrics page names no request."""
        return []

    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """One record per page and engine, with every figure that was read."""
        for frame in self._frames:
            for reading in frame.values():
                unix_ns = round((reading.unix_seconds or 0.0) * 1e9)
                if (start is None or unix_ns >= start) and (stop is None or unix_ns < stop):
                    yield {"kind": "scrape", "unix_ns": unix_ns, **_record(reading)}

    def counters(self) -> dict[str, float]:
        return transfers(frames.merged(list(self._frames[-1].values()))) if self._frames else {}

    @property
    def loss(self) -> LossView:
        """What the page lacks, and what had to be refused, with reasons."""
        newest = frames.merged(list(self._frames[-1].values())) if self._frames else None
        warnings = [f"{row.series}: {row.reason}" for row in self._rejected]
        if self._num_rejected > len(self._rejected):
            warnings.append(f"{self._num_rejected - len(self._rejected)} more series refused")
        if self.error:
            warnings.insert(0, self.error)
        if newest is not None:
            warnings += newest.warnings
            if frames.stuck_gauges(self._window(_STUCK_SECONDS)):
                warnings.append("running requests and usage stand at zero although requests were served")
        return LossView(unknown=NEVER_KNOWN + (newest.unknown if newest else ()), warnings=tuple(warnings))


def transfers(reading: Reading) -> dict[str, float]:
    """Bytes and seconds moved between tiers, by the names of ``Capture.counters``; only what the engine counts."""
    remote = {"bytes": reading.remote_bytes, "seconds": reading.remote_seconds}
    found: dict[str, float | None] = {
        "transfer_offload_load_bytes": reading.load_bytes,
        "transfer_offload_load_seconds": reading.load_seconds,
        "transfer_offload_store_bytes": reading.store_bytes,
        "transfer_offload_store_seconds": reading.store_seconds,
    } | {f"transfer_remote_load_{unit}": None if one is None else one.total for unit, one in remote.items()}
    return {name: value for name, value in found.items() if value is not None}


def info_of(reading: Reading) -> EngineInfo:
    """What a page alone tells of an engine's configuration."""
    config = reading.config
    return EngineInfo(
        engine=reading.kind,
        adapter="scrape",
        model=reading.key.model or None,
        num_blocks=reading.usable_blocks + 1 if reading.usable_blocks else 0,
        block_size=reading.block_size or 0,
        kv_cache_dtype=config.get("cache_dtype"),
        prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        max_num_seqs=reading.max_running,
        config=dict(config),
        unknown=NEVER_KNOWN,
    )


def _pool(now: Reading, window: list[Reading]) -> Pool:
    mark, source = watermark_for(info_of(now))
    return Pool(
        num_blocks=now.usable_blocks,
        active_blocks=now.active_blocks,
        block_size=now.block_size,
        active_tokens=now.active_tokens,
        active_blocks_max=frames.largest(window, lambda row: row.active_blocks),
        utilization_ratio=now.usage_ratio,
        watermark_utilization_ratio=mark,
        watermark_source=source,
    )


def _queues(now: Reading, window: list[Reading]) -> Queues:
    return Queues(
        running=now.running,
        waiting=now.waiting,
        waiting_for_blocks=now.waiting_for_blocks,
        waiting_other=now.waiting_other,
        running_max=frames.largest(window, lambda row: row.running),
        waiting_max=frames.largest(window, lambda row: row.waiting),
    )


def _efficiency(now: Reading) -> Efficiency:
    if now.active_tokens is None or not now.active_blocks or not now.block_size:
        return Efficiency()
    used = now.active_tokens / (now.active_blocks * now.block_size)
    return Efficiency(block_utilization_ratio=used, internal_fragmentation_ratio=1 - used)


def _latency(first: Reading | None, now: Reading) -> Latency:
    """Latencies of the window, or since the engine started when there is only one page."""
    old = first if first is not None else Reading(key=now.key)
    ttft = frames.grown(old.ttft, now.ttft)
    seconds = None
    if first is not None and first.unix_seconds is not None and now.unix_seconds is not None:
        seconds = now.unix_seconds - first.unix_seconds

    def rate(name: str, gauge: float | None) -> float | None:
        grown = frames.increase(first, now, name) if first is not None else None
        return grown / seconds if grown is not None and seconds else gauge

    return Latency(
        ttft_seconds=frames.mean(ttft),
        ttft_p95_seconds=frames.quantile(ttft, 0.95),
        tpot_seconds=frames.mean(frames.grown(old.tpot, now.tpot)),
        queue_seconds=frames.mean(frames.grown(old.queue, now.queue)),
        output_tokens_per_second=rate("generation_tokens", now.generation_rate),
        prompt_tokens_per_second=rate("prompt_tokens", now.prompt_rate),
        window_seconds=seconds,
    )


def _unix_ns(frame: Frame) -> int:
    return round((next(iter(frame.values())).unix_seconds or 0.0) * 1e9)


def _row(before: Frame, frame: Frame) -> dict[str, float | None]:
    """One sample row. Increases are taken engine by engine, so that one that joins adds nothing made up."""
    row = frames.merged(list(frame.values()))

    def gained(name: str) -> float | None:
        parts = [frames.increase(before.get(key), reading, name) for key, reading in frame.items()]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    seconds = None
    earlier = next(iter(before.values())).unix_seconds if before else None
    if earlier is not None and row.unix_seconds is not None:
        seconds = row.unix_seconds - earlier
    return {
        "interval_ns": None if seconds is None else seconds * 1e9,
        "running": row.running,
        "waiting": row.waiting,
        "deferred": row.waiting_other,
        "active_blocks": row.active_blocks,
        "held_tokens": row.active_tokens,
        "prefill_tokens": gained("prompt_tokens"),
        "decode_tokens": gained("generation_tokens"),
        "queried_tokens": gained("queries"),
        "hit_tokens": gained("hits"),
        "preemptions": gained("preemptions"),
    }


def _record(reading: Reading) -> dict[str, Any]:
    skip = ("key", "unix_seconds", "config", "unknown", "warnings")
    record: dict[str, Any] = {
        "engine": reading.key.engine,
        "model": reading.key.model,
        "engine_kind": reading.kind,
    }
    for name in reading.__struct_fields__:
        value = getattr(reading, name)
        if name in skip or name == "kind" or value is None:
            continue
        if isinstance(value, readings.Histogram):
            record[f"{name}_count"], record[f"{name}_sum"] = value.observations, value.total
        else:
            record[name] = value
    return record


# -- opening -----------------------------------------------------------------------------------------------
def open_scrape(targets: list[str], keep: int = KEEP_PAGES, timeout_seconds: float = 5.0) -> ScrapeCapture:
    """A capture from one ``/metrics`` URL, or from saved pages (files, folders or patterns) of one engine.

    Raises KVCatchError when the URL does not answer, or when no page can be read at all.
    """
    urls = [target for target in targets if target.startswith(("http://", "https://"))]
    if urls and len(targets) > 1:
        raise KVCatchError(
            f"{len(targets)} targets, but a scrape follows one URL.", "Open each engine's URL by itself."
        )
    if urls:
        capture = live(urls[0], keep=keep, timeout_seconds=timeout_seconds)
        capture.refresh()
        if capture.error:
            raise KVCatchError(capture.error, "Is the engine running, and is the path /metrics?")
        capture.describe(**beside(urls[0]))
        return capture
    return ScrapeCapture(" ".join(targets), pages=saved(targets), keep=keep)


def live(url: str, keep: int = KEEP_PAGES, timeout_seconds: float = 5.0) -> ScrapeCapture:
    """A capture that scrapes ``url`` at every ``refresh()``; nothing is read yet."""
    address = metrics_url(url)
    return ScrapeCapture(url, load=lambda: scrape_once(address, timeout_seconds), keep=keep)
