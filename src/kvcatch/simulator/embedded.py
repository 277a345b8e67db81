"""A small engine in plain Python that decides as vLLM 0.32 does, without a model.

Block pool, scheduler and request carry the names that vLLM gives them, so the recorder that hooks a real
engine hooks this one too. One KV group of full attention; first come, first served; no speculation.
Every decision is compared with the real ``Scheduler``, step by step, in ``tests/engine``.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcatch.simulator.blockpool import Block, BlockPool


class RequestStatus(enum.IntEnum):
    """Where a request is; everything after PREEMPTED is finished."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2

    def __str__(self) -> str:
        return self.name.lower()


_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
}


@dataclass
class SamplingParams:
    """The part of the sampling parameters that reaches the records: source tags travel in ``extra_args``."""

    max_tokens: int
    extra_args: dict[str, Any] | None = None


def hash_of(*parts: int | str) -> bytes:
    """A 32-byte stand-in for the engine's block hash."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


class Request:
    """One request. ``block_hashes`` covers the full blocks of the prompt; generated blocks get their own."""

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        block_hashes: Sequence[bytes] = (),
        *,
        arrival_time: float = 0.0,
        extra_args: dict[str, Any] | None = None,
        stops_after: int | None = None,
    ) -> None:
        """stops_after: output tokens at which the model ends by itself, None when only ``max_tokens`` ends it."""
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        # With two batches in flight: tokens scheduled and not answered, of these those that a preemption has
        # overtaken, and sampled tokens that are counted but not known yet.
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.num_output_placeholders = 0
        self.max_tokens = max_tokens
        self.stops_after = max_tokens if stops_after is None else stops_after
        self.block_hashes = list(block_hashes)
        self.arrival_time = arrival_time
        self.sampling_params = SamplingParams(max_tokens, extra_args)
        self.status = RequestStatus.WAITING
        self.num_preemptions = 0
        self.priority = 0
        self.num_cached_tokens: int | None = None
        self.cache_salt: str | None = None
        self.lora_request: object | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.num_prompt_tokens + self.num_output_tokens

    def is_finished(self) -> bool:
        """Whether it ended, for any reason."""
        return self.status > RequestStatus.PREEMPTED

    def get_finished_reason(self) -> FinishReason | None:
        """Why it ended, None while it lives."""
        return _REASONS.get(self.status)


@dataclass
class NewRequestData:
    """What a step says of a request that is scheduled for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    sampling_params: SamplingParams


@dataclass
class CachedRequestData:
    """What a step says of requests known already. ``new_block_ids``: None where nothing was added."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """One step: who computes how many tokens, who was preempted, who ended since the last step."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str]
    finished_req_ids: set[str]


@dataclass
class ModelRunnerOutput:
    """The tokens sampled in a step; an empty list for a prompt that is not complete yet."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]


class WaitingQueue(deque[Request]):
    """First come, first served; a preempted request goes back to the front."""

    def add_request(self, request: Request) -> None:
        """Queue a new request."""
        self.append(request)

    def prepend_request(self, request: Request) -> None:
        """Put a preempted request in front."""
        self.appendleft(request)

    def peek_request(self) -> Request:
        """Who is next."""
        return self[0]

    def pop_request(self) -> Request:
        """Take out who is next."""
        return self.popleft()

    def remove_request(self, request: Request) -> None:
        """Take out one request."""
        self.remove(request)


class GroupManager:
    """Blocks held by each request in one KV group (full attention)."""

    def __init__(self, block_pool: BlockPool, block_size: int) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        self.req_to_blocks: defaultdict[str, list[Block]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}


class Coordinator:
    """Holder of the group managers; one here."""

    def __init__(self, manager: GroupManager) -> None:
        self.single_type_managers = (manager,)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[list[Block]], int]:
        """Cached blocks of the longest prefix of at most so many tokens, per group, and their tokens."""
        (manager,) = self.single_type_managers
        hit: list[Block] = []
        for block_hash in itertools.islice(block_hashes, max_cache_hit_length // manager.block_size):
            block = manager.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hit.append(block)
        return (hit,), len(hit) * manager.block_size

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: tuple[Sequence[Block]]
    ) -> int:
        """Blocks out of the free queue for a request to hold ``num_tokens`` tokens, its idle hits included."""
        (manager,), (hit,) = self.single_type_managers, new_computed_blocks
        have = len(manager.req_to_blocks.get(request_id, ())) + len(hit)
        return max(_ceil(num_tokens, manager.block_size) - have, 0) + sum(block.ref_cnt == 0 for block in hit)


class KVCacheManager:
    """Looks up prefixes and allocates blocks for requests (vLLM 0.32, ``KVCacheManager``)."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool, watermark: float) -> None:
        self.block_pool = BlockPool(num_blocks, enable_caching)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.manager = GroupManager(self.block_pool, block_size)
        self.coordinator = Coordinator(self.manager)
        self.watermark_blocks = int(watermark * num_blocks)

    def get_computed_blocks(self, request: Request) -> list[Block]:
        """The longest cached prefix that leaves at least the last token to compute."""
        if not self.enable_caching:
            return []
        (hit,), _ = self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return hit

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Sequence[Block] = (),
        *,
        admission: bool,
        busy: bool = False,
    ) -> list[Block] | None:
        """Blocks for ``num_new_tokens`` more tokens, or None when they do not fit.

        At admission the whole sequence must fit now, plus the watermark while other requests run.
        """
        ask = self.coordinator.get_num_blocks_to_allocate
        computed = request.num_computed_tokens + len(hit) * self.block_size
        reserve = self.watermark_blocks if admission and busy else 0
        free = self.block_pool.get_num_free_blocks()
        if admission and ask(request.request_id, request.num_tokens, (hit,)) + reserve > free:
            return None
        needed = ask(request.request_id, computed + num_new_tokens, (hit,))
        if needed + reserve > free:
            return None
        needed -= sum(block.ref_cnt == 0 for block in hit)
        blocks = self.manager.req_to_blocks[request.request_id]
        if admission:
            if self.enable_caching:
                self.block_pool.touch(hit)
            blocks.extend(hit)
            self.manager.num_cached_block[request.request_id] = len(hit)
        new = self.block_pool.get_new_blocks(needed) if needed else []
        blocks.extend(new)
        self.cache_blocks(request, min(computed + num_new_tokens, request.num_tokens))
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of a request's first ``num_tokens`` tokens findable."""
        if not self.enable_caching:
            return
        start = self.manager.num_cached_block[request.request_id]
        full = num_tokens // self.block_size
        blocks = self.manager.req_to_blocks[request.request_id]
        for index in range(start, full):
            self.block_pool.cache_block(blocks[index], request.block_hashes[index])
        self.manager.num_cached_block[request.request_id] = max(start, full)

    def free(self, request: Request) -> None:
        """Give up a request's blocks, its last block first."""
        blocks = self.manager.req_to_blocks.pop(request.request_id, [])
        self.manager.num_cached_block.pop(request.request_id, None)
        self.block_pool.free_blocks(reversed(blocks))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of all blocks that a request holds, per group."""
        return ([block.block_id for block in self.manager.req_to_blocks[request_id]],)


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


def _ceil(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
