"""What a workload would do to an engine with arrivals: queueing, preemption, latency (``simulate --engine``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.results import Result
from kvcatch.simulator import batching as kernel
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.whatif import TenantHits, tenant_hits
from kvcatch.simulator.workers import Workers, run_all
from kvcatch.workload import BlockView, Workload

Array = npt.NDArray[Any]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as vLLM's flags name it. num_blocks counts the null block.

    append_all and reserve_full_prompt=False: the free queue and the admission of vLLM 0.12. priorities: tenant -> number,
    the smallest first, tenants left out at 0 (vLLM's ``--scheduling-policy priority``); None: first come, first served.
    scheduler: ``stock``, or a mode of kvcatch's scheduler, which ``kvcatch.control.rehearsal.serve_governed`` runs.
    async_scheduling: the next batch is decided while one is computed.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    append_all: bool = False
    reserve_full_prompt: bool = True
    priorities: dict[str, int] | None = None
    scheduler: str = "stock"
    async_scheduling: bool = False
    cost: StepCost = StepCost()


class EngineSimulation(Result, frozen=True):
    """One engine, one workload. Seconds are simulated; requests that can never fit are left out and counted."""

    trace: str
    num_blocks: int
    block_size: int
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    scheduling: str
    scheduler: str
    async_scheduling: bool
    requests: int
    rejected_requests: int
    queried_tokens: int
    hit_tokens: int
    token_hit_ratio: float | None
    queried_blocks: int
    hit_blocks: int
    block_hit_ratio: float | None
    evicted_blocks: int
    preemptions: int
    preempted_requests: int
    recomputed_tokens: int
    peak_active_blocks: int
    peak_active_ratio: float
    peak_running: int
    peak_waiting: int
    internal_fragmentation_ratio: float | None
    steps: int
    duration_seconds: float
    output_tokens_per_second: float | None
    ttft_seconds: dict[str, float]
    ttft_short_seconds: dict[str, float]
    ttft_long_seconds: dict[str, float]
    long_prompt_tokens: int
    queue_seconds: dict[str, float]
    tpot_seconds: dict[str, float]
    tenants: tuple[TenantHits, ...] = ()


class Served(msgspec.Struct, frozen=True):
    """Per request, in the workload's order; NaN and -1 where it was left out. Seconds from the first arrival."""

    scheduled: Any
    first_token: Any
    finished: Any
    cached_tokens: Any
    preemptions: Any
    recomputed_tokens: Any
    totals: Any
    log: Any


#: runs an engine over a workload: the fast stock engine, or another scheduler in plain Python
Server = Callable[[Workload, EngineSettings, BlockView], Served]


def lengths(workload: Workload, settings: EngineSettings) -> tuple[Array, Array]:
    """Output tokens of each request on this engine, and whether the pool can ever hold it."""
    output = np.maximum(workload.output_tokens, 1)
    if settings.max_model_len is not None:
        output = np.minimum(output, settings.max_model_len - workload.prompt_tokens)
    room = -(-(workload.prompt_tokens + output - 1) // settings.block_size)
    return output, (room <= settings.num_blocks - 1) & (output > 0)


def limits(workload: Workload, settings: EngineSettings, output: Array) -> Array:
    """The most output tokens that the scheduler expects of each request, at least the ``output`` it gets."""
    asked = output if workload.max_tokens is None else np.maximum(workload.max_tokens, output)
    if settings.max_model_len is None:
        return asked
    short: Array = np.minimum(asked, settings.max_model_len - workload.prompt_tokens)
    return short


def serve(
    workload: Workload, settings: EngineSettings, view: BlockView | None = None, *, log_steps: int = 0
) -> Served:
    """Run the engine. ``log_steps``: rows of ``batching.LOG_*`` to keep. Raises KVCatchError for bad settings."""
    check(settings)
    if settings.scheduler != "stock":
        raise KVCatchError(f"no scheduler {settings.scheduler!r} here.", "Give the server that runs it.")
    size = settings.block_size
    view = view or workload.blocks(size)
    prompt = workload.prompt_tokens
    output, fits = lengths(workload, settings)
    tokens = prompt + output - 1
    room = -(-tokens // size)
    whole = prompt // size
    made = np.where(fits, tokens // size - whole + 1, 0)
    generated = view.num_ids + np.concatenate(([0], np.cumsum(made)))
    tables = np.concatenate(([0], np.cumsum(np.where(fits, room + 1, 0)[fits])))
    log = np.zeros((log_steps, kernel.LOG_COLUMNS), np.int64)
    times, counts, totals = kernel.run_engine(
        workload.arrival_seconds[fits], prompt[fits], output[fits], view.ids, view.offsets[:-1][fits],
        generated[:-1][fits], tables, int(generated[-1]), settings.num_blocks, size, settings.max_num_seqs,
        settings.max_num_batched_tokens, int(settings.watermark * settings.num_blocks),
        settings.enable_prefix_caching, settings.append_all, settings.reserve_full_prompt,
        _priority(workload, settings, fits), limits(workload, settings, output)[fits],
        2 if settings.async_scheduling else 1, settings.cost.array(), log,
    )  # fmt: skip
    wide_times = np.full((len(workload), 3), np.nan)
    wide_counts = np.full((len(workload), 3), -1, np.int64)
    wide_times[fits], wide_counts[fits] = times, counts
    return Served(
        wide_times[:, kernel.SCHEDULED],
        wide_times[:, kernel.FIRST_TOKEN],
        wide_times[:, kernel.FINISHED],
        wide_counts[:, kernel.CACHED],
        wide_counts[:, kernel.PREEMPTED],
        wide_counts[:, kernel.RECOMPUTED],
        totals,
        log[: int(totals[kernel.STEPS])],
    )


def _priority(workload: Workload, settings: EngineSettings, fits: Array) -> Array:
    """Of each request that fits, or nothing. Raises KVCatchError for a tenant that the workload does not name."""
    if settings.priorities is None:
        return np.zeros(0, np.int64)
    unknown = [name for name in settings.priorities if name not in workload.tenants]
    if unknown:
        raise KVCatchError(
            f"no tenant {unknown[0]!r} in {workload.name}.", f"It has {list(workload.tenants)[:12]}."
        )
    of_tenant = np.array([settings.priorities.get(name, 0) for name in workload.tenants], np.int64)
    found: Array = of_tenant[workload.tenant_index[fits]]
    return found


def longest_request(workload: Workload, settings: EngineSettings) -> int:
    """Tokens of the context, or where no limit is set of the longest request that was asked for and fits."""
    if settings.max_model_len is not None:
        return settings.max_model_len
    output, fits = lengths(workload, settings)
    return int((workload.prompt_tokens + limits(workload, settings, output))[fits].max(initial=1))


def long_prompt_tokens(workload: Workload, settings: EngineSettings) -> int:
    """Prompts of more tokens are long, as for kvcatch's scheduler: a quarter of the context, a sixteenth of the pool."""
    share = (settings.num_blocks - 1) // 16 * settings.block_size
    return max(1, min(share, longest_request(workload, settings) // 4))


def simulate_engine(
    workload: Workload, settings: EngineSettings, *, view: BlockView | None = None, server: Server = serve
) -> EngineSimulation:
    """Run the engine and sum up. Raises KVCatchError for bad settings or when no request fits."""
    view = view or workload.blocks(settings.block_size)
    served = server(workload, settings, view)
    fits = served.cached_tokens >= 0
    if not fits.any():
        raise KVCatchError(
            f"no request of {workload.name} fits into {settings.num_blocks} blocks of {settings.block_size}.",
            "Give more with --num-blocks.",
        )
    arrival = workload.arrival_seconds[fits]
    output = np.maximum(workload.output_tokens, 1)[fits]
    first, finished = served.first_token[fits], served.finished[fits]
    queried, hit = int(workload.prompt_tokens[fits].sum()), int(served.cached_tokens[fits].sum())
    listed, hit_blocks = int(np.diff(view.offsets)[fits].sum()), hit // settings.block_size
    totals = served.totals
    slots = int(totals[kernel.BLOCK_STEPS]) * settings.block_size
    several = output > 1
    ttft = first - arrival
    border = long_prompt_tokens(workload, settings)
    long = workload.prompt_tokens[fits] > border
    duration = float(finished.max() - arrival[0])
    peak = int(totals[kernel.PEAK_ACTIVE])
    return EngineSimulation(
        trace=workload.name,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        policy="lru-append" if settings.append_all else "lru",
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        watermark=settings.watermark,
        scheduling="fcfs" if settings.priorities is None else "priority",
        scheduler=settings.scheduler,
        async_scheduling=settings.async_scheduling,
        requests=len(workload),
        rejected_requests=int((~fits).sum()),
        queried_tokens=queried,
        hit_tokens=hit,
        token_hit_ratio=hit / queried,
        queried_blocks=listed,
        hit_blocks=hit_blocks,
        block_hit_ratio=hit_blocks / listed,
        evicted_blocks=int(totals[kernel.EVICTED]),
        preemptions=int(totals[kernel.PREEMPTIONS]),
        preempted_requests=int((served.preemptions > 0).sum()),
        recomputed_tokens=int(served.recomputed_tokens[fits].sum()),
        peak_active_blocks=peak,
        peak_active_ratio=peak / (settings.num_blocks - 1),
        peak_running=int(totals[kernel.PEAK_RUNNING]),
        peak_waiting=int(totals[kernel.PEAK_WAITING]),
        internal_fragmentation_ratio=int(totals[kernel.SLACK_STEPS]) / slots if slots else None,
        steps=int(totals[kernel.STEPS]),
        duration_seconds=duration,
        output_tokens_per_second=int(output.sum()) / duration if duration > 0 else None,
        ttft_seconds=summary(ttft),
        ttft_short_seconds=summary(ttft[~long]),
        ttft_long_seconds=summary(ttft[long]),
        long_prompt_tokens=border,
        queue_seconds=summary(served.scheduled[fits] - arrival),
        tpot_seconds=summary(((finished - first)[several]) / (output[several] - 1)),
        tenants=tenant_hits(
            workload, np.where(fits, workload.prompt_tokens, 0), np.maximum(served.cached_tokens, 0)
        ),
    )


def sweep_engine(
    workload: Workload,
    grid: Sequence[EngineSettings],
    *,
    workers: Workers | None = None,
    progress: Callable[[int, int], None] | None = None,
    server: Server = serve,
) -> list[EngineSimulation]:
    """Every setting, in the order given, by ``workers`` (default: this thread)."""
    views = {size: workload.blocks(size) for size in {settings.block_size for settings in grid}}
    return run_all(_cell, (workload, views, server), grid, workers or Workers(), progress)


def _cell(
    shared: tuple[Workload, dict[int, BlockView], Server], settings: EngineSettings
) -> EngineSimulation:
    workload, views, server = shared
    return simulate_engine(workload, settings, view=views[settings.block_size], server=server)


def summary(seconds: Array) -> dict[str, float]:
    """mean, p50, p90, p95, p99 and max; empty without values."""
    if not len(seconds):
        return {}
    found = {"mean": float(seconds.mean())}
    for part in (50, 90, 95, 99):
        found[f"p{part}"] = float(np.percentile(seconds, part))
    return {**found, "max": float(seconds.max())}


def check(settings: EngineSettings) -> None:
    """Raises KVCatchError for a setting that no engine has."""
    for name, least in (
        ("num_blocks", 2),
        ("block_size", 1),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
    ):
        if getattr(settings, name) < least:
            raise KVCatchError(
                f"{name} = {getattr(settings, name)} is below {least}.", "Give a larger value."
            )
    if settings.async_scheduling and (
        settings.priorities is not None or settings.append_all or not settings.reserve_full_prompt
    ):
        raise KVCatchError(
            "async scheduling is simulated with the rules of vLLM 0.24 and later, first come first served.",
            "Leave out --priority and lru-append, or take --async-scheduling off.",
        )
    if not 0 <= settings.watermark < 1:
        raise KVCatchError(f"watermark {settings.watermark} is not in [0, 1).", "It is a fraction kept free.")
