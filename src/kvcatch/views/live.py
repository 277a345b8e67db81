"""Watching one target: open, poll, survive its death. No drawing here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvcatch import __version__
from kvcatch.analysis import rates
from kvcatch.analysis.glance import glance
from kvcatch.analysis.headroom import snapshot_headroom, typical_size
from kvcatch.errors import KVCatchError
from kvcatch.results import RequestView, Snapshot
from kvcatch.sources.scrape import ScrapeCapture
from kvcatch.store.base import Capture
from kvcatch.views.panels import Curves

Opener = Callable[[str | None], Capture]
#: latencies and rates cover this much of the past
WINDOW_SECONDS = 60.0
#: requests whose median length the headroom speaks of
RECENT = 512
#: span of the curves
CURVE_SECONDS = 300.0


@dataclass
class Watch:
    """One target over time. ``poll`` never raises for a target that is absent, dying or gone.

    ``newest`` names the newest recorder; with it a watch of an ended engine goes over to its next life.
    """

    target: str | None
    opener: Opener
    size: tuple[int, int] | None = None
    newest: Callable[[], str | None] | None = None
    capture: Capture | None = None
    problem: str = ""
    last: Snapshot | None = None
    polled_ns: int | None = None
    seen_ttft: list[tuple[int, float]] = field(default_factory=list)
    requests: list[RequestView] = field(default_factory=list)
    _listed: int | None = None
    seen_used: list[tuple[int, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the user typed, or what was found for them."""
        return self.capture.target if self.capture is not None else (self.target or "newest recorder")

    def open(self) -> Capture:
        """Open the target now. Raises KVCatchError when there is none."""
        if self.capture is None:
            self.capture = self.opener(self.target)
        return self.capture

    def poll(self) -> Snapshot:
        """Take in what is new and return the state, with maxima since the previous call."""
        try:
            self._renew()
            capture = self.open()
            capture.refresh()
            snapshot = self._complete(capture, capture.snapshot(WINDOW_SECONDS))
        except (KVCatchError, OSError) as error:
            self.problem = str(error)
            return self._gone()
        self.problem = ""
        self.last = snapshot
        return snapshot

    def _renew(self) -> None:
        """Leave an ended engine when a newer one is recorded."""
        if self.newest is None or self.capture is None or self.last is None or self.last.state != "ended":
            return
        path = self.newest()
        if path is not None and path != self.capture.target:
            self.capture.close()
            self.capture = self.opener(path)
            self.last = self.polled_ns = self._listed = None

    def _gone(self) -> Snapshot:
        """The last known state under *disconnected*, or *connecting* before there was one."""
        if self.last is None:
            return Snapshot(
                kvcatch_version=__version__, target=self.name, state="connecting", unix_seconds=time.time()
            )
        since = self.last.unix_seconds
        known = self.last.data_age_seconds or 0.0
        age = None if since is None else max(0.0, time.time() - since) + known
        return msgspec.structs.replace(self.last, state="disconnected", data_age_seconds=age)

    def _complete(self, capture: Capture, snapshot: Snapshot) -> Snapshot:
        """Add what the store leaves to analysis: maxima since the last call, headroom, findings."""
        pool, queues = snapshot.pool, snapshot.queues
        now = time.time_ns()
        if self.polled_ns is not None and snapshot.state not in {"ended", "past"}:
            rows = capture.samples(self.polled_ns, now)
            active, running = rates.peak(rows, "active_blocks"), rates.peak(rows, "running")
            waiting = rates.peak(rows, "waiting")
            pool = msgspec.structs.replace(
                pool,
                active_blocks_max=_most(active, pool.active_blocks),
                cached_blocks_max=_most(rates.peak(rows, "cached_blocks"), pool.cached_blocks),
            )
            now_waiting = _sum(queues.waiting_for_blocks, queues.waiting_other)
            queues = msgspec.structs.replace(
                queues, running_max=_most(running, queues.running), waiting_max=_most(waiting, now_waiting)
            )
        self.polled_ns = now
        self._list_requests(capture, snapshot)
        size = self.size or typical_size(self.requests[-RECENT:]) or _scraped_size(capture)
        room = snapshot.headroom
        if size is not None and (self.size is not None or room.requests is None):
            room = snapshot_headroom(capture.info, snapshot, size)
        self._remember(snapshot, now)
        snapshot = msgspec.structs.replace(
            snapshot, pool=pool, queues=queues, headroom=room,
            kvcatch_version=snapshot.kvcatch_version or __version__,
        )  # fmt: skip
        return msgspec.structs.replace(snapshot, findings=snapshot.findings or glance(snapshot, capture))

    def _list_requests(self, capture: Capture, snapshot: Snapshot) -> None:
        """All requests, listed again only after a step: the list of a long record is not cheap."""
        if snapshot.step is None or snapshot.step != self._listed:
            self.requests = capture.requests()
            self._listed = snapshot.step

    def _remember(self, snapshot: Snapshot, now: int) -> None:
        """Keep polled values for targets that record no samples of their own."""
        if snapshot.pool.active_blocks is not None and snapshot.pool.num_blocks:
            self.seen_used.append((now, snapshot.pool.active_blocks / snapshot.pool.num_blocks))
        if snapshot.latency.ttft_seconds is not None:
            self.seen_ttft.append((now, snapshot.latency.ttft_seconds))
        del self.seen_used[:-3600], self.seen_ttft[:-3600]

    def curves(self, bins: int) -> Curves:
        """Utilisation and TTFT of the last five minutes of the record in ``bins`` columns."""
        if self.capture is None or self.last is None:
            return Curves()
        stop = time.time_ns()
        if self.last.state in {"ended", "disconnected", "past"} and self.last.unix_seconds is not None:
            # A dead target's picture is its last minutes, not the emptiness since.
            stop = int(self.last.unix_seconds * 1e9) + 1
        start = stop - int(CURVE_SECONDS * 1e9)
        rows = self.capture.samples(start, stop)
        if self.last.state in {"ended", "past"} and len(rows["unix_ns"]):
            start = max(start, min(int(rows["unix_ns"][0]), stop - 1_000_000_000))
        used = rates.utilization(rows, self.capture.info.usable_blocks)
        times = rows["unix_ns"]
        if not len(used):
            times, used = _columns(self.seen_used)
        first = [
            (int((view.arrival_unix_seconds + view.ttft_seconds) * 1e9), view.ttft_seconds)
            for view in self.requests
            if view.arrival_unix_seconds is not None and view.ttft_seconds is not None
        ]
        when, ttft = _columns(first or self.seen_ttft)
        return Curves(
            seconds=(stop - start) / 1e9,
            utilization=rates.binned_max(times, used, start, stop, bins, carry=True),
            ttft_seconds=rates.binned_max(when, ttft, start, stop, bins),
        )

    def find(self, engine_request_id: str) -> RequestView | None:
        """One request by the engine's id, finished ones included."""
        return next(
            (view for view in reversed(self.requests) if view.engine_request_id == engine_request_id), None
        )

    def close(self) -> None:
        """Release the target."""
        if self.capture is not None:
            self.capture.close()


def _columns(pairs: list[tuple[int, float]]) -> tuple[rates.Array, rates.Array]:
    times = np.array([when for when, _ in pairs], dtype=np.int64)
    return times, np.array([value for _, value in pairs], dtype=np.float64)


def _most(peak: float | None, now: int | None) -> int | None:
    known = [int(value) for value in (peak, now) if value is not None]
    return max(known, default=None)


def _sum(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _scraped_size(capture: Capture) -> tuple[int, int] | None:
    """Mean size of a request by the engine's histograms, where no request is known by itself."""
    return capture.typical_size() if isinstance(capture, ScrapeCapture) else None
