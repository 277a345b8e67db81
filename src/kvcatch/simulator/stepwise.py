"""The engine simulation step by step in plain Python: slower than ``engine.serve``, for any scheduler object.

With the stock ``embedded.Scheduler`` it gives what ``engine.serve`` gives; another scheduler that keeps the same
names, such as one that chooses from the waiting queue differently, is run the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcatch.errors import KVCatchError
from kvcatch.simulator import batching as kernel
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.embedded import AsyncScheduler, Scheduler, sample
from kvcatch.simulator.engine import EngineSettings, Served, check, lengths, limits, longest_request
from kvcatch.simulator.requests import ModelRunnerOutput, Request, SchedulerOutput, hash_of
from kvcatch.workload import BlockView, Workload

#: makes the scheduler of a run; the function tells the simulated time in seconds
Build = Callable[[EngineSettings, int, Callable[[], float]], Scheduler]


class Stepwise:
    """One run, in the order of calls of vLLM's engine core.

    With async scheduling two batches are in flight: the next one is decided as soon as the one before it starts to be
    computed. ``now``: simulated seconds.
    """

    def __init__(self, workload: Workload, settings: EngineSettings, view: BlockView, build: Build) -> None:
        """Raises KVCatchError for settings that no engine, or only the fast one, has."""
        check(settings)
        if settings.append_all or not settings.reserve_full_prompt or settings.priorities is not None:
            raise KVCatchError(
                "only the rules of vLLM 0.24 and later, first come first served, run with another scheduler.",
                "Leave out --priority and lru-append, or --scheduler.",
            )
        self.now = 0.0
        self.depth = 2 if settings.async_scheduling else 1
        #: batches that are computed, oldest first: what was decided, the answer, when it is there
        self.flying: deque[tuple[SchedulerOutput, ModelRunnerOutput, float]] = deque()
        self.cost = settings.cost
        self.workload = workload
        self.view = view
        self.output, self.fits = lengths(workload, settings)
        self.limit = limits(workload, settings, self.output)
        self.scheduler = build(settings, longest_request(workload, settings), lambda: self.now)
        self.coming = np.flatnonzero(self.fits)
        self.hashes: dict[int, bytes] = {}
        self.times = np.full((len(workload), 3), np.nan)
        self.counts = np.full((len(workload), 3), -1, np.int64)
        self.counts[self.fits] = 0
        self.high: dict[str, int] = {}
        self.totals = np.zeros(kernel.TOTALS, np.int64)

    def step(self) -> bool:
        """Arrivals, one batch decided, and the oldest answer unless one more batch may fly. False at the end."""
        scheduler = self.scheduler
        arrival = self.workload.arrival_seconds
        if not scheduler.has_requests() and not self.flying:
            if not len(self.coming):
                return False
            self.now = max(self.now, float(arrival[self.coming[0]]))
        while len(self.coming) and arrival[self.coming[0]] <= self.now:
            scheduler.add_request(self._request(int(self.coming[0])))
            self.coming = self.coming[1:]
        if scheduler.has_requests():
            decided = scheduler.schedule()
            self._see(decided)
            start = self.flying[-1][2] if self.flying else self.now
            self.flying.append((decided, sample(scheduler, decided), start + self._seconds(decided)))
            if len(self.flying) < self.depth and (decided.num_scheduled_tokens or scheduler.has_requests()):
                return True
        self._answer()
        return True

    def _answer(self) -> None:
        decided, answer, ready = self.flying.popleft()
        self.now = max(self.now, ready)
        for name, tokens in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            row = self.times[int(name)]
            if tokens and np.isnan(row[kernel.FIRST_TOKEN]):
                row[kernel.FIRST_TOKEN] = self.now
        for request in self.scheduler.update_from_output(decided, answer):
            self.times[int(request.request_id), kernel.FINISHED] = self.now

    def served(self) -> Served:
        """What became of the requests."""
        self.totals[kernel.EVICTED] = self.scheduler.kv_cache_manager.block_pool.num_removed
        return Served(
            self.times[:, kernel.SCHEDULED], self.times[:, kernel.FIRST_TOKEN], self.times[:, kernel.FINISHED],
            self.counts[:, kernel.CACHED], self.counts[:, kernel.PREEMPTED], self.counts[:, kernel.RECOMPUTED],
            self.totals, np.zeros((0, kernel.LOG_COLUMNS), np.int64),
        )  # fmt: skip

    def _request(self, index: int) -> Request:
        workload = self.workload
        prompt = int(workload.prompt_tokens[index])
        ids = self.view.ids[self.view.offsets[index] :][: prompt // self.scheduler.block_size]
        known = self.hashes
        tenant = workload.tenants[workload.tenant_index[index]]
        return Request(
            str(index), prompt, int(self.limit[index]),
            [known.get(i) or known.setdefault(i, hash_of(i)) for i in ids.tolist()],
            arrival_time=float(workload.arrival_seconds[index]),
            extra_args={"kvcatch_tenant": tenant} if tenant else None, stops_after=int(self.output[index]),
        )  # fmt: skip

    def _see(self, decided: SchedulerOutput) -> None:
        scheduler, totals, counts = self.scheduler, self.totals, self.counts
        for new in decided.scheduled_new_reqs:
            index = int(new.req_id)
            self.times[index, kernel.SCHEDULED] = self.now
            counts[index, kernel.CACHED] = new.num_computed_tokens
        for name in decided.preempted_req_ids:
            counts[int(name), kernel.PREEMPTED] += 1
        for name, count in decided.num_scheduled_tokens.items():
            end, high = scheduler.requests[name].num_computed_tokens, self.high.get(name, 0)
            counts[int(name), kernel.RECOMPUTED] += max(0, min(end, high) - (end - count))
            self.high[name] = max(high, end)
        totals[kernel.PREEMPTIONS] += len(decided.preempted_req_ids)
        totals[kernel.RECOMPUTES] += len(decided.scheduled_cached_reqs.resumed_req_ids)
        if not decided.num_scheduled_tokens:
            return  # nothing to compute: who ended is told to the workers
        pool = scheduler.kv_cache_manager.block_pool
        active = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        held = scheduler.kv_cache_manager.manager.req_to_blocks
        slots = sum(len(held[request.request_id]) for request in scheduler.running) * scheduler.block_size
        totals[kernel.STEPS] += 1
        totals[kernel.BLOCK_STEPS] += active
        totals[kernel.SLACK_STEPS] += slots - sum(r.num_computed_tokens for r in scheduler.running)
        totals[kernel.FULL_STEPS] += pool.get_num_free_blocks() == 0
        for place, value in (
            (kernel.PEAK_ACTIVE, active),
            (kernel.PEAK_RUNNING, len(scheduler.running)),
            (kernel.PEAK_WAITING, len(scheduler.waiting)),
        ):
            totals[place] = max(totals[place], value)

    def _seconds(self, decided: SchedulerOutput) -> float:
        """The cost model of the fast engine: a decode reads its context, a prefill attends to what is before it."""
        if not decided.num_scheduled_tokens:
            return 0.0
        cost: StepCost = self.cost
        seconds = cost.fixed
        for name, count in decided.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            context = request.num_computed_tokens
            if count == 1 and context >= request.num_prompt_tokens:
                seconds += cost.per_decode + cost.per_context_token * context
            else:
                seconds += count * (cost.per_prefill_token + cost.per_attention * (context - 0.5 * count))
        return seconds


def stock(settings: EngineSettings, max_model_len: int, clock: Callable[[], float]) -> Scheduler:
    """vLLM's own order."""
    return (AsyncScheduler if settings.async_scheduling else Scheduler)(
        **scheduler_arguments(settings, max_model_len)
    )


def scheduler_arguments(settings: EngineSettings, max_model_len: int) -> dict[str, Any]:
    """Settings as ``embedded.Scheduler`` takes them."""
    return {
        "num_blocks": settings.num_blocks, "block_size": settings.block_size, "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens, "max_model_len": max_model_len,
        "enable_caching": settings.enable_prefix_caching, "watermark": settings.watermark,
    }  # fmt: skip


def serve_stepwise(
    workload: Workload, settings: EngineSettings, view: BlockView, build: Build = stock
) -> Served:
    """Run to the end."""
    run = Stepwise(workload, settings, view, build)
    while run.step():
        pass
    return run.served()
