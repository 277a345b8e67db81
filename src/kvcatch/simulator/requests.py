"""Requests and what a step says about them, with the names that vLLM gives them: what the embedded engine passes on."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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
