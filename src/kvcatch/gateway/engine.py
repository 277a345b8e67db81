"""One engine behind the gateway: what is known about its pool, from where, and how old that is."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvcatch import api
from kvcatch.analysis.headroom import blocks_for
from kvcatch.control.signals import stored_watermark
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.gateway.ledger import Ledger
from kvcatch.policy.blocks import BlockTable
from kvcatch.sources import procs, scrape
from kvcatch.store.base import Capture

logger = logging.getLogger("kvcatch.gateway")

#: kept free while no watermark is measured: vLLM's own sweep is best at 0.02 to 0.05 (its pull request 44594)
ASSUMED_RESERVE = 0.05
#: readings older than this are not used for decisions
STALE_SECONDS = 5.0
#: longest context a block table is made for
MAX_CONTEXT = 1 << 21


@dataclass(frozen=True)
class Reading:
    """One look at an engine. pools: data parallel engines behind one address; blocks are of one of them.

    progress: output tokens so far by the client's request id; finished: in the end, for requests asked about
    (recorder only).
    """

    info: EngineInfo
    pools: int
    active_blocks: int | None
    running: int | None
    waiting: int | None
    preemptions: int | None
    source: str
    progress: Mapping[str, int] = field(default_factory=dict)
    finished: Mapping[str, int] = field(default_factory=dict)
    epoch: int = 0  # when the server's process started, Unix milliseconds by its own page; 0 = unknown


class Engine:
    """State of one upstream. All methods run in the event loop; ``look`` (blocking) runs in a thread."""

    def __init__(self, url: str, feed: str | None = None, reserve_ratio: float | None = None) -> None:
        self.url = url.rstrip("/")
        self.label = urlsplit(self.url).netloc.rpartition("@")[2]
        self.reserve_ratio = reserve_ratio
        self.healthy = True
        self.models: tuple[str, ...] = ()
        self.roots: dict[str, str] = {}
        self.max_model_len: int | None = None
        self.ledger: Ledger | None = None
        self.info = EngineInfo()
        self.reading: Reading | None = None
        self.read_at: float | None = None
        self.in_flight = 0
        self.epoch = 0
        self.exact_layout = False
        self.want_finished: set[str] = set()
        self._feed_name = feed
        self._capture: Capture | None = None

    # ---- questions -----------------------------------------------------------------------------------

    @property
    def load(self) -> tuple[float, int]:
        """Planned share of the pool, then requests in flight: the smaller, the emptier."""
        ledger = self.ledger
        if ledger is None or not ledger.usable:
            return 0.0, self.in_flight
        return ledger.load / ledger.usable, self.in_flight

    @property
    def capacity_tokens(self) -> int:
        """KV tokens of one pool; 0 while unknown."""
        return self.info.usable_blocks * self.info.block_size

    def age(self, now: float) -> float | None:
        """Seconds since the last good reading."""
        return None if self.read_at is None else now - self.read_at

    def degraded(self, now: float) -> bool:
        """True when the pool's state is unknown or old: the ledger decides alone."""
        age = self.age(now)
        return age is None or age > STALE_SECONDS

    def needed_blocks(self, tokens: int) -> int | None:
        """Blocks one sequence of so many KV tokens holds; None when the layout is not known exactly."""
        if not self.exact_layout or not self.info.num_blocks:
            return None
        return blocks_for(tokens, self.info)

    # ---- readings --------------------------------------------------------------------------------------

    def take(self, reading: Reading, now: float) -> None:
        """Use a fresh reading."""
        known = self.ledger
        if reading.info != self.info or known is None:
            self._learn(reading)
        self.reading, self.read_at = reading, now
        self.epoch = max(self.epoch, reading.epoch)
        ledger = self.ledger
        if ledger is None:
            return
        if reading.progress:
            for entry in ledger.entries.values():
                produced = reading.progress.get(entry.request_id)
                if produced is not None:
                    entry.produced = max(entry.produced or 0, produced)
        if reading.active_blocks is not None:
            ledger.observe_active(reading.active_blocks, now)

    def _learn(self, reading: Reading) -> None:
        """The pool's size and layout, at first sight and after a restart with other settings."""
        info = reading.info
        self.info = info
        if info.max_model_len:
            self.max_model_len = info.max_model_len
        if not info.usable_blocks or not info.block_size:
            return
        self.exact_layout = _exact(info)
        longest = min(MAX_CONTEXT, max(info.max_model_len or 0, info.usable_blocks * info.block_size) + 1)
        table = _table(info, longest)
        before = self.ledger
        entries = before.entries if before is not None else {}
        # Requests are spread over data parallel engines by the server: the pools count together.
        self.ledger = Ledger(table, info.usable_blocks * reading.pools, self.reserved())
        if before is not None:
            self.ledger.others, self.ledger.budget = before.others, before.budget
        for entry in entries.values():
            self.ledger.size(entry)
            self.ledger.add(entry)

    def reserved(self) -> float:
        """Share of the pool kept free: as configured, else what the watermark measured on this engine says."""
        if self.reserve_ratio is not None:
            return self.reserve_ratio
        try:
            stored = stored_watermark(os.environ, self.info)
        except KVCatchError as error:
            logger.warning("%s", error)
            stored = None
        return round(1 - stored[0], 6) if stored is not None else ASSUMED_RESERVE

    def too_old(self, now: float) -> None:
        """Called when a reading failed: forget what is not known any more."""
        if self.ledger is not None and self.degraded(now):
            self.ledger.forget_foreign()

    # ---- blocking --------------------------------------------------------------------------------------

    def look(self) -> Reading:
        """Read the feed now. Raises KVCatchError. Blocking: seconds when the engine hangs."""
        try:
            if self._capture is None:
                self._capture = self._open()
            capture = self._capture
            capture.refresh()
            if isinstance(capture, scrape.ScrapeCapture):
                return _scraped(capture)
            snapshot = capture.snapshot(1.0)
            if snapshot.state == "ended":
                raise KVCatchError("the recorded engine has ended.")
        except (KVCatchError, OSError) as error:
            self.close()
            raise KVCatchError(f"{self.label}: {error}") from error
        running = [view for view in snapshot.requests if view.output_tokens is not None]
        return Reading(
            info=capture.info,
            pools=1,
            active_blocks=snapshot.pool.active_blocks,
            running=snapshot.queues.running,
            waiting=_waiting(snapshot.queues),
            preemptions=snapshot.preemption.preemptions,
            source="recorder",
            progress={view.request_id: view.output_tokens or 0 for view in running},
            finished=_finished(capture, self.want_finished) if self.want_finished else {},
        )

    def close(self) -> None:
        """Let go of the feed; the next look opens it again."""
        if self._capture is not None:
            with contextlib.suppress(OSError):
                self._capture.close()
            self._capture = None

    def _open(self) -> Capture:
        if self._feed_name is not None:
            if self._feed_name.startswith(("http://", "https://")):
                return self._page(self._feed_name)
            return api.open(self._feed_name)
        path = recorder_behind(self.url)
        if path is not None:
            return api.open(path)
        return self._page(self.url + "/metrics")

    def _page(self, url: str) -> Capture:
        return scrape.open_scrape([url], keep=4, timeout_seconds=STALE_SECONDS - 1)


def recorder_behind(url: str) -> str | None:
    """The recording of the engine that listens at a URL of this machine; None without one."""
    parts = urlsplit(url)
    if not _is_local(parts.hostname or ""):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = []
    for info in api.recorders():
        if info.state == "ended" or not info.pid:
            continue
        engine = procs.engine_of(info.pid)
        if engine is not None and engine.port == port:
            found.append(info.path)
    # Several cores (data parallel): only the server's page knows them all.
    return found[0] if len(found) == 1 else None


def _is_local(host: str) -> bool:
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    return host.startswith("127.")


def _exact(info: EngineInfo) -> bool:
    """Whether ``blocks_for`` is exact: all groups known, or a page that shows one group of full attention."""
    if info.groups:
        return blocks_for(info.block_size, info) is not None
    tokens = info.config.get("kv_cache_size_tokens")
    if isinstance(tokens, str) and tokens.isdigit():
        # A hybrid model's pool holds more tokens than blocks x block size.
        return abs(int(tokens) - info.usable_blocks * info.block_size) <= 2 * info.block_size
    # Older pages do not say; a window means that blocks are recycled.
    return info.config.get("sliding_window") in (None, "None", "")


def _table(info: EngineInfo, longest: int) -> BlockTable:
    if info.groups and blocks_for(info.block_size, info) is not None:
        step = math.gcd(*(group.block_size for group in info.groups)) or 1
        return BlockTable.sampled(lambda tokens: blocks_for(tokens, info) or 0, step, longest)
    return BlockTable.uniform(info.block_size, longest)


def _scraped(capture: scrape.ScrapeCapture) -> Reading:
    if capture.error:
        raise KVCatchError(capture.error)
    engines = capture.engines()
    snapshot = capture.snapshot(1.0)
    active, usable = snapshot.pool.active_blocks, engines[0].info.usable_blocks if engines else 0
    if active is None and snapshot.pool.utilization_ratio is not None and usable:
        active = round(snapshot.pool.utilization_ratio * usable * len(engines))
    return Reading(
        info=engines[0].info if len(engines) > 1 else capture.info,
        pools=max(1, len(engines)),
        active_blocks=active,
        running=snapshot.queues.running,
        waiting=_waiting(snapshot.queues),
        preemptions=snapshot.preemption.preemptions,
        source="metrics",
        epoch=round((capture.process_start or 0) * 1000),
    )


def _waiting(queues: Any) -> int | None:
    if queues.waiting is not None:
        return int(queues.waiting)
    known = [value for value in (queues.waiting_for_blocks, queues.waiting_other) if value is not None]
    return sum(known) if known else None


def _finished(capture: Capture, wanted: Iterable[str]) -> dict[str, int]:
    """Output tokens of the wanted requests that have ended, by the client's id."""
    names = frozenset(wanted)
    return {
        view.request_id: view.output_tokens
        for view in capture.requests()
        if view.finish_reason is not None and view.output_tokens is not None and view.request_id in names
    }
