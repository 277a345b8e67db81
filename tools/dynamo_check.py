"""One trace through Dynamo's replay, vLLM's own scheduler and kvcatch simulate, side by side.

    .venv-engine/bin/python tools/dynamo_check.py [--requests 20000]     # exit 1 when a number differs

Twelve tenants, one of them with a new head in every prompt; every second request continues an earlier one; all arrive
at once, so that no engine's idea of time matters. Dynamo gets an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
# The newest that runs from PyPI alone; its dependencies on serving frameworks are not needed.
DYNAMO = ["ai-dynamo==1.4.2", "ai-dynamo-runtime==1.4.2"]
NEEDS = ["transformers", "msgspec"]
BLOCK, SEQS, TOKENS = 16, 64, 2048
Numbers = dict[str, Any]


def trace(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Requests in Mooncake's format, one id for 16 tokens."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 40))
    heads = [[next(fresh) for _ in range(rng.randrange(4, 126))] for _ in range(12)]
    earlier: list[list[list[int]]] = [[] for _ in heads]
    for _ in range(count):
        tenant = rng.randrange(len(heads))
        if earlier[tenant] and rng.random() < 0.6:
            ids = list(rng.choice(earlier[tenant][-40:]))
        else:
            ids = list(heads[tenant]) if tenant else [next(fresh) for _ in range(40)]
        ids = (ids + [next(fresh) for _ in range(rng.randrange(1, 30))])[:190]
        earlier[tenant].append(ids)
        last = rng.randrange(1, BLOCK + 1)
        yield {
            "timestamp": 0,
            "input_length": BLOCK * (len(ids) - 1) + last,
            "output_length": rng.randrange(20, 300),
            # A block that is not full is nobody else's.
            "hash_ids": ids if last == BLOCK else [*ids[:-1], next(fresh)],
            "tenant": f"team{tenant}",
        }


def dynamo(path: Path, blocks: int) -> Numbers:
    """Its blocks are usable ones; vLLM's number holds one more, the null block."""
    from engine_env import own_environment

    settings = {
        "block_size": BLOCK, "num_gpu_blocks": blocks - 1, "max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS
    }  # fmt: skip
    report = path.with_suffix(".report.json")
    subprocess.run(
        [own_environment("dynamo-1.4.2", NEEDS, ["--no-deps", *DYNAMO]), "-m", "dynamo.replay", str(path), "--trace-format", "mooncake", "--trace-block-size",
         str(BLOCK), "--extra-engine-args", json.dumps(settings), "--report-json", str(report)],
        check=True, capture_output=True, cwd=path.parent,
    )  # fmt: skip
    found = json.loads(report.read_text())
    return {
        "token_hit_ratio": found["first_admission_prefix_cache_reused_ratio"],
        "seconds": found["wall_time_ms"] / 1000,
    }


def ours(path: Path, blocks: int) -> Numbers:
    """``kvcatch simulate --engine``; seconds without the start of Python and the reading."""
    from kvcatch.simulator.cost import StepCost
    from kvcatch.simulator.engine import EngineSettings, simulate_engine
    from kvcatch.sources.traces import read_workload

    workload = read_workload(path, trace_block_size=BLOCK)
    settings = EngineSettings(
        num_blocks=blocks, block_size=BLOCK, max_num_seqs=SEQS, max_num_batched_tokens=TOKENS,
        cost=StepCost(fixed=1.0, per_prefill_token=0.0, per_decode=0.0),
    )  # fmt: skip
    seconds = []
    for _ in range(2):  # the first one may compile
        start = time.perf_counter()
        run = simulate_engine(workload, settings)
        seconds.append(time.perf_counter() - start)
    return {
        "token_hit_ratio": run.token_hit_ratio,
        "hit_tokens": run.hit_tokens,
        "preemptions": run.preemptions,
        "recomputed_tokens": run.recomputed_tokens,
        "internal_fragmentation_ratio": run.internal_fragmentation_ratio,
        "steps": run.steps,
        "tenants": {one.tenant: one.hit_tokens for one in run.tenants},
        "seconds": min(seconds),
    }


def engine(path: Path, blocks: int) -> Numbers:
    """vLLM's Scheduler itself, every number from its own state."""
    from engine.simulator_oracle import Settings, real_answer, real_request, real_scheduler

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    longest = max(row["input_length"] + row["output_length"] for row in rows)
    chosen = Settings(blocks, BLOCK, SEQS, TOKENS, 0.0, len(rows), longest + 1)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = real_scheduler(chosen, Path(folder))
    tenants: dict[str, int] = {}
    highest: dict[str, int] = {}
    hits = preemptions = recomputed = steps = slack = active = 0
    pool = scheduler.kv_cache_manager.block_pool
    waiting = iter(enumerate(rows))
    left = len(rows)
    start = time.perf_counter()
    while left or scheduler.has_unfinished_requests():
        # Building all requests first takes gigabytes; a queue that is never short is the same to the scheduler.
        while left and len(scheduler.waiting) < 4 * SEQS:
            number, row = next(waiting)
            left -= 1
            # One block: its id, and the place in it.
            tokens = [id_ * BLOCK + at for id_ in row["hash_ids"] for at in range(BLOCK)][
                : row["input_length"]
            ]
            scheduler.add_request(real_request(str(number), tokens, row["output_length"], BLOCK))
        output = scheduler.schedule()
        steps += 1
        preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            hits += new.num_computed_tokens
            tenant = rows[int(new.req_id)]["tenant"]
            tenants[tenant] = tenants.get(tenant, 0) + new.num_computed_tokens
        for name, count in output.num_scheduled_tokens.items():
            end = scheduler.requests[name].num_computed_tokens
            recomputed += max(0, min(end, highest.get(name, 0)) - (end - count))
            highest[name] = max(end, highest.get(name, 0))
        blocks_of = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        slack += sum(
            BLOCK * len(blocks_of[request.request_id]) - request.num_computed_tokens
            for request in scheduler.running
        )
        active += blocks - 1 - pool.get_num_free_blocks()
        scheduler.update_from_output(output, real_answer(scheduler, output, 1))
    return {
        "token_hit_ratio": hits / sum(row["input_length"] for row in rows),
        "hit_tokens": hits,
        "preemptions": preemptions,
        "recomputed_tokens": recomputed,
        "internal_fragmentation_ratio": slack / (active * BLOCK),
        "steps": steps,
        "tenants": tenants,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=2048)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in trace(args.requests, 1)))
        found = {
            "dynamo": dynamo(path, args.blocks),
            "kvcatch": ours(path, args.blocks),
            "vllm": engine(path, args.blocks),
        }
    print(json.dumps(found, indent=1))
    names = set(found["vllm"]) & set(found["kvcatch"]) - {"seconds"}
    different = [name for name in sorted(names) if found["vllm"][name] != found["kvcatch"][name]]
    if abs(found["dynamo"]["token_hit_ratio"] - found["vllm"]["token_hit_ratio"]) > 1e-12:
        different.append("dynamo's token_hit_ratio")
    sys.exit(f"different: {', '.join(different)}" if different else 0)


if __name__ == "__main__":
    main()
