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
from kvcatch.simulator.whatif import TenantHits, tenant_hits
from kvcatch.simulator.workers import Workers, run_all
from kvcatch.workload import BlockView, Workload

Array = npt.NDArray[Any]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step: the sum of what it computes.

    fixed: every step. per_prefill_token, per_decode: each token of a prompt, each decoding request.
    per_context_token: each cached token that a decoding request reads. per_attention: each pair of a prompt token
    and a token before it. The defaults are of the order of an 8-billion-parameter model on one large card.
    """

    fixed: float = 0.007
    per_prefill_token: float = 25e-6
    per_decode: float = 0.1e-3
    per_context_token: float = 0.0
    per_attention: float = 0.0

    def array(self) -> Array:
        """The five numbers in the kernel's order."""
        return np.array(msgspec.structs.astuple(self), np.float64)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as vLLM's flags name it. num_blocks counts the null block.

    append_all and reserve_full_prompt=False: the free queue and the admission of vLLM 0.12. priorities: tenant -> number,
    the smallest first, tenants left out at 0 (vLLM's ``--scheduling-policy priority``); None: first come, first served.
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


def serve(
    workload: Workload, settings: EngineSettings, *, view: BlockView | None = None, log_steps: int = 0
) -> Served:
    """Run the engine. ``log_steps``: rows of ``batching.LOG_*`` to keep. Raises KVCatchError for bad settings."""
    _check(settings)
    size = settings.block_size
    view = view or workload.blocks(size)
    prompt = workload.prompt_tokens
    output = np.maximum(workload.output_tokens, 1)
    if settings.max_model_len is not None:
        output = np.minimum(output, settings.max_model_len - prompt)
    tokens = prompt + output - 1
    room = -(-tokens // size)
    fits = (room <= settings.num_blocks - 1) & (output > 0)
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
        _priority(workload, settings, fits), settings.cost.array(), log,
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


def simulate_engine(
    workload: Workload, settings: EngineSettings, *, view: BlockView | None = None
) -> EngineSimulation:
    """Run the engine and sum up. Raises KVCatchError for bad settings or when no request fits."""
    view = view or workload.blocks(settings.block_size)
    served = serve(workload, settings, view=view)
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
        ttft_seconds=summary(first - arrival),
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
) -> list[EngineSimulation]:
    """Every setting, in the order given, by ``workers`` (default: this thread)."""
    views = {size: workload.blocks(size) for size in {settings.block_size for settings in grid}}
    return run_all(_cell, (workload, views), grid, workers or Workers(), progress)


def _cell(shared: tuple[Workload, dict[int, BlockView]], settings: EngineSettings) -> EngineSimulation:
    workload, views = shared
    return simulate_engine(workload, settings, view=views[settings.block_size])


def summary(seconds: Array) -> dict[str, float]:
    """mean, p50, p90, p99 and max; empty without values."""
    if not len(seconds):
        return {}
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return {
        "mean": float(seconds.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99),
        "max": float(seconds.max()),
    }  # fmt: skip


def _check(settings: EngineSettings) -> None:
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
    if not 0 <= settings.watermark < 1:
        raise KVCatchError(f"watermark {settings.watermark} is not in [0, 1).", "It is a fraction kept free.")
