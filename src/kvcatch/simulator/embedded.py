"""A small engine in plain Python that decides as vLLM 0.32 does, without a model.

Block pool, scheduler and request carry the names that vLLM gives them, so the recorder that hooks a real
engine hooks this one too. One KV group of full attention; first come, first served; no speculation.
Every decision is compared with the real ``Scheduler``, step by step, in ``tests/engine``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcatch.simulator.kvmanager import KVCacheManager
from kvcatch.simulator.requests import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    Request,
    RequestStatus,
    SchedulerOutput,
    WaitingQueue,
    hash_of,
)


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation (vLLM 0.32, ``Scheduler``).

    Args:
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens a block.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in a step.
        max_model_len: most tokens a sequence may have.
        enable_caching: prefix caching.
        watermark: fraction of the blocks kept free when a waiting request is admitted beside running ones.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 1 << 30,
        enable_caching: bool = True,
        watermark: float = 0.0,
    ) -> None:
        self.block_size = block_size
        self.kv_cache_manager = KVCacheManager(num_blocks, block_size, enable_caching, watermark)
        self.max_num_running_reqs = max_num_seqs
        self.max_num_scheduled_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.requests: dict[str, Request] = {}
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.add_request(request)
        self.requests[request.request_id] = request

    def get_request_counts(self) -> tuple[int, int]:
        """Running, waiting."""
        return len(self.running), len(self.waiting)

    def has_unfinished_requests(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.waiting)

    def has_requests(self) -> bool:
        """Whether a step is due: anything runs or waits, or ended since the last step."""
        return self.has_unfinished_requests() or bool(self.finished_req_ids)

    def schedule(self) -> SchedulerOutput:
        """Decide one step: running requests first, then waiting ones while nothing was preempted."""
        budget = self.max_num_scheduled_tokens
        scheduled: dict[str, int] = {}
        cached, new_reqs = CachedRequestData(), []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            ahead = request.num_output_placeholders
            if ahead and (
                request.num_computed_tokens + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
            ):
                index += 1  # the token in flight is its last
                continue
            wanted = min(
                request.num_tokens + ahead - request.num_computed_tokens,
                budget,
                self.max_model_len - request.num_computed_tokens - 1,
            )
            if wanted <= 0:
                index += 1
                continue
            while (
                new_blocks := self.kv_cache_manager.allocate_slots(request, wanted, admission=False)
            ) is None:
                victim = self.running.pop()
                self._preempt_request(victim, 0.0)
                preempted = True
                if victim is request:
                    break
            if new_blocks is None:
                break
            self._note_cached(
                cached, request, ([block.block_id for block in new_blocks],) if new_blocks else None
            )
            scheduled[request.request_id] = wanted
            budget -= wanted
            index += 1
        # In vLLM's order: a queue that chooses is not asked in vain.
        while not preempted and budget > 0 and self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            hit = self.kv_cache_manager.get_computed_blocks(request)
            hit_tokens = len(hit) * self.block_size
            wanted = min(request.num_tokens - hit_tokens, budget)
            if (
                self.kv_cache_manager.allocate_slots(
                    request, wanted, hit, admission=True, busy=bool(self.running)
                )
                is None
            ):
                break
            self.waiting.pop_request()
            self.running.append(request)
            request.num_computed_tokens = hit_tokens
            block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
            if request.status == RequestStatus.WAITING:
                request.num_cached_tokens = hit_tokens
                new_reqs.append(
                    NewRequestData(request.request_id, block_ids, hit_tokens, request.sampling_params)
                )
            else:
                self._note_cached(cached, request, block_ids)
                cached.resumed_req_ids.add(request.request_id)
            request.status = RequestStatus.RUNNING
            scheduled[request.request_id] = wanted
            budget -= wanted
        output = SchedulerOutput(
            scheduled_new_reqs=new_reqs,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
        )
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()

    @staticmethod
    def _note_cached(
        cached: CachedRequestData, request: Request, block_ids: tuple[list[int], ...] | None
    ) -> None:
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(block_ids)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens + request.num_output_placeholders)

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.prepend_request(request)
        self.reset_preempted_req_ids.add(request.request_id)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[Request]:
        """Append the sampled tokens and end what is complete. Returns the requests that ended."""
        ended = []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            request.num_in_flight_tokens -= count
            stale = request.num_stale_output_tokens > 0
            if stale:
                request.num_stale_output_tokens -= count
            tokens = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request_id]]
            for _ in tokens:
                request.num_output_tokens += 1
                while len(request.block_hashes) < request.num_tokens // self.block_size:
                    request.block_hashes.append(hash_of(request_id, len(request.block_hashes)))
                made, most = request.num_output_tokens, request.max_tokens
                capped = made >= most or request.num_tokens >= self.max_model_len
                self._sampled(request, stale)
                if capped or made >= request.stops_after:
                    request.status = (
                        RequestStatus.FINISHED_LENGTH_CAPPED if capped else RequestStatus.FINISHED_STOPPED
                    )
                    ended.append(request)
                    break
        for request in ended:
            self._remove(request)
        return ended

    def _sampled(self, request: Request, stale: bool) -> None:
        """One more token of a request is known; ``stale``: it was in flight when the request was preempted."""

    def finish_requests(self, request_ids: str | Iterable[str], finished_status: RequestStatus) -> None:
        """End requests from outside, as a client that hangs up does."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                request.status = finished_status
                self._remove(request)

    def _remove(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove_request(request)
        self.finished_req_ids.add(request.request_id)
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]


class AsyncScheduler(Scheduler):
    """Schedules the next batch while one is in flight (vLLM 0.32, ``AsyncScheduler``).

    A token that is still being sampled is counted as a placeholder, so that the step after it can be scheduled. With two
    batches in flight, what a preemption has overtaken arrives before the next step; nobody resumes without it.
    """

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        super()._update_after_schedule(output)
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1

    def _sampled(self, request: Request, stale: bool) -> None:
        if not stale:
            request.num_output_placeholders -= 1
        if request.status == RequestStatus.RUNNING:
            self.kv_cache_manager.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )


def sample(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """What a model would answer to the step just scheduled: a token where the known tokens are all computed."""
    ids = list(output.num_scheduled_tokens)
    requests = (scheduler.requests[request_id] for request_id in ids)
    tokens = [[0] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
    return ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, tokens)
