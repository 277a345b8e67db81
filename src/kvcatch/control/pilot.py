"""Between one vLLM scheduler and the policy: reports what happened, asks what to start, writes down why.

Every entry point that the engine reaches is guarded: an exception of ours is logged once, the plugin steps
aside, and the queue goes on in the engine's own order.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from kvcatch.capture.tags import request_tags
from kvcatch.control.enginepool import Sharing, block_table
from kvcatch.policy import governor as why
from kvcatch.policy.eviction import EVICTIONS, Runner, victims
from kvcatch.policy.governor import Governor
from kvcatch.policy.keeper import Keeper
from kvcatch.policy.protect import Protection
from kvcatch.policy.settings import Settings
from kvcatch.policy.waiting import Job

#: decisions kept per step; a step with more keeps the first ones
MAX_DECISIONS = 256
Decision = tuple[int, str, str, str]


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """The in-engine guard: the engine goes on and the pilot steps aside when the wrapped method raises."""

    @functools.wraps(method)
    def call(pilot: Pilot, *args: Any) -> None:
        if pilot.failed:
            return
        try:
            method(pilot, *args)
        except Exception as error:  # noqa: BLE001 (the engine must go on)
            pilot.step_aside(error)

    return call


class Pilot:
    """One per scheduler.

    live: inside ``schedule()``. rejected: requests that can never fit, until they are finished with an error.
    decisions: (step, request id, decision, reason) of the current step. held: requests kept waiting by the
    policy, not by a limit of the engine, in the last step.
    """

    def __init__(self, scheduler: Any, settings: Settings, log: Any, decisions: list[Decision]) -> None:
        config = scheduler.vllm_config
        manager = scheduler.kv_cache_manager
        self.scheduler = scheduler
        self.settings = settings
        self.decisions = decisions
        self.clock = time.monotonic
        self.held = 0
        self.live = False
        self.failed = False
        self.rejected: dict[str, Any] = {}
        self._log = log
        self._pool = manager.block_pool
        self._usable = manager.block_pool.num_gpu_blocks - 1
        self._by_priority = scheduler.policy.value == "priority"
        self._sharing = Sharing(manager)
        speculative = int(getattr(scheduler, "num_spec_tokens", 0) or 0)
        lookahead = int(getattr(scheduler, "num_lookahead_tokens", 0) or 0) + speculative
        threshold = int(getattr(config.scheduler_config, "long_prefill_token_threshold", 0) or 0)
        self.governor = Governor(
            settings,
            block_table(manager, int(scheduler.max_model_len), lookahead),
            self._usable,
            int(scheduler.max_num_scheduled_tokens),
            chunk=max(0, threshold),
            reserve_blocks=int(getattr(manager, "watermark_blocks", 0)),
            lag=max(0, int(getattr(config, "max_concurrent_batches", 1)) - 1),
            flat=speculative > 0,
            pace=max(1, int(getattr(config.parallel_config, "pipeline_parallel_size", 1))),
            hits=(lambda job: self._sharing.hits(job.request)) if self._sharing.on else None,
        )
        self._keeper: Keeper | None = None
        if settings.protect and settings.mode != "observe" and getattr(manager, "enable_caching", False):
            protection = Protection(dict(settings.protect), self._usable)
            self._groups = list(manager.coordinator.single_type_managers)
            sizes = [int(group.block_size) for group in self._groups]
            self._keeper = Keeper(self._pool, sizes, protection, int(scheduler.max_num_scheduled_tokens))
        self._eviction = EVICTIONS[settings.victim]()
        self._step = 0
        self._pick: Job | None = None
        self._picked = False
        self._taken: dict[str, Job] = {}
        self._prefilling: dict[str, Any] = {}
        self._preempted: dict[str, Job] = {}
        self._shared: dict[str, Any] = {}
        self._between: list[Decision] = []
        self._last_hold: tuple[str, str] = ("", "")

    def step_aside(self, error: Exception) -> None:
        """Give up for the life of this engine; the queue keeps its contents and the engine's own order."""
        self.failed = True
        self.held = 0
        self._picked = False
        self._log.warning(
            "kvcatch: the scheduler plugin stepped aside, scheduling goes on as without it (%s: %s)",
            type(error).__name__, error, exc_info=error,
        )  # fmt: skip

    def note(self, request_id: str, decision: str, reason: str) -> None:
        """Keep one decision for the recorder; what happens between two steps belongs to the next."""
        step, notes = (self._step, self.decisions) if self.live else (self._step + 1, self._between)
        if len(notes) < MAX_DECISIONS:
            notes.append((step, request_id, decision, reason))

    # ---- the queue's side --------------------------------------------------------------------------------

    def enqueue(self, request: Any, front: bool) -> None:
        """A request arrives, comes back from a skip, or was preempted."""
        line = self.governor.line
        if self._by_priority:
            key: tuple[Any, ...] = (request.priority, request.arrival_time)
        else:
            key = line.next_key(front)
        self._picked = False
        skipped = self._taken.pop(request.request_id, None)
        if not self.failed:
            try:
                self._enqueue(request, key, skipped)
            except Exception as error:  # noqa: BLE001 (the engine must go on)
                self.step_aside(error)
        if self.failed and request.request_id not in line:
            job = skipped or Job(request.request_id, 0, 0, 0, 0, 1, request=request)
            job.key = key
            line.add(job)

    def _enqueue(self, request: Any, key: tuple[Any, ...], skipped: Job | None) -> None:
        if skipped is not None:
            skipped.key = key
            self.governor.untake(skipped)
            return
        job = self._preempt(request) or self._new_job(request)
        job.key = key
        self._wait(job)

    def _wait(self, job: Job) -> None:
        """Put a job in line, or reject it when it has grown beyond the pool."""
        job.tokens = job.request.num_tokens
        if self.governor.blocks[job.tokens] > self._usable and not self._encodes():
            if self.settings.mode != "observe":
                self._reject(job)
                return
            self.note(job.request_id, "would-reject", why.NEVER_FITS)
        self.governor.enqueue(job)

    def _encodes(self) -> bool:
        return bool(getattr(self.scheduler, "is_encoder_decoder", False))

    def _new_job(self, request: Any) -> Job:
        params = request.sampling_params or request.pooling_params
        _, tags = request_tags(request.request_id, getattr(params, "extra_args", None))
        job = Job(
            request.request_id,
            tokens=request.num_tokens,
            total=request.num_tokens,
            size=0,
            prompt_tokens=request.num_prompt_tokens,
            max_output=max(1, request.max_tokens),
            priority=request.priority if self._by_priority else 0,
            tenant=tags.get("tenant", ""),
            queued_at=self.clock(),
            request=request,
        )
        self.governor.line.virtual.arrive(job.tenant)
        return job

    def _preempt(self, request: Any) -> Job | None:
        """The running job of a request that comes back to the queue."""
        job = self._forget(request.request_id)
        if job is not None:
            job.passes = job.front = 0
            job.blocked_since = job.promised_step = None
            self._preempted[job.request_id] = job
        return job

    def _forget(self, request_id: str) -> Job | None:
        self._prefilling.pop(request_id, None)
        self._shared.pop(request_id, None)
        return self.governor.leave(request_id, self._sharing.leave(request_id))

    def _reject(self, job: Job) -> None:
        self._preempted.pop(job.request_id, None)
        self.rejected[job.request_id] = job.request
        self.governor.line.virtual.leave(job.tenant)
        self.note(job.request_id, "reject", why.NEVER_FITS)
        self._log.warning(
            "kvcatch: request %s can never run: its %d tokens need %d KV blocks, the pool has %d. It is "
            "finished with an error; shorten it or enlarge the cache.",
            job.request_id, job.tokens, self.governor.blocks[job.tokens], self._usable,
        )  # fmt: skip

    def remove(self, request: Any) -> bool:
        """A waiting request is aborted or finished; False when it does not wait here."""
        request_id = request.request_id
        self._picked = False
        self._preempted.pop(request_id, None)
        if self.rejected.pop(request_id, None) is not None:
            return True
        job = self.governor.line.get(request_id)
        if job is None:
            return False
        self.governor.line.remove(job)
        self.governor.line.virtual.leave(job.tenant)
        return True

    def pick(self) -> Job | None:
        """The job at the front, chosen once until the queue changes."""
        if not self._picked:
            self._pick = self._choose() if self.live and not self.failed else self.governor.line.first()
            self._picked = True
        return self._pick

    def take(self, job: Job) -> None:
        """The job leaves the queue: it starts, or is skipped and comes back within this step."""
        self._picked = False
        self._preempted.pop(job.request_id, None)
        self._taken[job.request_id] = job
        try:
            if not self.failed:
                self.governor.take(job)
        except Exception as error:  # noqa: BLE001 (the engine must go on)
            self.step_aside(error)
        if job.request_id in self.governor.line:
            self.governor.line.remove(job)
        if self.failed:
            return
        started = self.governor.reason
        if self.settings.mode != "observe" and started not in (why.IN_ORDER, why.ALONE):
            self.note(job.request_id, "start", started)

    def _active(self) -> int:
        free: int = self._pool.get_num_free_blocks()
        usable: int = self._usable
        return usable - free

    def _choose(self) -> Job | None:
        head = self.governor.line.first()
        if head is None:
            return None
        try:
            chosen = self.governor.choose(self._active(), len(self.scheduler.running))
        except Exception as error:  # noqa: BLE001 (the engine must go on)
            self.step_aside(error)
            return head
        if chosen is not head and self._last_hold != (head.request_id, self.governor.reason):
            if chosen is None:
                self._last_hold = (head.request_id, self.governor.reason)
            hold = "hold" if self.settings.mode != "observe" else "would-hold"
            if chosen is None:
                self.note(head.request_id, hold, self.governor.reason)
        if self.settings.mode == "observe":
            if chosen is not None and chosen is not head:
                self.note(chosen.request_id, "would-start", self.governor.reason)
            self.governor.reason = why.IN_ORDER
            return head
        return chosen

    # ---- a step --------------------------------------------------------------------------------------------

    def run(self, schedule: Callable[[], Any]) -> Any:
        """One step of the engine's own ``schedule`` with our choice at the front of the queue."""
        self._before()
        try:
            output = schedule()
        finally:
            self.live = False
        self._end(output)
        self._picked = False
        return output

    def _before(self) -> None:
        self.decisions[:] = self._between
        self._between.clear()
        self._begin()
        self._picked = False
        self.live = not self.failed

    @guarded
    def _begin(self) -> None:
        self._step += 1
        governor = self.governor
        for request_id in self.scheduler.finished_req_ids:
            job = self._forget(request_id)
            if job is not None:
                self._served(job)
        unheld = sum(
            governor.blocks[job.tokens] - governor.blocks[job.request.num_computed_tokens]
            for job in map(governor.running.get, self._prefilling)
            if job is not None
        )
        governor.begin(self._step, self.clock(), self._active(), unheld)
        for job in governor.overdue():
            self._replan(job)
        for job in list(self._preempted.values()):
            # Async scheduling still delivers a token that was in flight at the preemption.
            if job.request.num_tokens != job.tokens:
                governor.line.remove(job)
                try:
                    self._wait(job)
                finally:
                    if job.request_id not in governor.line and job.request_id not in self.rejected:
                        governor.line.add(job)
        if self._keeper is not None:
            self._keeper.before_step(len(self.scheduler.running))
        if self.settings.mode != "observe" and governor.planned_blocks > self._usable:
            self._line_up_victims()

    def _served(self, job: Job) -> None:
        request = job.request
        output = int(request.num_output_tokens)
        virtual = self.governor.line.virtual
        virtual.serve(job.tenant, output_tokens=output)
        virtual.leave(job.tenant)
        if output and request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            self.governor.lengths.observe(job.tenant, job.prompt_tokens, output)

    def _replan(self, job: Job) -> None:
        request = job.request
        self.governor.replan(job, int(request.num_computed_tokens), self._shared.get(job.request_id))
        if job.plan is not None:
            self._sharing.mark(job.request_id, job.plan)

    @guarded
    def _end(self, output: Any) -> None:
        governor = self.governor
        scheduled = output.num_scheduled_tokens
        cut = self._picked and self._pick is None and len(governor.line) > 0
        self.held = len(governor.line) if cut else 0
        if self._picked and self._pick is not None and self._pick.request_id in governor.line:
            self._pick.refused_step = self._step
        governor.end()
        resumed = getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
        fresh = [data.req_id for data in output.scheduled_new_reqs]
        fresh += [request_id for request_id in resumed if request_id in scheduled]
        admitted = dict.fromkeys([*fresh, *self._taken])
        requests = self.scheduler.requests
        governor.backlog = sum(
            max(0, requests[request_id].num_tokens - requests[request_id].num_computed_tokens)
            for request_id in {**self._prefilling, **admitted}
        )
        for request_id in admitted:
            self._admit(request_id, scheduled.get(request_id, 0))
        if self._keeper is not None:
            self._keeper.after_step(sum(scheduled.values()), len(scheduled))
        self._taken.clear()
        for request_id, job in list(self._prefilling.items()):
            if request_id not in admitted:
                self._replan(job)
                if job.request.num_computed_tokens >= job.tokens:
                    del self._prefilling[request_id]
        if len(scheduled) != len(governor.running):
            for request_id, job in governor.running.items():
                if request_id not in scheduled and request_id not in self._prefilling:
                    governor.stall(job)

    def _admit(self, request_id: str, count: int) -> None:
        request = self.scheduler.requests[request_id]
        job = self._taken.get(request_id) or self.governor.running.get(request_id) or self._new_job(request)
        job.tokens = max(job.tokens, request.num_tokens) if job.total == 0 else request.num_tokens
        job.total = self.governor.bound(job, job.tokens - job.prompt_tokens)
        shared = self._sharing.shared(request_id)
        if shared is not None:
            self._shared[request_id] = shared
        computed = int(request.num_computed_tokens)
        if self._keeper is not None and computed > count:
            # What a preempted request finds again may be its own.
            self._keeper.admitted(
                None if request.num_preemptions else job.tenant,
                [
                    group.req_to_blocks.get(request_id, ())[: (computed - count) // group.block_size]
                    for group in self._groups
                ],
            )
        self.governor.admit(job, computed, shared)
        self.governor.line.virtual.serve(job.tenant, input_tokens=job.tokens)
        if job.plan is not None:
            self._sharing.mark(request_id, job.plan)
        if computed < job.tokens:
            self._prefilling[request_id] = job

    def _line_up_victims(self) -> None:
        """Put those who should give way at the end of the running list, where vLLM (fcfs) takes victims."""
        scheduler, blocks = self.scheduler, self.governor.blocks
        if self._by_priority:
            return
        views, needed = [], 0
        for position, request in enumerate(scheduler.running):
            job = self.governor.running.get(request.request_id)
            if job is None:
                return
            computed = int(request.num_computed_tokens)
            held = blocks[computed]
            grows = blocks[min(computed + 1, job.total)] if computed >= job.tokens else blocks[job.tokens]
            needed += grows - held
            shared = self._shared.get(request.request_id)
            views.append(
                Runner(
                    request.request_id, int(request.priority), position, held,
                    max(0, held - (0 if shared is None else len(shared))), computed, computed,
                    job.total - computed, int(request.num_preemptions),
                )
            )  # fmt: skip
        short = needed - int(self._pool.get_num_free_blocks())
        if short <= 0:
            return
        chosen = victims(self._eviction, views, short)
        by_id = {request.request_id: request for request in scheduler.running}
        scheduler.running[:] = [r for r in scheduler.running if r.request_id not in set(chosen)] + [
            by_id[request_id] for request_id in reversed(chosen)
        ]
        for request_id in chosen:
            self.note(request_id, "preempt", why.VICTIM)
