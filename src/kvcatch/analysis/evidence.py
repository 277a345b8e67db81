"""What rules look at: one engine, whatever it was read from. Unknown is None or NaN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.analysis.headroom import blocks_for
from kvcatch.analysis.tenant_peaks import TenantPeak, while_blocked
from kvcatch.events import EngineInfo
from kvcatch.results import LossView, RankView, Snapshot
from kvcatch.sources import frames
from kvcatch.sources.failures import Failures
from kvcatch.sources.readings import Reading
from kvcatch.sources.scrape import ScrapeCapture
from kvcatch.store.base import BOUNDS, Capture, Columns
from kvcatch.store.columns import Ints, Recording, Requests
from kvcatch.store.names import client_request_id
from kvcatch.store.watermark import watermark_for

Floats = npt.NDArray[np.float64]

#: holders that are kept for the rules, largest first
_HOLDERS = 50


@dataclass(eq=False)
class Series:
    """Load over time; one value per step, page or log line. Counts are per row.

    seconds: how long each row stood. usage: active share of usable blocks.
    """

    unix: Floats
    seconds: Floats
    columns: dict[str, Floats]
    steps: bool  # rows are single engine steps, so bounds and short waits are seen

    def get(self, name: str) -> Floats | None:
        """A column, None when nothing of it is known."""
        values = self.columns.get(name)
        return values if values is not None and len(values) and not np.isnan(values).all() else None

    def total(self, name: str) -> float | None:
        """The sum of a count, None when unknown."""
        values = self.get(name)
        return None if values is None else float(np.nansum(values))

    @property
    def busy(self) -> npt.NDArray[np.bool_]:
        """Rows with anything running or waiting."""
        running, waiting = self.get("running"), self.get("waiting")
        result = np.zeros(len(self.unix), bool)
        for values in (running, waiting):
            if values is not None:
                result |= values > 0
        return result

    def share(self, mask: npt.NDArray[np.bool_]) -> float:
        """Share of the busy time in which ``mask`` holds."""
        busy = float(self.seconds[self.busy].sum())
        return float(self.seconds[mask & self.busy].sum()) / busy if busy else 0.0

    @property
    def span_seconds(self) -> float:
        """From the first to the last row."""
        return float(self.unix[-1] - self.unix[0]) if len(self.unix) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class Holder:
    """One request at its largest. start and stop: when it held at least half of its peak. Unix seconds."""

    request_id: str
    tenant: str
    blocks: int
    share: float
    start: float
    stop: float
    prompt_tokens: int
    output_tokens: int
    arrival: float
    live: bool


@dataclass(eq=False)
class Case:
    """All that is known of one engine."""

    target: str
    kind: str  # recording | metrics | log | moment
    info: EngineInfo = field(default_factory=EngineInfo)
    moment: Snapshot = field(default_factory=Snapshot)
    series: Series | None = None
    requests: Requests | None = None
    rows: Ints | None = None  # rows of ``requests`` that lived in the span
    holders: tuple[Holder, ...] = ()
    median_blocks: float | None = None
    tenants: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # share under pressure, worst moment
    tenant_peaks: tuple[TenantPeak, ...] = ()
    preempted: Columns | None = None
    wall_offset: int = 0
    log: Failures | None = None
    pages: tuple[Reading, Reading] | None = None  # first and last of a scrape
    readings: tuple[Reading, ...] = ()  # all of them, oldest first
    loss: LossView = field(default_factory=LossView)
    ranks: tuple[RankView, ...] = ()
    engine: str = "0"
    recording: Recording | None = None
    span: tuple[int | None, int | None] = (None, None)  # wall-clock nanoseconds asked for
    notes: list[str] = field(default_factory=list)

    @property
    def usable(self) -> int | None:
        """Usable blocks of the pool."""
        return self.info.usable_blocks or self.moment.pool.num_blocks

    @property
    def block_size(self) -> int | None:
        """Tokens of a block."""
        return self.info.block_size or self.moment.pool.block_size

    def blocks_of(self, tokens: int) -> int | None:
        """Blocks that a request of so many tokens holds."""
        return blocks_for(tokens, self.info) if self.block_size else None


# -- recordings -------------------------------------------------------------------------------------------


def from_recording(recording: Recording, start: int | None = None, stop: int | None = None) -> Case:
    """The case of a recording, or of its part in wall-clock nanoseconds [start, stop)."""
    info, offset = recording.info, recording.wall_offset
    samples = recording.samples
    unix = samples["unix_ns"]
    first = 0 if start is None else int(np.searchsorted(unix, start))
    last = len(unix) if stop is None else int(np.searchsorted(unix, stop))
    cut = {name: column[first:last] for name, column in samples.items()}
    low = (start - offset) if start is not None else -(1 << 62)
    high = (stop - offset) if stop is not None else 1 << 62
    requests = recording.requests
    # Without a finish a request lived to the end of the record.
    alive = np.flatnonzero((requests.arrival < high) & ((requests.finish == 0) | (requests.finish >= low)))
    preempted = recording.preempted
    inside = (preempted["time"] >= low) & (preempted["time"] < high)
    case = Case(
        target=recording.target,
        kind="recording",
        info=info,
        moment=_moment(recording, cut),
        series=_steps(cut, info),
        requests=requests,
        rows=alive,
        preempted={name: column[inside] for name, column in preempted.items()},
        wall_offset=offset,
        loss=LossView(
            dropped_records=recording.loss["dropped_records"],
            dropped_bytes=recording.loss["dropped_bytes"],
            hook_errors=recording.loss["hook_errors"],
            sampled_steps=info.sample_steps,
            unknown=info.unknown,
            warnings=tuple(recording.warnings),
        ),
        ranks=_ranks(recording),
        engine=str(info.dp_rank),
        recording=recording,
        span=(start, stop),
    )
    _holders(case, recording, low, high)
    _tenants(case, recording, low, high)
    return case


def _steps(samples: Columns, info: EngineInfo) -> Series | None:
    unix = samples["unix_ns"] / 1e9
    if not len(unix):
        return None
    gaps = np.diff(unix, prepend=unix[0])
    steps = samples["step_ns"] / 1e9
    # After an idle gap a row speaks of its own step only.
    seconds = np.where(samples["interval_ns"] > 0, gaps, np.minimum(gaps, steps))
    usable = info.usable_blocks
    active = samples["active_blocks"].astype(np.float64)
    waiting = samples["waiting"].astype(np.float64)
    blocked = np.where(samples["bound"] == BOUNDS.index("blocks"), waiting - samples["deferred"], 0.0)
    columns: dict[str, Floats] = {
        "active": active,
        "usage": active / usable if usable else np.full(len(unix), np.nan),
        "waiting": waiting,
        "blocked": np.maximum(blocked, 0),
    }
    for name in (
        "running", "cached_blocks", "prefill_tokens", "decode_tokens", "queried_tokens", "hit_tokens",
        "evicted_blocks", "preemptions", "recomputed_tokens", "bound",
    ):  # fmt: skip
        columns[name] = samples[name].astype(np.float64)
    if "completed" in samples:
        columns["first_tokens"] = samples["completed"].astype(np.float64)
    held = samples["held_tokens"].astype(np.float64)
    slots = active * info.block_size
    with np.errstate(divide="ignore", invalid="ignore"):
        columns["filled"] = np.where((held >= 0) & (slots > 0), held / slots, np.nan)
    return Series(unix, seconds, columns, steps=True)


def _moment(recording: Recording, samples: Columns) -> Snapshot:
    """The last row as a snapshot, for rules that ask about a moment."""
    from kvcatch.results import Pool, Queues

    info = recording.info
    if not len(samples["unix_ns"]):
        return Snapshot(source="capture", state="live" if recording.live else "ended")
    row = {name: int(column[-1]) for name, column in samples.items()}
    mark, source = watermark_for(info)
    usable = info.usable_blocks or None
    blocked = max(0, row["waiting"] - row["deferred"]) if row["bound"] == BOUNDS.index("blocks") else 0
    return Snapshot(
        target=recording.target,
        state="live" if recording.live else "ended",
        source="recorder" if recording.live else "capture",
        engine=info.engine,
        engine_version=info.engine_version,
        model=info.model,
        unix_seconds=row["unix_ns"] / 1e9,
        bound_by=BOUNDS[row["bound"]] if row["bound"] < len(BOUNDS) else None,
        pool=Pool(
            num_blocks=usable, active_blocks=row["active_blocks"], cached_blocks=row["cached_blocks"],
            free_blocks=row["free_blocks"], block_size=info.block_size or None, block_bytes=info.block_bytes,
            utilization_ratio=row["active_blocks"] / usable if usable else None,
            watermark_utilization_ratio=mark, watermark_source=source,
        ),
        queues=Queues(
            running=row["running"], waiting=row["waiting"], waiting_for_blocks=blocked,
            waiting_other=row["waiting"] - blocked,
        ),
    )  # fmt: skip


def _holders(case: Case, recording: Recording, low: int, high: int) -> None:
    """The largest holders and the median one."""
    holds, usable = recording.holds, case.usable
    if not usable or not len(holds.rid):
        return
    same = holds.rid[1:] == holds.rid[:-1]
    # A row stands until the next one of its request, or to the end.
    until = np.full(len(holds.time), 1 << 62)
    until[:-1][same] = holds.time[1:][same]
    seen = (until >= low) & (holds.time < high) & (holds.blocks > 0)
    if not seen.any():
        return
    rid, time, blocks, until = holds.rid[seen], holds.time[seen], holds.blocks[seen], until[seen]
    starts = np.flatnonzero(np.diff(rid, prepend=rid[0] - 1))
    peaks = np.maximum.reduceat(blocks, starts)
    case.median_blocks = float(np.median(peaks))
    order = np.argsort(-peaks, kind="stable")[:_HOLDERS]
    ends = np.append(starts[1:], len(rid))
    requests = recording.requests
    end_of_record = int(recording.samples["unix_ns"][-1]) - case.wall_offset
    holders = []
    for place in order:
        part = slice(starts[place], ends[place])
        large = blocks[part] * 2 >= peaks[place]
        row = int(np.searchsorted(requests.rid, rid[starts[place]]))
        if row >= len(requests) or requests.rid[row] != rid[starts[place]]:
            continue
        key, tags = requests.named(row)
        live = not requests.finish[row]
        stop = min(int(until[part][large].max()), end_of_record)
        holders.append(
            Holder(
                request_id=client_request_id(key),
                tenant=tags.get("tenant", "-"),
                blocks=int(peaks[place]),
                share=float(peaks[place]) / usable,
                start=(int(time[part][large].min()) + case.wall_offset) / 1e9,
                stop=(stop + case.wall_offset) / 1e9,
                prompt_tokens=int(requests.prompt_tokens[row]),
                output_tokens=int(requests.output_tokens[row]),
                arrival=(int(requests.arrival[row]) + case.wall_offset) / 1e9,
                live=live,
            )
        )
    case.holders = tuple(holders)


def _tenants(case: Case, recording: Recording, low: int, high: int) -> None:
    """Mean share of the pool by tenant while requests waited for blocks; shared blocks count for every holder."""
    holds, requests, series = recording.holds, recording.requests, case.series
    blocked = series.get("blocked") if series is not None else None
    if series is None or blocked is None or not case.usable or not (blocked > 0).any():
        return
    names = requests.tenants()
    known = sorted(set(names))
    if not 2 <= len(known) <= 1000:
        return
    code = {name: number for number, name in enumerate(known)}
    codes = np.array([code[name] for name in names])
    row = np.minimum(np.searchsorted(requests.rid, holds.rid), len(requests) - 1)
    change = holds.blocks.copy()
    same = holds.rid[1:] == holds.rid[:-1]
    change[1:][same] -= holds.blocks[:-1][same]
    order = np.argsort(holds.time, kind="stable")
    tenant, change, time = codes[row][order], change[order], holds.time[order]
    pressed = np.flatnonzero(blocked > 0)
    moments = (series.unix[pressed] * 1e9).astype(np.int64) - case.wall_offset
    seconds = np.maximum(series.seconds[pressed], 1e-9)
    for number, name in enumerate(known):
        mine = tenant == number
        held, when = np.append(0, np.cumsum(change[mine])), time[mine]
        # A microsecond of slack: wall-clock seconds are floats.
        shares = held[np.searchsorted(when, moments + 1000, side="right")] / case.usable
        mean = float((shares * seconds).sum() / seconds.sum())
        case.tenants[name] = (mean, float(series.unix[pressed[int(np.argmax(shares))]]))


def _ranks(recording: Recording) -> tuple[RankView, ...]:
    views = []
    for row in recording.ranks.values():
        total, free, used = (row.get(name) for name in ("total_kib", "free_kib", "used_kib"))
        known = (
            total is not None and free is not None and used is not None and (1 << 32) - 1 not in (total, free)
        )
        others = max(0, total - free - used) << 10 if known and row.get("device") != "cpu" else None  # type: ignore[operator]
        views.append(
            RankView(
                tp_rank=row.get("tp_rank"), pp_rank=row.get("pp_rank"), dp_rank=row.get("dp_rank"),
                device=row.get("device"), kv_cache_bytes=row.get("kv_cache_bytes"),
                memory_total_bytes=None if not known else int(total) << 10,  # type: ignore[arg-type]
                memory_used_bytes=None if not known else int(used) << 10,  # type: ignore[arg-type]
                other_processes_bytes=others,
            )
        )  # fmt: skip
    return tuple(views)


# -- pages ------------------------------------------------------------------------------------------------


def from_scrape(capture: ScrapeCapture, start: int | None = None, stop: int | None = None) -> list[Case]:
    """A case per engine of a scraped target."""
    return [_one_page(engine, start, stop) for engine in capture.engines() or [capture]]


def _one_page(capture: ScrapeCapture, start: int | None, stop: int | None) -> Case:
    samples = capture.samples(start, stop)
    readings = capture.readings(start, stop)
    case = Case(
        target=capture.target,
        kind="metrics",
        info=capture.info,
        moment=capture.snapshot(600.0),
        loss=capture.loss,
        engine=capture.engine_label,
    )
    if readings:
        case.pages, case.readings = (readings[0], readings[-1]), tuple(readings)
    count = len(samples["unix_ns"])
    if count > 1:
        unix = samples["unix_ns"] / 1e9
        usable = capture.info.usable_blocks
        ratios = np.array([np.nan if row.usage_ratio is None else row.usage_ratio for row in readings])
        active = samples["active_blocks"]
        blocked = [row.waiting_for_blocks for row in readings]
        columns = {name: np.asarray(column, np.float64) for name, column in samples.items()}
        columns |= {
            "active": active,
            "usage": np.where(np.isnan(ratios), active / usable if usable else np.nan, ratios),
            "blocked": np.array([np.nan if value is None else value for value in blocked]),
            "first_tokens": np.full(count, np.nan),
            "filled": np.full(count, np.nan),
        }
        case.series = Series(unix, np.diff(unix, prepend=unix[0]), columns, steps=False)
        blocked_by_usage(case.series)
        if capture.holdings is not None:
            held = while_blocked(capture.holdings, unix, case.series.seconds, case.series.columns["blocked"])
            case.tenants, case.tenant_peaks = held
    return case


def blocked_by_usage(series: Series) -> None:
    """Where nobody says why requests wait: for blocks when the pool is full, else for something else."""
    usage, waiting = series.columns["usage"], series.columns["waiting"]
    blocked = series.columns["blocked"]
    guess = np.where(usage >= 0.9, waiting, 0.0)
    series.columns["blocked"] = np.where(np.isnan(blocked), guess, blocked)


# -- moments ----------------------------------------------------------------------------------------------


def from_snapshot(snapshot: Snapshot) -> Case:
    """The case of one moment: what ``top`` has."""
    usable = snapshot.pool.num_blocks
    info = EngineInfo(
        engine=snapshot.engine or "vllm",
        model=snapshot.model,
        num_blocks=usable + 1 if usable else 0,
        block_size=snapshot.pool.block_size or 0,
    )
    case = Case(
        target=snapshot.target,
        kind="moment",
        info=info,
        moment=snapshot,
        loss=snapshot.loss,
        ranks=snapshot.ranks,
    )
    now = snapshot.unix_seconds or 0.0
    held = sorted(
        (view for view in snapshot.requests if view.num_blocks), key=lambda view: -(view.num_blocks or 0)
    )
    if usable and held:
        case.median_blocks = float(np.median([view.num_blocks or 0 for view in held]))
        case.holders = tuple(
            Holder(
                request_id=view.request_id, tenant=view.tags.get("tenant", "-"), blocks=view.num_blocks or 0,
                share=(view.num_blocks or 0) / usable, start=now - (view.age_seconds or 0.0), stop=now,
                prompt_tokens=view.prompt_tokens or 0, output_tokens=view.output_tokens or 0,
                arrival=view.arrival_unix_seconds or now, live=True,
            )
            for view in held[:_HOLDERS]
        )  # fmt: skip
    case.tenants = {view.tenant: (view.share_ratio or 0.0, now) for view in snapshot.tenants}
    return case


def from_live(capture: Capture, snapshot: Snapshot, window_seconds: float) -> Case:
    """The case of a moment of a living engine together with what went before it."""
    case = from_snapshot(snapshot)
    start = int(((snapshot.unix_seconds or 0.0) - window_seconds) * 1e9)
    if isinstance(capture, ScrapeCapture):
        page = _one_page(capture, start, None)
        case.series, case.pages, case.readings = page.series, page.pages, page.readings
        case.kind, case.info = page.kind, page.info
        return case
    samples = capture.samples(start)
    if len(samples["unix_ns"]) > 1 and not any(
        np.isnan(samples[name]).any() for name in ("bound", "step_ns")
    ):
        case.info = capture.info
        case.series = _steps(samples, capture.info)
    return case


def increase(case: Case, name: str) -> float | None:
    """Growth of a page's counter over the scrape, or its whole value when there is one page."""
    if case.pages is None:
        return None
    first, last = case.pages
    if first is last:
        value: Any = getattr(last, name)
        return None if value is None else float(value)
    return frames.increase(first, last, name)
