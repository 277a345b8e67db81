"""Many engines at once: one thread each, so that a slow or dead one delays nobody."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvcatch.analysis.committed import committed_ratio
from kvcatch.analysis.doctor import diagnose, glance
from kvcatch.analysis.evidence import Case, from_scrape
from kvcatch.analysis.headroom import snapshot_headroom
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.metrics import THRESHOLDS
from kvcatch.results import Finding, Headroom, Pool, Snapshot
from kvcatch.sources.cards import Card, cards, with_cards
from kvcatch.sources.scrape import ScrapeCapture
from kvcatch.store.base import BOUNDS, Capture
from kvcatch.views.live import Watch

Opener = Callable[[str | None], Capture]
#: between two looks at cards and findings, and how far back the latter go
CLOSER_SECONDS = 10.0
#: how long a peak stays visible
PEAK_SECONDS = 60.0
DIAGNOSIS_SPAN_NS = 600 * 10**9
#: sample columns that the exporter turns into counters
COUNTED = (
    "step_ns",
    "schedule_ns",
    "prefill_tokens",
    "decode_tokens",
    "evicted_blocks",
    "queried_tokens",
    "hit_tokens",
    "preemptions",
    "recomputed_tokens",
)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as it was last read. ``totals`` and ``bounds`` only hold what the source knows."""

    target: str
    engine: str
    snapshot: Snapshot
    info: EngineInfo
    headroom: Headroom
    committed_ratio: float | None
    watermark_ratio: float
    watermark_source: str
    totals: dict[str, float]
    bounds: dict[str, int]
    up: bool
    read_seconds: float | None
    error: str


class Totals:
    """Counters from the sample rows of a recorder: every row is added exactly once."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.bounds: dict[str, int] = {}
        self._seen_ns: int | None = None

    def start(self) -> None:
        """Everything at zero: a recorder that has seen no step yet knows that nothing happened."""
        self.sums = dict.fromkeys(COUNTED, 0.0)
        self.bounds = dict.fromkeys(BOUNDS, 0)

    def add(self, capture: Capture) -> None:
        """Take in the rows written since the last call."""
        rows = capture.samples(None if self._seen_ns is None else self._seen_ns + 1, None)
        if not len(rows["unix_ns"]):
            return
        self._seen_ns = int(rows["unix_ns"].max())
        for name in COUNTED:
            values = np.asarray(rows[name], dtype=np.float64)
            if not np.isnan(values).all():
                self.sums[name] = self.sums.get(name, 0.0) + float(np.nansum(values))
        bound = np.asarray(rows["bound"], dtype=np.float64)
        # With --sample-steps a row stands for several steps; the limit of the last one speaks for them.
        steps = np.asarray(rows.get("steps", np.ones(len(bound))), dtype=np.float64)
        for index, name in enumerate(BOUNDS):
            count = int(steps[bound == index].sum())
            if count or not np.isnan(bound).all():
                self.bounds[name] = self.bounds.get(name, 0) + count


class Target:
    """One target and the thread that reads it. ``latest`` may be read from any thread.

    Args:
        name: what to open; its part before ``#`` is the ``target`` label.
        opener: opens it, again and again until it is there.
        interval_seconds: between two reads.
        follow: the name means whatever is newest: when the engine has ended, look for its next life.
    """

    def __init__(
        self, name: str | None, opener: Opener, interval_seconds: float, follow: bool = False
    ) -> None:
        self.watch = Watch(name, opener)
        self.label = (name or "live").split("#")[0]
        self._opener = opener
        self._follow = follow
        self.latest: tuple[Observation, ...] = ()
        self._totals = Totals()
        self._counters: dict[str, float] = {}
        #: engine label -> findings; "" for a recorder
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._peaks: deque[tuple[float, int | None, int | None]] = deque()
        self._cards: list[Card] = []
        self._looked: float | None = None
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"kvcatch {name}", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """End reading; does not wait for a read in progress."""
        self._stop.set()

    @property
    def alive(self) -> bool:
        """False when the reading thread has ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            start = time.monotonic()
            self.read()
            self._stop.wait(max(0.0, self._interval - (time.monotonic() - start)))
        self.watch.close()

    def read(self) -> None:
        """Read once and publish the outcome."""
        with self._reading:
            self._read()

    def read_now(self) -> None:
        """Read again when that costs nothing: a recorder is memory of this machine, a URL is not.

        Returns at once when a read is in progress.
        """
        capture = self.watch.capture
        if capture is None or isinstance(capture, ScrapeCapture) or not self._reading.acquire(blocking=False):
            return
        try:
            self._read()
        finally:
            self._reading.release()

    def _read(self) -> None:
        start = time.monotonic()
        snapshot = self.watch.poll()
        if self._follow and snapshot.state == "ended" and self._next_life():
            snapshot = self.watch.poll()
        seconds = time.monotonic() - start
        capture = self.watch.capture
        if capture is None:
            self.latest = (self._observe(EngineInfo(), snapshot, "0", None, seconds),)
            return
        snapshot = msgspec.structs.replace(snapshot, pool=self._peak_pool(snapshot.pool))
        self._look_closer(capture, snapshot)
        snapshot = msgspec.structs.replace(
            snapshot, findings=self._findings.get("", ()), ranks=with_cards(snapshot.ranks, self._cards)
        )
        if isinstance(capture, ScrapeCapture):
            self.latest = tuple(self._scraped(capture, snapshot, seconds))
            return
        if snapshot.source != "scrape" and not self._totals.sums:
            self._totals.start()
        self._totals.add(capture)
        self._counters = capture.counters()
        engine = str(snapshot.dp_rank if snapshot.dp_rank is not None else capture.info.dp_rank)
        self.latest = (self._observe(capture.info, snapshot, engine, None, seconds),)

    def _peak_pool(self, pool: Pool) -> Pool:
        """The pool with its peaks of the last minute: a scrape every 15 s must not miss one."""
        now = time.monotonic()
        self._peaks.append((now, pool.active_blocks_max, pool.cached_blocks_max))
        while now - self._peaks[0][0] > PEAK_SECONDS:
            self._peaks.popleft()
        active = max((row[1] for row in self._peaks if row[1] is not None), default=None)
        cached = max((row[2] for row in self._peaks if row[2] is not None), default=None)
        return msgspec.structs.replace(pool, active_blocks_max=active, cached_blocks_max=cached)

    def _look_closer(self, capture: Capture, snapshot: Snapshot) -> None:
        """What does not change within a second, every ten: cards, and findings by the rules of ``doctor``.

        Findings are taken over the last pages of a scrape, and over the newest state of a recorder (its
        whole record is for ``kvcatch doctor`` itself).
        """
        now = time.monotonic()
        if self._looked is not None and now - self._looked < CLOSER_SECONDS:
            return
        self._looked = now
        if any((rank.device or "").startswith("cuda") for rank in snapshot.ranks):
            self._cards = _cards()
        if isinstance(capture, ScrapeCapture):
            start = time.time_ns() - DIAGNOSIS_SPAN_NS if snapshot.state != "ended" else None
            self._findings = _scraped_findings(from_scrape(capture, start))
        else:
            self._findings = {"": glance(snapshot)}

    def _next_life(self) -> bool:
        """Switch to the recorder of a restarted engine. False while there is none."""
        old = self.watch.capture
        try:
            new = self._opener(self.watch.target)
        except (KVCatchError, OSError):
            return False
        if old is None or new.target == old.target:
            new.close()
            return False
        old.close()
        self.watch = Watch(self.watch.target, self._opener, capture=new)
        self._totals = Totals()
        self._counters = {}
        return True

    def _scraped(self, capture: ScrapeCapture, snapshot: Snapshot, seconds: float) -> list[Observation]:
        engines = capture.engines()
        several = len(engines) > 1
        observations = []
        for one in engines:
            state = msgspec.structs.replace(
                one.snapshot() if several else snapshot, findings=self._findings.get(one.engine_label, ())
            )
            observations.append(self._observe(one.info, state, one.engine_label, one, seconds))
        return observations

    def _observe(
        self, info: EngineInfo, snapshot: Snapshot, engine: str, scraped: ScrapeCapture | None, seconds: float
    ) -> Observation:
        size = scraped.typical_size() if scraped is not None else None
        room = snapshot.headroom
        if room.requests is None and size is not None:
            room = snapshot_headroom(info, snapshot, size)
        measured = snapshot.pool.watermark_utilization_ratio
        return Observation(
            target=self.label,
            engine=engine,
            snapshot=snapshot,
            info=info,
            headroom=room,
            committed_ratio=committed_ratio(info, snapshot, size[0] if size else None),
            watermark_ratio=THRESHOLDS.assumed_watermark_ratio if measured is None else measured,
            watermark_source="assumed" if measured is None else snapshot.pool.watermark_source,
            totals={**self._totals.sums, **(self._counters if scraped is None else scraped.counters())},
            bounds=dict(self._totals.bounds),
            up=_up(snapshot),
            read_seconds=seconds,
            error=self.watch.problem or (scraped.error if scraped is not None and scraped.error else ""),
        )


def _up(snapshot: Snapshot) -> bool:
    """Whether there is an engine, or a file, behind the target that says how things are.

    An engine that ended is down; one that hangs is not, its recorder still shows the state it hangs in.
    """
    recorder = snapshot.source == "recorder"
    return (
        snapshot.state in ("live", "idle")
        or (recorder and snapshot.state == "stale")
        or (not recorder and snapshot.state == "ended")
    )


def _scraped_findings(cases: Sequence[Case]) -> dict[str, tuple[Finding, ...]]:
    """Findings of each engine of a page; those that compare engines are the first one's."""
    found = {case.engine or "0": diagnose([case]).findings for case in cases}
    if len(cases) > 1:
        alone = {finding.code for findings in found.values() for finding in findings}
        across = [finding for finding in diagnose(cases).findings if finding.code not in alone]
        found[next(iter(found))] += tuple(across)
    return found


def _cards() -> list[Card]:
    """The cards of this machine; none without a driver or binding: the ranks' own figures stand."""
    try:
        return cards()
    except KVCatchError:
        return []


class Fleet:
    """Every target of one process."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = list(targets)

    def start(self) -> None:
        """Start every reader."""
        for target in self.targets:
            target.start()

    def stop(self) -> None:
        """Stop every reader."""
        for target in self.targets:
            target.stop()

    def observations(self) -> list[Observation]:
        """The latest of each engine, in the order the targets were given."""
        return [observation for target in self.targets for observation in target.latest]

    def fresh_observations(self) -> list[Observation]:
        """The same, with recorders read again first: who asks for room acts on the answer at once."""
        for target in self.targets:
            target.read_now()
        return self.observations()

    @property
    def healthy(self) -> bool:
        """True while every reader runs; a dead engine does not make the exporter unhealthy."""
        return all(target.alive for target in self.targets)
