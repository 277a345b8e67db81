"""Speed of the simulator beside vLLM's own classes: ``.venv-engine/bin/python bench/simulate.py``.

Prints one JSON object a row: what, measured, unit, budget, met, peer. Every rate is the best of several runs
in CPU time of one thread, after the kernels are compiled; the peers run in the same process.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvcatch.simulator.batching import PREEMPTIONS, STEPS
from kvcatch.simulator.curve import curve_of, hit_curve
from kvcatch.simulator.engine import EngineSettings, serve
from kvcatch.simulator.pool import serial_pool
from kvcatch.simulator.sampling import sampled_curve
from kvcatch.sources.traces import read_workload
from kvcatch.workload import Workload, build

TRACE = Path(__file__).parents[1] / "tests/data/mooncake_fast25/conversation_trace.jsonl.gz"


def best(call: Callable[[], Any], times: int = 15) -> float:
    """CPU seconds of the fastest of several calls, the first (compilation) left out."""
    call()
    taken = []
    for _ in range(times):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return min(taken)


def pool_rows(workload: Workload, block_size: int, num_blocks: int) -> list[dict[str, Any]]:
    """References a second of the exact pool, and the curve against one capacity."""
    view = workload.blocks(block_size)

    def one() -> Any:
        return serial_pool(
            view.ids, view.offsets, workload.prompt_tokens, workload.output_tokens, view.num_ids, num_blocks,
            block_size, False,
        )  # fmt: skip

    seconds = best(one)
    every = best(lambda: curve_of(workload, view, engine_rules=True))
    references = len(view.ids)
    name = f"{references:,} references, blocks of {block_size}, pool of {num_blocks:,}"
    return [
        {
            "what": f"pool simulation, {name}",
            "measured": references / seconds,
            "unit": "references/s",
            "budget": 10e6,
            "met": references / seconds >= 10e6,
            "peer": vllm_pool(workload.head(400), block_size, num_blocks),
        },
        {
            "what": f"every capacity in one pass, {name}",
            "measured": every / seconds,
            "unit": "times one capacity",
            "budget": 4.0,
            "met": every / seconds <= 4.0,
            "peer": {"name": "one run for each of 48 capacities", "measured": 48.0},
        },
    ]


def sampling_row(workload: Workload, block_size: int, rate: float) -> dict[str, Any]:
    """The whole curve, blocks cut from the trace included, against the same from a sample."""
    exact = best(lambda: hit_curve(workload, block_size), 5)
    sampled = best(lambda: sampled_curve(workload, block_size, rate=rate), 5)
    references = int((-(-workload.prompt_tokens // block_size)).sum())
    return {
        "what": f"curve from {rate:.0%} of the blocks, {references:,} references, blocks of {block_size}",
        "measured": exact / sampled,
        "unit": "times as fast as the exact curve",
        "budget": 2.0,
        "met": exact / sampled >= 2.0,
        "peer": {"name": "the exact curve, seconds", "measured": exact},
    }


def vllm_pool(workload: Workload, block_size: int, num_blocks: int) -> dict[str, Any] | None:
    """References a second of vLLM's ``BlockPool`` doing the same; None where vLLM is not installed."""
    try:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    except ImportError:
        return None
    view = workload.blocks(block_size)
    names = [make_block_hash_with_group_id(int(i).to_bytes(32, "big"), 0) for i in range(view.num_ids)]
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=block_size)
    start = time.thread_time()
    for request in range(len(workload)):
        ids = view.ids[view.offsets[request] : view.offsets[request + 1]].tolist()
        prompt = int(workload.prompt_tokens[request])
        tokens = prompt + max(int(workload.output_tokens[request]), 1) - 1
        held = []
        for name in ids[: (prompt - 1) // block_size]:
            block = pool.cached_block_hash_to_block.get_one_block(names[name])
            if block is None:
                break
            held.append(block)
        pool.touch(held)
        hit = len(held)
        held += pool.get_new_blocks(-(-tokens // block_size) - hit)
        for place in range(hit, prompt // block_size):
            pool._insert_block_hash(names[ids[place]], held[place], num_tokens=None)
        pool.free_blocks(reversed(held))
    seconds = time.thread_time() - start
    return {"name": "vLLM 0.32 BlockPool, first 400 requests", "measured": len(view.ids) / seconds}


def engine_rows() -> list[dict[str, Any]]:
    """The engine simulation beside vLLM's Scheduler without a model, and at the size of a day's traffic."""
    rows = []
    peer = vllm_scheduler()
    if peer is not None:
        ours, theirs, steps, preemptions = peer
        rows.append(
            {
                "what": f"engine simulation, 400 requests, {steps:,} steps, {preemptions} preemptions",
                "measured": theirs / ours,
                "unit": "times as fast as vLLM's Scheduler",
                "budget": 50.0,
                "met": theirs / ours >= 50.0,
                "peer": {"name": "vLLM 0.32 Scheduler without a model, same decisions", "measured": theirs},
            }
        )
    for name, num_blocks, budget in (("relaxed", 400_000, 1.0), ("heavy preemption", 6_000, 5.0)):
        workload = many(20_000)
        settings = EngineSettings(num_blocks=num_blocks, max_num_seqs=256, max_num_batched_tokens=8192)
        view = workload.blocks(16)
        seconds = best(lambda w=workload, s=settings, v=view: serve(w, s, view=v), 3)
        totals = serve(workload, settings, view=view).totals
        rows.append(
            {
                "what": f"engine simulation, {name}: 20,000 requests, {len(view.ids):,} prompt blocks, "
                f"{int(totals[STEPS]):,} steps, {int(totals[PREEMPTIONS]):,} preemptions",
                "measured": seconds,
                "unit": "s",
                "budget": budget,
                "met": seconds <= budget,
                "peer": None,
            }
        )
    return rows


def dynamo_row(count: int = 20_000, num_blocks: int = 2048) -> dict[str, Any]:
    """The trace of ``tools/dynamo_check.py`` through Dynamo's replay and ours: the same hits, and the time of both."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    import dynamo_check

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in dynamo_check.trace(count, 1)))
        theirs, ours = dynamo_check.dynamo(path, num_blocks), dynamo_check.ours(path, num_blocks)
    ratio = theirs["seconds"] / ours["seconds"]
    same = abs(theirs["token_hit_ratio"] - ours["token_hit_ratio"]) < 1e-12
    return {
        "what": f"engine simulation, {count:,} requests at once, {ours['preemptions']:,} preemptions, "
        f"{'same' if same else 'ANOTHER'} first-admission hit ratio",
        "measured": ratio,
        "unit": "times as fast as Dynamo's replay",
        "budget": 1.0,
        "met": same and ratio >= 1.0,
        "peer": {"name": "Dynamo replay 1.4.2, wall seconds it reports", "measured": theirs["seconds"]},
    }


def many(count: int) -> Workload:
    """Requests of 12 tenants, each with a head of its own: 1,024 to 2,000 prompt tokens, 20 to 200 output."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        head, tail = int(random.integers(12)), int(random.integers(512, 1488))
        rows.append(
            {
                "arrival": number / 40,
                "prompt": 512 + tail,
                "output": int(random.integers(20, 200)),
                "segments": [(("head", head), 512), (number, tail)],
            }
        )
    return build("many", rows, grain=1)


def vllm_scheduler() -> tuple[float, float, int, int] | None:
    """Seconds of ours and of vLLM's Scheduler on one workload, steps and preemptions; None without vLLM."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    try:
        from engine.simulator_oracle import Settings, prompts, real_answer, real_request, real_scheduler
    except ImportError:
        return None
    chosen = Settings(400, 16, 32, 2048, 0.0, 400, 2000)
    made = prompts(1, chosen)
    with tempfile.TemporaryDirectory() as folder:
        try:
            scheduler = real_scheduler(chosen, Path(folder))
        except ImportError:
            return None
    for number, (tokens, output) in enumerate(made):
        scheduler.add_request(real_request(str(number), tokens, output, 16))
    seconds = steps = preemptions = 0
    while scheduler.has_unfinished_requests():
        start = time.thread_time()
        output = scheduler.schedule()
        seconds += time.thread_time() - start
        steps += 1
        preemptions += len(output.preempted_req_ids or ())
        answer = real_answer(scheduler, output, 1)
        start = time.thread_time()
        scheduler.update_from_output(output, answer)
        seconds += time.thread_time() - start
    rows = [
        {"arrival": 0.0, "prompt": len(tokens), "output": n, "segments": [(t, 1) for t in tokens]}
        for tokens, n in made
    ]
    workload = build("same", rows, grain=1)
    settings = EngineSettings(
        num_blocks=400, max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=2000
    )
    view = workload.blocks(16)
    ours = best(lambda: serve(workload, settings, view=view))
    totals = serve(workload, settings, view=view).totals
    assert (int(totals[STEPS]), int(totals[PREEMPTIONS])) == (steps, preemptions)
    return ours, seconds, steps, preemptions


def main() -> int:
    """Print the rows; 1 when a budget is missed."""
    logging.disable(logging.WARNING)
    workload = read_workload(TRACE)
    rows = pool_rows(workload, 512, 20_000) + pool_rows(workload, 16, 200_000) + engine_rows()
    rows += [dynamo_row(), sampling_row(workload, 16, 0.01)]
    for row in rows:
        print(json.dumps(row))
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
