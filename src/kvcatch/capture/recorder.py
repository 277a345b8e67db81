"""The flight recorder: hooks on one scheduler that append deltas and one row per step to a ring.

Nothing here locks, allocates without bound, formats or does I/O beyond a memory map. Everything is guarded: an
error of ours takes the hooks off, is counted and logged once, and never reaches the engine. What runs in every
step is written for few calls and few objects: the engine empties the processor's caches between two steps, and
what is touched then costs more than what is computed.

In an engine core of its own (``behind``) the hooks only take notes on the way from one model call to the next; they are
worked off in ``get_grammar_bitmask``, which the core calls right after it has handed the step to the workers, or by the
next hook that needs them. An engine whose steps the caller makes may stand still after any of them: there nothing waits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from struct import Struct
from typing import Any

from kvcatch.capture.chains import MIN_HASHES_PER_STEP
from kvcatch.capture.hooks import Hooks
from kvcatch.capture.live import Describer
from kvcatch.capture.poolwatch import PoolWatch
from kvcatch.capture.requestlog import DECODE, EVICTED, NO_SUMS, RequestLog
from kvcatch.capture.ring import RingWriter
from kvcatch.capture.windows import Windows
from kvcatch.store import layout as L
from kvcatch.store.layout import UNKNOWN

logger = logging.getLogger("kvcatch")

IDLE_ROW_NS = 100_000_000
_NO_MAXIMA = [0] * 4
#: now, free blocks, cached blocks, running, waiting, of those without a need for blocks, held, finished ids, evicted ids
_Moment = tuple[int, int, int, int, int, int, int, Any, list[int]]
_ROW_HEAD = L.SAMPLE | (1 + len(L.ROW)) << 16
_pack_row = Struct(f"<{1 + len(L.ROW)}I").pack
_pack_scheduled = Struct("<3IQ").pack


class Recorder(RequestLog):
    """Records one scheduler. ``attach`` installs the hooks, ``detach`` removes them."""

    def __init__(
        self, scheduler: Any, ring: RingWriter, groups: list[tuple[str, int]], options: Any,
        mono: Callable[[], int] = time.monotonic_ns, wall: Callable[[], int] = time.time_ns, behind: bool = False,
    ) -> None:  # fmt: skip
        """groups: (kind, block size) per KV cache group; options: capture.options.Options; clocks in nanoseconds.

        behind: notes of a step may wait until the engine core has handed on the next one.
        """
        super().__init__(scheduler, ring, groups, mono, wall)
        self.options = options
        pool = scheduler.kv_cache_manager.block_pool
        self.watch = PoolWatch(pool, self.out, self.settle, self.fail)
        self.usable = pool.num_gpu_blocks - 1
        sizes = {size for _, size in groups}
        self.row_block_size = sizes.pop() if len(sizes) == 1 and self.attention_groups else 0
        self.windows = Windows(self.managers, [kind for kind, _ in groups])
        self.max_seqs = getattr(scheduler, "max_num_active_reqs", None) or scheduler.max_num_running_reqs
        self.max_tokens = scheduler.max_num_scheduled_tokens
        # Queues beside ``waiting``; these objects live as long as the scheduler.
        self.holding = getattr(scheduler, "kv_holding_waiting", ())
        self.skipped = getattr(scheduler, "skipped_waiting", ())
        self.deferred = getattr(scheduler, "deferred_waiting", ())
        self.governed = hasattr(type(scheduler), "kvcatch_held")
        self.step = 0
        self.schedules: dict[int, tuple[int, int, int]] = {}
        self.written_totals = list(self.totals)  # without what is still in self.out
        self.maxima = list(_NO_MAXIMA)  # active, running, waiting, step time
        self.last_update = 0
        self.last_row = 0
        self.last_bound = 0
        self.steps_since_row = 0
        self.describer = Describer()
        self.updated: tuple[Any, _Moment] | None = None  # a step whose outputs are in, not yet recorded
        self.arrived: list[tuple[Any, int, int]] = []  # requests not yet recorded, with both clocks
        self.scheduled: tuple[Any, int, int] | None = (
            None  # a step that was scheduled since, not yet recorded
        )
        self.behind = behind
        self._hooks = Hooks()
        self.active = False

    # -- installation ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on this scheduler object and its block pool (instances, never classes)."""
        scheduler, add = self.scheduler, self._hooks.add
        add(scheduler, "schedule", self._schedule)
        if hasattr(scheduler, "get_grammar_bitmask"):
            add(scheduler, "get_grammar_bitmask", self._get_grammar_bitmask)
        add(scheduler, "update_from_output", self._update_from_output)
        add(scheduler, "add_request", self._add_request)
        add(scheduler, "finish_requests", self._finish_requests)
        add(scheduler, "_preempt_request", self._preempt_request)
        self.watch.attach(self._hooks)
        self.active = True
        for request in list(getattr(scheduler, "requests", {}).values()):
            self._arrive(request, self.mono(), self.wall())
        moment = self._moment(self.mono())
        self._row(moment, None)  # an engine that never served anything has a pool all the same
        self._flush(moment[0])

    def detach(self) -> None:
        """Record what was noted and take the hooks off; the scheduler runs as if it had never been touched."""
        self.settle()
        self._hooks.remove()
        self.watch.detach()
        self.active = False

    @property
    def cached(self) -> int:
        """Free blocks that still hold a prefix."""
        return self.watch.cached

    def fail(self) -> None:
        """Called inside an except block of a hook: stop recording for good, say so once."""
        self.updated = self.scheduled = None
        self.arrived = []
        try:
            self.detach()
            self.ring.count_hook_error()
            self.ring.set_state("disabled")
            logger.exception("kvcatch: a hook failed, capture is off; the engine is not affected")
        except Exception:  # noqa: BLE001 (nothing of ours may reach the engine)
            pass

    # -- scheduler hooks ------------------------------------------------------------------------------

    def _schedule(self, original: Any) -> Any:
        mono = self.mono

        def schedule(*args: Any, **kwargs: Any) -> Any:
            if self.scheduled is not None:
                self.settle()
            self.in_schedule = True
            self.watch.freed = False
            start = mono()
            try:
                output = original(*args, **kwargs)
            finally:
                self.in_schedule = False
            if self.active:
                self.scheduled = (output, start, mono())
                if not self.behind:
                    self.settle()
            return output

        return schedule

    def settle(self) -> None:
        """Record the steps that were only noted so far, in their order."""
        updated, scheduled, arrived = self.updated, self.scheduled, self.arrived
        self.updated = self.scheduled = None
        try:
            if updated is not None:
                self._after_update(*updated)
            if arrived:
                self.arrived = []
                for request, mono, wall in arrived:
                    if request.request_id not in self.slots:
                        self._arrive(request, mono, wall)
            if scheduled is not None:
                self._after_schedule(*scheduled)
        except Exception:  # noqa: BLE001 (nothing of ours may reach the engine)
            self.fail()

    def _get_grammar_bitmask(self, original: Any) -> Any:
        def get_grammar_bitmask(*args: Any, **kwargs: Any) -> Any:
            self.settle()
            return original(*args, **kwargs)

        return get_grammar_bitmask

    def _update_from_output(self, original: Any) -> Any:
        def update_from_output(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self.scheduled is not None or self.updated is not None:
                self.settle()
            result = original(scheduler_output, *args, **kwargs)
            if self.active:
                try:
                    self.updated = scheduler_output, self._moment(self.mono())
                    if self.speculative or self.resync or not (self.behind and self.scheduler.running):
                        # Later the numbers of computed tokens are others, or no step may come for long.
                        self.settle()
                except Exception:  # noqa: BLE001
                    self.fail()
            return result

        return update_from_output

    def _add_request(self, original: Any) -> Any:
        def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id in self.slots:
                self.settle()  # its name may be that of one which has just ended
            result = original(request, *args, **kwargs)
            if self.active:
                try:
                    if request.request_id not in self.slots:
                        now = self.mono()
                        self.arrived.append((request, now, self.wall()))
                        if not self.scheduler.running:
                            self.settle()
                            self._flush(now)
                except Exception:  # noqa: BLE001
                    self.fail()
            return result

        return add_request

    def _finish_requests(self, original: Any) -> Any:
        def finish_requests(*args: Any, **kwargs: Any) -> Any:
            self.settle()
            result = original(*args, **kwargs)
            if self.active:
                try:
                    if self.scheduler.finished_req_ids:
                        moment = self._moment(self.mono())
                        self._finished(moment[0], self.scheduler.finished_req_ids)
                        self._row(moment, None)
                        self._flush(moment[0])
                except Exception:  # noqa: BLE001
                    self.fail()
            return result

        return finish_requests

    def _preempt_request(self, original: Any) -> Any:
        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.settle()
            before = None
            if self.active:
                try:
                    before = self._before_preempt(request)
                except Exception:  # noqa: BLE001
                    self.fail()
            result = original(request, *args, **kwargs)
            if before is not None and self.active:
                try:
                    self._after_preempt(request, before)
                except Exception:  # noqa: BLE001
                    self.fail()
            return result

        return preempt_request

    # -- after schedule() -----------------------------------------------------------------------------

    def _after_schedule(self, output: Any, start: int, end: int) -> None:
        total = output.total_num_scheduled_tokens
        known = output.scheduled_cached_reqs
        if output.scheduled_new_reqs or known.resumed_req_ids:
            self._admitted(output.scheduled_new_reqs, known, start)
        elif known.new_block_ids:
            self._gained(known)
        self.computed_total += total
        scheduler = self.scheduler
        running = scheduler.running
        prefill = 0
        if total:
            if self.prefilling or total != len(running) or self.speculative:
                prefill = self._tokens(output.num_scheduled_tokens, total, running)
            scheduled = len(output.num_scheduled_tokens)
            self.out += _pack_scheduled(L.SCHEDULED | 5 << 16, total, scheduled, start)
        windows = self.windows
        if windows.sliding and self.watch.freed:
            windows.scan_sliding(self.out, running, self.slots)
        if windows.replaced and (total or self.watch.freed):
            windows.scan_replaced(self.out, running, self.slots)

        # Which limit bound this step, by elimination; an index into BOUNDS of store/base.py.
        skipped = len(self.skipped)
        waiting = len(scheduler.waiting) + len(self.holding) + skipped
        if output.preempted_req_ids:
            bound = 1
        elif waiting == 0:
            bound = 0
        elif waiting <= (len(self.deferred) or skipped):
            bound = 4
        elif total >= self.max_tokens:
            bound = 3
        elif len(running) >= self.max_seqs:
            bound = 2
        else:
            bound = 1
        self.last_bound = bound
        if total:
            self.sums[DECODE] += total - prefill
            if len(self.schedules) > 64:
                self.schedules.clear()
            self.schedules[id(output)] = (start, end - start, bound)
        if self.governed and scheduler.kvcatch_decisions:
            self._write_decisions(scheduler.kvcatch_decisions)
        if self.chains.queue:
            self.chains.write(self.out, max(MIN_HASHES_PER_STEP, prefill // 16))
        if self.describer.segment >= 0:
            self.describer.write(self.out, self.slots, self.prefilling, self._held_blocks)
        if prefill or output.preempted_req_ids:
            # Long steps show at once who is in them; a step of decodes alone is written with its row.
            self._flush(end)

    # -- after update_from_output() -------------------------------------------------------------------

    def _moment(self, now: int) -> _Moment:
        """The pool and the queues now: all that a later step could change."""
        scheduler, watch = self.scheduler, self.watch
        skipped = len(self.skipped)
        # A list of its own: what is evicted from now on belongs to a later step.
        evicted, watch.evicted = watch.evicted, []
        return (
            now, self.free_queue.num_free_blocks, watch.settle(), len(scheduler.running),
            len(scheduler.waiting) + len(self.holding) + skipped, len(self.deferred) or skipped,
            scheduler.kvcatch_held if self.governed else 0, scheduler.finished_req_ids, evicted,
        )  # fmt: skip

    def _after_update(self, output: Any, moment: _Moment) -> None:
        now, finished = moment[0], moment[7]
        if self.awaiting:
            self._first_tokens(now)
        if self.speculative:
            self._write_computed()
        if finished:
            self._finished(now, finished)
        self.step += 1
        self.steps_since_row += 1
        self.totals[0] += 1
        self._row(moment, self.schedules.pop(id(output), None))
        self._flush(now)

    def _row(self, moment: _Moment, schedule: tuple[int, int, int] | None) -> None:
        """One sample row: the pool and the queues at that moment, the sums since the previous row."""
        now, free_all, cached, running, waiting, deferred, held, _, gone = moment
        if gone:
            self.sums[EVICTED] += len(gone)
            self._ids(L.EVICT, 0, (), gone)
        active = self.usable - free_all
        interval = 0
        if schedule is None:
            start, schedule_ns, bound = now, 0, self.last_bound
            if not self.out and now - self.last_row < IDLE_ROW_NS:
                return
        else:
            start, schedule_ns, bound = schedule
            interval = now - self.last_update if self.last_update else 0
            self.last_update = now if running else 0
        step_ns = now - start
        if self.resync:
            self.resync = False
            self.computed_total = sum(request.num_computed_tokens for request in self.scheduler.running)
        if self.options.sample_steps > 1 and self._between_rows(now, active, running, waiting, step_ns):
            return
        size = self.row_block_size
        slack = self.span_total - self.attention_groups * self.computed_total
        prefill, decode, queried, hit, evicted, preemptions, recomputed, completed = sums = self.sums
        active_max, running_max, waiting_max, step_max = self.maxima
        self.out += _pack_row(
            _ROW_HEAD, self.step & UNKNOWN, now & UNKNOWN, now >> 32,
            schedule_ns if schedule_ns < UNKNOWN else UNKNOWN, step_ns if step_ns < UNKNOWN else UNKNOWN,
            interval if interval < UNKNOWN else UNKNOWN, running, waiting, deferred,
            held, active, cached, free_all - cached,
            max(0, active * size - slack) if size else UNKNOWN, prefill, decode, queried, hit, evicted, preemptions,
            recomputed, bound, active_max or active, running_max or running, waiting_max or waiting,
            (step_max or step_ns) if step_ns < UNKNOWN else UNKNOWN, self.steps_since_row, len(self.schedules), completed,
        )  # fmt: skip
        totals = self.totals
        totals[10] += decode
        if prefill or evicted or queried:
            totals[5] += recomputed
            totals[6] += queried
            totals[7] += hit
            totals[8] += evicted
            totals[9] += prefill
        sums[:] = NO_SUMS
        self.steps_since_row = 0
        self.last_row = now
        if step_max:
            self.maxima[:] = _NO_MAXIMA

    def _between_rows(self, now: int, active: int, running: int, waiting: int, step_ns: int) -> bool:
        """Whether this step gets no row; the maxima are kept for the row that comes."""
        maxima = self.maxima
        for index, value in enumerate((active, running, waiting, step_ns)):
            maxima[index] = max(maxima[index], value)
        options = self.options
        return bool(
            self.steps_since_row < options.sample_steps and now - self.last_row < options.sample_interval_ns
        )

    # -- the ring -------------------------------------------------------------------------------------

    def _flush(self, now: int) -> None:
        out = self.out
        if out:
            if not self.ring.append_if_room(out, now, self.step):
                self._flush_across(out, now)
            out.clear()
            self.written_totals[:] = self.totals

    def _flush_across(self, out: bytearray, now: int) -> None:
        """Record by record: none may cross a segment border."""
        ring, step = self.ring, self.step
        position = 0
        batch = bytearray()
        while position < len(out):
            size = 4 * int.from_bytes(out[position + 2 : position + 4], "little")
            if size > 4 * ring.room() - len(batch):
                ring.append(batch, now, step)
                ring.pad(now, step)
                ring.append(self._segment(now), now, step)
                batch.clear()
            batch += out[position : position + size]
            position += size
        ring.append(batch, now, step)

    def _segment(self, now: int) -> bytes:
        number = self.ring.head // L.SEGMENT_WORDS
        if number % 16 == 0:
            # Readers that lost the older segments need the hashes again.
            self.chains.forget = bool(self.chains.seen)
        self.describer.begin(number, self.slots)
        return L.segment_record(number, now, self.wall(), self.written_totals)


def ring_path(directory: str, run: str, part: str) -> str:
    """``<run>.<part>.kvring`` in the recorder directory."""
    return os.path.join(directory, f"{run}.{part}.kvring")
