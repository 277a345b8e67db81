"""What a workload would hit with other pool sizes, block sizes and eviction policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.results import Result
from kvcatch.simulator import pool
from kvcatch.simulator.floors import floored_pool
from kvcatch.simulator.policies import RUNNABLE, check_policy, policy_hits
from kvcatch.simulator.workers import Workers, run_all
from kvcatch.workload import BlockView, Workload

Array = npt.NDArray[Any]


class TenantHits(Result, frozen=True):
    """One tenant's share of a simulation."""

    tenant: str
    requests: int
    queried_tokens: int
    hit_tokens: int
    token_hit_ratio: float | None


class Simulation(Result, frozen=True):
    """One pool, one policy, one workload.

    num_blocks: as vLLM's ``num_gpu_blocks``, the null block included (without engine rules: the capacity);
    None is unlimited. hit_tokens: lower bound where ``exact`` is False, with ``hit_tokens_ceiling`` above it.
    queried_* and hit_*: of requests that fit; rejected_requests need more blocks than the pool has.
    preemptions and recomputed_tokens are None: requests come one after the other here. runs_on: what makes an
    engine evict in this order, None for a bound that no engine runs.
    """

    trace: str
    num_blocks: int | None
    block_size: int
    policy: str
    engine_rules: bool
    exact: bool
    requests: int
    rejected_requests: int
    queried_tokens: int
    hit_tokens: int
    hit_tokens_ceiling: int
    token_hit_ratio: float | None
    token_hit_ratio_ceiling: float | None
    queried_blocks: int
    hit_blocks: int
    block_hit_ratio: float | None
    stored_blocks: int | None
    evicted_blocks: int
    preemptions: int | None = None
    recomputed_tokens: int | None = None
    peak_active_blocks: int | None = None
    internal_fragmentation_ratio: float | None = None
    tenants: tuple[TenantHits, ...] = ()
    runs_on: str | None = None


@dataclass(frozen=True, eq=False)
class Shape:
    """Blocks of each request by what they may do.

    limit: may hit. used: stored under their ids. keep: cached at the end, generated ones included. room: held
    while the request runs.
    """

    limit: Array
    used: Array
    keep: Array
    room: Array


def shape(workload: Workload, view: BlockView, engine_rules: bool) -> Shape:
    """Blocks of each request under vLLM's rules, or the ids as the trace lists them."""
    if not engine_rules:
        listed = np.diff(view.offsets)
        return Shape(listed, listed, listed, listed)
    size = view.block_size
    # The last generated token never gets its key and value computed.
    tokens = workload.prompt_tokens + np.maximum(workload.output_tokens, 1) - 1
    return Shape(
        limit=(workload.prompt_tokens - 1) // size,
        used=workload.prompt_tokens // size,
        keep=tokens // size,
        room=-(-tokens // size),
    )


def simulate(
    workload: Workload,
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    policy: str = "lru",
    engine_rules: bool = True,
    pinned: Sequence[str] = (),
    protect_tokens: int = 0,
    floors: Mapping[str, float] | None = None,
    view: BlockView | None = None,
) -> Simulation:
    """Serve the workload's requests one after the other.

    Args:
        workload: the requests.
        num_blocks: blocks of the pool as vLLM counts them, null block included; None: no limit.
        block_size: tokens a block; by default the trace's own, 16 where it has none.
        policy: a name from ``kvcatch.simulator.policies.POLICIES``.
        engine_rules: vLLM's rules; False: plain prefix caching over the listed ids.
        pinned: tenants whose blocks are evicted last (policy ``priority``).
        protect_tokens: leading tokens of every prompt that are evicted last (policy ``protect``).
        floors: tenant -> share of the pool, ``*`` for every other (policy ``floors``; ``policy.protect.parse_floors``).
        view: the workload's blocks, when they are at hand.

    Raises:
        KVCatchError: a size that is not positive, an unknown policy or tenant, ``floors`` without floors.
    """
    size = block_size or default_block_size(workload)
    check_policy(policy)
    if num_blocks is not None and num_blocks < 2:
        raise KVCatchError(
            f"{num_blocks} blocks: one is the null block.", "Give at least 2 with --num-blocks."
        )
    named = [*pinned, *(name for name in floors or () if name != "*")]
    if unknown := [name for name in named if name not in workload.tenants]:
        raise KVCatchError(
            f"no tenant {unknown[0]!r} in {workload.name}.", f"It has {list(workload.tenants)}."
        )
    if policy == "floors" and not (floors and engine_rules):
        raise KVCatchError(
            "policy floors needs floors and the engine's rules.",
            "Give --floors chat=0.1 (* = everybody else).",
        )
    view = view or workload.blocks(size)
    blocks = shape(workload, view, engine_rules)
    capacity = _capacity(num_blocks, engine_rules, blocks)
    totals: Array | None = None
    if engine_rules and policy in ("lru", "lru-append"):
        hits, totals = pool.serial_pool(
            view.ids, view.offsets, workload.prompt_tokens, workload.output_tokens, view.num_ids, capacity + 1,
            size, policy == "lru-append",
        )  # fmt: skip
        evicted = int(totals[pool.REMOVED])
    elif policy == "floors" and floors:
        names = [workload.tenants[index] for index in workload.tenant_index]
        hits, totals = floored_pool(
            view.ids, view.offsets, workload.prompt_tokens, workload.output_tokens, names, view.num_ids,
            capacity + 1, size, floors,
        )  # fmt: skip
        evicted = int(totals[pool.REMOVED])
    elif policy in ("lru", "lru-append"):
        hits, evicted = pool.plain_lru(view.ids, view.offsets, view.num_ids, capacity)
    else:
        ranks = np.array([name in pinned for name in workload.tenants], np.int64)
        hits, evicted = policy_hits(
            policy, view.ids, view.offsets, view.num_ids, capacity, limit=blocks.limit, used=blocks.used,
            keep=blocks.keep, room=blocks.room, pinning=engine_rules, rank=ranks[workload.tenant_index],
            protected=-(-protect_tokens // size),
        )  # fmt: skip
    return _result(workload, view, hits, int(evicted), totals, num_blocks, policy, engine_rules)


def default_block_size(workload: Workload) -> int:
    """The trace's own block size; 16 where its token ids are known."""
    return workload.grain if workload.grain > 1 else 16


def sweep(
    workload: Workload,
    num_blocks: Sequence[int | None],
    block_sizes: Sequence[int],
    policies: Sequence[str],
    *,
    workers: Workers | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> list[Simulation]:
    """Every combination, in the order given, by ``workers`` (default: this thread)."""
    views = {size: workload.blocks(size) for size in block_sizes}
    grid = list(product(block_sizes, num_blocks, policies))
    return run_all(_cell, (workload, views, options), grid, workers or Workers(), progress)


def _cell(
    shared: tuple[Workload, dict[int, BlockView], dict[str, Any]], cell: tuple[int, int | None, str]
) -> Simulation:
    workload, views, options = shared
    size, blocks, policy = cell
    return simulate(workload, block_size=size, num_blocks=blocks, policy=policy, view=views[size], **options)


def _capacity(num_blocks: int | None, engine_rules: bool, blocks: Shape) -> int:
    if num_blocks is None:
        return int(blocks.room.sum()) + 1
    return num_blocks - 1 if engine_rules else num_blocks


def _result(
    workload: Workload,
    view: BlockView,
    hits: Array,
    evicted: int,
    totals: Array | None,
    num_blocks: int | None,
    policy: str,
    engine_rules: bool,
) -> Simulation:
    fits = hits >= 0
    hit = np.where(fits, hits, 0).astype(np.int64)
    prompt = workload.prompt_tokens
    tokens = np.minimum(hit * view.block_size, prompt)
    ceiling = tokens
    if not view.exact or not engine_rules:
        # The ids cannot tell how far into its next block a prompt matches (Mooncake FAST'25, Figure 9).
        ceiling = np.where(fits, np.minimum(tokens + workload.grain - 1, prompt), 0)
    queried = np.where(fits, prompt, 0)
    total = int(queried.sum())
    listed = int(np.diff(view.offsets)[fits].sum())
    blocks = shape(workload, view, engine_rules)
    slots = int(blocks.room[fits].sum())
    held = int((prompt + np.maximum(workload.output_tokens, 1) - 1)[fits].sum())
    return Simulation(
        trace=workload.name,
        num_blocks=num_blocks,
        block_size=view.block_size,
        policy=policy,
        engine_rules=engine_rules,
        exact=view.exact,
        requests=len(workload),
        rejected_requests=int((~fits).sum()),
        queried_tokens=total,
        hit_tokens=int(tokens.sum()),
        hit_tokens_ceiling=int(ceiling.sum()),
        token_hit_ratio=_ratio(int(tokens.sum()), total),
        token_hit_ratio_ceiling=_ratio(int(ceiling.sum()), total),
        queried_blocks=listed,
        hit_blocks=int(hit.sum()),
        block_hit_ratio=_ratio(int(hit.sum()), listed),
        stored_blocks=int(totals[pool.STORED]) if totals is not None else None,
        evicted_blocks=evicted,
        peak_active_blocks=int(blocks.room[fits].max(initial=0)) if engine_rules else None,
        internal_fragmentation_ratio=1 - held / (slots * view.block_size) if engine_rules and slots else None,
        tenants=tenant_hits(workload, queried, tokens),
        runs_on=RUNNABLE.get(policy),
    )


def tenant_hits(workload: Workload, queried: Array, tokens: Array) -> tuple[TenantHits, ...]:
    """Tokens asked for and hit per request, summed by tenant; empty when the workload names fewer than two."""
    count = len(workload.tenants)
    if count < 2:
        return ()
    index = workload.tenant_index
    asked = np.bincount(index, queried, count).astype(np.int64)
    found = np.bincount(index, tokens, count).astype(np.int64)
    requests = np.bincount(index, minlength=count)
    return tuple(
        TenantHits(
            tenant=name,
            requests=int(requests[i]),
            queried_tokens=int(asked[i]),
            hit_tokens=int(found[i]),
            token_hit_ratio=_ratio(int(found[i]), int(asked[i])),
        )
        for i, name in enumerate(workload.tenants)
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
