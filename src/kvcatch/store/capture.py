"""``Capture`` over recorded events: a live ring, a dead one, or a ``.kvcap`` file."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvcatch import __version__
from kvcatch.events import EngineInfo
from kvcatch.results import (
    Efficiency,
    GroupView,
    Latency,
    LossView,
    Pool,
    Preemption,
    Prefix,
    Queues,
    RankView,
    RequestView,
    Snapshot,
    TenantView,
)
from kvcatch.store import layout as L
from kvcatch.store.base import BOUNDS, SAMPLE_COLUMNS, Capture, Columns
from kvcatch.store.feeds import JUMP, Feed, RingFeed, open_feed
from kvcatch.store.names import client_request_id
from kvcatch.store.state import DECODING, FINISHED, PREEMPTED, RUNNING, Request, State, tags_of
from kvcatch.store.watermark import watermark_for

_ROW_INDEX = {name: index for index, name in enumerate(L.ROW)}
_RANK_INDEX = {name: index for index, name in enumerate(L.RANK_ROW)}
STALE_SECONDS = 5.0


class ReplayCapture(Capture):
    """Replays a feed. ``keep_rows``/``keep_finished`` bound the memory of long-lived readers (0 = keep all)."""

    def __init__(self, target: str, feed: Feed, keep_rows: int = 0, keep_finished: int = 0) -> None:
        self.target = target
        self.feed = feed
        self.state = State(keep_rows, keep_finished)
        self.rank_rows: dict[int, list[int]] = {}
        fields = feed.core_info()
        self.unknown_config = not fields
        self.info = msgspec.convert(fields, EngineInfo, strict=False)
        self.wall_offset = self.info.start_unix_ns - self.info.start_monotonic_ns
        self.state.block_size = self.info.hash_block_size or self.info.block_size
        self.damage: list[str] = []
        self.pending: list[tuple[int, int, list[int]]] = []

    @classmethod
    def open(cls, path: str, **bounds: int) -> ReplayCapture:
        """Open a ``.kvring`` or ``.kvcap`` file and read it to its end. Raises KVCatchError."""
        capture = cls(path, open_feed(path), **bounds)
        capture.refresh()
        return capture

    def refresh(self) -> None:
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[State]:
        """Apply what is new; yields the state after every recorded row.

        Records wait for the row that ends their step, so that requests and pool are of one moment. What a
        dead engine wrote after its last row is applied; so is what a live one wrote in a very long step.
        """
        state, pending = self.state, self.pending
        for source, kind, aux, payload in self.feed.records():
            if source:
                if kind == L.RANK:
                    self._rank(source, payload)
                continue
            pending.append((kind, aux, payload))
            if kind == L.SAMPLE:
                self._apply_pending()
                yield state
        if pending and (not self.feed.is_live() or self._silent()):
            self._apply_pending()

    def _silent(self) -> bool:
        """Whether a live writer has written nothing for half a second."""
        written = self.feed.last_mono_ns()
        return bool(written) and time.monotonic_ns() - written > 500_000_000

    def _apply_pending(self) -> None:
        state = self.state
        for kind, aux, payload in self.pending:
            if kind == JUMP:
                state.jump()
                continue
            try:
                state.apply(kind, aux, payload)
            except (IndexError, KeyError) as error:
                self.damage.append(f"record {L.KIND_NAMES.get(kind, kind)} is too short ({error})")
        self.pending.clear()

    def _rank(self, source: int, payload: list[int]) -> None:
        if len(payload) >= len(L.RANK_ROW):
            self.rank_rows[source] = payload

    def counters(self) -> dict[str, float]:
        state = self.state
        return {
            "records": state.records,
            "missed_compulsory_tokens": state.missed["compulsory"],
            "missed_capacity_tokens": state.missed["capacity"],
        }

    # -- time -----------------------------------------------------------------------------------------

    def unix_ns(self, mono_ns: int) -> int:
        """Wall-clock time of a monotonic time, by the clocks at the engine's start."""
        return mono_ns + self.wall_offset

    def _unix_seconds(self, mono_ns: int) -> float | None:
        return self.unix_ns(mono_ns) / 1e9 if mono_ns else None

    def _last_mono(self) -> int:
        row = self.state.row
        return row[1] | row[2] << 32 if row else 0

    # -- answers --------------------------------------------------------------------------------------

    def _first_row(self, start: int) -> int:
        """Index of the first row at or after a wall clock time; rows are in order."""
        rows, width = self.state.rows, len(L.ROW)
        low, high = _ROW_INDEX["mono_lo"], _ROW_INDEX["mono_hi"]

        def unix(index: int) -> int:
            at = index * width
            return (rows[at + low] | rows[at + high] << 32) + self.wall_offset

        return bisect_left(range(len(rows) // width), start, key=unix)

    def samples(self, start: int | None = None, stop: int | None = None) -> Columns:
        width = len(L.ROW)
        # A reader that follows a long record asks for its last second, again and again.
        first = 0 if start is None else self._first_row(start)
        table = np.array(self.state.rows[first * width :], dtype=np.uint32).reshape(-1, width)
        column = {name: table[:, index] for name, index in _ROW_INDEX.items()}
        mono = column["mono_lo"].astype(np.int64) | column["mono_hi"].astype(np.int64) << 32
        unix = mono + self.wall_offset
        keep = np.ones(len(unix), dtype=bool)
        if start is not None:
            keep &= unix >= start
        if stop is not None:
            keep &= unix < stop
        result: Columns = {"unix_ns": unix[keep]}
        for name in (
            *SAMPLE_COLUMNS[1:],
            "active_max",
            "running_max",
            "waiting_max",
            "step_max_ns",
            "steps",
            "completed",
        ):
            if name in column:
                result[name] = column[name][keep].astype(np.int64)
        held = result["held_tokens"]
        result["held_tokens"] = np.where(held == L.UNKNOWN, -1, held)
        return result

    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        from kvcatch.store.dump import event_dicts

        for event in event_dicts(open_feed(self.target), self.wall_offset):
            if (start is None or event["unix_ns"] >= start) and (stop is None or event["unix_ns"] < stop):
                yield event

    def requests(self) -> list[RequestView]:
        everything = [*self.state.finished, *self.state.requests.values()]
        everything.sort(key=lambda request: request.rid)
        now = self._now_mono()
        return [self._view(request, now) for request in everything]

    @property
    def loss(self) -> LossView:
        loss = self.feed.loss()
        unknown = list(self.info.unknown)
        if self.state.partial:
            unknown.append("requests not described again since records were lost")
        if self.unknown_config:
            unknown.append("configuration")
        return LossView(
            dropped_records=loss["dropped_records"],
            dropped_bytes=loss["dropped_bytes"],
            hook_errors=loss["hook_errors"],
            sampled_steps=self.info.sample_steps,
            unknown=tuple(unknown),
            warnings=(*self.feed.warnings, *self.state.notes[-5:], *self.damage[-5:]),
        )

    def _now_mono(self) -> int:
        """The engine's clock now while it lives; its last row's time afterwards."""
        return time.monotonic_ns() if self.feed.is_live() else self._last_mono()

    def liveness(self) -> str:
        """live, idle (nothing to do), stale (work but no steps for 5 s) or ended."""
        if not self.feed.is_live():
            return "ended"
        age = (time.monotonic_ns() - self._last_mono()) / 1e9
        busy = bool(self.state.requests)
        if busy:
            return "live" if age < STALE_SECONDS else "stale"
        return "live" if age < 1 else "idle"

    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        state, row = self.state, self.state.row
        value = {name: row[index] for name, index in _ROW_INDEX.items()} if row else {}
        now = self._now_mono()
        views = [self._view(request, now) for request in state.requests.values()]
        views.sort(key=lambda view: -(view.num_blocks or 0))
        last = self._last_mono()
        info = self.info
        queried, hits = state.totals["queried_tokens"], state.totals["hit_tokens"]
        recent = self._recent(window_seconds, now)
        held = value.get("held_tokens", L.UNKNOWN)
        held_tokens = None if held == L.UNKNOWN else held
        waiting = value.get("waiting")
        mark, source = watermark_for(info)
        return Snapshot(
            kvcatch_version=__version__,
            target=self.target,
            state=self.liveness(),
            source="recorder" if isinstance(self.feed, RingFeed) else "capture",
            engine=info.engine,
            engine_version=info.engine_version,
            model=info.model,
            pid=info.pid or None,
            dp_rank=info.dp_rank,
            unix_seconds=self._unix_seconds(last),
            data_age_seconds=max(0.0, (now - last) / 1e9) if last else None,
            step=value.get("step"),
            bound_by=BOUNDS[value["bound"]] if value and value["bound"] < len(BOUNDS) else None,
            pool=Pool(
                num_blocks=info.usable_blocks or None,
                active_blocks=value.get("active_blocks"),
                cached_blocks=value.get("cached_blocks"),
                free_blocks=value.get("free_blocks"),
                block_size=info.block_size or None,
                active_tokens=held_tokens,
                block_bytes=info.block_bytes,
                active_blocks_max=recent.get("active_max"),
                cached_blocks_max=recent.get("cached_max"),
                watermark_utilization_ratio=mark,
                watermark_source=source,
                utilization_ratio=value["active_blocks"] / info.usable_blocks
                if value and info.usable_blocks
                else None,
                step_blocks=max(0, len(state.refs) - value["active_blocks"]) if value else None,
            ),
            groups=tuple(
                GroupView(
                    kind=group.kind,
                    layers=group.layers,
                    block_size=group.block_size,
                    page_bytes=group.page_bytes,
                    window_tokens=group.window,
                )
                for group in info.groups
            ),
            queues=Queues(
                running=value.get("running"),
                waiting_for_blocks=self._waiting_for_blocks(value),
                waiting_other=None if waiting is None else waiting - (self._waiting_for_blocks(value) or 0),
                held=value.get("held"),
                running_max=recent.get("running_max"),
                waiting_max=recent.get("waiting_max"),
                waiting=waiting,
            ),
            prefix=Prefix(
                queried_tokens=queried, hit_tokens=hits, hit_ratio=hits / queried if queried else None
            )
            if info.prefix_caching is not False
            else Prefix(),
            preemption=Preemption(
                preemptions=state.totals["preemptions"],
                recomputes=state.totals["resumes"],
                recomputed_tokens=state.totals["recomputed_tokens"],
            ),
            efficiency=self._efficiency(value, held_tokens, recent),
            latency=self._latency(window_seconds, now, recent, value),
            requests=tuple(views),
            tenants=self._tenants(views),
            ranks=self._ranks(),
            loss=self.loss,
        )

    def _waiting_for_blocks(self, value: dict[str, int]) -> int | None:
        """Waiting requests that could run but for blocks: those not deferred, when blocks bound the step."""
        if not value:
            return None
        bound = BOUNDS[value["bound"]] if value["bound"] < len(BOUNDS) else ""
        return max(0, value["waiting"] - value["deferred"]) if bound == "blocks" else 0

    def _efficiency(
        self, value: dict[str, int], held_tokens: int | None, recent: dict[str, int]
    ) -> Efficiency:
        size, active = self.info.block_size, value.get("active_blocks", 0)
        if held_tokens is None or not size or not active:
            return Efficiency()
        ratio = held_tokens / (active * size)
        lowest = recent.get("utilization_min_ppm")
        return Efficiency(
            block_utilization_ratio=ratio,
            internal_fragmentation_ratio=1 - ratio,
            internal_fragmentation_ratio_max=None if lowest is None else 1 - lowest / 1e6,
        )

    def _recent(self, window_seconds: float, now: int) -> dict[str, int]:
        """Maxima and sums over the rows of the window."""
        width = len(L.ROW)
        rows = self.state.rows
        count = len(rows) // width
        if not count:
            return {}
        start = count
        oldest = now - int(window_seconds * 1e9)
        while start > 0 and count - start < 100_000:
            base = (start - 1) * width
            if (rows[base + 1] | rows[base + 2] << 32) < oldest:
                break
            start -= 1
        if start == count:
            return {}
        table = np.array(rows[start * width : count * width], dtype=np.int64).reshape(-1, width)
        column = {name: table[:, index] for name, index in _ROW_INDEX.items()}
        busy = column["step_ns"] > 0
        mono = column["mono_lo"] | column["mono_hi"] << 32
        # The row of an engine that has only just been attached to is no step: rates begin with the first one.
        stepped = mono[column["steps"] > 0]
        active = column["active_blocks"]
        known = (column["held_tokens"] != L.UNKNOWN) & (active > 0)
        result = {
            "active_max": int(column["active_max"].max()),
            "cached_max": int(column["cached_blocks"].max()),
            "running_max": int(column["running_max"].max()),
            "waiting_max": int(column["waiting_max"].max()),
            "step_max_ns": int(column["step_max_ns"].max()),
            "steps": int(column["steps"].sum()),
            "output_tokens": int(column["decode_tokens"].sum() + column["completed"].sum()),
            "prompt_tokens": int(column["prefill_tokens"].sum() + column["hit_tokens"].sum()),
            "span_ns": int(max(now - stepped[0], 1))
            if len(stepped) > 1
            else int(max(column["step_ns"].max(), 1)),
        }
        if busy.any():
            result["schedule_ns"] = int(column["schedule_ns"][busy].mean())
            result["step_ns"] = int(column["step_ns"][busy].mean())
        if known.any() and self.info.block_size:
            ratio = column["held_tokens"][known] / (active[known] * self.info.block_size)
            result["utilization_min_ppm"] = int(1e6 * ratio.min())
        return result

    def _latency(self, window: float, now: int, recent: dict[str, int], value: dict[str, int]) -> Latency:
        oldest = now - int(window * 1e9)
        ttft, tpot, queue = [], [], []
        for request in self._recently_finished(oldest):
            if request.finish >= oldest and request.first and request.output_tokens > 1:
                tpot.append((request.finish - request.first) / (request.output_tokens - 1))
            if request.first >= oldest:
                ttft.append(request.first - request.arrival)
            if request.scheduled >= oldest:
                queue.append(request.scheduled - request.added)
        for request in self.state.requests.values():
            if request.first >= oldest:
                ttft.append(request.first - request.arrival)
            if request.scheduled >= oldest:
                queue.append(request.scheduled - request.added)
        span = recent.get("span_ns")
        return Latency(
            ttft_seconds=_mean_seconds(ttft),
            ttft_p95_seconds=float(np.percentile(ttft, 95)) / 1e9 if ttft else None,
            tpot_seconds=_mean_seconds(tpot),
            queue_seconds=_mean_seconds(queue),
            output_tokens_per_second=recent["output_tokens"] * 1e9 / span if span else None,
            prompt_tokens_per_second=recent["prompt_tokens"] * 1e9 / span if span else None,
            schedule_seconds=_seconds(recent.get("schedule_ns")),
            step_seconds=_seconds(recent.get("step_ns")),
            step_seconds_max=_seconds(recent.get("step_max_ns")),
            window_seconds=window,
        )

    def _recently_finished(self, oldest: int) -> Iterator[Request]:
        for request in reversed(self.state.finished):
            if request.finish < oldest:
                return
            yield request

    def _view(self, request: Request, now: int) -> RequestView:
        state, refs = self.state, self.state.refs
        ids = [block for group in request.blocks for block in group if block]
        tokens = state.num_tokens(request)
        status = {DECODING: "running", RUNNING: "running", PREEMPTED: "preempted"}.get(
            request.state, request.state
        )
        done = request.state == FINISHED
        return RequestView(
            request_id=client_request_id(request.key),
            engine_request_id=request.key,
            status=status,
            tags=tags_of(request),
            num_blocks=len(ids),
            shared_blocks=sum(1 for block in ids if refs.get(block, 0) > 1),
            num_tokens=tokens,
            prompt_tokens=request.prompt_tokens,
            output_tokens=tokens - request.prompt_tokens,
            cached_tokens=request.cached_tokens if request.scheduled else None,
            num_preemptions=request.preemptions,
            recomputed_tokens=request.recomputed_tokens if done or not request.preemptions else None,
            age_seconds=max(0.0, ((request.finish if done else now) - request.arrival) / 1e9),
            arrival_unix_seconds=self._unix_seconds(request.arrival),
            queue_seconds=(request.scheduled - request.added) / 1e9 if request.scheduled else None,
            ttft_seconds=(request.first - request.arrival) / 1e9 if request.first else None,
            finish_reason=request.reason or None,
            max_tokens=request.max_tokens or None,
            decision=request.decision or None,
        )

    def _tenants(self, views: list[RequestView]) -> tuple[TenantView, ...]:
        grouped: dict[str, list[RequestView]] = {}
        for view in views:
            grouped.setdefault(view.tags["tenant"], []).append(view)
        usable = self.info.usable_blocks
        tenants = []
        for tenant, members in grouped.items():
            blocks = sum(view.num_blocks or 0 for view in members)
            admitted = [view for view in members if view.cached_tokens is not None]
            tenants.append(
                TenantView(
                    tenant=tenant,
                    num_blocks=blocks,
                    share_ratio=blocks / usable if usable else None,
                    running=sum(view.status == "running" for view in members),
                    waiting=sum(view.status != "running" for view in members),
                    queried_tokens=sum(view.prompt_tokens or 0 for view in admitted),
                    hit_tokens=sum(view.cached_tokens or 0 for view in admitted),
                    preemptions=sum(view.num_preemptions or 0 for view in members),
                )
            )
        return tuple(sorted(tenants, key=lambda view: -(view.num_blocks or 0)))

    def _ranks(self) -> tuple[RankView, ...]:
        infos = self.feed.ranks()
        rows = {source: dict(zip(L.RANK_ROW, row, strict=False)) for source, row in self.rank_rows.items()}
        used_by_all = sum(row["used_kib"] for row in rows.values())
        views = []
        for source, info in sorted(infos.items()):
            row = rows.get(source, {})
            other = None
            if row and L.UNKNOWN not in (row["total_kib"], row["free_kib"]):
                ours = used_by_all if info.get("device") == "cpu" else row["used_kib"]
                other = max(0, row["total_kib"] - row["free_kib"] - ours) << 10
            views.append(
                RankView(
                    tp_rank=info.get("tp_rank"),
                    pp_rank=info.get("pp_rank"),
                    dp_rank=info.get("dp_rank"),
                    device=info.get("device"),
                    pid=info.get("pid"),
                    memory_total_bytes=_kib(row.get("total_kib")),
                    memory_used_bytes=_kib(row.get("used_kib")),
                    memory_peak_bytes=_kib(row.get("peak_kib")),
                    kv_cache_bytes=info.get("kv_cache_bytes"),
                    other_processes_bytes=other,
                    step_seconds=_seconds(row.get("step_ns")),
                    step_seconds_max=_seconds(row.get("step_max_ns")),
                )
            )
        return tuple(views)

    def close(self) -> None:
        self.feed.close()


def _mean_seconds(values: list[int] | list[float]) -> float | None:
    return sum(values) / len(values) / 1e9 if values else None


def _seconds(value: int | None) -> float | None:
    return None if value is None else value / 1e9


def _kib(value: int | None) -> int | None:
    return None if value is None or value == L.UNKNOWN else value << 10
