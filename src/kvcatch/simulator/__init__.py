"""What-if: the block pool and the engine, simulated exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.simulator.engine import EngineSimulation
    from kvcatch.simulator.whatif import Simulation
    from kvcatch.workload import Workload


def simulate(
    trace: str | Path | Workload,
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    policy: str = "lru",
    engine: bool = False,
    **options: Any,
) -> Simulation | EngineSimulation:
    """What a trace would hit with another pool; with ``engine`` also queueing, preemption and latency.

    >>> from kvcatch.data import CONVERSATION
    >>> simulate(CONVERSATION, num_blocks=2560).hit_tokens
    1468416

    Args:
        trace: a trace file, a recording (``.kvcap``, ``.kvring``) or a ``Workload``.
        num_blocks: blocks of the pool as vLLM counts them; None is unlimited. Needed with ``engine``.
        block_size: tokens a block; by default the trace's own, 16 where it has none.
        policy: eviction order, see ``kvcatch.simulator.policies.POLICIES``.
        engine: with arrivals and the scheduler.
        options: of ``kvcatch.simulator.whatif.simulate``, or with ``engine`` of ``EngineSettings``.

    Raises:
        KVCatchError: the trace cannot be read or an option is out of range.
    """
    from kvcatch.errors import KVCatchError
    from kvcatch.simulator.whatif import default_block_size
    from kvcatch.simulator.whatif import simulate as simulate_pool

    workload = load(trace)
    if not engine:
        return simulate_pool(workload, num_blocks=num_blocks, block_size=block_size, policy=policy, **options)
    from kvcatch.simulator.engine import EngineSettings, simulate_engine

    if num_blocks is None:
        raise KVCatchError("an engine needs the size of its pool.", "Give num_blocks.")
    if policy not in ("lru", "lru-append"):
        raise KVCatchError(f"an engine evicts as vLLM does, not by {policy!r}.", "Use lru or lru-append.")
    old = policy == "lru-append"
    settings = EngineSettings(
        num_blocks=num_blocks,
        block_size=block_size or default_block_size(workload),
        append_all=old,
        reserve_full_prompt=not old,
        **options,
    )
    return simulate_engine(workload, settings)


def load(trace: str | Path | Workload) -> Workload:
    """A trace file or a recording as a workload. Raises KVCatchError when it cannot be read."""
    from kvcatch.workload import Workload

    if isinstance(trace, Workload):
        return trace
    if str(trace).endswith((".kvcap", ".kvring")):
        from kvcatch.sources.captured import workload_of
        from kvcatch.store.capture import ReplayCapture

        capture = ReplayCapture.open(str(trace))
        workload, _ = workload_of(capture)
        capture.close()
        return workload
    from kvcatch.sources.traces import read_workload

    return read_workload(trace)
