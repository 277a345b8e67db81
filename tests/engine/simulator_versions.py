"""One vLLM release's Scheduler beside the fast engine: a program, because each release needs its own process.

    PYTHONPATH=<release>:tests:src python tests/engine/simulator_versions.py SEEDS FOLDER

Prints JSON with steps and preemptions, or fails with the first difference.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import vllm

from engine.simulator_oracle import prompts, real_answer, real_request, real_scheduler, settings
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.engine import EngineSettings, serve
from kvcatch.workload import build


def compare(seed: int, folder: Path, old: bool) -> tuple[int, int]:
    """Steps and preemptions of one workload; raises AssertionError where the two differ."""
    chosen = settings(seed)
    if old:
        chosen = dataclasses.replace(chosen, watermark=0.0)
    real = real_scheduler(chosen, folder)
    made = prompts(seed, chosen)
    rng = random.Random(seed)
    arrivals: list[int] = []
    decided: list[tuple[int, ...]] = []
    while len(arrivals) < len(made) or real.has_unfinished_requests():
        fewest = 0 if real.has_unfinished_requests() else 1
        for _ in range(min(len(made) - len(arrivals), max(fewest, rng.choice([0, 1, 3, 8])))):
            tokens, output_tokens = made[len(arrivals)]
            real.add_request(real_request(str(len(arrivals)), tokens, output_tokens, chosen.block_size))
            arrivals.append(len(decided))
        before = sum(request.num_preemptions for request in real.requests.values())
        output = real.schedule()
        preempted = sum(request.num_preemptions for request in real.requests.values()) - before
        decided.append(
            (
                len(real.running),
                len(real.waiting),
                real.kv_cache_manager.block_pool.get_num_free_blocks(),
                output.total_num_scheduled_tokens,
                preempted,
            )
        )
        real.update_from_output(output, real_answer(real, output, seed))
    rows = [
        {"arrival": at, "prompt": len(tokens), "output": n, "segments": [(t, 1) for t in tokens]}
        for at, (tokens, n) in zip(arrivals, made, strict=True)
    ]
    fast = serve(
        build("real", rows, grain=1),
        EngineSettings(
            num_blocks=chosen.num_blocks,
            block_size=chosen.block_size,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_model_len=chosen.max_model_len,
            watermark=chosen.watermark,
            append_all=old,
            reserve_full_prompt=not old,
            cost=StepCost(fixed=1.0, per_prefill_token=0.0, per_decode=0.0),
        ),
        log_steps=len(decided) + 1,
    )
    ours = [tuple(row[:5]) for row in fast.log.tolist()]
    first = next((k for k, (a, b) in enumerate(zip(ours, decided, strict=False)) if a != b), None)
    assert ours == decided, f"seed {seed} step {first}: {ours[first or 0]} for {decided[first or 0]}"
    return len(decided), sum(row[4] for row in decided)


def main() -> None:
    """Compare all seeds."""
    seeds, folder = int(sys.argv[1]), Path(sys.argv[2])
    steps = preemptions = 0
    for seed in range(seeds):
        done = compare(seed, folder, vllm.__version__.startswith("0.12"))
        steps += done[0]
        preemptions += done[1]
    print(json.dumps({"version": vllm.__version__, "steps": steps, "preemptions": preemptions}))


if __name__ == "__main__":
    main()
