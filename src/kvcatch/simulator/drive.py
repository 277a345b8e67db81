"""Runs a workload through the embedded engine on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcatch.simulator.embedded import Scheduler, sample
from kvcatch.simulator.requests import Request, SchedulerOutput, hash_of
from kvcatch.workload import Workload


class VirtualClock:
    """Time that passes only when the engine says so; starts at the two clocks given."""

    def __init__(self, monotonic_ns: int, unix_ns: int) -> None:
        self.start_monotonic_ns = monotonic_ns
        self.start_unix_ns = unix_ns
        self.passed_ns = 0

    def monotonic_ns(self) -> int:
        """Nanoseconds, as ``time.monotonic_ns``."""
        return self.start_monotonic_ns + self.passed_ns

    def time_ns(self) -> int:
        """Nanoseconds since 1970, as ``time.time_ns``."""
        return self.start_unix_ns + self.passed_ns

    def time(self) -> float:
        """Seconds since 1970, as ``time.time``."""
        return self.time_ns() / 1e9

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.passed_ns / 1e9

    def advance_to(self, seconds: float) -> None:
        """Let time pass until ``seconds`` after the start; never backwards."""
        self.passed_ns = max(self.passed_ns, round(seconds * 1e9))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: a fixed part, a part per prompt token and a part per decoding request.

    The defaults are of the order of an 8-billion-parameter model on one large card.
    """

    fixed: float = 0.007
    per_prompt_token: float = 25e-6
    per_decode: float = 0.1e-3

    def seconds(self, output: SchedulerOutput) -> float:
        """Of this step."""
        decodes = sum(1 for count in output.num_scheduled_tokens.values() if count == 1)
        prompt = output.total_num_scheduled_tokens - decodes
        return self.fixed + self.per_prompt_token * prompt + self.per_decode * decodes


@dataclass
class Served:
    """What became of the requests, in seconds after the start; None where it never happened."""

    first_token: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    steps: int = 0


def _reached(clock: VirtualClock, workload: Workload, request: int, speed: float) -> bool:
    """Whether a request is there, in the clock's own nanoseconds: an idle engine was woken for it and must see it."""
    return round(float(workload.arrival_seconds[request]) / speed * 1e9) <= clock.passed_ns


def drive(
    workload: Workload,
    scheduler: Scheduler,
    clock: VirtualClock,
    *,
    step_time: StepTime | None = None,
    speed: float = 1.0,
    on_step: Callable[[int, int], None] | None = None,
) -> Served:
    """Serve every request of the workload, arrivals included.

    Args:
        workload: the requests; its tenants travel as ``kvcatch_tenant`` in the sampling parameters.
        scheduler: the engine. Requests that need more blocks than it has are refused at arrival.
        clock: advanced by each step.
        step_time: how long a step takes.
        speed: arrivals are this many times as fast as in the trace.
        on_step: called with requests finished and requests in all.
    """
    timing = step_time or StepTime()
    view = workload.blocks(scheduler.block_size)
    hashes: dict[int, bytes] = {}
    usable = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    served = Served()
    upcoming = 0
    while upcoming < len(workload) or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            clock.advance_to(float(workload.arrival_seconds[upcoming]) / speed)
        while upcoming < len(workload) and _reached(clock, workload, upcoming, speed):
            name = f"req-{upcoming:05d}"
            prompt, output = int(workload.prompt_tokens[upcoming]), int(workload.output_tokens[upcoming])
            arrival = float(workload.arrival_seconds[upcoming]) / speed
            if -(-(prompt + max(output, 1) - 1) // scheduler.block_size) > usable:
                served.refused.append(name)
                upcoming += 1
                continue
            ids = view.ids[view.offsets[upcoming] :][: prompt // scheduler.block_size]
            tenant = workload.tenants[workload.tenant_index[upcoming]]
            request = Request(
                name,
                prompt,
                max(output, 1),
                [hashes.get(i) or hashes.setdefault(i, hash_of(i)) for i in ids.tolist()],
                arrival_time=clock.start_unix_ns / 1e9 + arrival,
                extra_args={"kvcatch_tenant": tenant} if tenant else None,
            )
            served.arrived[name] = arrival
            scheduler.add_request(request)
            upcoming += 1
        decided = scheduler.schedule()
        clock.advance_to(clock.seconds + timing.seconds(decided))
        answer = sample(scheduler, decided)
        for name, tokens in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            if tokens:
                served.first_token.setdefault(name, clock.seconds)
        for request in scheduler.update_from_output(decided, answer):
            served.finished[request.request_id] = clock.seconds
        served.steps += 1
        if on_step is not None:
            on_step(len(served.finished), len(workload))
    return served
